"""Scores of given pairs are the model's log-probabilities, in the order of the pairs."""

import os
from types import SimpleNamespace

import pytest
import torch
from conftest import run_command, seq2seq
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.data.text_files import read_file
from vanilla_transformer.data.vocabularies import Specials, words
from vanilla_transformer.inference import scoring
from vanilla_transformer.inference.alignment import add_alignments
from vanilla_transformer.inference.scoring import add_token_scores, score_pairs, token_scores
from vanilla_transformer.inference.translation import Hypothesis, translate, translate_n_best

PAIRS = [
    ("a house by the lake", "ein Haus am See"),
    ("the lake", "der See ist tief und tief und tief"),
    ("", "tief"),
    ("the lake is deep", ""),
]


@pytest.fixture
def translator(checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    return model, AutoTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize("max_tokens", [1, 20, 2048])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_scores_are_log_probabilities_in_order(monkeypatch, translator, max_tokens, window):
    monkeypatch.setattr(scoring, "PAIRS_PER_WINDOW", window)
    model, tokenizer = translator
    scores = list(score_pairs(PAIRS, model, tokenizer, max_tokens=max_tokens))
    for (source, target), score in zip(PAIRS, scores, strict=True):
        labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"]
        loss = model(**tokenizer(source, return_tensors="pt"), labels=labels).loss  # a mean
        assert score.tokens == labels.shape[1]
        assert score.log_probability == pytest.approx(-loss.item() * score.tokens, abs=1e-4)


def test_a_pair_that_is_too_long_is_a_batch_of_its_own(translator):
    ids = [[5] * length for length in (9, 2, 2, 2, 2)]
    batches = scoring.pair_batches(ids, ids, *translator, max_tokens=4)
    assert sorted(sorted(rows) for rows, _ in batches) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("names", [["input_ids"], ["input_ids", "attention_mask"]])
def test_the_padding_side_of_a_tokenizer_changes_no_score(translator, side, names):
    model, tokenizer = translator
    expected = [next(score_pairs([pair], model, tokenizer))[0] for pair in PAIRS]
    tokenizer.padding_side, tokenizer.model_input_names = side, names
    found = [score.log_probability for score in score_pairs(PAIRS, model, tokenizer)]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["decoder_start_token_id", "bos_token_id"])
def test_scores_start_after_the_token_that_starts_generation(translator, name):
    """The generation config's, as in `translate --n_best`, reranking and exported folders."""
    model, tokenizer = translator
    model.generation_config.update(**{"decoder_start_token_id": None, name: 5})
    _, (source, target), *_ = PAIRS
    (score,) = score_pairs([(source, target)], model, tokenizer)
    model.config.decoder_start_token_id = 5  # of labels
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"]
    loss = model(**tokenizer(source, return_tensors="pt"), labels=labels).loss
    assert score.log_probability == pytest.approx(-loss.item() * score.tokens, abs=1e-4)
    hypothesis = Hypothesis(target, token_ids=tuple(tokenizer(text_target=target)["input_ids"]))
    ((scored,),) = add_token_scores([source], [[hypothesis]], model, tokenizer)
    assert score.log_probability == pytest.approx(sum(scored.token_scores), abs=1e-4)


def test_results_have_no_dropout_in_a_loop_that_then_trains_on_with_it(translator):
    """Each module keeps its own mode, such as that of a frozen encoder."""
    model, _ = translator
    lines = [source for source, _ in PAIRS]
    options = {"num_beams": 2, "max_new_tokens": 6}

    def results():
        found = list(translate_n_best(lines, *translator, 2, **options))
        yield found
        for change in (add_token_scores, add_alignments):
            yield list(change(lines, found, *translator))
        yield list(score_pairs(PAIRS, *translator))

    expected = list(results())
    model.train().get_encoder().eval()
    modes = [module.training for module in model.modules()]
    for found, right in zip(results(), expected, strict=True):
        assert found == right
        assert [module.training for module in model.modules()] == modes

    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(translate(lines, *translator, logits_processor=[interrupt], **options))
    assert [module.training for module in model.modules()] == modes


def test_the_script_writes_a_line_for_each_pair(translator, checkpoint, tmp_path):
    def script(*flags):
        model = ("--model", checkpoint)
        return run_command("score", *model, *flags, cwd=tmp_path, check=False)

    for place, name in enumerate(("source", "target")):
        text = "".join(pair[place] + "\n" for pair in PAIRS)
        (tmp_path / name).write_text(text)
    process = script("--source", "source", "--target", "target")
    assert process.returncode == 0, process.stderr
    for line, score in zip(
        process.stdout.splitlines(), score_pairs(PAIRS, *translator), strict=True
    ):
        log_probability, tokens = line.split("\t")
        assert float(log_probability) == pytest.approx(score.log_probability, abs=1e-4)
        assert int(tokens) == score.tokens
    (tmp_path / "shorter").write_text("one line\n")
    process = script("--source", "source", "--target", "shorter", "--output", "scores")
    assert "source has 4 lines and shorter 1: expected the same number" in process.stderr
    assert not (tmp_path / "scores").exists()


def test_a_script_that_fails_does_not_replace_earlier_scores(tokenizer, tmp_path, monkeypatch):
    options = {"position_encoding": "learned", "max_position_embeddings": 12}
    model = seq2seq(vocab_size=len(tokenizer), **options)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(scoring, "PAIRS_PER_WINDOW", 1)
    for lines, written in (("See\nTal\n", 2), ("See\n" + "tief " * 9 + "\n", 0)):
        (tmp_path / "lines").write_text(lines)
        names = ("--model", "model", "--source", "lines", "--target", "lines")
        for output in ("scores", "scores.gz"):
            process = run_command("score", *names, "--output", output, cwd=tmp_path, check=False)
            assert (process.returncode == 0) == bool(written), process.stderr
            assert len([*read_file(tmp_path / output)]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"model", "lines", "scores", "scores.gz"}


def test_a_script_writes_scores_into_a_pipe(checkpoint, tmp_path):
    """A file is replaced instead."""
    (tmp_path / "lines").write_text("See\nTal\n")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    flags = ("--model", checkpoint, "--source", "lines", "--target", "lines", "--output", "pipe")
    run_command("score", *flags, cwd=tmp_path)
    assert os.read(reader, 9999).count(b"\n") == 2
    os.close(reader)


def test_several_processes_would_each_print_all_scores(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("a house\n")
    flags = ["--model", checkpoint, "--source", "text", "--target", "text"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    process = run_command("score", *flags, cwd=tmp_path, check=False)
    assert process.stdout == ""
    assert process.stderr.endswith(
        "2 processes: expected one, without torchrun or accelerate launch\n"
    )


def test_a_pair_without_tokens_is_reported_with_its_number_in_the_text(monkeypatch, translator):
    monkeypatch.setattr(scoring, "PAIRS_PER_WINDOW", 2)
    names = ["<pad>", "<s>", "</s>", "<unk>", "a"]
    tokenizer = words({name: i for i, name in enumerate(names)}, Specials(template="$A"))
    scores = score_pairs([("a", "a")] * 4 + [("", "a")], translator[0], tokenizer)
    with pytest.raises(ValueError, match="the source of pair 5 has no token: expected"):
        list(scores)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_text_that_is_longer_than_the_table_of_positions_is_reported(tokenizer, side):
    options = {"position_encoding": "learned", "max_position_embeddings": 12}
    model = seq2seq(vocab_size=len(tokenizer), **options)
    long = {"source": "See", "target": "See", side: "the lake is deep " * 9}
    message = rf"the {side} of pair 2 has \d+ tokens: expected at most 12, where the model's table"
    with pytest.raises(ValueError, match=message):
        list(score_pairs([("See", "See"), tuple(long.values())], model, tokenizer))


def scores_of(logits, labels):
    inputs = {"decoder_input_ids": labels, "labels": labels}
    return token_scores(lambda **_: SimpleNamespace(logits=logits), inputs)


def test_scores_are_as_precise_as_float32_allows_for_a_large_vocabulary():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 30_000) * 3, torch.randint(30_000, (2, 5))
    labels[1, 3:] = -100
    found = scores_of(logits, labels)
    expected = logits.double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(
        found, expected.masked_fill(labels == -100, 0), rtol=5e-7, atol=0, check_dtype=True
    )


def test_scores_of_a_model_in_half_precision_are_not_rounded_to_it():
    logits, labels = torch.randn(2, 5, 8).bfloat16(), torch.randint(8, (2, 5))
    assert torch.equal(scores_of(logits, labels), scores_of(logits.float(), labels))


class OnMps(torch.Tensor):
    """Like a tensor on an Apple GPU, which has no float64; tensors computed from it are the
    same."""

    def double(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_scores_are_summed_on_the_cpu_if_the_gpu_has_no_float64():
    logits, labels = torch.randn(2, 5, 8), torch.randint(8, (2, 5))
    found, expected = scores_of(logits.as_subclass(OnMps), labels), scores_of(logits, labels)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)

"""`evaluate`: systems, references, tables, pictures, and what it refuses."""

import io
import json
import sys
from contextlib import redirect_stderr

import pytest
import torch
from conftest import run_module
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.cli import evaluate
from vanilla_transformer.inference.translation import translate

TEXTS = {
    "source": "one\ntwo words\nand three words\n",
    "ref0": "eins\nzwei Worte\nund drei Worte\n",
    "ref1": "eins\nzwei Wörter\nund drei Wörter\n",
    "a.de": "eins\nzwei Wörter\nund Worte\n",
    "b.de": "zwei\nzwei Worte\nund vier Worte\n",
    "short": "eins\n",
    "none": "",
    "none.de": "",
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `evaluate` with the given flags in a folder with `TEXTS`, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)

    def evaluate_with(*flags):
        monkeypatch.setattr(sys, "argv", ["evaluate", *flags])
        evaluate.main()
        return capsys.readouterr().out

    return evaluate_with


def test_metrics_can_be_chosen_and_there_can_be_several_references(run):
    flags = ["--predictions", "a.de", "--metrics", "ter", "exact_match", "wer"]
    one = json.loads(run(*flags, "--target", "ref0"))
    two = json.loads(run(*flags, "--target", "ref0", "ref1"))
    assert list(one) == ["ter", "exact_match", "wer", "ter_signature"]
    assert one["exact_match"] == pytest.approx(100 / 3)
    assert two["exact_match"] == pytest.approx(200 / 3)
    assert one["wer"] == pytest.approx(100 * 2 / 6)
    assert "nrefs:2" in two["ter_signature"]


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_lowercase_applies_to_each_metric_that_supports_it(run, metric):
    flags = ["--predictions", "a.de", "--target", "ref0", "--metrics", metric]
    assert "case:mixed" in json.loads(run(*flags))[f"{metric}_signature"]
    assert "case:lc" in json.loads(run(*flags, "--lowercase"))[f"{metric}_signature"]


def test_signatures_name_the_tokenizer_and_the_test(run):
    flags = ["--predictions", "a.de", "b.de", "--target", "ref0", "--metrics", "bleu"]
    for more, named in (
        (["--tokenize", "char"], "tok:char"),
        (["--paired", "bootstrap"], "bs:1000"),
        (["--paired", "ar"], "ar:10000"),
    ):
        assert named in json.loads(run(*flags, *more))["a.de"]["bleu_signature"].split("|")


def test_scores_of_a_model_are_those_of_its_translations(run, checkpoint, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    model.generation_config.max_new_tokens = 9
    model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.save_pretrained(tmp_path / "model")
    rest = ["--target", "ref0", "--metrics", "cer", "chrf"]
    scores = []
    for num_beams, flags in ((1, []), (4, ["--num_beams", "4"])):
        lines = translate(TEXTS["source"].splitlines(), model, tokenizer, num_beams=num_beams)
        (tmp_path / "mine").write_text("".join(f"{line}\n" for line in lines))
        scores.append(json.loads(run("--predictions", "mine", *rest)))
        flags = ["--model", "model", "--source", "source", "--device", "cpu", *flags]
        assert json.loads(run(*flags, *rest)) == scores[-1]
    assert scores[0] != scores[1]


def test_a_model_that_samples_has_the_same_scores_each_time(run, checkpoint, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    model.generation_config.update(do_sample=True, max_new_tokens=9)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    flags = ["--model", "model", "--source", "source", "--target", "ref0", "--device", "cpu"]
    first = run(*flags, "--metrics", "cer")
    torch.manual_seed(1)
    assert run(*flags, "--metrics", "cer") == first


def test_truncated_translations_are_counted(run, checkpoint, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    errors = io.StringIO()
    with redirect_stderr(errors):
        run("--model", "model", "--source", "source", "--target", "ref0", "--device", "cpu")
    assert "3 of 3 translations reached their length limit and are cut" in errors.getvalue()


@pytest.mark.slow
def test_processes_translate_together_and_print_once(checkpoint, tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    flags = ["evaluate", "--model", checkpoint, "--source", "source", "--target", "ref0"]
    flags += ["--device", "cpu", "--batch_size", "1"]
    alone = run_module("vanilla_transformer", *flags, cwd=tmp_path)
    launcher = ["--nproc_per_node", "2", "-m", "vanilla_transformer"]
    several = run_module("torch.distributed.run", *launcher, *flags, cwd=tmp_path)
    assert json.loads(several.stdout) == json.loads(alone.stdout)
    message = "translations reached their length limit"
    assert several.stderr.count(message) == alone.stderr.count(message)


def test_the_comparison_of_systems_is_printed_in_one_line(run):
    flags = ["--predictions", "a.de", "b.de", "--target", "ref0", "--metrics", "wer"]
    assert json.loads(run(*flags)) == {
        "a.de": {"wer": pytest.approx(100 / 3)},
        "b.de": {"wer": pytest.approx(100 / 3)},
    }
    text = run(*flags, "--paired", "bootstrap")
    assert text.count("\n") == 1
    assert json.loads(text)["b.de"]["wer_p"] == 1


def test_a_table_has_a_row_for_each_system(run):
    flags = ["--predictions", "a.de", "b.de", "--target", "ref0", "--metrics", "bleu", "wer"]
    header, *rows, signature = run(*flags, "--format", "table").splitlines()
    assert header.split() == ["system", "bleu", "wer"]
    assert [row.split()[0] for row in rows] == ["a.de", "b.de"]
    assert [row.split()[2] for row in rows] == ["33.33", "33.33"]
    assert len({len(row) for row in (header, *rows)}) == 1
    assert signature.startswith("bleu: nrefs:1|")
    first, second = run(*flags, "--format", "table", "--paired", "bootstrap").splitlines()[1:3]
    assert "±" in first
    assert "p=" not in first
    assert "p=1.0000" in second


def test_a_table_of_the_scores_of_each_line_is_written(run, tmp_path):
    flags = ["--target", "ref0", "--metrics", "exact_match", "wer", "--line_scores", "lines.tsv"]
    run("--predictions", "a.de", *flags)
    rows = [["exact_match", "wer"], ["100.00", "0.00"], ["0.00", "50.00"], ["0.00", "33.33"]]
    table = (tmp_path / "lines.tsv").read_text()
    assert [line.split("\t") for line in table.splitlines()] == rows
    run("--predictions", "a.de", "b.de", *flags)
    header, *_ = (tmp_path / "lines.tsv").read_text().splitlines()
    assert header.split("\t") == [
        "exact_match a.de", "wer a.de", "exact_match b.de", "wer b.de",
    ]  # fmt: skip


def test_scores_are_plotted_by_source_length(run, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(
        "vanilla_transformer.plotting.save", lambda figure, _: figures.append(figure)
    )
    flags = ["--predictions", "a.de", "b.de", "--target", "ref0", "--metrics", "wer", "ser"]
    run(*flags, "--source", "source", "--plot_by_length", "lengths.png")
    words, sentences = figures[0].axes
    assert words.get_title() == "word error rate by source length"
    assert sentences.get_ylabel() == "sentence error rate, %"
    assert [label.get_text() for label in words.get_xticklabels()] == ["1\nn=1", "2\nn=1", "3\nn=1"]
    assert {line.get_label(): list(line.get_ydata()) for line in words.lines} == {
        "a.de": [0, 50, pytest.approx(100 / 3)],
        "b.de": [100, 0, pytest.approx(100 / 3)],
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metrics", "blue"], "metrics=blue: expected one of bleu, chrf, ter"),
        (["--metrics", "comet"], "metrics=comet: expected the sources too"),
        (["--predictions", "a.de", "short"], "short has 1 lines and ref0 3: expected the same"),
        (["--target", "ref0", "short"], "short has 1 lines and ref0 3: expected the same"),
        (["--source", "short"], "short has 1 lines and ref0 3: expected the same"),
        (["--predictions", "none"], "none: expected at least one line"),
        (["--predictions", "none", "--target", "none.de"], "none.de: expected at least one line"),
        (["--predictions", "a.de", "a.de"], "predictions='a.de': expected each file once"),
        (["--paired", "bootstrap"], "paired='bootstrap': expected several files"),
        (["--paired", "t"], "paired='t': expected one of bootstrap, ar"),
        (["--tokenize", "14a"], "tokenize='14a': expected one of none, zh, 13a"),
        (["--format", "xml"], "format='xml': expected json or table"),
        (["--num_beams", "4"], "num_beams=4: expected --model in place of --predictions"),
        (["--batch_size", "7"], "batch_size=7: expected --model in place of --predictions"),
        (["--device", "cpu"], "device='cpu': expected --model in place of --predictions"),
        (["--trust_remote_code"], "trust_remote_code=True: expected --model in place of"),
        (["--comet_model", "mine.ckpt"], "comet_model='mine.ckpt': expected comet in --metrics"),
        (["--metrics", "chrf", "--tokenize", "zh"], "tokenize='zh': expected bleu in --metrics"),
        (["--metrics", "ter", "--lowercase"], "lowercase=True: expected bleu or chrf in --metrics"),
        (["--plot_by_length", "a.png"], "plot_by_length='a.png': expected --source"),
        (["--source", "source", "--plot_by_length", "a.jpg"], "a.jpg: expected a name that ends"),
        (["--line_scores", "ref0"], "line_scores='ref0': expected another file than target"),
        (["--line_scores", "a.de"], "line_scores='a.de': expected another file than predictions"),
        (["--line_scores", "a.zip"], "line_scores='a.zip': expected a plain text file or .gz"),
    ],
)
def test_inputs_that_cannot_be_scored_are_reported_before_work_starts(
    run, monkeypatch, flags, message
):
    monkeypatch.delattr(evaluate, "make_metrics")
    defaults = {"--predictions": ["a.de"], "--target": ["ref0"]}
    given = [word for name in defaults if name not in flags for word in (name, *defaults[name])]
    with pytest.raises(ValueError, match=message):
        run(*given, *flags)


def test_an_empty_source_is_reported_before_the_model_is_loaded(run):
    flags = ["--model", "no_such_model", "--source", "none", "--target", "none.de"]
    with pytest.raises(ValueError, match=r"^none: expected at least one line$"):
        run(*flags)

"""Pictures show the given numbers with labels, and the same numbers give the same files."""

import copy
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import run_command, small_config
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import (
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.analysis.attention import attention_maps
from vanilla_transformer.analysis.positions import position_encodings
from vanilla_transformer.cli import plot as script
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.data.tokenizer_options import TokenizerArguments
from vanilla_transformer.inference.engines import ctranslate2_engine
from vanilla_transformer.model.modeling_vanilla_transformer import SinusoidalPositions
from vanilla_transformer.plotting import (
    AttentionMaps,
    plot_attention,
    plot_by_length,
    plot_curves,
    plot_positions,
    plot_schedule,
    save,
)
from vanilla_transformer.training.logs import read_log, read_runs


def lines(axes):
    """The points of each line by its label."""
    return {
        line.get_label(): list(zip(*map(list, line.get_data()), strict=True)) for line in axes.lines
    }


# ---------------------------------------------------------------- Learning curves

LOG = [
    {"step": 10, "loss": 5.0, "learning_rate": 1e-3},
    {"step": 20, "loss": 4.0, "learning_rate": 2e-3},
    {"step": 20, "eval_loss": 4.5, "eval_bleu": 1.5, "eval_chrf": 20.0},
    {"step": 30, "loss": 3.5},
    {"step": 40, "eval_loss": 4.25, "eval_bleu": 2.5},
    {"step": 40, "train_loss": 4.1},
]


def write_state(folder, log, step):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step, "log_history": log}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_losses_and_bleu_of_several_runs_are_drawn_together():
    runs = {"base": LOG, "no_scores": [{"step": 15, "loss": 6.0}, {"step": 25, "eval_loss": 5.0}]}
    figure = plot_curves(runs)
    loss, bleu = figure.axes
    assert lines(loss) == {
        "base, training": [(10, 5.0), (20, 4.0), (30, 3.5)],
        "base, validation": [(20, 4.5), (40, 4.25)],
        "no_scores, training": [(15, 6.0)],
        "no_scores, validation": [(25, 5.0)],
    }
    assert lines(bleu) == {"base": [(20, 1.5), (40, 2.5)]}
    assert [loss.get_xlabel(), loss.get_ylabel()] == ["step", "loss (nats per token)"]
    assert [bleu.get_xlabel(), bleu.get_ylabel()] == ["step", "BLEU"]


def test_a_run_has_one_colour_and_its_training_loss_is_the_lighter_line():
    figure = plot_curves({"one": LOG, "another": LOG})
    loss, bleu = figure.axes
    training, validation, other, _ = loss.lines
    assert training.get_color() == validation.get_color() == bleu.lines[0].get_color()
    assert other.get_color() == bleu.lines[1].get_color() != training.get_color()
    assert training.get_linewidth() < validation.get_linewidth()
    assert training.get_alpha() < 1


def test_more_runs_than_colours_can_still_be_distinguished():
    runs = {f"run {number}": LOG for number in range(20)}
    _, bleu = plot_curves(runs).axes
    assert len({(line.get_color(), line.get_linestyle()) for line in bleu.lines}) == 20


def test_the_legend_lists_runs_and_kinds_of_loss_for_any_folder_names():
    (legend,) = plot_curves({"_hidden": LOG, "$x$": LOG}).legends
    texts = legend.get_texts()
    assert [text.get_text() for text in texts] == ["_hidden", "$x$", "training", "validation"]
    assert not any(text.get_parse_math() for text in texts)


def test_the_legend_of_scores_by_length_lists_systems_of_any_name():
    scores = {"_a.de": [1.0], "$b$.de": [2.0]}
    panel = plot_by_length([(1, 2, 3)], {"BLEU": scores, "chrF": scores}).axes[0]
    texts = panel.get_legend().get_texts()
    assert [text.get_text() for text in texts] == list(scores)
    assert not any(text.get_parse_math() for text in texts)


def test_without_bleu_there_is_no_panel_for_it():
    (loss,) = plot_curves({"run": LOG[:2]}).axes
    assert list(lines(loss)) == ["run, training"]


def test_a_run_that_has_not_logged_yet_has_no_lines(tmp_path):
    figure = plot_curves({"run": []})
    assert not figure.axes[0].lines
    assert save(figure, tmp_path / "curves.png")[0].is_file()


def test_the_log_is_the_newest_in_a_folder_or_its_checkpoints(tmp_path):
    run = tmp_path / "run"
    write_state(run / "checkpoint-90", LOG[:1], 90)
    write_state(run / "checkpoint-100", LOG[:2], 100)
    assert read_log(run) == LOG[:2]  # still running
    write_state(run, LOG[:3], 110)
    assert read_log(run) == LOG[:3]  # finished
    write_state(run / "checkpoint-120", LOG[:4], 120)
    assert read_log(run) == LOG[:4]  # resumed
    assert read_log(run / "checkpoint-90") == LOG[:1]


def test_runs_are_labelled_by_folder_or_by_path_if_folders_have_the_same_name(tmp_path):
    folders = [
        write_state(tmp_path / name, LOG[: number + 1], number)
        for number, name in enumerate(("a/model", "b/model", "c"))
    ]
    assert read_runs(folders) == {str(folders[0]): LOG[:1], str(folders[1]): LOG[:2], "c": LOG[:3]}


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no run: expected one at least"):
        plot_curves({})
    with pytest.raises(
        FileNotFoundError, match=r"empty: expected a training's output folder, with trainer_state"
    ):
        read_log(tmp_path / "empty")
    silent = write_state(tmp_path / "silent", LOG[-1:], 40)
    with pytest.raises(
        ValueError, match=r"silent: its log has none of loss, eval_loss, eval_bleu.*logging_steps"
    ):
        read_log(silent)
    run = write_state(tmp_path / "run", LOG, 40)
    with pytest.raises(ValueError, match="run is given twice"):
        read_runs([run, run])
    for content in ("{", "[1]", '{"no": "state"}'):
        (run / "trainer_state.json").write_text(content)
        with pytest.raises(ValueError, match=r"trainer_state\.json: expected a trainer's state"):
            read_log(run)


# ---------------------------------------------------------------- Learning rate


def test_the_learning_rate_of_training_is_the_papers_formula():
    settings = [(512, 400), (512, 800), (256, 400)]
    (axes,) = plot_schedule(settings, steps=2000).axes
    for line, (d_model, warmup) in zip(axes.lines, settings, strict=True):
        steps, rates = line.get_data()
        assert list(steps) == list(range(2001))
        assert rates[0] == 0
        paper = [d_model**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, 2001)]
        np.testing.assert_allclose(rates[1:], paper, rtol=1e-12)
        assert line.get_markevery() == [warmup]  # the dot is at the peak
        assert line.get_label() == (f"$d_\\mathrm{{model}}$ = {d_model}, warmup = {warmup} steps")
    assert [axes.get_xlabel(), axes.get_ylabel()] == ["step", "learning rate"]


def test_a_warmup_longer_than_the_picture_has_no_peak_marker():
    (axes,) = plot_schedule([(512, 400)], steps=399).axes
    assert axes.lines[0].get_markevery() == []


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        ([(0, 4000)], 10, "d_model=0: expected a positive number"),
        ([(512, 0)], 10, "warmup_steps=0: expected a positive number"),
        ([(512, 4000)], 0, "steps=0: expected a positive number"),
        ([], 10, "there is no setting"),
    ],
)
def test_an_invalid_schedule_is_refused(settings, steps, message):
    with pytest.raises(ValueError, match=message):
        plot_schedule(settings, steps)


# ---------------------------------------------------------------- Positions


def test_the_heat_map_shows_the_models_sinusoids_and_lines_show_its_rows():
    sinusoids = SinusoidalPositions(small_config())
    encodings = position_encodings(sinusoids, 50)
    assert encodings.shape == (50, 24)
    assert torch.equal(encodings, sinusoids(torch.arange(50)[None], torch.float32)[0])
    figure = plot_positions(encodings, dimensions=[4, 5, 6])
    heat_map, even, odd = figure.axes
    np.testing.assert_array_equal(heat_map.images[0].get_array(), encodings.T)
    assert heat_map.images[0].get_clim() == (-1, 1)
    drawn = {}
    for axes, title in ((even, "Even dimensions: sine"), (odd, "Odd dimensions: cosine")):
        assert axes.get_title() == title
        drawn |= {line.get_label(): line.get_ydata() for line in axes.lines}
    assert list(drawn) == ["4", "6", "5"]
    for label, values in drawn.items():
        np.testing.assert_array_equal(values, encodings[:, int(label)])
    assert drawn["4"][3] == pytest.approx(math.sin(3 / 10000 ** (4 / 24)))
    assert drawn["5"][3] == pytest.approx(math.cos(3 / 10000 ** (4 / 24)))
    assert [heat_map.get_ylabel(), odd.get_xlabel()] == ["dimension", "position"]


@pytest.mark.parametrize("d_model", [2, 8, 128, 512])
def test_sines_and_cosines_have_the_same_frequencies_and_different_colours(d_model):
    config = small_config(d_model=d_model, encoder_attention_heads=1, decoder_attention_heads=1)
    _, even, odd = plot_positions(position_encodings(SinusoidalPositions(config), 10)).axes
    sines, cosines = ([int(line.get_label()) for line in axes.lines] for axes in (even, odd))
    assert [dimension + 1 for dimension in sines] == cosines
    assert {dimension % 2 for dimension in sines} == {0}
    for line in even.lines:
        red, _, blue, _ = line.get_color()
        assert blue > red
    for line in odd.lines:
        red, _, blue, _ = line.get_color()
        assert red > blue


def test_learned_positions_are_drawn_unchanged():
    config = small_config(position_encoding="learned", max_position_embeddings=20)
    stack = VanillaTransformerForConditionalGeneration(config).model.decoder
    encodings = position_encodings(stack.embed_positions, 20)
    heat_map, even, _ = plot_positions(encodings, kind="learned").axes
    weights = stack.embed_positions.weight.detach()
    np.testing.assert_array_equal(heat_map.images[0].get_array(), weights.T)
    assert heat_map.images[0].get_clim()[1] == weights.abs().max()
    assert heat_map.get_title() == "Learned positional encoding"
    assert even.get_title() == "Even dimensions"
    with pytest.raises(ValueError, match="length=21: expected 1 to 20"):
        position_encodings(stack.embed_positions, 21)


def test_missing_positions_are_refused():
    sinusoids = SinusoidalPositions(small_config())
    with pytest.raises(ValueError, match="length=0: expected a positive number"):
        position_encodings(sinusoids, 0)
    with pytest.raises(ValueError, match="dimension 24: expected 0 to 23"):
        plot_positions(position_encodings(sinusoids, 5), dimensions=[0, 24])


# ---------------------------------------------------------------- Attention

SOURCE, TARGET = "the lake is", "See ist"


@pytest.fixture(scope="module")
def translator(checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(checkpoint)


def tick_labels(axes):
    return tuple(
        [label.get_text() for label in labels]
        for labels in (axes.get_yticklabels(), axes.get_xticklabels())
    )


@pytest.mark.parametrize(
    ("kind", "query_side", "key_side", "layers", "heads"),
    [
        ("encoder", "source", "source", 2, 2),
        ("decoder", "read", "read", 3, 4),
        ("cross", "predicted", "source", 3, 4),
    ],
)
def test_maps_are_the_models_weights_with_its_tokens(
    translator, kind, query_side, key_side, layers, heads
):
    model, tokenizer = translator
    tokens = {
        "source": ["the", "lake", "is", "</s>"],
        "read": ["<s>", "See", "is", "t"],
        "predicted": ["See", "is", "t", "</s>"],
    }
    inputs = tokenizer(SOURCE, text_target=TARGET, return_tensors="pt")
    outputs = model(**inputs, output_attentions=True)
    figure = plot_attention(attention_maps(model, tokenizer, SOURCE, TARGET, kind))
    *panels, colour_bar = figure.axes
    assert len(panels) == layers * heads
    for index, axes in enumerate(panels):
        layer, head = divmod(index, heads)
        weights = axes.images[0].get_array()
        expected = outputs[f"{kind}_attentions"][layer][0, head].detach()
        np.testing.assert_array_equal(weights, expected)
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
        assert axes.get_title() == f"layer {layer + 1}, head {head + 1}"
        assert tick_labels(axes) == (
            tokens[query_side] if head == 0 else [],
            tokens[key_side] if layer == layers - 1 else [],
        )
    assert colour_bar.get_ylabel() == "attention weight"
    assert {axes.images[0].get_clim() for axes in panels} == {(0, 1)}


def test_the_target_is_the_models_own_translation_by_default(translator):
    model, tokenizer = translator
    generated = model.generate(**tokenizer(SOURCE, return_tensors="pt"))
    maps = attention_maps(model.train(), tokenizer, SOURCE)  # without dropout
    outputs = model.eval()(
        **tokenizer(SOURCE, return_tensors="pt"),
        decoder_input_ids=generated[:, :-1],
        output_attentions=True,
    )
    assert maps.kind == "cross"
    assert len(maps.queries) == generated.shape[1] - 1
    assert torch.equal(maps.weights, torch.cat(outputs.cross_attentions))


def test_attention_is_of_one_translation_whatever_num_return_sequences_is(translator):
    """Otherwise the best translation would be padded to the length of the others."""
    model, tokenizer = translator
    model, found = copy.deepcopy(model), []
    model.generation_config.num_beams = 4
    for number in (1, 4):
        model.generation_config.num_return_sequences = number
        model.generation_config.return_dict_in_generate = number > 1
        found.append(attention_maps(model, tokenizer, SOURCE).queries)
    assert found[0] == found[1]


def test_layers_and_heads_are_numbered_from_1(translator):
    maps = attention_maps(*translator, SOURCE, TARGET)
    figure = plot_attention(maps, layers=[3], heads=[4, 2])
    first, second, _ = figure.axes
    assert figure.get_suptitle() == "Attention from decoder to encoder, layer 3"
    assert [first.get_title(), second.get_title()] == ["head 4", "head 2"]
    np.testing.assert_array_equal(first.images[0].get_array(), maps.weights[2, 3])
    np.testing.assert_array_equal(second.images[0].get_array(), maps.weights[2, 1])


@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (2, 1), (4, 2), (8, 2), (5, 1), (16, 4)])
def test_heads_of_one_layer_fill_a_grid(heads, rows):
    maps = AttentionMaps(torch.ones(1, heads, 2, 1), ["a", "b"], ["c"], "cross")
    *panels, _ = plot_attention(maps).axes
    grid = panels[0].get_subplotspec().get_gridspec()
    assert (grid.nrows, len(panels)) == (rows, heads)
    assert grid.nrows * grid.ncols == heads


def test_tokens_are_shown_as_text_with_visible_white_space_and_bytes(translator):
    maps = attention_maps(*translator, "the $ lake $ 中", TARGET, "encoder")
    assert maps.keys == [
        "the", "␣", "$", "lake", "␣", "$", "␣", "<0xE4>", "<0xB8>", "<0xAD>", "</s>",
    ]  # fmt: skip
    axes = plot_attention(maps, layers=[1], heads=[1]).axes[0]
    assert not any(label.get_parse_math() for label in axes.get_xticklabels())


def test_joiners_and_ideographic_spaces_are_visible():
    tokenizer = train_tokenizer(["می\u200cرود", "我\u3000你"], 300, tokenizer_type="char")
    config = small_config(vocab_size=len(tokenizer), attn_implementation="eager")
    model = VanillaTransformerForConditionalGeneration(config)
    maps = attention_maps(model, tokenizer, "ی\u200cر我\u3000", "م", "encoder")
    assert maps.keys == ["ی", r"\u200c", "ر", "我", r"\u3000", "</s>"]


@pytest.mark.parametrize(
    ("kind", "queries", "keys"),
    [
        ("encoder", ["c", "␣", "a", "b", "</s>"], ["c", "␣", "a", "b", "</s>"]),
        ("cross", ["b", "a:", "</s>"], ["c", "␣", "a", "b", "</s>"]),
    ],
)
def test_each_side_has_the_tokens_of_its_own_vocabulary(kind, queries, keys):
    pairs = Dataset.from_dict({"source": ["abc", "c ab"], "target": ["a: b", "b a:"]})
    tokenizer = TokenizerArguments(
        tokenizer_type="char", separate_vocabularies=True, target_tokenizer_type="word"
    ).train(pairs)
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": tokenizer.target_vocab_size}
    config = small_config(**sizes, attn_implementation="eager")
    model = VanillaTransformerForConditionalGeneration(config)
    maps = attention_maps(model, tokenizer, "c ab", "b a:", kind)
    assert (list(maps.queries), list(maps.keys)) == (queries, keys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0]}, "layer=0: expected 1 to 3"),
        ({"layers": [1, 4]}, "layer=4: expected 1 to 3"),
        ({"heads": [5]}, "head=5: expected 1 to 4"),
    ],
)
def test_missing_layers_and_heads_are_refused(translator, options, message):
    maps = attention_maps(*translator, SOURCE, TARGET)
    with pytest.raises(ValueError, match=message):
        plot_attention(maps, **options)


def test_inputs_without_attention_maps_are_refused(translator, checkpoint):
    model, tokenizer = translator
    with pytest.raises(ValueError, match="source=' ': expected a sentence"):
        attention_maps(model, tokenizer, " ")
    with pytest.raises(ValueError, match="target='': expected a sentence"):
        attention_maps(model, tokenizer, SOURCE, "")
    with pytest.raises(ValueError, match="kind='self': expected one of encoder, decoder, cross"):
        attention_maps(model, tokenizer, SOURCE, TARGET, "self")
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="attn_implementation='sdpa': expected 'eager'"):
        attention_maps(model, tokenizer, SOURCE)


# ---------------------------------------------------------------- Files

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def test_a_name_without_a_suffix_gives_png_and_svg_and_with_a_suffix_that_file(tmp_path):
    figure = plot_curves({"run": LOG[:2]})
    places = {
        "new/folder/curves": [".png", ".svg"],
        "one.png": [".png"],
        "one.svg": [".svg"],
        "one.pdf": [".pdf"],
    }
    for name, suffixes in places.items():
        files = save(figure, tmp_path / name)
        assert files == [(tmp_path / name).with_suffix(suffix) for suffix in suffixes]
        for file in files:
            assert file.read_bytes().startswith(SIGNATURES[file.suffix])


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_the_same_numbers_give_the_same_file(tmp_path, suffix):
    def draw():
        return plot_attention(AttentionMaps(torch.ones(1, 2, 2, 1), ["a", "b"], ["c"], "cross"))

    figure = draw()
    for name, drawn in (("first", figure), ("again", figure), ("anew", draw())):
        save(drawn, tmp_path / (name + suffix))
    first, again, anew = (
        (tmp_path / (name + suffix)).read_bytes() for name in ("first", "again", "anew")
    )
    assert again == first
    assert anew == first


def test_an_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jpg: expected a name that ends in \.png, \.svg, "):
        save(plot_curves({"run": LOG}), tmp_path / "a.jpg")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- The script


@pytest.fixture
def plot(monkeypatch, tmp_path):
    """A function that runs the script and returns the figure that it would save."""
    monkeypatch.chdir(tmp_path)
    figures = []
    monkeypatch.setattr(script, "save", lambda figure, path: figures.append(figure) or [])

    def run(*flags):
        output = [] if "--output" in flags else ["--output", "picture"]
        monkeypatch.setattr(sys, "argv", ["plot", *map(str, flags), *output])
        script.main()
        return figures[-1]

    return run


def test_the_script_draws_attention(checkpoint, tmp_path):
    flags = ["--model", checkpoint, "--source", SOURCE, "--output", "pictures/attention"]
    process = run_command("plot", "attention", *flags, cwd=tmp_path)
    assert process.stdout.splitlines() == ["pictures/attention.png", "pictures/attention.svg"]
    for line in process.stdout.splitlines():
        assert (tmp_path / line).stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "title"),
    [
        ([], "Attention from decoder to encoder, layer 3"),
        (["--kind", "encoder", "--layer", 1], "Self-attention of the encoder, layer 1"),
        (["--kind", "decoder", "--layer", "all"], "Self-attention of the decoder"),
    ],
)
def test_the_script_draws_the_requested_layers(plot, checkpoint, flags, title):
    figure = plot("attention", "--model", checkpoint, "--source", SOURCE, *flags)
    assert figure.get_suptitle() == title


def test_the_script_draws_curves_of_folders(plot, tmp_path):
    write_state(tmp_path / "outputs/a", LOG, 40)
    write_state(tmp_path / "outputs/b/checkpoint-20", LOG[:2], 20)
    figure = plot("curves", "outputs/a", "outputs/b")
    assert list(lines(figure.axes[0])) == ["a, training", "a, validation", "b, training"]


def test_the_script_draws_schedules(plot):
    (axes,) = plot("schedule", "--settings", "64/10", "128/20", "--steps", 30).axes
    assert [line.get_markevery() for line in axes.lines] == [[10], [20]]
    assert axes.get_xlim() == (0, 30)


def test_the_script_draws_positions_for_a_d_model_or_of_a_model(plot, checkpoint):
    heat_map = plot("positions", "--d_model", 6, "--length", 4).axes[0]
    assert heat_map.images[0].get_array().shape == (6, 4)
    heat_map, even, odd = plot("positions", "--model", checkpoint, "--dimensions", 2, 3, 4).axes
    assert heat_map.images[0].get_array().shape == (24, 100)
    assert [len(even.lines), len(odd.lines)] == [2, 1]


def test_learned_positions_of_a_stack_that_a_model_lacks_are_not_drawn(plot, tmp_path):
    """transformers would make random ones."""
    config = small_config(position_encoding="learned", is_encoder_decoder=False)
    model = VanillaTransformerForCausalLM(config)
    model.save_pretrained(tmp_path)
    flags = ["positions", "--model", tmp_path, "--stack"]
    drawn = plot(*flags, "decoder").axes[0].images[0].get_array()
    table = model.get_parameter("model.decoder.embed_positions.weight")
    np.testing.assert_array_equal(drawn, table[:100].detach().T)
    with pytest.raises(ValueError, match="stack='encoder': expected one whose learned positions"):
        plot(*flags, "encoder")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["curves", "nowhere"], "nowhere: expected a training's output folder"),
        (["curves", "nowhere", "--output", "a.jpg"], "a.jpg: expected a name that ends in .png"),
        (["schedule", "--settings", "512"], "'512': expected d_model/warmup steps, such as"),
        (["schedule", "--steps", "0"], "steps=0: expected a positive number"),
        (["positions", "--d_model", "7"], "d_model=7: sinusoidal positions come in pairs"),
        (["positions", "--d_model", "8", "--model", "m"], "not allowed with argument --d_model"),
        (["attention", "--source", ""], "source='': expected a sentence"),
        (["attention", "--source", "a", "--target", " "], "target=' ': expected a sentence"),
        (["attention", "--source", "a", "--layer", "4"], "layer=4: expected 1 to 3"),
        (
            ["attention", "--source", "a", "--layer", "x"],
            "'x': expected a number from 1 on, or all",
        ),
        (["attention", "--source", "a", "--heads", "1", "5"], "heads=5: expected 1 to 4"),
        (
            ["attention", "--source", "a", "--kind", "encoder", "--heads", "3"],
            "heads=3: expected 1 to 2",
        ),
    ],
)
def test_inputs_that_cannot_be_drawn_are_reported_before_work_starts(
    plot, monkeypatch, checkpoint, capsys, flags, message
):
    monkeypatch.delattr(script, "AutoModelForSeq2SeqLM")
    if flags[0] == "attention":
        flags = [*flags, "--model", checkpoint]
    with pytest.raises((SystemExit, Exception)) as raised:
        plot(*flags)
    assert message in f"{raised.value}{capsys.readouterr().err}"


def test_a_model_for_a_different_engine_is_refused(plot, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model/model.bin").touch()  # CTranslate2's
    assert ctranslate2_engine.recognizes(tmp_path / "model")
    for picture in (["attention", "--source", "a"], ["positions"]):
        with pytest.raises(ValueError, match="engine='ctranslate2': expected a model that torch "):
            plot(*picture, "--model", "model")


def test_a_model_for_a_browser_is_refused(plot, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    (tmp_path / "model/onnx").mkdir()
    for picture in (["attention", "--source", "a"], ["positions"]):
        with pytest.raises(ValueError, match=r"engine='transformers\.js': expected a model that "):
            plot(*picture, "--model", "model")


def test_a_model_of_an_unsupported_type_is_refused(plot, tmp_path):
    for model_type, picture, message in (
        ("bert", ["attention", "--source", "a"], "expected an encoder and a decoder"),
        ("bart", ["positions"], "model is of type bart: expected vanilla_transformer"),
    ):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model/config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ValueError, match=message):
            plot(*picture, "--model", "model")

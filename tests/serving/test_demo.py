"""The demo shows what the model does, in a browser without requests to any other host."""

import os
import runpy
import socket
from pathlib import Path

import pytest
import torch
import yaml
from conftest import run_command, save_fsmt, seq2seq
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.translation import Hypothesis, translate, translate_n_best
from vanilla_transformer.plotting import AttentionMaps

gradio = pytest.importorskip("gradio", reason="needs the extra [demo]")

from vanilla_transformer.cli.demo import DemoArguments  # noqa: E402
from vanilla_transformer.serving import demo as serving  # noqa: E402
from vanilla_transformer.serving.demo import (  # noqa: E402
    MARK,
    MEAN,
    Demo,
    look,
    make_demo,
    write_space,
)

BROWSER = Path("/usr/bin/chromium-headless-shell")
SOURCE = "the lake is deep"


@pytest.fixture(scope="module")
def demo(checkpoint):
    made = make_demo(checkpoint, loading=LoadingArguments(device="cpu"))
    made.model.generation_config.extra_output_tokens = 0  # it has not learned to stop
    return made


def test_a_model_with_one_layer_has_a_page(tokenizer):
    model = seq2seq(vocab_size=len(tokenizer), decoder_layers=1)
    page = Demo(model, tokenizer, "one layer").page()
    (layer,) = [one for one in page.blocks.values() if "Layer" in str(getattr(one, "label", ""))]
    assert layer.value == 1
    assert not layer.visible


class Engine:
    """Has `generate()`, and is not a model of transformers."""

    def __init__(self, model):
        self.generate, self.eval, self.device = model.generate, model.eval, model.device
        self.config, self.generation_config = model.config, model.generation_config


# ---------------------------------------------------------------- translation


def test_hypotheses_come_with_their_scores_best_first(demo):
    options = {"num_beams": 4, "length_penalty": 0.5}
    found = translate_n_best([SOURCE], demo.model, demo.tokenizer, 3, **options)
    expected = [[f"{each.score:.3f}", each.text] for each in next(found)]
    best, rows, maps = demo.translate(" the lake\nis deep ", 4, 0.5, 3)
    assert rows == expected
    assert best == rows[0][1]
    weights = maps.weights
    assert weights.shape == (3, 4, len(maps.queries), len(maps.keys))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_there_are_at_most_as_many_hypotheses_as_beams(demo):
    assert len(demo.translate(SOURCE, 2, 1.0, 5)[1]) == 2


def test_a_hypothesis_of_one_beam_has_no_score(demo):
    (text,) = translate([SOURCE], demo.model, demo.tokenizer, num_beams=1)
    assert demo.translate(SOURCE, 1, 1.0, 3)[:2] == (text, [["", text]])


def test_a_blank_source_has_a_blank_translation(demo):
    assert demo.translate(" \n", 4, 1.0, 3) == ("", [], None)


def test_a_long_source_is_refused_with_its_length(demo):
    with pytest.raises(gradio.Error, match="1001 characters: expected at most 1000"):
        demo.translate("a" * 1001, 4, 1.0, 3)


def test_a_text_beyond_the_table_of_positions_is_refused_or_has_no_attention(
    tokenizer, monkeypatch
):
    model = seq2seq(
        vocab_size=len(tokenizer), position_encoding="learned", max_position_embeddings=12
    )
    demo = Demo(model, tokenizer, "learned")
    with pytest.raises(gradio.Error, match="19 tokens: expected at most 12"):
        demo.translate(f"{SOURCE} " * 3, 4, 1.0, 3)
    long = Hypothesis("der See ist tief " * 3, -1.0)
    monkeypatch.setattr(serving, "translate_n_best", lambda *_, **__: iter([[long]]))
    assert demo.translate(SOURCE, 4, 1.0, 3) == (long.text, [["-1.000", long.text]], None)


def test_a_translation_that_the_tokenizer_cannot_read_has_no_attention(tmp_path):
    pytest.importorskip("sacremoses", reason="needs vanilla-transformer[moses]")
    save_fsmt(tmp_path, targets="cba")  # another vocabulary than for sources
    best, rows, maps = make_demo(tmp_path).translate("a b", 3, 1.0, 2)
    assert [best, maps] == [rows[0][1], None]
    assert best


# ---------------------------------------------------------------- attention


def test_a_token_shows_the_source_tokens_it_attended_to():
    weights = torch.zeros(2, 2, 2, 3)
    weights[1, 0, 1] = torch.tensor([0.5, 0.25, 0.25])
    weights[1, 1, 1] = torch.tensor([0.0, 0.75, 0.25])
    maps = AttentionMaps(weights, ["der", "See"], ["the", "lake", "</s>"], "cross")
    targets, sources, numbers = look(maps, 1, 2, "2")
    assert targets == [("der", 0.0), ("See", MARK)]
    assert [key for key, _ in sources] == maps.keys
    assert [mark / MARK for _, mark in sources] == pytest.approx([0, 1, 1 / 3])
    assert numbers == "See  looked at  lake 75%,  </s> 25%,  the 0%"
    assert look(maps, 1, 2, MEAN)[2] == "See  looked at  lake 50%,  the 25%,  </s> 25%"


def components(page):
    return {one["type"] for one in page.config["components"]}


def test_an_engine_without_attention_has_a_page_without_attention(demo):
    engine = Demo(Engine(demo.model), demo.tokenizer, "engine")
    best, rows, maps = engine.translate(SOURCE, 4, 1.0, 3)
    assert (best, rows) == demo.translate(SOURCE, 4, 1.0, 3)[:2]
    assert maps is None
    assert "highlightedtext" in components(demo.page())
    assert "highlightedtext" not in components(engine.page())


def test_a_model_of_onnx_runtime_has_a_page_and_a_space(onnx_folder, tmp_path):
    """Its class is a PreTrainedModel, but its graphs return no attention weights."""
    exported = onnx_folder[2]
    demo = make_demo(exported)
    best, rows, maps = demo.translate(SOURCE, 4, 1.0, 3)
    (text,) = translate([SOURCE], demo.model, demo.tokenizer, num_beams=4)
    assert (best, len(rows), maps) == (text, 3, None)
    assert "highlightedtext" not in components(demo.page())
    space = write_space(tmp_path / "space", str(exported), demo)
    copied = {file.name for file in (space / "model").iterdir()}
    assert copied == {file.name for file in exported.iterdir()}


# ---------------------------------------------------------------- a Space


@pytest.fixture
def space(checkpoint, tmp_path):
    examples = tmp_path / "examples.en"
    examples.write_text(f"{SOURCE}\n\na house\u2028by the lake\n")
    flags = ["--examples", examples, "--device", "cpu", "--space", "space"]
    run_command("demo", checkpoint, *flags, cwd=tmp_path)
    return tmp_path / "space"


def test_a_space_is_self_contained(space, checkpoint, monkeypatch):
    served = []
    monkeypatch.chdir(space)
    monkeypatch.setattr(serving, "launch", served.append)
    runpy.run_path("app.py", run_name="__main__")
    assert served[0].examples == [SOURCE, "a house\u2028by the lake"]
    assert served[0].name == checkpoint.name
    header = yaml.safe_load((space / "README.md").read_text().split("---")[1])
    assert (header["sdk"], header["sdk_version"]) == ("gradio", gradio.__version__)
    assert Path(header["app_file"]).is_file()
    assert "vanilla-transformer[demo]" in (space / "requirements.txt").read_text()
    original = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).state_dict()
    copied = AutoModelForSeq2SeqLM.from_pretrained("model").state_dict()
    assert all(torch.equal(copied[name], weight) for name, weight in original.items())
    AutoTokenizer.from_pretrained("model")


@pytest.mark.parametrize(
    ("engine", "moses", "extras"),
    [(False, None, "demo"), (True, None, "demo,export"), (False, {"source": "en"}, "demo,moses")],
)
def test_a_space_requires_what_its_model_needs(demo, monkeypatch, tmp_path, engine, moses, extras):
    monkeypatch.setitem(demo.tokenizer.init_kwargs, "moses", moses)
    model = Engine(demo.model) if engine else demo.model
    write_space(tmp_path, "me/mine", Demo(model, demo.tokenizer, "mine"))
    required = (tmp_path / "requirements.txt").read_text()
    assert required.startswith(f"vanilla-transformer[{extras}]==")


def test_a_space_that_can_not_be_written_leaves_nothing(demo, checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match="no_such_file"):
        write_space(tmp_path / "space", str(checkpoint), demo, examples=tmp_path / "no_such_file")
    assert not os.listdir(tmp_path)


def test_a_space_of_a_model_on_the_hub_loads_it_from_there(demo, tmp_path):
    write_space(tmp_path, "me/mine", demo)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "app.py", "requirements.txt"]
    assert "make_demo('me/mine', None, LoadingArguments(), " in (tmp_path / "app.py").read_text()
    assert "models:\n- me/mine\n" in (tmp_path / "README.md").read_text()


def test_a_space_loads_a_model_as_the_command_did(demo, tmp_path):
    loading = LoadingArguments(device="cpu", dtype="bfloat16", trust_remote_code=True)
    write_space(tmp_path, "me/mine", demo, loading=loading)
    expected = "LoadingArguments(dtype='bfloat16', trust_remote_code=True)"
    assert expected in (tmp_path / "app.py").read_text()


@pytest.mark.parametrize(
    ("option", "value"), [("num_beams", 12), ("length_penalty", 3.0), ("length_penalty", -0.5)]
)
def test_options_saved_with_a_model_are_within_the_sliders(demo, monkeypatch, option, value):
    monkeypatch.setattr(demo.model.generation_config, option, value)
    for slider in demo._sliders():
        slider.preprocess(slider.value)


def test_a_folder_in_use_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    process = run_command("demo", "no/model", "--space", ".", cwd=tmp_path, check=False)
    assert "space='.': expected a new or empty folder" in process.stderr


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_has_the_form_that_gradio_accepts(host):
    assert DemoArguments(host=host).host == "[::1]"
    assert DemoArguments().host == "127.0.0.1"


# ---------------------------------------------------------------- the browser


@pytest.mark.slow
def test_type_translate_and_select_a_word(checkpoint, tmp_path, monkeypatch):
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not BROWSER.exists():
        pytest.skip(f"needs {BROWSER}")
    connect, elsewhere = socket.socket.connect, []

    def connect_here(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            elsewhere.append(address)
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    (tmp_path / "examples").write_text("a house by the lake\n")
    demo = make_demo(checkpoint, tmp_path / "examples", LoadingArguments(device="cpu"))
    _, url, _ = serving.launch(demo, prevent_thread_lock=True, quiet=True)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.on("request", lambda request: elsewhere.append(request.url))
        page.goto(url)
        page.get_by_label("Source", exact=True).fill(SOURCE)
        page.get_by_role("button", name="Translate").click()
        tokens = page.locator("#target-tokens").get_by_role("button")
        tokens.last.wait_for()
        best, rows, maps = demo.translate(SOURCE, 4, 1.0, 3)
        assert page.get_by_label("Translation", exact=True).input_value() == best
        assert page.get_by_role("gridcell").all_inner_texts() == [
            cell for row in rows for cell in row
        ]
        assert tokens.all_inner_texts() == maps.queries
        tokens.last.click()
        expected = look(maps, len(maps.queries) - 1, 3, MEAN)[2]
        api.expect(page.get_by_label("In numbers")).to_have_value(expected)
        page.get_by_role("button", name="a house by the lake").click()
        source = page.get_by_label("Source", exact=True)
        api.expect(source).to_have_value("a house by the lake")
        source.press("Enter")
        browser.close()
    gradio.close_all()
    assert [one for one in elsewhere if not str(one).startswith(url)] == []

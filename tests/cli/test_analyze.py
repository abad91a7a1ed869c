"""`analyze`: its tables, pictures and smaller models, and what it refuses."""

import json
import sys
from importlib.util import find_spec

import pytest
from transformers import AutoConfig, AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.cli import analyze
from vanilla_transformer.inference.engines import ENGINES

MISSING = [package for package in ("bertviz", "IPython") if find_spec(package) is None]


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """A model that can be pruned, and a text."""
    folder = tmp_path_factory.mktemp("analyze")
    config = AutoConfig.from_pretrained(checkpoint, head_dim=6, dtype="float32")
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder / "model")
    (folder / "source").write_text("the lake is deep\na house\n")
    (folder / "target").write_text("der See ist tief\nein Haus\n")
    (folder / "links").write_text("0-0 1-1 2p2 3-3\n0-0 1-1\n")
    (folder / "far").write_text("0-0\n1-2\n")
    (folder / "odd").write_text("0-0\n0:0\n")
    (folder / "unsure").write_text("0p0\n1p1\n")
    (folder / "short").write_text("der See\n")
    (folder / "bert").mkdir()
    (folder / "bert/config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs `analyze` with the given flags in that folder, and returns what it prints."""
    monkeypatch.chdir(folder)

    def analyze_with(*flags):
        model = [] if "--model" in flags else ["--model", "model"]
        monkeypatch.setattr(sys, "argv", ["analyze", *flags, *model])
        analyze.main()
        return capsys.readouterr().out.splitlines()

    return analyze_with


TEXT = ["--source", "source", "--target", "target"]


def test_a_pruned_model_that_can_not_be_written_leaves_nothing(run, folder, monkeypatch):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(
        type(AutoTokenizer.from_pretrained(folder / "model")), "save_pretrained", fail
    )
    with pytest.raises(OSError, match="no space left"):
        run("heads", *TEXT, "--prune", "0.5", "--prune_output", "lost/pruned")
    assert not list(folder.glob("lost/*"))


def test_heads_are_listed_drawn_and_pruned(run, folder):
    prune = ["--prune", "0.5", "--prune_output", "new/pruned"]
    header, *lines = run("heads", *TEXT, "--output", "heads.png", *prune)
    assert header.split() == ["attention", "layer", "head", "importance", "confidence"]
    heads = [line.split() for line in lines[:-3]]
    assert len(heads) == 2 * 2 + 3 * 4 + 3 * 4
    assert heads[-1][:3] == ["cross", "3", "4"]
    assert lines[-3].startswith("loss: ")
    assert lines[-2] == "heads.png"
    assert lines[-1].startswith("new/pruned: 1 heads in each layer of the encoder, 2 of the decode")
    assert (folder / "heads.png").stat().st_size > 0
    assert AutoConfig.from_pretrained("new/pruned").decoder_attention_heads == 2
    assert AutoTokenizer.from_pretrained("new/pruned")("lake")["input_ids"]
    with pytest.raises(FileExistsError, match="prune_output='new/pruned': expected a new or"):
        run("heads", *TEXT, *prune)


@pytest.fixture
def drawn(monkeypatch):
    """Skip drawing the pictures."""
    monkeypatch.setattr(analyze, "save", lambda figure, path: [path])


def test_positions_have_a_similarity_and_attention_a_reach(run, drawn):
    lines = run("positions", *TEXT, "--length", "20", "--output", "pictures/positions.png")
    assert [line.split()[0] for line in lines[1:6]] == ["1", "2", "3", "5", "10"]
    assert lines[6] == "pictures/positions.png"
    assert lines[7].split() == [
        "attention",
        "layer",
        "head",
        "distance",
        "previous",
        "same",
        "next",
    ]
    assert len(lines[8:-1]) == 2 * 2 + 3 * 4
    assert lines[-1] == "pictures/positions_distance.png"
    assert len(run("positions", "--stack", "decoder")) == 8


def test_embeddings_have_norms_and_neighbours(run, drawn):
    lines = run("embeddings", "--tokens", "lake", "See", "--output", "norms.svg")
    assert lines[0].split("  ")[-1] == "share of position"
    assert "embedding * sqrt(d_model) (this model)" in lines[2]
    assert [line.split(":")[0] for line in lines[4:6]] == ["lake", "See"]
    assert lines[6] == "norms.svg"


def test_alignments_have_an_error_rate_by_layer(run):
    header, *lines = run("alignments", *TEXT, "--links", "links")
    assert header.split() == ["--alignment_layer", "AER", "precision", "recall"]
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert ["(default)" in line for line in lines] == [False, True, False]
    assert all(0 <= float(value) <= 100 for line in lines for value in line.split()[-3:])


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
def test_attention_is_written_to_a_page(run, folder):
    assert run("attention", "--text", "the lake", "--output", "pages/a.html") == ["pages/a.html"]
    assert "<h2>Self-attention of the encoder</h2>" in (folder / "pages/a.html").read_text()


def test_a_page_names_the_extra_that_it_needs(run, monkeypatch):
    monkeypatch.setattr("vanilla_transformer.analysis.attention.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"bertviz; .*\[analysis\]"):
        run("attention", "--text", "the lake", "--output", "a.html")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.NAME)
def test_an_exported_model_is_refused(run, folder, monkeypatch, engine):
    monkeypatch.setattr(engine, "recognizes", lambda path: True)
    message = f"^model with engine='{engine.NAME}': expected a model that torch runs"
    with pytest.raises(ValueError, match=message):
        run("heads", *TEXT)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["heads", *TEXT, "--prune", "1.5", "--prune_output", "x"], "prune=1.5: expected a share"),
        (["heads", *TEXT, "--prune", "0.5"], "expected both --prune and --prune_output"),
        (["heads", "--source", "source", "--target", "short"], "source has 2 lines and short 1"),
        (["heads", *TEXT, "--max_tokens", "0"], "max_tokens=0: expected a positive number"),
        (["heads", *TEXT, "--output", "a.jpg"], "a.jpg: expected a name that ends in .png"),
        (["heads", *TEXT, "--model", "bert"], "is of type bert: expected vanilla_transformer"),
        (["heads", *TEXT, "--model", "adapter"], "adapter holds an adapter: expected a whole mo"),
        (
            ["alignments", *TEXT, "--links", "far"],
            "far, line 2: link 1-2 between 2 and 2 words: ex",
        ),
        (
            ["alignments", *TEXT, "--links", "odd"],
            "odd, line 2: '0:0': expected a link such as 0-0",
        ),
        (["alignments", *TEXT, "--links", "short"], "short has 1 lines: expected 2, one for each"),
        (["alignments", *TEXT, "--links", "unsure"], "unsure has no sure link: expected at least"),
        (["positions", "--source", "source"], "expected both --source and --target"),
        (["attention", "--text", " ", "--output", "a.html"], "text=' ': expected a sentence"),
        (["attention", "--text", "a", "--output", "a.png"], "output='a.png': expected a name"),
    ],
)
def test_inputs_that_cannot_be_analyzed_are_reported_before_work_starts(
    run, monkeypatch, flags, message
):
    monkeypatch.delattr(analyze, "LoadingArguments")
    with pytest.raises(ValueError, match=message):
        run(*flags)

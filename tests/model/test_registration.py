"""One saved folder loads through every Auto class and the pipeline, with the package and without.

Models are loaded in fresh processes: only their own imports register anything there.
"""

import importlib
import json

import pytest
import torch
import transformers
from conftest import REPOSITORY, SMALL, in_new_process, random_ids
from packaging.version import Version

from vanilla_transformer import VanillaTransformerForConditionalGeneration

LOAD_EVERYTHING = """
    import json, sys
    import torch
    from transformers import (
        AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM,
        AutoModelForTextEncoding, AutoTokenizer, pipeline,
    )

    root, trust = sys.argv[1], {"trust_remote_code": True} if sys.argv[-1] else {}

    def load(folder, resaved):
        config = AutoConfig.from_pretrained(folder, **trust)
        tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
        ids = torch.tensor([[5, 6, 7, 8]])
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust)
        results = {
            "config": type(config).__name__,
            "text": tokenizer.decode(tokenizer("ein Haus")["input_ids"], skip_special_tokens=True),
            "logits": model(input_ids=ids, decoder_input_ids=ids).logits.sum().item(),
            "generated": model.generate(ids, max_new_tokens=5).tolist(),
        }
        for auto in (AutoModel, AutoModelForTextEncoding, AutoModelForCausalLM):
            loaded = auto.from_pretrained(folder, **trust)
            inputs = {"decoder_input_ids": ids} if auto is AutoModel else {}
            results[auto.__name__] = [type(loaded).__name__, loaded(ids, **inputs)[0].sum().item()]
        translate = pipeline("translation", model=folder, **trust)
        results["pipeline"] = translate(["a house", ""], max_new_tokens=5)
        text2text = pipeline("text2text-generation", model=folder, **trust)
        results["text2text"] = text2text("a house", max_new_tokens=5)
        pair = pipeline("translation_en_to_de", model=folder, **trust)
        results["pair"] = pair("a house", max_new_tokens=5)
        model.save_pretrained(f"{resaved}/model")
        tokenizer.save_pretrained(f"{resaved}/model")
        translate.save_pretrained(f"{resaved}/pipeline")
        results["module"] = type(model).__module__
        return results

    folders = sys.argv[2:-1]
    print(json.dumps([load(folder, f"{root}/{i}") for i, folder in enumerate(folders)]))
"""


@pytest.fixture(scope="module")
def loaded(checkpoint, tmp_path_factory):
    """What a process with the package loaded, and one without, which also loads the new folders."""
    root = tmp_path_factory.mktemp("processes")
    runs, again, piped = {}, root / "without/0/model", root / "with/0/pipeline"
    for name, folders in [("with", [checkpoint]), ("without", [checkpoint, again, piped])]:
        cache = root / name / "modules"
        cache.mkdir(parents=True)
        results = in_new_process(LOAD_EVERYTHING, name == "with", cache, root / name, *folders)
        names = (name, "saved again", "saved by the pipeline")
        runs |= dict(zip(names, results, strict=False))
    return runs


def test_the_package_is_used_if_it_is_installed(loaded):
    assert loaded["with"]["module"] == "vanilla_transformer.model.modeling_vanilla_transformer"


def test_the_code_in_the_folder_is_used_if_the_package_is_not_installed(loaded):
    assert loaded["without"]["module"].startswith("transformers_modules.")


def test_every_auto_class_finds_its_model(loaded):
    found = loaded["with"]
    assert found["config"] == "VanillaTransformerConfig"
    assert found["AutoModel"][0] == "VanillaTransformerModel"
    assert found["AutoModelForTextEncoding"][0] == "VanillaTransformerEncoderModel"
    assert found["AutoModelForCausalLM"][0] == "VanillaTransformerForCausalLM"


@pytest.mark.parametrize("run", ["without", "saved again", "saved by the pipeline"])
def test_results_are_the_same_everywhere(loaded, run):
    expected, actual = dict(loaded["with"]), dict(loaded[run])
    expected.pop("module"), actual.pop("module")
    assert actual == expected


def test_results_in_a_new_process_equal_those_of_this_process(loaded, checkpoint):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert loaded["with"]["logits"] == pytest.approx(logits.sum().item(), rel=1e-4)
    assert loaded["with"]["generated"] == model.generate(ids, max_new_tokens=5).tolist()
    assert loaded["with"]["text"] == "ein Haus"
    assert loaded["with"]["pipeline"][1] == {"translation_text": ""}
    assert loaded["with"]["pair"] == loaded["with"]["pipeline"][:1]


@pytest.mark.parametrize("save", ["model", "config"])
def test_every_saved_folder_contains_all_the_code(model, tmp_path, save):
    (model if save == "model" else model.config).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["auto_map"]) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForSeq2SeqLM",
        "AutoModelForTextEncoding",
        "AutoModelForCausalLM",
    }
    files = {reference.split(".")[0] for reference in config["auto_map"].values()}
    files |= {task["impl"].split(".")[0] for task in config["custom_pipelines"].values()}
    for file in {*files, "generation"}:
        assert (tmp_path / f"{file}.py").is_file()


OWN_MODEL = """
from huggingface_hub.dataclasses import strict
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


@strict
class WarmConfig(VanillaTransformerConfig):
    model_type = "warm_transformer"
    warmth: float = 1.0


class Warm(VanillaTransformerForConditionalGeneration):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits / getattr(self.config, "warmth", 4.0)
        return outputs


class WarmWithConfig(Warm):
    config_class = WarmConfig
"""
LOAD_OWN = """
    import json, sys
    import torch
    from transformers import AutoModelForSeq2SeqLM

    del sys.modules["vanilla_transformer"]  # which the folder's own code imports
    ids, found = torch.tensor([[5, 6, 7, 8]]), {}
    for folder in sys.argv[1:-1]:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
        logits = model(input_ids=ids, decoder_input_ids=ids).logits
        found[type(model).__name__] = logits.sum().item()
    print(json.dumps(found))
"""


def test_a_registered_subclass_is_loaded_from_its_folder(tmp_path, monkeypatch):
    """Its base class is not."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    ids, expected = torch.tensor([[5, 6, 7, 8]]), {}
    for name, fields in {"Warm": {}, "WarmWithConfig": {"warmth": 2.0}}.items():
        kind = getattr(importlib.import_module("own_model"), name)
        model = kind(kind.config_class(**SMALL, **fields)).eval()
        kind.register_for_auto_class("AutoModelForSeq2SeqLM")
        model.save_pretrained(tmp_path / name)
        expected[name] = model(input_ids=ids, decoder_input_ids=ids).logits.sum().item()
    found = in_new_process(LOAD_OWN, False, tmp_path, *(tmp_path / name for name in expected))
    assert found == pytest.approx(expected, rel=1e-4)


def test_saving_a_second_time_gives_the_same_config(model, tmp_path):
    model.save_pretrained(tmp_path / "first")
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "first")
    loaded(input_ids=random_ids(1, 3), decoder_input_ids=random_ids(1, 3))
    loaded.save_pretrained(tmp_path / "second")
    for name in ("config.json", "generation_config.json"):
        first, second = ((tmp_path / run / name).read_text() for run in ("first", "second"))
        assert first == second


# ---------------------------------------------------------------- a checkpoint of version 0.1.0

OLD = REPOSITORY / "tests/fixtures/checkpoint_0.1.0"
renamed_cache = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24"),
    reason="the checkpoint's own code has the name of the cache before transformers 5.24",
)
LOAD_OLD = """
    import json, sys
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoModelForTextEncoding

    folder, trust = sys.argv[1], {"trust_remote_code": True} if sys.argv[3] else {}
    expected = json.loads(open(sys.argv[2]).read())
    ids, labels = (torch.tensor(expected[name]) for name in ("input_ids", "labels"))
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust)
    outputs = model(input_ids=ids, labels=labels)
    print(json.dumps({
        "loss": outputs.loss.item(),
        "logits_sum_by_row": outputs.logits.sum((1, 2)).tolist(),
        "generated": model.generate(ids, max_new_tokens=8).tolist(),
        "module": type(model).__module__,
        "encoder": type(AutoModelForTextEncoding.from_pretrained(folder, **trust)).__name__,
    }))
"""


@pytest.mark.parametrize(
    "package",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=renamed_cache)],
    ids=["with the package", "with its own code"],
)
def test_a_checkpoint_of_version_0_1_0_gives_the_same_results(tmp_path, package):
    """Saved before the package had subpackages, with its own code in files with different names."""
    expectation = OLD.with_name("expected_0.1.0.json")
    expected = json.loads(expectation.read_text())
    found = in_new_process(LOAD_OLD, package, tmp_path, OLD, expectation)
    ours = found["module"] == "vanilla_transformer.model.modeling_vanilla_transformer"
    assert ours == package
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["logits_sum_by_row"] == pytest.approx(expected["logits_sum_by_row"], abs=1e-3)
    assert found["generated"] == expected["generated"]
    assert found["encoder"] == "VanillaTransformerEncoderModel"

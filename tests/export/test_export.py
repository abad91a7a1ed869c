"""What `export` refuses before it starts, what it does not change, and its command."""

import copy
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import run_command, run_module
from huggingface_hub import metadata_load
from transformers import GenerationConfig

from scripts.benchmarks import engines
from vanilla_transformer import VanillaTransformerForCausalLM
from vanilla_transformer.export import TARGETS, export
from vanilla_transformer.export.check import check, compare, size

NEEDED = {"ctranslate2": "ctranslate2"}


@pytest.fixture(params=["ctranslate2", "marian"])
def to(request):
    if request.param in NEEDED:
        pytest.importorskip(NEEDED[request.param], reason="needs vanilla-transformer[export]")
    return request.param


def expect_refusal(error, message, folder, tmp_path, to, **options):
    """An error that names the cause, and nothing is written."""
    with pytest.raises(error, match=message):
        export(folder, tmp_path / "exported", to, **options)
    assert not (tmp_path / "exported").exists()


def test_unknown_targets_and_quantizations_are_refused(saved, tmp_path, to):
    _, folder = saved()
    expect_refusal(ValueError, "to='abacus': expected one of ctra", folder, tmp_path, "abacus")
    message = "quantization='int2' with"
    expect_refusal(ValueError, message, folder, tmp_path, to, quantization="int2")


def test_folders_without_a_finished_model_are_refused(saved, tmp_path, to):
    _, folder = saved()
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    expect_refusal(ValueError, "expected complete files, but .*header", folder, tmp_path, to)
    weights.unlink()
    expect_refusal(FileNotFoundError, "no model.safetensors", folder, tmp_path, to)
    weights.write_bytes(content)
    generation = folder / "generation_config.json"
    content = generation.read_bytes()
    generation.write_bytes(content[:9])
    expect_refusal(ValueError, f"^{generation}: expected complete files", folder, tmp_path, to)
    generation.write_bytes(content)
    (folder / "tokenizer_config.json").unlink()
    expect_refusal(FileNotFoundError, "no tokenizer_config.json", folder, tmp_path, to)
    expect_refusal(FileNotFoundError, "no config.json", tmp_path / "none", tmp_path, to)


def test_weights_that_a_file_lacks_are_reported(saved, tmp_path, to):
    _, folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    expect_refusal(
        ValueError, "complete weights, .* missing, such as .*k_proj.bias", folder, tmp_path, to
    )


def test_other_architectures_are_refused(saved, tmp_path, to):
    model, folder = saved()
    VanillaTransformerForCausalLM(model.config).save_pretrained(folder)
    expect_refusal(ValueError, "is_encoder_decoder=False", folder, tmp_path, to)
    (folder / "config.json").write_text('{"model_type": "t5"}')
    expect_refusal(ValueError, "model_type='t5': expected", folder, tmp_path, to)


def test_quantized_models_are_refused(saved, tmp_path, to):
    """Targets read matrices from the layers, where other libraries keep integers and scales."""
    _, folder = saved()
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "any"}
    (folder / "config.json").write_text(json.dumps(fields))
    message = f"^{folder} is quantized: expected a model before it is quantized$"
    expect_refusal(ValueError, message, folder, tmp_path, to)


def test_an_output_folder_in_use_is_not_overwritten(saved, tmp_path, to):
    _, folder = saved()
    before = sorted(folder.iterdir())
    with pytest.raises(FileExistsError, match="expected a new or empty folder"):
        export(folder, folder, to)
    assert sorted(folder.iterdir()) == before


def test_a_volume_can_be_mounted_at_the_output_folder(saved, tmp_path, to, monkeypatch):
    """Nothing can replace it, and its parent may belong to someone else."""
    _, folder = saved()
    volume = (tmp_path / "volume").resolve()
    volume.mkdir()
    replace, temporary = Path.replace, tempfile.mkdtemp

    def replace_files(path, target):
        if Path(target) == volume:
            raise OSError(16, "Device or resource busy")
        return replace(path, target)

    def make_folder(suffix=None, prefix=None, dir=None):
        assert dir is None or Path(dir) != volume.parent
        return temporary(suffix, prefix, dir)

    monkeypatch.setattr(Path, "replace", replace_files)
    monkeypatch.setattr(tempfile, "mkdtemp", make_folder)
    with monkeypatch.context() as patch:
        error = OSError(28, "No space left on device")
        patch.setattr("vanilla_transformer.export._write_card", Mock(side_effect=error))
        with pytest.raises(OSError, match="No space left"):
            export(folder, volume, to)
    assert not any(volume.iterdir())
    export(folder, volume, to)
    assert {"config.json", "README.md"} < {path.name for path in volume.iterdir()}
    assert not any(path.name.startswith(".") for path in volume.iterdir())


def test_an_export_keeps_the_languages_and_the_licence(saved, tmp_path, to):
    _, folder = saved()
    (folder / "README.md").write_text(
        "---\nlanguage: [en, de]\nlicense: mit\nlibrary_name: transformers\n"
        "tags: [vanilla_transformer]\nmodel_name: mine\nmetrics: [bleu]\n---\n# mine\n"
    )
    output = export(folder, tmp_path / "exported", to)
    found = metadata_load(output / "README.md")
    assert (found["language"], found["license"]) == (["en", "de"], "mit")
    assert found["tags"] == [to]
    assert not {"model_name", "metrics"} & found.keys()
    card = (output / "README.md").read_text()
    assert card.split("---\n")[2].startswith("# exported\n")
    assert "vanilla-transformer translate --model FOLDER" in card
    (folder / "README.md").write_text("---\nlanguage: [en\n---\n")
    shutil.rmtree(output)
    expect_refusal(ValueError, "README.md: expected YAML between two", folder, tmp_path, to)


PRE = {"norm_position": "pre"}
REFUSED = [
    ("ctranslate2", {"activation_function": "mish"}, "activation_function='mish'"),
    ("marian", PRE, "norm_position='pre'"),
    ("marian", {"decoder_norm_position": "pre"}, "decoder_norm_position='pre'"),
    ("marian", {"position_encoding": "learned"}, "position_encoding='learned'"),
    ("marian", {"sinusoid_frequencies": "tensor2tensor"}, "sinusoid_frequencies"),
    ("marian", {"position_offset": 1}, "position_offset=1"),
    ("marian", {"embedding_layer_norm": True}, "embedding_layer_norm=True"),
    ("marian", {"final_layer_norm": "both"}, "final_layer_norm='both'"),
    ("marian", {"head_dim": 13}, "encoder_attention_heads=2, head_dim=13"),
    ("pegasus", {}, "norm_position='post'"),
    ("pegasus", {**PRE, "tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ("pegasus", {**PRE, "decoder_vocab_size": 300}, "decoder_vocab_size=300"),
    ("pegasus", {**PRE, "final_layer_norm": "none"}, "final_layer_norm='none'"),
]


@pytest.mark.parametrize(("to", "config", "message"), REFUSED)
def test_options_that_a_target_cannot_express_are_refused_by_name(
    saved, tmp_path, to, config, message
):
    if to in NEEDED:
        pytest.importorskip(NEEDED[to], reason="needs vanilla-transformer[export]")
    _, folder = saved(**config)
    expect_refusal(ValueError, message, folder, tmp_path, to)


def test_a_missing_package_is_reported(saved, tmp_path, monkeypatch):
    _, folder = saved()
    monkeypatch.delitem(
        sys.modules, f"vanilla_transformer.export.{TARGETS['ctranslate2']}", raising=False
    )
    monkeypatch.setitem(sys.modules, "ctranslate2.specs", None)
    message = r"needs the package ctranslate2.*vanilla-transformer\[export\]"
    expect_refusal(ImportError, message, folder, tmp_path, "ctranslate2")


def test_quantization_does_not_change_the_model(saved, tokenizer):
    pytest.importorskip("ctranslate2", reason="needs vanilla-transformer[export]")
    from vanilla_transformer.export.to_ctranslate2 import make_spec

    model, _ = saved()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spec = make_spec(model, tokenizer)
    spec.validate()
    spec.optimize("int8")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_command_exports_and_checks(saved, tmp_path, to):
    _, folder = saved()
    GenerationConfig.from_pretrained(folder, max_length=12).save_pretrained(folder)
    (tmp_path / "lines").write_text("a house by the lake\n\nthe lake is deep\n")
    flags = ["model", "--to", to, "--output_dir", "exported", "--check", "lines"]
    printed = run_command("export", *flags, cwd=tmp_path).stdout
    rows = dict(line.rsplit("  ", 1) for line in printed.splitlines()[1:])
    rows = {name.strip(): value for name, value in rows.items()}
    assert rows["lines"] == "3"
    assert rows["equal translations"] == "3 (100.0%)"
    assert float(rows["largest difference of scores, 4 beams"]) < 1e-4
    size = (folder / "model.safetensors").stat().st_size
    assert rows["MB of weights, model"] == f"{size / 1e6:.1f}"
    assert float(rows["MB of weights, export"]) > 0


def test_the_size_of_a_trained_or_converted_folder_only_counts_the_model(tmp_path):
    names = ("model.safetensors", "training_args.bin", "onnx/model.onnx")
    others = ("checkpoint-3/model.safetensors", "checkpoint-3/optimizer.pt")
    for name in (*names, *others, "original/leftovers.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
    assert size(tmp_path) == 200  # the model's two files


def test_the_command_refuses_before_it_starts(tmp_path):
    flags = ["model", "--to", "marian", "--output_dir", "exported", "--check", "none"]
    failed = run_command("export", *flags, cwd=tmp_path, check=False)
    assert "check='none': expected a file" in failed.stderr


def test_a_model_in_bfloat16_is_compared_in_the_precision_of_the_export(saved, tmp_path, to):
    """Otherwise the rounding of its own products would count as a difference of the export."""
    model, folder = saved(layer_norm_eps=1e-5)
    model.generation_config.max_new_tokens = 5
    model.bfloat16().save_pretrained(folder)
    (tmp_path / "lines").write_text("the lake is deep\na house\n")
    table = check(folder, export(folder, tmp_path / "exported", to), tmp_path / "lines")
    rows = dict(line.split("  ", 1) for line in table.splitlines())
    assert float(rows["largest difference of scores, 4 beams"]) < 1e-4


def test_scores_are_only_compared_for_equal_tokens(saved, tokenizer):
    model, _ = saved()
    torch.manual_seed(1)
    another = type(model)(model.config).eval()
    lines = ["the lake is deep", "a house"]
    same = compare((model, tokenizer), (model, tokenizer), lines)
    assert (same.equal, same.difference) == (2, 0.0)
    different = compare((model, tokenizer), (another, tokenizer), lines)
    assert (different.equal, different.difference) == (0, None)


def test_speeds_count_the_lines_of_all_batches(saved, tokenizer, monkeypatch):
    """The model takes 2 seconds for each of two batches, the export 1."""
    pair = saved()[0], tokenizer
    clock = iter([0, 2, 10, 11, 20, 22, 30, 31])
    fake = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("vanilla_transformer.export.check.time", fake)
    lines = ["a house"] * 33
    assert compare(pair, pair, lines).speeds == [33 / 4, 33 / 2]
    assert not list(clock)


def test_an_empty_file_is_reported(tmp_path):
    (tmp_path / "lines").write_text("\n \n")
    with pytest.raises(ValueError, match="lines: expected lines of the source language"):
        check(tmp_path, tmp_path, tmp_path / "lines")


def test_a_nan_score_is_a_difference(saved, tokenizer, monkeypatch):
    model, _ = saved()
    broken = copy.deepcopy(model)
    generate = type(model).generate

    def spoil(self, **inputs):
        output = generate(self, **inputs)
        if self is broken and hasattr(output, "sequences_scores"):
            output["sequences_scores"][-1] = math.nan
        return output

    monkeypatch.setattr(type(model), "generate", spoil)
    found = compare((model, tokenizer), (broken, tokenizer), ["the lake is deep", "a house"])
    assert found.equal == 2
    assert math.isnan(found.difference)


def test_a_model_that_samples_is_compared_without_sampling(saved, tmp_path, to):
    """And without a repetition penalty in beam search, which CTranslate2 lacks."""
    model, folder = saved(layer_norm_eps=1e-5)
    fields = {"do_sample": True, "repetition_penalty": 1.2, "max_new_tokens": 5}
    model.generation_config.update(**fields)
    model.generation_config.save_pretrained(folder)
    (tmp_path / "lines").write_text("the lake is deep\n\na house\n")
    table = check(folder, export(folder, tmp_path / "exported", to), tmp_path / "lines")
    assert "equal translations                     3 (100.0%)" in table


@pytest.mark.parametrize(
    ("limit", "length"), [({"extra_output_tokens": 5}, 1 + 12), ({"max_length_factor": 2}, 1 + 14)]
)
def test_truncated_translations_are_equal_in_a_class_of_transformers(
    saved, tmp_path, monkeypatch, limit, length
):
    """Its length limit differs, so both get the model's limit, here for 7 source tokens."""
    model, folder = saved(layer_norm_eps=1e-5)
    fields = {"suppress_tokens": [2], **limit}
    model.generation_config.update(**fields, allow_custom_entries=True)
    model.generation_config.save_pretrained(folder)
    (tmp_path / "lines").write_text("the lake is deep\n\na house\n")
    exported = export(folder, tmp_path / "exported", "marian")
    lengths, generate = [], model.generate

    def spy(self, **inputs):
        output = generate.__func__(self, **inputs)
        lengths.append(getattr(output, "sequences", output).shape[1])
        return output

    monkeypatch.setattr(type(model), "generate", spy)
    table = check(folder, exported, tmp_path / "lines")
    assert "equal translations                     3 (100.0%)" in table
    assert "no equal translations" not in table
    assert lengths == [length] * 2


@pytest.mark.slow
def test_the_benchmark_compares_the_engines(saved, tmp_path):
    pytest.importorskip("ctranslate2", reason="needs vanilla-transformer[export]")
    saved()
    (tmp_path / "lines").write_text("a house by the lake\nthe lake is deep\n")
    flags = ["--source", "lines", "--target", "lines", "--rounds", 1, "--tokenize", "none"]
    options = ["--model", "model", "--output_dir", "out", *flags]
    run_module("scripts.benchmarks.engines", *options, cwd=tmp_path, fresh=True)
    results = json.loads((tmp_path / "out" / "engines.json").read_text())
    found = {(row["engine"], row["weights"]): row for row in results}
    assert found["ctranslate2", "float32"]["equal"] == 1
    weights = [found["ctranslate2", name]["megabytes"] for name in ("int8", "float32")]
    assert weights[0] < weights[1]


def test_the_benchmark_runs_models_of_any_dtype_in_float32(saved):
    model, folder = saved()
    model.bfloat16().save_pretrained(folder)
    assert engines.load(folder)[0].dtype == torch.float32

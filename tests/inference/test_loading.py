"""All scripts load models in the same way, and check the options first."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_command, save_fsmt
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModelForSeq2SeqLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
)

from vanilla_transformer.cli.main import needs_traceback
from vanilla_transformer.inference.engines import onnxruntime_engine
from vanilla_transformer.inference.loading import (
    LoadingArguments,
    expect_torch_model,
    read_config,
)
from vanilla_transformer.inference.scoring import score_pairs
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.training.arguments import ModelArguments
from vanilla_transformer.training.preparation import make_model, make_tokenizer


@pytest.mark.parametrize("dtype", ["auto", "float32", "float64"])
def test_a_model_has_the_requested_precision(model, tokenizer, tmp_path, dtype):
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = LoadingArguments(device="cpu", dtype=dtype, attn_implementation="eager")
    loaded, its_tokenizer = options.load(tmp_path)
    assert loaded.dtype == (torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    assert loaded.config._attn_implementation == "eager"
    assert its_tokenizer.get_vocab() == tokenizer.get_vocab()


def test_a_model_without_its_tokenizer_is_reported(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: .* with a tokenizer_config.json"):
        LoadingArguments(device="cpu").load(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")  # the name that PEFT uses
    with pytest.raises(FileNotFoundError, match=r"with a tokenizer_config.json"):
        LoadingArguments(device="cpu").load(tmp_path)


@pytest.mark.parametrize("load", [LoadingArguments(device="cpu").load, read_config])
def test_a_folder_without_a_model_is_reported(load, model, tokenizer, tmp_path):
    """Such as that of a training which has only checkpoints yet."""
    model.save_pretrained(tmp_path / "checkpoint-5")
    tokenizer.save_pretrained(tmp_path / "checkpoint-5")
    load(tmp_path / "checkpoint-5")
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path}: expected .* config.json; `vanilla-"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("model.safetensors", ""),
        ("tokenizer.json", ""),
        ("tokenizer_config.json", ""),
        ("generation_config.json", "/generation_config.json"),
    ],
)
@pytest.mark.parametrize("left", [b"", b'{"version', b"\xff"])
def test_a_damaged_file_is_reported(checkpoint, tmp_path, file, named, left):
    """Cut short, as by a full disk, or not UTF-8. transformers would translate without a generation
    config, as if the model had none: with other beams and limits of length."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / file).write_bytes(left)
    with pytest.raises(ValueError, match=f"^{folder}{named}: expected complete files, but ") as e:
        LoadingArguments(device="cpu").load(folder)
    assert not needs_traceback(e.value)


@pytest.mark.parametrize("content", [None, "{}", '{"version": "1.0"}'])
def test_an_unusable_tokenizer_is_reported_in_one_line(checkpoint, tmp_path, content):
    """transformers and tokenizers raise different errors, some in five lines, without the folder's
    name."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"^{folder}: can't load the tokenizer: .+") as error:
        LoadingArguments(device="cpu").load(folder)
    assert "\n" not in str(error.value)
    assert not needs_traceback(error.value)


def test_a_folder_may_have_an_index_of_something_else(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "pages.index.json").write_text("[]")
    LoadingArguments(device="cpu").load(folder)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_that_also_has_graphs_for_a_browser_is_loaded(checkpoint, tmp_path, weights):
    """As many have on the Hub."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "onnx").mkdir()
    if weights == "pytorch_model.bin":
        torch.save(load_file(folder / "model.safetensors"), folder / weights)
        (folder / "model.safetensors").unlink()
    expect_torch_model(folder)
    (folder / weights).unlink()
    with pytest.raises(ValueError, match=r"with engine='transformers\.js': expected a model that"):
        expect_torch_model(folder)


def test_weights_that_may_not_be_read_are_not_reported_as_missing(checkpoint, monkeypatch):
    """safetensors saves weights that only their owner may read."""
    opened = Path.open

    def open_as_another_user(path, *args, **kwargs):
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_as_another_user)
    with pytest.raises(PermissionError, match=r"Permission denied: .*model\.safetensors"):
        LoadingArguments(device="cpu").load(checkpoint)


def lose_weight(path, ending):
    """Rewrite a weights file without the first weight whose name has this ending."""
    weights = load_file(path)
    del weights[next(name for name in weights if name.endswith(ending))]
    save_file(weights, path, {"format": "pt"})


def test_a_model_that_lacks_weights_is_refused(model, tokenizer, tmp_path):
    """transformers only warns, and initializes them randomly."""
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lose_weight(tmp_path / "model.safetensors", "fc2.weight")
    lacking = r"complete weights, 1 are missing, such as .*weight$"
    with pytest.raises(ValueError, match=lacking):
        LoadingArguments(device="cpu").load(tmp_path)
    with pytest.raises(ValueError, match=lacking):
        make_model(ModelArguments(model_name_or_path=str(tmp_path)), tokenizer, None)


def test_a_model_with_more_weights_than_its_configuration_says_is_refused(
    model, tokenizer, tmp_path
):
    """transformers only warns, and leaves them out."""
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_layers": 1}))
    others = r"weights of the model in its config\.json, but \d+ do not belong to it, such as"
    with pytest.raises(ValueError, match=others):
        LoadingArguments(device="cpu").load(tmp_path)
    with pytest.raises(ValueError, match=others):
        make_model(ModelArguments(model_name_or_path=str(tmp_path)), tokenizer, None)


def test_weights_of_other_sizes_are_refused(model, tokenizer, tmp_path):
    """transformers raises an error that refers to a table in the log."""
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_ffn_dim": 7}))
    sizes = r"weights of the sizes in its config\.json, but model\.decoder.*ffn.* instead of \[7\]"
    with pytest.raises(ValueError, match=f"^{tmp_path}: expected {sizes}$") as error:
        LoadingArguments(device="cpu").load(tmp_path)
    assert not needs_traceback(error.value)
    with pytest.raises(ValueError, match=sizes):
        make_model(ModelArguments(model_name_or_path=str(tmp_path)), tokenizer, None)


def test_a_stock_model_can_lack_sinusoids_that_it_computes(tokenizer, tmp_path):
    """Pegasus on the Hub has no sinusoids."""
    config = PegasusConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    model = PegasusForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lose_weight(tmp_path / "model.safetensors", "encoder.embed_positions.weight")
    loaded, _ = LoadingArguments(device="cpu").load(tmp_path)
    for name, weight in model.named_parameters():
        assert_close(loaded.get_parameter(name), weight)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_adapter_is_loaded_completely_or_refused(model, tokenizer, tmp_path, is_whole):
    """transformers (5.24) does not find the magnitudes of PEFT's DoRA (0.21)."""
    peft = pytest.importorskip("peft")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(base), config).eval()
    adapted.save_pretrained(adapter)
    tokenizer.save_pretrained(adapter)
    options = LoadingArguments(device="cpu")
    if not is_whole:
        lose_weight(adapter / "adapter_model.safetensors", "q_proj.lora_A.weight")
        with pytest.raises(ValueError, match=r"weights, 1 .*lora_A.*; PEFT's merge_and_unload"):
            options.load(adapter)
        return
    loaded, _ = options.load(adapter)
    inputs = {name: torch.tensor([[4, 5, 6]]) for name in ("input_ids", "decoder_input_ids")}
    assert_close(loaded(**inputs).logits, adapted(**inputs).logits)


def test_an_adapter_of_a_model_with_weights_of_other_sizes_is_refused(model, tokenizer, tmp_path):
    """The model would get random ones in their place."""
    peft = pytest.importorskip("peft")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    lora = peft.LoraConfig(target_modules=["q_proj"])
    peft.get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(base), lora).save_pretrained(adapter)
    tokenizer.save_pretrained(adapter)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "decoder_ffn_dim": 7}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        LoadingArguments(device="cpu").load(adapter)


@pytest.mark.parametrize("models", [1, 2])
def test_loading_a_model_disables_cudnn_attention(model, tokenizer, tmp_path, models):
    """For stock models: ours never use it, but are loaded in the same way."""
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    LoadingArguments(device="cpu").load([tmp_path] * models)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("targets", ["abc", "cba"])
def test_an_fsmt_with_two_vocabularies_translates_but_cannot_score_targets(tmp_path, targets):
    """transformers encodes targets with the source vocabulary."""
    pytest.importorskip("sacremoses", reason="needs vanilla-transformer[moses]")
    save_fsmt(tmp_path, targets)
    loaded = LoadingArguments(device="cpu").load(tmp_path)
    assert len(list(translate(["a b"], *loaded, max_new_tokens=3))) == 1
    arguments = ModelArguments(model_name_or_path=str(tmp_path))
    if targets == "abc":
        assert len(list(score_pairs([("a", "b")], *loaded))) == 1
        make_tokenizer(arguments, None, None)
        return
    message = f"{tmp_path}: .* with the vocabulary of the sources.*; vanilla-transformer convert"
    for read in (
        lambda: list(score_pairs([("a", "b")], *loaded)),
        lambda: list(translate(["a"], *loaded, prefixes=["b"])),
        lambda: make_tokenizer(arguments, None, None),
    ):
        with pytest.raises(ValueError, match=message):
            read()


def with_accelerator(monkeypatch, kind, count):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    device = torch.device(kind) if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: device)


@pytest.mark.parametrize(("kind", "count", "expected"), [("xpu", 2, "xpu"), ("xpu", 0, "cpu")])
def test_any_accelerator_is_the_default(monkeypatch, kind, count, expected):
    with_accelerator(monkeypatch, kind, count)
    assert LoadingArguments().device == expected


@pytest.mark.parametrize("device", ["cpu", "xpu", "xpu:1"])
def test_devices_of_this_machine_are_accepted(monkeypatch, device):
    with_accelerator(monkeypatch, "xpu", 2)
    assert LoadingArguments(device=device).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda", "xpu:2", "meta", ""])
def test_missing_devices_are_refused(monkeypatch, device):
    with_accelerator(monkeypatch, "xpu", 2)
    message = f"device='{device}': expected one of xpu, xpu:0, xpu:1, cpu"
    with pytest.raises(ValueError, match=message):
        LoadingArguments(device=device)


def test_an_engine_runs_on_the_gpu_of_its_process(monkeypatch, checkpoint, tmp_path):
    """accelerate chooses it for torch, whose "xpu" then means the second one here."""
    with_accelerator(monkeypatch, "xpu", 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(onnxruntime_engine, "recognizes", lambda folder: True)
    monkeypatch.setattr(onnxruntime_engine, "load", lambda folder, device, dtype: device)
    found = [
        LoadingArguments("onnxruntime", device).load(checkpoint)[0]
        for device in (None, "xpu:0", "cpu")
    ]
    assert found == ["xpu:1", "xpu:0", "cpu"]


FLAGS = {
    "translate": ["--source", "text"],
    "evaluate": ["--source", "text", "--target", "text"],
    "score": ["--source", "text", "--target", "text"],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").write_text("a house\n")
    return tmp_path


@pytest.mark.parametrize("script", FLAGS)
def test_all_scripts_accept_the_same_loading_options(script, folder, checkpoint):
    flags = ["--device", "cpu", "--dtype", "bfloat16", "--attn_implementation", "eager"]
    flags += ["--trust_remote_code", "--model", checkpoint, *FLAGS[script]]
    assert run_command(script, *flags, cwd=folder).stdout.count("\n") == 1


@pytest.mark.parametrize("script", FLAGS)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "gpu"], "device='gpu': expected one of"),
        (["--dtype", "int8"], "dtype='int8': expected one of auto, float32"),
        (["--dtype", "half_float"], "dtype='half_float': expected one of auto, float32"),
    ],
)
def test_invalid_names_are_refused_before_a_model_is_looked_up(script, flags, message, folder):
    process = run_command(
        script, "--model", "nowhere", *flags, *FLAGS[script], cwd=folder, check=False
    )
    assert process.returncode != 0
    assert message in process.stderr.splitlines()[-1]

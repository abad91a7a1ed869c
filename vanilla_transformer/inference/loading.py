"""The options of commands that load a model for inference."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    FSMTTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding import set_output_limit
from .engines import ENGINES, find_engine, named_engine
from .ensemble import VanillaTransformerEnsemble, expect_same_vocabulary

logger = logging.getLogger(__name__)

TORCH = "torch"
ENGINE_NAMES = (TORCH, *(engine.NAME for engine in ENGINES))
# Patterns of files in any format.
TOKENIZERS = ("*token*", "*.spm", "*.model", "vocab*")
WEIGHTS = ("*.safetensors*", "*.bin*")
LANGUAGES_HINT = "docs/data.md#save-the-languages shows how to save the languages with a model"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass
class LoadingArguments:
    """How to load a model for inference.

    Raises:
        ValueError: The engine, the device or the dtype does not exist.
    """

    engine: str | None = HfArg(
        default=None,
        help=f"One of {', '.join(ENGINE_NAMES)}. Default: the engine that the folder was "
        "exported for, else torch.",
    )
    device: str | None = HfArg(
        default=None, help="cpu, cuda, cuda:1, ... Default: the accelerator, if there is one."
    )
    dtype: str = HfArg(
        default="auto", help=f"One of {', '.join(DTYPES)}. Default: the dtype of the checkpoint."
    )
    attn_implementation: str | None = HfArg(
        default=None, help="Attention implementation: eager, sdpa, ..."
    )
    trust_remote_code: bool = HfArg(
        default=False, help="Allow the code in the model's folder or repository to run."
    )

    def __post_init__(self) -> None:
        if self.engine not in (None, *ENGINE_NAMES):
            names = ", ".join(ENGINE_NAMES)
            raise ValueError(f"engine={self.engine!r}: expected one of {names}")
        devices = ["cpu"]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            numbers = range(torch.accelerator.device_count())
            kind = accelerator.type
            devices = [kind, *(f"{kind}:{number}" for number in numbers), "cpu"]
        if self.device is None:
            self.device = devices[0]
        if self.device not in devices:
            raise ValueError(f"device={self.device!r}: expected one of {', '.join(devices)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")

    def load(self, name: str | Path | Sequence[str | Path]) -> tuple[Any, PreTrainedTokenizerBase]:
        """Load a sequence-to-sequence model and its tokenizer, from a folder or the Hub.

        Args:
            name: A folder or Hub name. Several make an ensemble. A folder that was exported for an
                engine gives an object of that engine, with `generate()`.

        Raises:
            ImportError: The engine needs a package that is not installed.
            ValueError: The folder was exported for another engine, the engine lacks an option, or
                the members of an ensemble have different vocabularies.
        """
        names = [name] if isinstance(name, (str, Path)) else list(name)
        if len(names) > 1:
            models, tokenizers = zip(*map(self.load_model, names), strict=True)
            expect_same_vocabulary(tokenizers, names)
            return VanillaTransformerEnsemble(models), tokenizers[0]
        (name,) = names
        engine = find_engine(name) if self.engine is None else named_engine(self.engine)
        if engine is None:
            return self.load_model(name)
        if not engine.recognizes(Path(name)):
            raise ValueError(
                f"engine={engine.NAME!r}: {name} was not exported for it; "
                f"vanilla-transformer export {name} --to {engine.TARGET} --output_dir FOLDER "
                "writes such a folder"
            )
        if self.attn_implementation is not None:
            raise ValueError(
                f"attn_implementation={self.attn_implementation!r} with engine={engine.NAME!r}: "
                "expected none"
            )
        tokenizer = self._load_tokenizer(name)
        with naming_damaged(name):
            model = engine.load(Path(name), device=self._numbered_device(), dtype=self.dtype)
        return model, tokenizer

    def _numbered_device(self) -> str:
        """The device with its number. For torch, "cuda" is the GPU that accelerate has chosen for
        this process, for engines the first one."""
        device = torch.device(str(self.device))
        if device.type == "cpu" or device.index is not None:
            return str(device)
        return f"{device.type}:{torch.accelerator.current_device_index()}"

    def load_model(self, name: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load one model that torch runs. This disables cuDNN's attention in the process, as it
        plans each new shape of batch.

        Raises:
            ValueError: The folder was exported for an engine, or an engine is named; or weights of
                an adapter, or of a model of this package, are missing; or a file is damaged.
        """
        torch.backends.cuda.enable_cudnn_sdp(False)  # our own models never use it
        expect_torch_model(name, self.engine)
        tokenizer = self._load_tokenizer(name)
        model = load_intact(
            AutoModelForSeq2SeqLM,
            name,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )
        set_output_limit(model)
        warn_of_unknown_language(model, tokenizer)
        return model.to(self.device), tokenizer

    def _load_tokenizer(self, name: str | Path) -> PreTrainedTokenizerBase:
        """Load the tokenizer. Raise a FileNotFoundError if a folder has no model or no
        tokenizer."""
        expect_model_folder(name)
        expect_tokenizer(name)
        tokenizer = load_tokenizer(name, trust_remote_code=self.trust_remote_code)
        if not reads_targets(tokenizer):
            # transformers calls this before it reads a target, which translation does not do.
            switch = getattr(tokenizer, "_switch_to_target_mode", None)
            tokenizer._switch_to_target_mode = partial(_switch_to_target, tokenizer, switch)
        return tokenizer


def has_model(folder: Path) -> bool:
    """Whether a folder has a model, or an adapter that PEFT saved."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def expect_model_folder(name: str | Path) -> None:
    """Raise a FileNotFoundError for a folder without a model, such as that of a training which has
    only checkpoints yet, and for a file. Other names may be on the Hub. Raise a ValueError if its
    generation config is damaged: transformers would translate without it; or if its weights are in
    another folder, which transformers would read. Raise a PermissionError if a file may not be
    read."""
    if Path(name).exists() and not has_model(Path(name)):
        raise FileNotFoundError(
            f"{name}: expected a model folder, with a config.json; `vanilla-transformer convert` "
            "makes one of another toolkit's checkpoint"
        )
    if (file := Path(name, GENERATION_CONFIG_NAME)).is_file():
        with naming_damaged(file):
            json.loads(file.read_text(encoding="utf-8"))
    for file in _weight_indexes(Path(name)):
        with naming_damaged(file):
            shards = json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
        for shard in map(Path, shards):
            if shard.is_absolute() or ".." in shard.parts:
                raise ValueError(f"{file}: expected files in this folder, but it names {shard}")
    for file in Path(name).glob("*.safetensors"):
        file.open("rb").close()  # safetensors reports one that may not be read as missing


def _weight_indexes(folder: Path) -> set[Path]:
    """The indexes of weights that transformers may read: also the one that a configuration names,
    which may be in a subfolder."""
    found = {*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")}
    if (file := folder / CONFIG_NAME).is_file():
        with naming_damaged(folder):
            named = str(json.loads(file.read_text(encoding="utf-8")).get("transformers_weights"))
        if named.endswith(".index.json") and (folder / named).is_file():
            found.add(folder / named)
    return found


@contextmanager
def naming_damaged(name: str | Path) -> Iterator[None]:
    """Let errors about damaged files name the model.

    Raises:
        ValueError: A file of weights is not complete, or one is not JSON.
    """
    try:
        yield
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected complete files, but {error}") from error


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """A file of weights, in safetensors' format. An error about a damaged one names it."""
    with naming_damaged(path), safe_open(path, framework="pt") as file:
        yield file


def expect_tokenizer(name: str | Path) -> None:
    """Raise a FileNotFoundError for a folder without a tokenizer, and for a file. Other names may
    be on the Hub."""
    if Path(name).exists() and not _has_any(Path(name), TOKENIZERS):
        raise FileNotFoundError(
            f"{name}: expected a tokenizer's folder, with a tokenizer_config.json"
        )


def _has_any(folder: Path, patterns: Sequence[str]) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def expect_torch_model(name: str | Path, engine: str | None = None) -> None:
    """Raise a ValueError if the folder was exported for an engine or transformers.js, or an engine
    is named."""
    exported_for = find_engine(name)
    if exported_for is not None:
        engine = exported_for.NAME
    elif Path(name, "onnx").is_dir() and not _has_any(Path(name), WEIGHTS):
        engine = "transformers.js"
    if engine not in (None, TORCH):
        raise ValueError(
            f"{name} with engine={engine!r}: expected a model that torch runs, such as the one "
            "that was exported"
        )


def read_config(name: str | Path) -> Any:
    """Same as `AutoConfig.from_pretrained`, but raises a ValueError for PEFT's adapters, which have
    no model configuration, and a FileNotFoundError for a folder without a model."""
    expect_model_folder(name)
    if find_adapter_config_file(str(name)) is not None:
        raise ValueError(
            f"{name} holds an adapter: expected a whole model; PEFT's merge_and_unload makes one"
        )
    return AutoConfig.from_pretrained(name)


def load_intact(model_class: Any, name: str | Path, **options: Any) -> Any:
    """Same as `model_class.from_pretrained`, but with the weights of the file, all of them and no
    others.

    Args:
        model_class: A class of models, or an Auto class.
        name: The model's folder or name.
        options: Of `from_pretrained`.

    Raises:
        ValueError: A file is damaged; weights have other sizes than those of the configuration; or
            some are missing, which transformers would fill with random ones, or belong to no layer,
            which it would leave out. Stock models may lack weights that they compute, such as
            Pegasus's sinusoids, or have more.
        RuntimeError: Weights of an adapter, or of the model that it adapts, have other sizes.
    """
    # Of an adapter, the report leaves out the model that it adapts.
    is_whole = find_adapter_config_file(str(name)) is None
    with naming_damaged(name):
        model, report = model_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=is_whole, **options
        )
    for weight, in_file, in_model in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{name}: expected weights of the sizes in its config.json, but {weight} is "
            f"{list(in_file)} instead of {list(in_model)}"
        )
    is_adapted = hasattr(model, "peft_config")
    is_ours = model.config.model_type == VanillaTransformerConfig.model_type
    missing, others = report["missing_keys"], report["unexpected_keys"]
    if others and is_ours and not is_adapted:
        raise ValueError(
            f"{name}: expected the weights of the model in its config.json, but {len(others)} do "
            f"not belong to it, such as {min(others)}"
        )
    if missing and (is_adapted or is_ours):
        merge = "; PEFT's merge_and_unload makes a model of it" if is_adapted else ""
        raise ValueError(
            f"{name}: expected complete weights, {len(missing)} are missing, such as "
            f"{min(missing)}{merge}"
        )
    return model


def load_tokenizer(name: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """Same as `AutoTokenizer.from_pretrained`, but an error names the folder, in one line.

    Raises:
        ValueError: A file is damaged or missing.
    """
    with naming_damaged(name):
        try:
            return AutoTokenizer.from_pretrained(name, **options)
        except (OSError, ImportError, json.JSONDecodeError, UnicodeDecodeError):
            raise
        except Exception as error:  # tokenizers has no class of its own for them
            reason = " ".join(str(error).split())
            raise ValueError(f"{name}: can't load the tokenizer: {reason}") from error


def lacks_target_language(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer of many languages, such as NLLB's, was not told that of the targets. It
    would then read targets as text in the source's language, or fail."""
    return getattr(tokenizer, "tgt_lang", "") is None


def reads_targets(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer reads both sides. transformers reads targets of FSMT with the vocabulary
    of the sources, even if the targets have another."""
    if not isinstance(tokenizer, FSMTTokenizer):
        return not lacks_target_language(tokenizer)
    return tokenizer.encoder == {token: number for number, token in tokenizer.decoder.items()}


def expect_to_read_targets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError for FSMT's tokenizers with two vocabularies, and for those of many
    languages without the target's."""
    name = tokenizer.name_or_path
    if lacks_target_language(tokenizer):
        raise ValueError(
            f"{name}: the tokenizer has no target language, expected one; {LANGUAGES_HINT}"
        )
    if not reads_targets(tokenizer):
        raise ValueError(
            f"{name}: FSMT's tokenizer reads targets with the vocabulary of the sources, expected "
            f"one that reads both sides; vanilla-transformer convert {name} --output_dir FOLDER "
            "makes a model that has one"
        )


def _switch_to_target(
    tokenizer: PreTrainedTokenizerBase, switch: Callable[[], None] | None
) -> None:
    """Replaces a tokenizer's `_switch_to_target_mode`, if any."""
    expect_to_read_targets(tokenizer)
    if switch is not None:
        switch()


def warn_of_unknown_language(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if neither a tokenizer of many languages nor the model's generation config says which
    one to translate into."""
    config = model.generation_config
    languages = getattr(tokenizer, "lang_code_to_id", {}).values()
    is_known = config.forced_bos_token_id is not None or config.decoder_start_token_id in languages
    if lacks_target_language(tokenizer) and not is_known:
        name = tokenizer.name_or_path
        logger.warning(
            "%s has no target language: it may translate into any; %s", name, LANGUAGES_HINT
        )

"""Uploads a finished model folder to the Hub, in one commit."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
)

from ..inference.derived_cards import SHOW_PAGE, TRANSLATE, card_metadata
from ..inference.loading import expect_model_folder, open_weights
from ..model.tokenization_vanilla_transformer import (
    SOURCE_FILE,
    TARGET_FILE,
    VanillaTransformerTokenizer,
)
from .checkpoints import CHECKSUMS_NAME, checkpoints_by_step, expect_intact
from .model_card import USAGE

# The parts of a finished model, and the files that each may be in, in any exported format.
REQUIRED_FILES = {
    "configuration": ("config.json",),
    "weights": ("*.safetensors", "*.onnx", "model.bin"),
    "tokenizer": ("tokenizer.json", SOURCE_FILE, "*.spm", "*.model", "vocab*"),
}
BELOW = ".onnx"  # files that an export may put into a subfolder
WEIGHTS = (*REQUIRED_FILES["weights"], "*.safetensors.index.json")

# Files for resuming, for converting back, or about this machine: fairseq's options, which a
# conversion keeps in `original`, contain paths of its folders, and the names of TensorBoard's files
# the machine's own.
PRIVATE_FILES = (
    "_*", ".*", "checkpoint-*", "runs", "*.tfevents.*", "training_args.bin", "trainer_state.json",
    "optimizer*", "original",
    "pytorch_model_fsdp*", "scheduler.pt", "scaler.pt", "rng_state*", "global_step*", "*.log",
    CHECKSUMS_NAME,
)  # fmt: skip

DOWNLOAD = "hf download"
USAGE_WITHOUT_CODE = f"```bash\n{TRANSLATE}\n```"

CARD = """---
{{ card_data }}
---

# {{ name }}

{{ usage }}
"""


def push_folder(
    folder: str | Path,
    repository: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> CommitInfo:
    """Upload a finished model to the Hub, and create the repository and the branch if necessary.

    The card is the folder's `README.md` with the repository's name in its title and its example, or
    a short one. Files that only training needs are not uploaded: checkpoints, the optimizer, the
    options. Weights from an earlier upload next to the configuration are deleted, because they
    could be loaded instead.

    Args:
        folder: A model written by training, averaging, conversion or export.
        repository: `NAME/MODEL`, or `MODEL` for the user's own.
        private: Whether a new repository is private. Default: the setting of the user's account.
        revision: A branch. Default: the main one.

    Returns:
        The commit; pass its `oid` as `revision=` to load this version.

    Raises:
        ValueError: The folder holds no finished model, or a card that can't be read. The message
            names what is missing.
        huggingface_hub.errors.HfHubHTTPError: The Hub rejects the upload, for example without a
            token.
    """
    folder = Path(folder)
    expect_finished_model(folder)
    files = {path.relative_to(folder).as_posix(): path for path in _public_files(folder)}
    old_card = _read_card(folder)
    api = HfApi()
    name = api.create_repo(repository, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    card = str(_named(old_card, name, folder)).encode()
    added = [CommitOperationAdd(path, file) for path, file in files.items()]
    there = set(api.list_repo_files(name, revision=revision)) - files.keys()
    deleted = [
        CommitOperationDelete(path)
        for path in sorted(there)
        if "/" not in path and any(fnmatch(path, pattern) for pattern in WEIGHTS)
    ]
    return api.create_commit(
        name,
        [*added, CommitOperationAdd("README.md", card), *deleted],
        commit_message=commit_message,
        revision=revision,
    )


def expect_finished_model(folder: Path) -> None:
    """Raise a ValueError unless the folder has everything needed for loading."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a model's folder")
    files = _public_files(folder)
    names = [path.name for path in files if path.parent == folder or path.suffix == BELOW]
    for part, patterns in REQUIRED_FILES.items():
        if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
            hint = "; its checkpoints are models" if checkpoints_by_step(folder) else ""
            raise ValueError(f"{folder} holds no {part}: expected {' or '.join(patterns)}{hint}")
    expect_model_folder(folder)
    _expect_both_vocabularies(folder)
    for index in folder.glob("*.safetensors.index.json"):
        for shard in set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()):
            if not (folder / shard).is_file():
                raise ValueError(f"{folder / shard} is missing: {index.name} names it")
    for weights in folder.glob("*.safetensors"):
        with open_weights(weights):
            pass  # its header tells its size
    expect_intact(folder)


def _expect_both_vocabularies(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8") if config.is_file() else "{}"
    kind = json.loads(text).get("tokenizer_class")
    if kind == VanillaTransformerTokenizer.__name__ and not (folder / TARGET_FILE).is_file():
        raise ValueError(f"{folder} holds no target tokenizer: expected {TARGET_FILE}")


def _public_files(folder: Path) -> list[Path]:
    """All files to upload except the card."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path != folder / "README.md"
        and not any(
            fnmatch(part, pattern)
            for part in path.relative_to(folder).parts
            for pattern in PRIVATE_FILES
        )
    ]


def _read_card(folder: Path) -> Any:
    """The folder's card, or a short one; a checkpoint's has the metadata of its training."""
    path = folder / "README.md"
    try:
        if path.is_file():
            return ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: expected YAML between two lines of ---, but {error}") from None
    fields = {"library_name": "transformers", "pipeline_tag": "translation"}
    return ModelCard.from_template(
        ModelCardData(**{**fields, **card_metadata(folder)}),
        template_str=CARD,
        name=folder.resolve().name,
        usage=USAGE.format(place="") if any(folder.glob("*.py")) else USAGE_WITHOUT_CODE,
    )


def _named(card: Any, repository: str, folder: Path) -> Any:
    """The card with the repository's name in its title, its example and its metadata."""
    name = repository.split("/")[-1]
    title = re.escape(card.data.model_name or folder.resolve().name)
    card.text = re.sub(rf"\A(\s*)# {title}\n", rf"\g<1># {name}\n", card.text)
    if card.data.model_name:
        card.data.model_name = name
    example = r'(pipeline\("translation", model=)"[^"]*"'
    card.text = re.sub(example, rf'\1"{repository}"', card.text)
    download = f"{DOWNLOAD} {repository} --local-dir FOLDER"
    card.text = re.sub(rf"{DOWNLOAD} \S+ --local-dir FOLDER", download, card.text)
    if DOWNLOAD not in card.text:
        for command in (TRANSLATE, SHOW_PAGE):
            card.text = card.text.replace(command, f"{download}\n{command}", 1)
    return card

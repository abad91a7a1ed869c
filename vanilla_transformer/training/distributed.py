"""Training on several processes beyond what accelerate does by itself."""

import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import (
    DistributedType,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
    patch_environment,
    reduce,
)
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..model.pretrained import own_class

logger = logging.getLogger(__name__)

FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # overrides the arguments of `torch.load`
# The classes that may be unpickled from the index of a sharded checkpoint, besides dtypes. None of
# them opens a file.
INDEX_CLASSES = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
# What accelerate writes under FSDP: folders of shards, or files of the full state.
SHARDED_MODEL, SHARDED_OPTIMIZER = f"{FSDP_MODEL_NAME}_0", f"{OPTIMIZER_NAME}_0"
FULL_OPTIMIZER = f"{OPTIMIZER_NAME}.bin"
EMBEDDING_GETTERS = ("get_input_embeddings", "get_output_embeddings")


def uses_fsdp() -> bool:
    """Whether the launcher has requested FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def saves_shards() -> bool:
    """Whether the launcher has requested FSDP with sharded checkpoints, which is its default."""
    return uses_fsdp() and os.environ.get("FSDP_STATE_DICT_TYPE") != "FULL_STATE_DICT"


def launched_world_size() -> int:
    """The number of processes, as set by the launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def any_process(condition: bool, arguments: TrainingArguments) -> bool:
    """Whether the condition is true in any process. All of them must call it."""
    if arguments.world_size == 1:
        return condition
    return bool(reduce(torch.tensor(int(condition), device=arguments.device), "sum"))


def run_on_main_process(make: Callable[[], Any]) -> Any:
    """Call the function on the main process; all processes return its result, or raise its
    error."""
    results: list[Any] = [None]
    if PartialState().is_main_process:
        try:
            results = [make()]
        except Exception as error:
            results = [error]
    broadcast_object_list(results)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def expect_in_all_processes(folder: str | Path, is_seen: bool) -> None:
    """Raise a FileNotFoundError in all processes unless all can see the folder's content."""
    seen = gather_object([is_seen])
    if missing := [process for process, sees in enumerate(seen) if not sees]:
        raise FileNotFoundError(
            f"{folder}: process 0 sees this folder, processes {missing} do not: expected a file "
            "system that all processes share"
        )


def init_cpu_process_group(arguments: TrainingArguments) -> None:
    """Apply `ddp_timeout` to processes on CPUs. transformers (5.17 to 5.24) ignores it there, so
    that the other processes would wait 30 minutes for a stalled one."""
    several = launched_world_size() > 1 and "RANK" in os.environ
    if arguments.use_cpu and several and not distributed.is_initialized():
        timeout = timedelta(seconds=arguments.ddp_timeout)
        distributed.init_process_group(arguments.ddp_backend or "gloo", timeout=timeout)


def end_training(trainer: Trainer) -> None:
    """Leave the group of processes at the end of a program; the trainer can't be used afterwards.
    torch sometimes aborts a process that exits without leaving its group
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    # If `DistributedDataParallel` has the last reference to a gloo group, torch joins the group's
    # threads while it holds the interpreter's lock, and hangs if one of them waits for that lock.
    trainer.model_wrapped = trainer.model
    trainer.accelerator.end_training()


def enable_fsdp_on_cpu(arguments: TrainingArguments) -> None:
    """Let accelerate use FSDP on CPUs too. By itself accelerate (1.10 to 1.15) falls back to DDP
    there without a warning, and has no option for it."""
    state = arguments.distributed_state
    if uses_fsdp() and state and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether each process holds only a part of the weights, by FSDP2 or DeepSpeed's ZeRO 3."""
    marks = ("device_mesh", "ds_tensor")
    return any(hasattr(one, mark) for one in model.parameters() for mark in marks)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has."""
    held = getattr(tensor, "ds_tensor", tensor)
    return held.to_local() if isinstance(held, DTensor) else held


def load_saved_model(model: PreTrainedModel, folder: str | Path) -> Any:
    """Load what the processes that trained the model have saved into the folder: not sharded, and
    without the trainer's autocast. All of them must call it."""
    PartialState().wait_for_everyone()  # until the main process has written the files
    unset_hf_deepspeed_config()  # or transformers would shard the model under ZeRO 3
    return type(model).from_pretrained(folder)


def load_full_weights(model: torch.nn.Module, folder: str | Path) -> None:
    """Load safetensors files of the full model into a model, which may be sharded (FSDP2)."""
    files = Path(folder).glob("*.safetensors")
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    # not strict: tied weights are saved under one name
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, weights, options=options)


class ShardedTrainer(Trainer):
    """A mixin for any trainer: `class MyTrainer(ShardedTrainer, Seq2SeqTrainer)`.

    It makes FSDP2 work with weights that several stacks share, runs no code from a checkpoint, and
    saves a model that loads anywhere, even if the checkpoints are sharded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Tied weights are saved under one name: a checkpoint without their other names is complete.
        if isinstance(self.model, PreTrainedModel):
            ignored = {
                *(self.model._keys_to_ignore_on_save or ()),
                *self.model.all_tied_weights_keys,
            }
            self.model._keys_to_ignore_on_save = ignored or None
        self.add_callback(_IndexCallback())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Same as `Trainer.train`.

        Raises:
            ValueError: A checkpoint holds pickled objects other than weights and their index.
        """
        resumed = args[0] if args else kwargs.get("resume_from_checkpoint")
        if isinstance(resumed, str):
            check_index(resumed)
        trusted = _trust_records_of_deepspeed() if self.is_deepspeed_enabled else nullcontext()
        with trusted, force_weights_only():
            return super().train(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Same as `Trainer.create_optimizer`, which comes right before accelerate wraps the model.

        accelerate (1.15) makes the embedding and the projection a unit of FSDP2. Their weight is
        also the embedding of each stack, and torch (2.13) requires all of these in one unit, such
        as the root's, so the two are hidden from accelerate.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.is_fsdp_enabled:
            for name in EMBEDDING_GETTERS:
                setattr(self.model, name, lambda: None)
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Same as `Trainer.create_scheduler`, which comes right after accelerate has wrapped the
        model."""
        for name in EMBEDDING_GETTERS:
            self.model.__dict__.pop(name, None)
        if is_sharded(self.model):
            held = sum(local_part(parameter).numel() for parameter in self.model.parameters())
            logger.info("This process holds %s of the parameters", f"{held:,}")
        return super().create_scheduler(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Same as `Trainer.save_model`, which saves nothing if checkpoints are sharded."""
        with _original_class(self.model):
            if not self._saves_shards():
                super().save_model(output_dir, _internal_call)
            elif not _internal_call:
                plugin = self.accelerator.state.fsdp_plugin
                plugin.set_state_dict_type("FULL_STATE_DICT")
                super().save_model(output_dir)
                plugin.set_state_dict_type("SHARDED_STATE_DICT")
            elif self.args.should_save:  # the parts of a checkpoint that are not sharded
                self.model.config.save_pretrained(output_dir)
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(output_dir)

    def _saves_shards(self) -> bool:
        if not self.is_fsdp_enabled:
            return False
        return "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type)


class _IndexCallback(TrainerCallback):
    """Checks the best checkpoint, which is loaded at the end of training."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reject it before the first step."""
        if state.best_model_checkpoint is not None:
            check_index(state.best_model_checkpoint)


@contextmanager
def _original_class(model: Any) -> Iterator[None]:
    """Give a model back its own class, which FSDP2 has replaced: a saved model names its class and
    includes its code."""
    sharded = type(model)
    if issubclass(sharded, FSDPModule):
        model.__class__ = own_class(model)
    try:
        yield
    finally:
        model.__class__ = sharded


# ---------------------------------------------------------------- No code from checkpoints


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles the index of a sharded checkpoint and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's index")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: str) -> Enum:
    """How Python 3.11.0 to 3.11.3 pickle a member of an enum, in place of `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{kind!r} is not allowed in a checkpoint's index")
    return kind[name]


def check_index(checkpoint: str | Path) -> None:
    """Check the indexes of a checkpoint's shards, if there are any: torch (2.11 to 2.15) unpickles
    them without a check.

    Raises:
        ValueError: An index can't be read, or contains classes that don't belong in one.
    """
    for folder in (SHARDED_MODEL, SHARDED_OPTIMIZER):
        index = Path(checkpoint, folder, ".metadata")
        if not index.is_file():
            continue
        try:
            _IndexUnpickler(io.BytesIO(index.read_bytes())).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            LookupError,
            AttributeError,
            ImportError,
        ) as error:
            raise ValueError(f"{index} is not a checkpoint's index: {error}") from error


@contextmanager
def force_weights_only() -> Iterator[None]:
    """Let `torch.load` unpickle nothing but weights, even if its caller passes
    `weights_only=False`.

    Raises:
        ValueError: A sharded checkpoint contains something else.
    """
    try:
        with patch_environment(**{FORCE_WEIGHTS_ONLY: 1}):
            yield
    except CheckpointException as error:  # not a subclass of `Exception`
        raise ValueError(f"the checkpoint's shards can't be read: {error}") from error


@contextmanager
def _trust_records_of_deepspeed() -> Iterator[None]:
    """Let `torch.load` unpickle the classes that DeepSpeed (0.19) keeps in its checkpoints."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    records = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals(records):
        yield

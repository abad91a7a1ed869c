"""Models in parts on several processes: FSDP2 as accelerate does it, tensor parallelism as
transformers does; and checkpoints that any other layout goes on from, but DeepSpeed's.

    ShardedTrainer     a `Trainer` that reads each layout's checkpoints
    tensor_parallel    a model, each matrix of which is split up
    load_whole         the model that a trained one has been saved as
    join_on_cpus       processes that give up on each other after `ddp_timeout`
    shard_on_cpus      FSDP also where there is no GPU

A checkpoint is whole, as one process would write it, or, under FSDP with SHARDED_STATE_DICT, in
shards, which need not fit into one process.
"""

import io
import logging
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, str_to_bool
from accelerate.utils.constants import FSDP_MODEL_NAME
from huggingface_hub import save_torch_model
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

logger = logging.getLogger(__name__)

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)  # to the first process

# transformers trains models that it has split up from 5.19 on.
TRAINS_PARTS = hasattr(PreTrainedModel, "is_distributed_loading_by_transformers")

ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # of torch.load, whatever its caller says
INDEX_NAMES = {  # besides types of numbers; by module, and no class that opens a file among them
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
SHARDED_MODEL, SHARDED_OPTIMIZER = f"{FSDP_MODEL_NAME}_0", "optimizer_0"  # accelerate's folders


def writes_shards() -> bool:
    """Whether the launcher has asked for FSDP and for checkpoints in shards, its default."""
    return _asks_for_fsdp() and os.environ.get("FSDP_STATE_DICT_TYPE") != "FULL_STATE_DICT"


def _asks_for_fsdp() -> bool:
    return bool(str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false")))


def launched_processes() -> int:
    """How many work together, by the launcher's word."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_on_cpus(arguments: TrainingArguments) -> None:
    """Let processes on CPUs wait for each other no longer than `ddp_timeout`, which transformers
    (5.17 to 5.23) forgets there: a stalled one would hold up the others for 30 minutes."""
    several = launched_processes() > 1 and "RANK" in os.environ
    if arguments.use_cpu and several and not distributed.is_initialized():
        timeout = timedelta(seconds=arguments.ddp_timeout)
        distributed.init_process_group(arguments.ddp_backend or "gloo", timeout=timeout)


def shard_on_cpus(arguments: TrainingArguments) -> None:
    """Let accelerate share out models on CPUs as it does on GPUs: of itself it (1.10 to 1.15) goes
    on without FSDP, not saying so, and refuses tensor parallelism."""
    state = arguments.distributed_state
    is_sharded = _asks_for_fsdp() or getattr(arguments, "tp_size", 1) > 1
    if is_sharded and state and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU  # the type that it may be of


def tensor_parallel(model: PreTrainedModel, tp_size: int, data_parallel_size: int = 1) -> Any:
    """The model, each matrix split up among `tp_size` processes, and those parts once more (FSDP2)
    among `data_parallel_size` groups of them. All processes must call it with the same model."""
    sizes = DistributedConfig(tp_size=tp_size, fsdp_size=data_parallel_size)
    attention = model.config._attn_implementation
    # transformers splits up what it loads, and saves in one process of all, on one host of all
    with tempfile.TemporaryDirectory() as folder:
        for part in (model.config, model.generation_config):
            part.save_pretrained(folder)
        save_torch_model(model, folder)
        return type(model).from_pretrained(
            folder, distributed_config=sizes, attn_implementation=attention
        )


def is_in_parts(model: torch.nn.Module) -> bool:
    """Whether a process holds parts of weights only: those of FSDP2 and of tensor parallelism know
    their devices, those of DeepSpeed's ZeRO 3 the part."""
    marks = ("device_mesh", "ds_tensor")
    return any(hasattr(one, mark) for one in model.parameters() for mark in marks)


def load_whole(model: PreTrainedModel, folder: str | Path) -> Any:
    """What the processes that trained the model have saved into the folder, as anyone will load it:
    whole, and without the trainer's autocast. All of them must call it."""
    PartialState().wait_for_everyone()  # the first of them has written it
    unset_hf_deepspeed_config()  # with ZeRO 3's, transformers would share this one out too
    return type(model).from_pretrained(folder)


class ShardedTrainer(Trainer):
    """For any trainer: `class Mine(ShardedTrainer, Seq2SeqTrainer)`.

    Where the model is in parts, checkpoints are whole, unless FSDP is to write shards; a checkpoint
    of either kind is read wherever training goes on. The model saved in the end is whole.
    """

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any):
        before = args.save_only_model
        if getattr(model, "is_distributed_loading_by_transformers", False):
            args.save_only_model = True  # transformers refuses to save what this trainer can
        super().__init__(model, args, *rest, **kwargs)
        args.save_only_model = before

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with _embeddings_with_the_rest(self.model), self._no_code_from_deepspeed():
            prepared = super()._prepare_for_training(*args, **kwargs)
        if is_in_parts(self.model):
            held = sum(_local(parameter).numel() for parameter in self.model.parameters())
            logger.info("This process holds %s of the parameters", f"{held:,}")
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`, which saves nothing where checkpoints are in shards."""
        if not self._writes_shards():
            super().save_model(output_dir, _internal_call)
        elif not _internal_call:
            plugin = self.accelerator.state.fsdp_plugin
            plugin.set_state_dict_type("FULL_STATE_DICT")
            super().save_model(output_dir)
            plugin.set_state_dict_type("SHARDED_STATE_DICT")
        elif self.args.should_save:  # of a checkpoint what is in no shard
            self.model.config.save_pretrained(output_dir)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if _is_sharded(self.model):
            if state_dict is None:
                state_dict = get_model_state_dict(self.model, options=GATHERED)
            tied = self.model.all_tied_weights_keys  # once gathered, they are no longer one
            state_dict = {name: state_dict[name] for name in state_dict if name not in tied}
        with _as_before_sharding(self.model):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._writes_shards() or not _is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = get_optimizer_state_dict(self.model, self.optimizer, options=GATHERED)
        if self.args.should_save:
            names = self._parameter_names()
            numbers = {name: number for number, name in enumerate(chain(*names))}
            groups = [[numbers[name] for name in group] for group in names]
            state = _regrouped(state, numbers, groups)
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            schedule = _of_groups(self.lr_scheduler.state_dict(), len(groups))
            torch.save(schedule, Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        shards = Path(resume_from_checkpoint, SHARDED_MODEL)
        if self._reads_as_it_is(shards, model):
            with _no_code_from(shards):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = _read_shards(shards)["model"] if shards.is_dir() else _read_whole(shards.parent)
        # not strict: a whole checkpoint names tied weights once
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, weights, options=options)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As the trainer's (5.17 to 5.23), which misses tied weights too: they are saved once."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        shards = Path(checkpoint, SHARDED_OPTIMIZER)
        if self._reads_as_it_is(shards, self.model):
            with _no_code_from(shards):
                super()._load_optimizer_and_scheduler(checkpoint)
            return
        if shards.is_dir():
            state = _read_shards(shards)["optimizer"]
            names = {name: name for name in state["state"]}
        else:
            state = torch.load(shards.parent / OPTIMIZER_NAME, map_location="cpu")
            names = dict(enumerate(chain(*self._parameter_names())))
        state = _regrouped(state, names, _names_of(self.optimizer, self.model))
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, state, options=options)
        schedule = torch.load(shards.parent / SCHEDULER_NAME)
        groups = len(self.optimizer.param_groups)
        self.lr_scheduler.load_state_dict(_of_groups(schedule, groups))

    def _load_best_model(self) -> None:
        if _is_sharded(self.model):
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            with self._no_code_from_deepspeed():
                super()._load_best_model()

    def _parameter_names(self) -> list[list[str]]:
        """Of the optimizer's groups on one process: tensor parallelism has more."""
        names = [name for name, one in self.model.named_parameters() if one.requires_grad]
        decayed = set(self.get_decay_parameter_names(self.model))
        return [
            [name for name in names if name in decayed],
            [name for name in names if name not in decayed],
        ]

    @contextmanager
    def _no_code_from_deepspeed(self) -> Iterator[None]:
        """Let DeepSpeed (0.19), which unpickles its checkpoints, make nothing of them but numbers
        and its own records."""
        if not self.is_deepspeed_enabled:
            yield
            return
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        records = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals(records), _only_weights():
            yield

    def _writes_shards(self) -> bool:
        if not self.is_fsdp_enabled:
            return False
        return "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type)

    def _reads_as_it_is(self, shards: Path, model: Any) -> bool:
        """Whether a checkpoint, in shards if there is such a folder, is of the trainer's layout."""
        return self._writes_shards() if shards.is_dir() else not _is_sharded(model)


@contextmanager
def _embeddings_with_the_rest(model: Any) -> Iterator[None]:
    """Let accelerate (1.15) not make one unit of FSDP2 of embedding and projection: their matrix is
    each stack's embedding too, and torch (2.13) wants all of these in one unit, such as the root's.
    """
    hidden = ("get_input_embeddings", "get_output_embeddings")
    for name in hidden:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in hidden:
            delattr(model, name)


@contextmanager
def _as_before_sharding(model: Any) -> Iterator[None]:
    """Let a model be of its own class, which FSDP2 has replaced by one of torch's: saved, it names
    the class whose code is to load it."""
    sharded = type(model)
    if issubclass(sharded, FSDPModule):
        model.__class__ = next(
            one for one in sharded.__mro__[1:] if issubclass(one, PreTrainedModel)
        )
    try:
        yield
    finally:
        model.__class__ = sharded


def _is_sharded(model: Any) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _local(parameter: torch.Tensor) -> torch.Tensor:
    held = getattr(parameter, "ds_tensor", parameter)
    return held.to_local() if isinstance(held, DTensor) else held


def _read_whole(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


class _IndexUnpickler(pickle.Unpickler):
    """Reads what the index of a sharded checkpoint is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_number and name not in INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")
        return super().find_class(module, name)


@contextmanager
def _no_code_from(shards: Path) -> Iterator[None]:
    """Let torch (2.11 to 2.13), which unpickles a sharded checkpoint's index and what in it is no
    tensor, execute nothing on the way. Raises ValueError if they can't be read so."""
    index = shards / ".metadata"
    if shards.is_dir():
        try:
            _IndexUnpickler(io.BytesIO(index.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise ValueError(f"{index} is no checkpoint's index: {error}") from error
    try:
        with _only_weights():
            yield
    except CheckpointException as error:  # which is no Exception
        raise ValueError(f"{shards} can't be read: {error}") from error


@contextmanager
def _only_weights() -> Iterator[None]:
    """Let `torch.load` unpickle nothing but weights, even where it is told to."""
    before = os.environ.get(ONLY_WEIGHTS)
    os.environ[ONLY_WEIGHTS] = "1"
    try:
        yield
    finally:
        os.environ.pop(ONLY_WEIGHTS)
        if before is not None:
            os.environ[ONLY_WEIGHTS] = before


def _read_shards(folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch, _no_code_from(folder):
        whole = Path(scratch, "whole.pt")
        dcp_to_torch_save(folder, whole)
        return torch.load(whole, map_location="cpu")


def _names_of(optimizer: Any, model: Any) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]


def _of_groups(schedule: dict[str, Any], groups: int) -> dict[str, Any]:
    """A schedule's state for so many groups of parameters, which all learn at one rate."""
    return {
        name: value[:1] * groups if isinstance(value, list) else value
        for name, value in schedule.items()
    }


def _regrouped(
    state: dict[str, Any], keys: dict[Any, Any], groups: list[list[Any]]
) -> dict[str, Any]:
    """An optimizer's state, whose parameters one process numbers and several name: with other keys
    in place of those that it has, and these groups of them."""
    named = {keys[key]: group for group in state["param_groups"] for key in group["params"]}
    return {
        "state": {keys[key]: values for key, values in state["state"].items()},
        "param_groups": [{**named[group[0]], "params": group} for group in groups],
    }

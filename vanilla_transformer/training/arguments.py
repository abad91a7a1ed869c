"""What a training run is told: options, and recipes that give them."""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
import yaml
from transformers import GenerationConfig, HfArgumentParser, Seq2SeqTrainingArguments
from transformers.integrations import is_tensorboard_available
from transformers.utils import is_in_notebook

from ..data.parallel_text import SPLITS, DataArguments
from ..inference.metrics import METRICS
from ..model.configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from .distributed import (
    TRAINS_PARTS,
    join_on_cpus,
    launched_processes,
    shard_on_cpus,
    writes_shards,
)
from .finite_gradients import FiniteGradientArguments
from .recipes import find_recipe
from .token_batches import TokenBudgetArguments

# Local files on the command line replace the data set that a recipe names, languages included.
LOCAL_DATA_OPTIONS = {
    f"{split}_{side}" for split in SPLITS for side in ("source", "target", "file")
}
REMOTE_DATA_OPTIONS = {"dataset_name", "dataset_config_name", "source_lang", "target_lang"}


@dataclass
class ModelArguments:
    """Which model to train, and with which tokenizer.

    Raises:
        ValueError: An option is not among its choices, or `config_overrides` can't be read.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Fine-tune this checkpoint. Default: train from scratch."}
    )
    preset: str = field(
        default="base", metadata={"help": f"Shape of a new model: {', '.join(PRESETS)}."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields unlike the preset's, or unlike those of the checkpoint to fine-tune, "
            "e.g. dropout=0.2,norm_position=pre."
        },
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer to use; by default, one is trained on the data."}
    )
    vocab_size: int = field(
        default=8000, metadata={"help": "Size of the tokenizer trained on the data."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "eager, sdpa, flex_attention, flash_attention_2, ..."}
    )
    float32_matmul_precision: str | None = field(
        default=None,
        metadata={
            "help": "torch.set_float32_matmul_precision: highest, high or medium, which on CPUs "
            "with AVX-512 or AMX trains up to twice as fast at next to no loss of precision."
        },
    )

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r}: expected one of {', '.join(PRESETS)}")
        precisions = (None, "highest", "high", "medium")
        if self.float32_matmul_precision not in precisions:
            raise ValueError(
                f"float32_matmul_precision={self.float32_matmul_precision!r}: "
                "expected highest, high or medium"
            )
        self.overrides()

    def overrides(self) -> dict[str, Any]:
        """`config_overrides` as fields and values."""
        fields: dict[str, Any] = {}
        for item in (self.config_overrides or "").split(","):
            name, equals, value = (part.strip() for part in item.partition("="))
            if name and not equals:
                raise ValueError(f"config_overrides has {item!r}: expected name=value")
            if name and name not in VanillaTransformerConfig.__dataclass_fields__:
                raise ValueError(f"config_overrides has {name!r}: no field of the configuration")
            if name:
                fields[name] = yaml.safe_load(value)
        return fields


@dataclass
class TranslationTrainingArguments(
    TokenBudgetArguments, FiniteGradientArguments, Seq2SeqTrainingArguments
):
    """transformers' arguments, and those of the paper's training that it has none for.

    Raises:
        ValueError: Checkpoints are to be averaged that would not be there; alpha is negative; the
            generation config has no such field; the best model's metric scores translations, which
            are not made; so many processes can't share the work so.
    """

    _VALID_DICT_FIELDS = [*Seq2SeqTrainingArguments._VALID_DICT_FIELDS, "generation_kwargs"]

    average_checkpoints: int | None = field(
        default=None,
        metadata={
            "help": "At the end of training, let the mean of the last so many checkpoints be the "
            "model (the paper: 5, and 20 for the big model); with load_best_model_at_end of the "
            "best by metric_for_best_model."
        },
    )
    r_drop_alpha: float = field(
        default=0.0,
        metadata={
            "help": "Weight of R-Drop's divergence between two passes with other dropout, 5 in "
            "its paper for translation; 0: one pass. Each batch is then worked on twice at a time."
        },
    )
    report_to: None | str | list[str] = field(  # noqa: RUF036  # HfArgumentParser wants this order
        default_factory=lambda: "tensorboard" if is_tensorboard_available() else "none",
        metadata={"help": "Where to log besides: tensorboard (default if installed), none, ..."},
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "Train on from a checkpoint: 'true' for the newest whole one in output_dir, "
            "'auto' for the same or, where there is none, from the start, or a checkpoint's folder."
        },
    )
    disable_tqdm: bool | None = field(
        default=None,
        metadata={"help": "Show no progress bars. Default: unless stderr is a terminal."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Look for weights without gradient: here all have one."}
    )
    batches_per_update: int | None = field(
        default=None,
        metadata={
            "help": "Batches of each update on all devices together: gradient_accumulation_steps "
            "follows, so that the training is the same on any number of devices."
        },
    )
    tp_size: int = field(
        default=1,
        metadata={
            "help": "Split each matrix up among so many processes (tensor parallelism); of more "
            "processes, groups of so many share the data, and the weights once more (FSDP2)."
        },
    )
    generation_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "What the model's generation config is to hold besides generation_num_beams, "
            'e.g. {"length_penalty": 0.6, "length_penalty_type": "gnmt"}.'
        },
    )

    def __post_init__(self) -> None:
        if self.disable_tqdm is None and not (sys.stderr.isatty() or is_in_notebook()):
            self.disable_tqdm = True  # bars within bars are made of escape sequences
        self._share_out()
        join_on_cpus(self)
        super().__post_init__()
        shard_on_cpus(self)
        if self.r_drop_alpha < 0:
            raise ValueError(f"r_drop_alpha={self.r_drop_alpha}: expected a number from 0")
        known = GenerationConfig().to_dict().keys() | {"length_penalty_type"}
        for name in self.generation_kwargs or {}:
            if name not in known:
                raise ValueError(f"generation_kwargs has {name!r}: no field of GenerationConfig")
        metric = self.metric_for_best_model or ""
        if metric.removeprefix("eval_") in METRICS and not self.predict_with_generate:
            raise ValueError(
                f"metric_for_best_model={metric}: expected predict_with_generate, for it to score"
            )
        self._check_averages()

    @property
    def device(self) -> torch.device:
        """As transformers', whose processes on CPUs number theirs in 5.17: torch then can't load an
        optimizer's state to resume from."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def data_parallel_size(self) -> int:
        """How many batches are worked on at a time."""
        return launched_processes() // self.tp_size

    def _share_out(self) -> None:
        processes = launched_processes()
        if self.tp_size < 1 or processes % self.tp_size:
            raise ValueError(f"tp_size={self.tp_size}: expected a divisor of {processes} processes")
        if self.tp_size > 1 and not TRAINS_PARTS:
            raise ValueError(
                f"tp_size={self.tp_size}: expected transformers 5.19 or newer, "
                f"not {transformers.__version__}"
            )
        wanted, at_a_time = self.batches_per_update, self.data_parallel_size
        if wanted is None:
            return
        if wanted < 1 or wanted % at_a_time:
            raise ValueError(
                f"batches_per_update={wanted}: expected a multiple of {at_a_time}, as many as are "
                "worked on at a time"
            )
        self.gradient_accumulation_steps = wanted // at_a_time

    def _check_averages(self) -> None:
        wanted, limit = self.average_checkpoints, self.save_total_limit
        if wanted is None:
            return
        if wanted < 1:
            raise ValueError(f"average_checkpoints={wanted}: expected a positive number")
        if limit is not None and limit < wanted:
            raise ValueError(
                f"average_checkpoints={wanted}: save_total_limit={limit} keeps fewer, expected as "
                "many at least"
            )
        if writes_shards():
            raise ValueError(
                f"average_checkpoints={wanted}: expected FSDP with FULL_STATE_DICT, which unlike "
                "SHARDED_STATE_DICT leaves whole checkpoints"
            )
        if self.save_strategy == "no":
            raise ValueError(f"average_checkpoints={wanted}: save_strategy='no' keeps none")

    def expect_data(self, splits: Collection[str], streaming: bool = False) -> None:
        """Raise ValueError where a split that the training needs is missing, or the number of steps
        over a stream."""
        needs = [("training", "train")]
        if self.eval_strategy != "no":
            needs.append((f"eval_strategy={self.eval_strategy.value}", "validation"))
        if self.eval_on_start:
            needs.append(("eval_on_start=True", "validation"))
        for need, split in needs:
            if split not in splits:
                raise ValueError(
                    f"{need}: expected {split} data ({split}_source and {split}_target, "
                    f"{split}_file, or that split of dataset_name), found only "
                    f"{', '.join(splits)} data"
                )
        if streaming and self.max_steps < 1:
            raise ValueError(
                f"max_steps={self.max_steps}: expected a positive number, since a stream does not "
                "tell its length"
            )

    def limit(self, data: DataArguments) -> None:
        """Let tokenisation cut what the budget can't take, if that is wished."""
        if self.oversized != "cut" or self.max_tokens is None:
            return
        for name in ("max_source_length", "max_target_length"):
            setattr(data, name, min(getattr(data, name) or self.max_tokens, self.max_tokens))


def parse_arguments(
    dataclass_types: Iterable[Any],
    argv: Sequence[str] | None = None,
    make_parser: Callable[..., HfArgumentParser] = HfArgumentParser,
) -> tuple:
    """Parse a command line in which `--config RECIPE` sets defaults and flags override them.

    Args:
        dataclass_types: As for `HfArgumentParser`.
        argv: The command line without the program's name. Default: that of `sys.argv`.
        make_parser: Makes the parser from the dataclasses, with `HfArgumentParser`'s arguments.

    Returns:
        One instance of each dataclass.

    Raises:
        ValueError: The recipe is not a mapping, or a name in it is not an option.
        FileNotFoundError: `--config` is neither a file nor the name of a packaged recipe.
    """
    parser = make_parser(dataclass_types, allow_abbrev=False)
    parser.add_argument(
        "--config",
        help="A packaged recipe's name (`vanilla-transformer recipes`) or a YAML file, with any "
        "options by name. Flags override it.",
    )
    argv = sys.argv[1:] if argv is None else list(argv)
    if not torch.accelerator.is_available():
        # Left to themselves, several processes on CPUs would each train a model of their own.
        parser.set_defaults(use_cpu=True)
    given = vars(parser.parse_known_args(argv)[0])
    if given["config"] is not None:
        recipe_path = find_recipe(given["config"])
        recipe = yaml.safe_load(recipe_path.read_text(encoding="utf-8"))
        if not isinstance(recipe, dict):
            raise ValueError(f"{recipe_path}: expected a mapping from options to values")
        unknown = sorted(set(map(str, recipe)) - {action.dest for action in parser._actions})
        if unknown:
            raise ValueError(f"{recipe_path}: unknown options {', '.join(unknown)}")
        if "dataset_name" in recipe and any(map(given.get, LOCAL_DATA_OPTIONS)):
            recipe = {name: recipe[name] for name in recipe.keys() - REMOTE_DATA_OPTIONS}
        parser.set_defaults(**recipe)
    return parser.parse_args_into_dataclasses(argv)[: len(parser.dataclass_types)]

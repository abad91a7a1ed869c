"""The options of a training run."""

import logging
import re
import sys
from argparse import Action, Namespace
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from transformers import Seq2SeqTrainingArguments
from transformers.hf_argparser import HfArg
from transformers.integrations import is_tensorboard_available
from transformers.utils import is_in_notebook

from ..data.data_options import DataArguments
from ..data.tokenizer_options import TokenizerArguments
from ..inference.metrics import (
    LOWER_IS_BETTER,
    METRICS,
    METRICS_WITHOUT_SOURCE,
    expect_bleu_tokenizer,
)
from ..model.configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from .distributed import enable_fsdp_on_cpu, init_cpu_process_group, launched_world_size
from .finite_gradients import FiniteGradientArguments
from .option_checks import expect_equal_strategies, expect_possible_options
from .token_batches import TokenBudgetArguments

logger = logging.getLogger(__name__)

# What a training from scratch chooses from its model and data (defaults.py), and transformers' own
# defaults, which apply to fine-tuning.
CHOSEN = {"learning_rate": 5e-5, "warmup_steps": 0, "num_train_epochs": 3.0}
# Schedules that watch metric_for_best_model. By default, both lower the rate unless it falls.
SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
WITHOUT_WARMUP = ("constant", *SCHEDULES_BY_METRIC)
WITHOUT_KWARGS = ("constant", "constant_with_warmup")


class AddFields(Action):
    """An option whose fields add to those of the recipe, and of the same option before it."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, *args: Any) -> None:
        """Add the fields to those that were given before."""
        before = getattr(namespace, self.dest)
        fields = _as_fields(before) | _as_fields(values) if before else values
        setattr(namespace, self.dest, fields)


@dataclass
class ModelArguments(TokenizerArguments):
    """Which model to train, and with which tokenizer.

    Raises:
        ValueError: An option is not among its choices, or `config_overrides` can't be read.
        huggingface_hub.errors.StrictDataclassError: `config_overrides` has a wrong value.
    """

    model_name_or_path: str | None = HfArg(
        default=None, help="Fine-tune this checkpoint. Default: train from scratch."
    )
    preset: str = HfArg(default="base", help=f"Shape of a new model: {', '.join(PRESETS)}.")
    config_overrides: str | None = HfArg(
        default=None,
        help="Configuration fields that override the preset, such as "
        "dropout=0.2,norm_position=pre, or fields of the checkpoint to fine-tune that leave its "
        "weights as they are. They add to those of a recipe.",
        metadata={"action": AddFields},
    )
    attn_implementation: str | None = HfArg(
        default=None,
        help="Attention implementation: eager, sdpa, flex_attention, flash_attention_2, ...",
    )
    license: str | None = HfArg(
        default=None, help="Licence for the model card, by its name on the Hub, such as apache-2.0."
    )
    float32_matmul_precision: str | None = HfArg(
        default=None,
        help="Precision of float32 matrix products: highest, high or medium. On some CPUs medium "
        "trains faster with almost the same result.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r}: expected one of {', '.join(PRESETS)}")
        precisions = (None, "highest", "high", "medium")
        if self.float32_matmul_precision not in precisions:
            raise ValueError(
                f"float32_matmul_precision={self.float32_matmul_precision!r}: "
                "expected highest, high or medium"
            )
        overrides = self.overrides()
        if self.model_name_or_path is None:  # wrong values are found before the text is read
            VanillaTransformerConfig.from_preset(self.preset, **overrides)

    def warn_of_what_has_no_effect(self) -> None:
        """Warn about options for a new tokenizer or model if an existing one is used."""
        decides: dict[str, str] = {}
        if self.tokenizer_name is not None or self.model_name_or_path is not None:
            of_new = TokenizerArguments.__dataclass_fields__.keys() - {
                "tokenizer_name",
                "user_tokens",
            }
            existing = "model_name_or_path" if self.tokenizer_name is None else "tokenizer_name"
            decides = dict.fromkeys(sorted(of_new), existing)
        elif self.sentencepiece_model or self.bpe_codes:
            file = "sentencepiece_model" if self.sentencepiece_model else "bpe_codes"
            decides = dict.fromkeys(("vocab_size", "target_vocab_size"), file)
            if self.sentencepiece_model and len(self.sentencepiece_model) == 1:
                decides["separate_vocabularies"] = file  # codes give each side its characters
        if self.model_name_or_path is not None:
            decides["preset"] = "model_name_or_path"
        for name, other in decides.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                _warn_of_second(self, other, name)

    def states_dropout(self) -> bool:
        """Whether `config_overrides`, or a row of Table 3 about dropout, names a rate."""
        return "dropout" in self.overrides() or self.preset.startswith("D-drop")

    def overrides(self) -> dict[str, Any]:
        """`config_overrides` as fields and values. A recipe may have them as a mapping. For a model
        to fine-tune they are fields of its own configuration."""
        fields = _as_fields(self.config_overrides)
        is_new = self.model_name_or_path is None
        for name in fields:
            if is_new and name not in VanillaTransformerConfig.__dataclass_fields__:
                raise ValueError(f"config_overrides has {name!r}: no field of the configuration")
            if name in ("vocab_size", "decoder_vocab_size"):
                raise ValueError(f"config_overrides has {name!r}, which follows from the tokenizer")
        return fields


def _warn_of_second(options: Any, one: str, other: str) -> None:
    """Warn if both are given, as the second then has no effect."""
    values = getattr(options, one), getattr(options, other)
    if None not in values:
        logger.warning("%s=%s has no effect: %s=%s decides", other, values[1], one, values[0])


def _as_fields(given: Any) -> dict[str, Any]:
    """The fields of "dropout=0.2,norm_position=pre", or of a mapping."""
    if isinstance(given, dict):
        return dict(given)
    fields = {}
    for item in (given or "").split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name and not equals:
            raise ValueError(f"config_overrides has {item!r}: expected name=value")
        if name:
            fields[name] = yaml.load(value, TypedLoader)
    return fields


class TypedLoader(yaml.SafeLoader):
    """Reads 1e-6, which is text in YAML 1.1, as a number, and dates, which no option has, as
    text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


TypedLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    [*"-+.0123456789"],
)


@dataclass
class TranslationTrainingArguments(
    TokenBudgetArguments, FiniteGradientArguments, Seq2SeqTrainingArguments
):
    """`Seq2SeqTrainingArguments`, with the options that the paper's training needs besides.

    Raises:
        ValueError: An option has an invalid value, or two options contradict each other, such as
            `average_checkpoints` and `save_total_limit`.
    """

    _VALID_DICT_FIELDS = [*Seq2SeqTrainingArguments._VALID_DICT_FIELDS, "generation_kwargs"]

    output_dir: str | None = HfArg(
        default=None,
        help="Folder for the model, its tokenizer, card and checkpoints. Default: trainer_output.",
    )
    learning_rate: float | None = HfArg(
        default=None,
        help="The peak learning rate. Default: (d_model * 4000)^-0.5, the paper's; 5e-5 for "
        "fine-tuning.",
    )
    warmup_steps: float | None = HfArg(
        default=None,
        help="Updates in which the learning rate rises; a number below 1 is a share of all "
        "updates. Default: a tenth, at most 4000; 0 for fine-tuning.",
    )
    num_train_epochs: float | None = HfArg(
        default=None,
        help="Number of epochs. Default: about 30, but at least 3,000 and at most 100,000 updates; "
        "3 for fine-tuning.",
    )
    max_steps: int = HfArg(
        default=-1,
        help="Number of updates, in place of num_train_epochs. Default: as many as in those "
        "epochs.",
    )
    predict_with_generate: bool = HfArg(
        default=False, help="Translate in each evaluation, and compute metrics."
    )
    per_device_train_batch_size: int | None = HfArg(
        default=None,
        help="Sentence pairs in a batch, per device. Default: batches of max_tokens tokens.",
    )
    adam_beta2: float = HfArg(default=0.98, help="Adam's beta2 (section 5.3).")
    adam_epsilon: float = HfArg(default=1e-9, help="Adam's epsilon (section 5.3).")
    average_checkpoints: int | None = HfArg(
        default=None,
        help="Number of last checkpoints to average for the final model (the paper: 5, and 20 for "
        "the big model); 0 averages none. With load_best_model_at_end, the best checkpoints by "
        "metric_for_best_model.",
    )
    metrics: list[str] = HfArg(
        default_factory=lambda: list(METRICS),
        help="Scores of an evaluation with predict_with_generate: some of "
        f"{', '.join(METRICS_WITHOUT_SOURCE)}. metric_for_best_model may be another of these. "
        f"Default: {', '.join(METRICS)}.",
    )
    bleu_tokenize: str | None = HfArg(
        default=None,
        help="sacreBLEU's tokenizer, such as zh, ja-mecab, or none for tokenized text. Default: "
        "13a.",
    )
    log_translations: int = HfArg(
        default=3,
        help="Number of translations to log in an evaluation with predict_with_generate: the first "
        "ones, with their references.",
    )
    early_stopping_patience: int | None = HfArg(
        default=None,
        help="End training after this many evaluations without a better metric_for_best_model. "
        "Needs load_best_model_at_end.",
    )
    r_drop_alpha: float = HfArg(
        default=0.0,
        help="Weight of R-Drop's divergence between two passes with different dropout, which "
        "double the batch. Its paper uses 5 for translation. 0 turns R-Drop off.",
    )
    r_drop_start: int = HfArg(
        default=0,
        help="Start R-Drop after this many updates; those before are faster. Needs r_drop_alpha.",
    )
    report_to: None | str | list[str] = HfArg(  # noqa: RUF036  # HfArgumentParser wants this order
        default_factory=lambda: "tensorboard" if is_tensorboard_available() else "none",
        help="Where to log: tensorboard (default if installed), none, ...",
    )
    include_num_input_tokens_seen: str = HfArg(
        default="no",
        help="Count the source tokens: all, non_padding, no. Without a value: all.",
        metadata={"nargs": "?", "const": "all"},
    )
    resume_from_checkpoint: str | None = HfArg(
        default=None,
        help="Checkpoint to resume from: 'true' for the newest complete one in output_dir, 'auto' "
        "for the same if there is one, or a checkpoint's folder.",
    )
    disable_tqdm: bool | None = HfArg(
        default=None, help="Hide progress bars. Default: hidden unless stderr is a terminal."
    )
    ddp_find_unused_parameters: bool | None = HfArg(
        default=None,
        help="Search for parameters without a gradient (DDP). Default: false for our model, which "
        "has none; other models may drop layers.",
    )
    batches_per_update: int | None = HfArg(
        default=None,
        help="Batches per update over all devices. Sets gradient_accumulation_steps, so that "
        "training is the same on any number of devices, except for dropout.",
    )
    generation_kwargs: dict | str | None = HfArg(
        default=None,
        help="Fields to set in the model's generation config, as JSON, such as "
        '{"length_penalty": 0.6, "length_penalty_type": "gnmt"}.',
    )

    def __post_init__(self) -> None:
        # The options on the command line and in its recipe; empty in Python code.
        self.on_command_line, self.in_recipe = set[str](), set[str]()
        if self.disable_tqdm is None and not (sys.stderr.isatty() or is_in_notebook()):
            self.disable_tqdm = True  # nested bars would fill a file with escape sequences
        self._name_counted_tokens()
        self._find_left_open()
        self._set_gradient_accumulation()
        self._choose_metrics()
        expect_equal_strategies(self)
        init_cpu_process_group(self)
        super().__post_init__()
        watches_metric = self.lr_scheduler_type in SCHEDULES_BY_METRIC
        if watches_metric and self.greater_is_better:  # type: ignore[has-type]
            given: Any = self.lr_scheduler_kwargs  # type: ignore[has-type]
            self.lr_scheduler_kwargs = {"mode": "max", **(given or {})}
        enable_fsdp_on_cpu(self)
        expect_possible_options(self)

    def __getstate__(self) -> dict[str, Any]:
        """What `Trainer` saves and uploads as `training_args.bin`: without the token."""
        return {**self.__dict__, "hub_token": None}

    @property
    def device(self) -> torch.device:
        """Same as `TrainingArguments.device`, but without an index on CPUs: transformers 5.17 adds
        one there, and torch then can't load an optimizer's state."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    def _choose_metrics(self) -> None:
        """Also compute the metric that selects the best model, and set its direction."""
        expect_bleu_tokenizer(self.bleu_tokenize, "bleu_tokenize")
        choices = ", ".join(METRICS_WITHOUT_SOURCE)
        for name in self.metrics:
            if name not in METRICS_WITHOUT_SOURCE:
                raise ValueError(f"metrics={name}: expected one of {choices}")
        best = (self.metric_for_best_model or "loss").removeprefix("eval_")
        is_greater = best not in ("loss", *LOWER_IS_BETTER)
        if self.greater_is_better not in (None, is_greater):  # type: ignore[has-type]
            logger.warning(
                "greater_is_better=%s with metric_for_best_model=%s: the worst checkpoint counts "
                "as the best", self.greater_is_better, best,  # type: ignore[has-type]
            )  # fmt: skip
        if best == "loss":
            return
        if best not in METRICS_WITHOUT_SOURCE:
            raise ValueError(f"metric_for_best_model={best}: expected loss or one of {choices}")
        for name, needed in (("predict_with_generate", True), ("prediction_loss_only", False)):
            if bool(getattr(self, name)) != needed:
                raise ValueError(
                    f"metric_for_best_model={self.metric_for_best_model}: expected "
                    f"{name}={str(needed).lower()}, with which it is computed"
                )
        self.metrics = list(dict.fromkeys([*self.metrics, best]))
        if self.greater_is_better is None:  # type: ignore[has-type]
            self.greater_is_better = is_greater

    @property
    def has_token_batches(self) -> bool:
        """Whether batches are made by `max_tokens`, given or chosen."""
        return self.max_tokens is not None or "max_tokens" in self.left_open

    def _find_left_open(self) -> None:
        """Collect the unset options, whose values a training from scratch chooses later, and set
        them to transformers' defaults until then."""
        _warn_of_second(self, "max_tokens", "per_device_train_batch_size")
        if self.train_sampling_strategy != "random":
            _warn_of_second(self, "max_tokens", "train_sampling_strategy")
        if self.dataloader_drop_last:
            _warn_of_second(self, "max_tokens", "dataloader_drop_last")
        if self.max_steps > 0:
            _warn_of_second(self, "max_steps", "num_train_epochs")
        if self.lr_scheduler_type in WITHOUT_WARMUP:
            _warn_of_second(self, "lr_scheduler_type", "warmup_steps")
            self.warmup_steps = 0
        if self.lr_scheduler_type in WITHOUT_KWARGS:
            _warn_of_second(self, "lr_scheduler_type", "lr_scheduler_kwargs")
        self.left_open = {name for name in CHOSEN if getattr(self, name) is None}
        if "num_train_epochs" in self.left_open and self.max_steps < 1:
            self.left_open.add("max_steps")
        by_rows = self.per_device_train_batch_size is not None
        if self.max_tokens is None and not by_rows and self.train_sampling_strategy == "random":
            self.left_open.add("max_tokens")
        for name, value in {**CHOSEN, "per_device_train_batch_size": 8}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _name_counted_tokens(self) -> None:
        """Accept the values of transformers' option, booleans included."""
        given = str(self.include_num_input_tokens_seen).lower()
        self.include_num_input_tokens_seen = {"true": "all", "false": "no"}.get(given, given)
        if self.include_num_input_tokens_seen not in ("all", "non_padding", "no"):
            raise ValueError(
                f"include_num_input_tokens_seen={given}: expected all, non_padding or no"
            )

    def _set_gradient_accumulation(self) -> None:
        wanted, processes = self.batches_per_update, launched_world_size()
        if wanted is None:
            return
        if wanted < 1 or wanted % processes:
            raise ValueError(
                f"batches_per_update={wanted}: expected a positive multiple of {processes}, the "
                "number of processes"
            )
        given: int = self.gradient_accumulation_steps  # type: ignore[has-type]
        if given not in (1, wanted // processes):
            raise ValueError(
                f"batches_per_update={wanted} and gradient_accumulation_steps={given}: expected "
                "one of them"
            )
        self.gradient_accumulation_steps = wanted // processes

    def expect_data(self, splits: Collection[str], streaming: bool = False) -> None:
        """Check that the splits that training needs exist, and that the options suit a stream.

        Raises:
            ValueError: A split or `max_steps` is missing, or several processes would read batches
                of rows from a stream.
        """
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
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            if streaming and getattr(self, name) == "epoch":
                raise ValueError(
                    f"{name}=epoch: expected steps or no, as batches from a stream have no epochs"
                )
        by_length = self.train_sampling_strategy not in ("random", "sequential")
        if streaming and by_length and not self.has_token_batches:
            logger.warning(
                "train_sampling_strategy=%s has no effect: a stream is read in its order",
                self.train_sampling_strategy,
            )
        if streaming and not self.has_token_batches and launched_world_size() > 1:
            raise ValueError(
                f"per_device_train_batch_size={self.per_device_train_batch_size} with a stream in "
                f"{launched_world_size()} processes: expected max_tokens in its place"
            )
        if streaming and self.max_steps < 1:
            raise ValueError(
                f"max_steps={self.max_steps}: expected a positive number, as the length of a "
                "stream is unknown"
            )

    def limit(self, data: DataArguments) -> None:
        """With `oversized="cut"`, let tokenization truncate sentences to the token budget."""
        if self.oversized != "cut" or self.max_tokens is None:
            return
        for name in ("max_source_length", "max_target_length"):
            setattr(data, name, min(getattr(data, name) or self.max_tokens, self.max_tokens))

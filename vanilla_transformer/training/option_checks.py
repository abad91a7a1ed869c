"""Checks of a training's options that transformers makes late, or not at all.

Each raises a ValueError that names the option and what was expected, before any text is read. For
options without effect there is a warning."""

import copy
import logging
import math
from typing import Any

import torch
from transformers import GenerationConfig, Seq2SeqTrainer, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy

from ..model.generation_options import OWN_OPTIONS
from .distributed import saves_shards

logger = logging.getLogger(__name__)

# The lowest value of each. Below it, training fails late or silently ignores the option.
AT_LEAST = {
    "gradient_accumulation_steps": 1,
    "per_device_eval_batch_size": 1,
    "eval_accumulation_steps": 1,
    "generation_max_length": 1,
    "generation_num_beams": 1,
    "early_stopping_patience": 1,
    "average_checkpoints": 0,
    "log_translations": 0,
    "dataloader_num_workers": 0,
    "weight_decay": 0,
    "seed": 0,
    "data_seed": 0,
    "r_drop_alpha": 0,
    "r_drop_start": 0,
}


def expect_possible_options(args: Any) -> None:
    """Check the options of a `TranslationTrainingArguments` one by one, and those that need or
    exclude each other."""
    _expect_numbers(args)
    _expect_optimizer(args)
    _expect_schedule(args)
    _expect_batches(args)
    _expect_one_device(args)
    _expect_evaluations(args)
    if args.r_drop_start and not args.r_drop_alpha:
        raise ValueError(f"r_drop_start={args.r_drop_start}: expected r_drop_alpha with it")
    _expect_generation_fields(args)
    _expect_averages(args)
    _expect_reports(args)


def expect_equal_strategies(args: Any) -> None:
    """Check what `load_best_model_at_end` needs. The message of transformers has several lines."""
    evaluates, saves = args.eval_strategy, args.save_strategy
    if not args.load_best_model_at_end or saves == "best":
        return
    if evaluates != saves or evaluates == "no":
        evaluates, saves = (IntervalStrategy(each).value for each in (evaluates, saves))
        raise ValueError(
            f"load_best_model_at_end=True with eval_strategy={evaluates} and "
            f"save_strategy={saves}: expected steps for both, or epoch"
        )


def _expect_numbers(args: Any) -> None:
    for name, least in AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name}={value}: expected {least} or more")
    if args.seed >= 2**32:
        raise ValueError(f"seed={args.seed}: expected less than 2^32, as NumPy does")
    if args.max_steps < 1 and args.max_steps != -1:
        raise ValueError(
            f"max_steps={args.max_steps}: expected a positive number, or -1 for as many as in "
            "num_train_epochs"
        )
    kinds = ("eval", "save", "logging")
    by_steps = [f"{kind}_steps" for kind in kinds if getattr(args, f"{kind}_strategy") == "steps"]
    for name in ("num_train_epochs", *by_steps):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: expected a positive number")
    for name, value in vars(args).items():
        clips_nothing = name == "max_grad_norm" and value == math.inf
        if isinstance(value, float) and not math.isfinite(value) and not clips_nothing:
            raise ValueError(f"{name}={value}: expected a finite number")


def _expect_optimizer(args: Any) -> None:
    """Make an optimizer for one number: it fails if a package is missing or a setting wrong."""
    if args.optim_args and any(one.count("=") != 1 for one in args.optim_args.split(",")):
        raise ValueError(
            f"optim_args={args.optim_args!r}: expected name=value, with commas between several"
        )
    modules, name = args.optim_target_modules, args.optim.value
    if "lomo" in name or (modules and name.startswith(("galore", "apollo"))):
        return  # these need the model
    if modules:
        logger.warning("optim_target_modules=%s has no effect with optim=%s", modules, name)
    try:
        kind, options = Seq2SeqTrainer.get_optimizer_cls_and_kwargs(args)
        if isinstance(kind, type):
            kind([torch.nn.Parameter(torch.zeros(1))], **options)
    except (ImportError, TypeError, ValueError) as error:
        given = f" and optim_args={args.optim_args!r}" if args.optim_args else ""
        raise ValueError(f"optim={args.optim.value}{given}: {error}") from error
    if args.optim_args:
        _warn_of_unread_optim_args(args)


def _warn_of_unread_optim_args(args: Any) -> None:
    """Warn about arguments that this optimizer lacks: transformers (5.17 to 5.24) ignores them."""

    def optimizer(optim_args: str | None) -> Any:
        other = copy.copy(args)
        other.optim_args = optim_args
        return Seq2SeqTrainer.get_optimizer_cls_and_kwargs(other)

    for one in args.optim_args.split(","):
        if optimizer(one) == optimizer(None):
            logger.warning("optim_args=%s has no effect with optim=%s", one, args.optim.value)


def _expect_schedule(args: Any) -> None:
    """Make a schedule for two numbers, in two groups as in a trainer: it fails if an argument is
    missing or wrong."""
    given, kind = args.lr_scheduler_kwargs or {}, args.lr_scheduler_type
    if not isinstance(given, dict):
        raise ValueError(f"lr_scheduler_kwargs={given!r}: expected a JSON object")
    peak = 1.0 if "learning_rate" in args.left_open else args.learning_rate
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    try:
        get_scheduler(kind, torch.optim.SGD(groups, lr=peak), 1, 2, given)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_type={kind.value} with lr_scheduler_kwargs={given}: {error}"
        ) from error


def _expect_batches(args: Any) -> None:
    # "cut" needs the number before the text is read, which a default depends on.
    by_default = args.oversized == "drop" and "max_tokens" in args.left_open
    if args.oversized != "alone" and args.max_tokens is None and not by_default:
        raise ValueError(f"oversized={args.oversized!r}: expected max_tokens with it")
    if args.auto_find_batch_size and args.has_token_batches:
        raise ValueError(
            "auto_find_batch_size=True: expected per_device_train_batch_size with it, which it "
            "lowers, and not max_tokens"
        )
    for name in ("dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        if getattr(args, name) and not args.dataloader_num_workers:
            raise ValueError(f"{name}={getattr(args, name)}: expected dataloader_num_workers too")


def _expect_one_device(args: Any) -> None:
    if args.n_gpu <= 1:
        return
    found, wanted = f"{args.n_gpu} GPUs in one process", "a process for each, as torchrun starts"
    if args.r_drop_alpha:  # `DataParallel` multiplies a loss that is computed outside the model
        raise ValueError(f"r_drop_alpha={args.r_drop_alpha} with {found}: expected {wanted}")
    logger.warning("%s share each batch through DataParallel; faster is %s", found, wanted)


def _expect_evaluations(args: Any) -> None:
    for name, value in (("batch_eval_metrics", False), ("eval_do_concat_batches", True)):
        if getattr(args, name) != value:
            raise ValueError(
                f"{name}={not value}: expected {str(value).lower()}, as scores are computed over "
                "all pairs"
            )
    for name, known in (("include_for_metrics", ["inputs", "loss"]), ("label_names", ["labels"])):
        for one in getattr(args, name) or ():
            if one not in known:
                raise ValueError(f"{name}={one!r}: expected {' or '.join(known)}")
    if args.early_stopping_patience is not None and not args.load_best_model_at_end:
        raise ValueError(
            f"early_stopping_patience={args.early_stopping_patience}: expected "
            "load_best_model_at_end, with eval_strategy and save_strategy"
        )
    lacks = args.eval_strategy == "no" or args.metric_for_best_model is None
    if args.save_strategy == "best" and lacks:
        raise ValueError(
            "save_strategy=best: expected eval_strategy and metric_for_best_model with it"
        )


def _expect_generation_fields(args: Any) -> None:
    given = args.generation_kwargs or {}
    if not isinstance(given, dict):
        raise ValueError(f"generation_kwargs={given!r}: expected a JSON object")
    known = GenerationConfig().to_dict().keys() | set(OWN_OPTIONS)
    for name in given:
        if name not in known:
            raise ValueError(f"generation_kwargs has {name!r}: no field of GenerationConfig")


def _expect_averages(args: Any) -> None:
    wanted, limit = args.average_checkpoints, args.save_total_limit
    if not wanted:
        return
    if limit is not None and limit < wanted:
        raise ValueError(
            f"average_checkpoints={wanted} and save_total_limit={limit}: expected "
            f"save_total_limit of at least {wanted}"
        )
    if saves_shards():
        raise ValueError(
            f"average_checkpoints={wanted}: expected FSDP with FULL_STATE_DICT; checkpoints "
            "with SHARDED_STATE_DICT can't be averaged"
        )
    if args.save_strategy == "no":
        raise ValueError(f"average_checkpoints={wanted}: save_strategy='no' keeps none")


def _expect_reports(args: Any) -> None:
    # Whether these two work depends on more than a package.
    found = {*get_available_reporting_integrations(), "azure_ml", "flyte"}
    for name in args.report_to or ():
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to={name!r}: expected none, all or some of {known}")
        if name not in found:
            raise ValueError(f"report_to={name!r}: its package is not installed")

"""The help of `train`: which options it shows, and in which groups."""

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from transformers import Seq2SeqTrainingArguments

from ..data.corpora import CorpusArguments
from ..data.data_options import DataArguments
from ..data.tokenizer_options import TokenizerArguments
from ..training.arguments import ModelArguments, TranslationTrainingArguments
from ..training.parsing import FOR_LATER_EVALUATIONS
from .parser import GroupedParser

# transformers keeps these for its own scripts. Here they have no effect.
WITHOUT_EFFECT = {
    "do_eval", "do_predict", "do_train", "liger_kernel_config", "local_rank", "sortish_sampler",
    "use_liger_kernel", *FOR_LATER_EVALUATIONS,
}  # fmt: skip

# Options of transformers that most runs set.
TRAINING = (
    "output_dir", "resume_from_checkpoint", "seed", "max_steps", "num_train_epochs",
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "adam_beta2", "weight_decay", "max_grad_norm", "bf16",
    "fp16", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit",
    "load_best_model_at_end", "metric_for_best_model", "logging_steps", "report_to",
    "torch_compile", "dataloader_num_workers", "push_to_hub",
)  # fmt: skip
DECODING = (
    "predict_with_generate", "generation_num_beams", "generation_max_length", "generation_config",
    "generation_kwargs", "per_device_eval_batch_size", "eval_max_tokens",
)  # fmt: skip

# All others, by the beginning of their names: an option is in the first group that matches.
MORE_GROUPS = {
    "optimization": "optim|adam_|weight_|lr_|max_grad|label_smoothing|neftune|average_tokens",
    "precision and speed": "bf16|fp16|tf32|activation_|gradient_|torch_|use_cache|auto_find",
    "logging": "log|disable_tqdm|report_to|run_name|project|trackio|include_num|skip_memory|debug",
    "evaluation": "eval_|prediction_|per_device_eval|include_for|batch_eval|label_names|greater_",
    "checkpoints": "save_|enable_jit|ignore_data|restore_",
    "Hub": "push_|hub_",
    "data loading": "dataloader_|remove_unused|train_sampling|length_column|data_seed",
    "devices": "ddp_|fsdp|deepspeed|use_cpu|accelerator_|parallelism_|full_determinism",
    "other": "",
}

EPILOG = """All other options of transformers' Seq2SeqTrainingArguments work too: see --help_all."""


def make_parser(
    dataclass_types: Iterable[Any],
    *,
    usage: str = "%(prog)s [--config RECIPE] [--output_dir FOLDER] [options]",
    own_groups: dict[str, list[str]] | None = None,
    **kwargs: Any,
) -> GroupedParser:
    """The parser of `train`, or of another command with its options.

    Args:
        dataclass_types: As for `HfArgumentParser`.
        usage: How to call the command.
        own_groups: Groups of options that `train` does not have.
        kwargs: As for `ArgumentParser`.
    """
    groups = main_groups()
    return GroupedParser(
        dataclass_types,
        usage=usage,
        epilog=EPILOG,
        groups={"help": groups.pop("help"), **(own_groups or {}), **groups},
        more_groups=more_groups(),
        **kwargs,
    )


def main_groups() -> dict[str, list[str]]:
    """The package's own options, and those of transformers that most runs set."""
    own = names(TranslationTrainingArguments, without=[*names(Seq2SeqTrainingArguments), *DECODING])
    return {
        "help": ["help", "help_all", "config"],
        "data": [*names(DataArguments, without=names(CorpusArguments)), *names(CorpusArguments)],
        "tokenizer": names(TokenizerArguments),
        "model": names(ModelArguments, without=names(TokenizerArguments)),
        "training": [*TRAINING, *own],
        "decoding": list(DECODING),
    }


def more_groups() -> dict[str, list[str]]:
    """The remaining options of transformers. Those without an effect here are in no group."""
    groups: dict[str, list[str]] = {title: [] for title in MORE_GROUPS}
    for name in names(Seq2SeqTrainingArguments, without=[*TRAINING, *DECODING, *WITHOUT_EFFECT]):
        groups[next(title for title in groups if re.match(MORE_GROUPS[title], name))].append(name)
    return {f"transformers: {title}": found for title, found in groups.items() if found}


def names(dataclass_type: Any, without: Iterable[str] = ()) -> list[str]:
    """The options of a dataclass, in their order."""
    left_out = set(without)
    return [one.name for one in fields(dataclass_type) if one.init and one.name not in left_out]

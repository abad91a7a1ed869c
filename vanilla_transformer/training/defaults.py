"""Defaults of a training from scratch that depend on the model and the data."""

import logging
import math
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..data.token_batches import count_distinct_labels, count_tokens
from ..inference.decoding import position_limits, set_output_limit
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.generation_options import first_given
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

logger = logging.getLogger(__name__)

FEWEST_TOKENS, MOST_TOKENS = 1000, 25_000  # per update; the paper's batches are the largest
FEWEST_UPDATES, MOST_UPDATES = 3000, 100_000  # the paper trains its base model for 100,000
EPOCHS = 30
WARMUP_STEPS = 4000  # section 5.3
UNKNOWN_SIZE_TOKENS = 4096
OFTEN = 5000  # occurrences of each distinct target token, on average


class TextSize(NamedTuple):
    """The size of a tokenized training text."""

    pairs: int
    source_tokens: int
    target_tokens: int
    longest_excess: int  # tokens: how much longer a target is than its source, at most
    distinct_target_tokens: int

    @classmethod
    def of(cls, dataset: Any) -> "TextSize | None":
        """The size of a data set with `input_ids` and `labels`; None for a stream."""
        if not hasattr(dataset, "__len__"):
            return None
        source, target = count_tokens(dataset)
        longest_excess = int((target - source).max(initial=0))
        distinct = count_distinct_labels(dataset)
        return cls(len(target), int(source.sum()), int(target.sum()), longest_excess, distinct)

    @property
    def tokens(self) -> int:
        """Tokens of the longer side, which decides how many batches there are."""
        return max(self.source_tokens, self.target_tokens)


def choose_dropout(config: VanillaTransformerConfig, size: TextSize) -> float:
    """0.3 if the text has fewer target tokens than the model has weights, otherwise 0.1. The
    paper's choices follow the same rule: 0.1 for its base model and for big on the 36 million pairs
    of WMT 2014 English-French, 0.3 for big on the 4.5 million of English-German (section 6.1).

    A text whose targets consist of a few frequent symbols, as in formal languages, also gets 0.1:
    more dropout prevents the model from learning exact rules.
    """
    with torch.device("meta"):
        weights = VanillaTransformerForConditionalGeneration(config).num_parameters()
    tokens, distinct = size.target_tokens, size.distinct_target_tokens
    if tokens >= weights:
        dropout, reason = 0.1, "no fewer target tokens than the model has weights"
    elif tokens >= OFTEN * distinct:
        dropout, reason = 0.1, f"few target tokens ({distinct}) that occur often"
    else:
        dropout, reason = 0.3, "fewer target tokens than the model has weights"
    logger.info(
        "dropout=%s: the text has %s; %s in the text, %s weights",
        dropout, reason, f"{tokens:,}", f"{weights:,}",
    )  # fmt: skip
    return dropout


def choose_open_options(arguments: Any, d_model: int | None, size: TextSize | None) -> None:
    """Set the options in `arguments.left_open`, and log each with its reason.

    Args:
        arguments: `TranslationTrainingArguments`, which are changed.
        d_model: The model's width; None if the learning rate is not open.
        size: The size of the text; None if unknown.
    """

    def choose(name: str, value: float, reason: str) -> None:
        if name in arguments.left_open:
            setattr(arguments, name, value)
            logger.info("%s=%s: %s", name, value, reason)

    tokens = tokens_per_update(size)
    batches = arguments.world_size * arguments.gradient_accumulation_steps
    known = "a stream's size is unknown"
    if size is not None:
        known = f"{size.tokens:,} on the longer side of the text"
    choose("max_tokens", max(1, tokens // batches), f"{tokens} tokens per update; {known}")
    epoch = updates_per_epoch(arguments, size)
    updates = min(max(round(EPOCHS * epoch), FEWEST_UPDATES), MOST_UPDATES)
    limits = f"from {FEWEST_UPDATES:,} to {MOST_UPDATES:,}"
    choose("max_steps", updates, f"{EPOCHS} epochs of about {epoch:.0f} updates, but {limits}")
    if arguments.max_steps < 1:
        updates = round(epoch * arguments.num_train_epochs)
    else:
        updates = arguments.max_steps
    warmup = min(math.ceil(updates / 10), WARMUP_STEPS)
    choose("warmup_steps", warmup, f"a tenth of {updates:,} updates, but at most {WARMUP_STEPS}")
    if d_model is not None:
        rate = float(f"{(d_model * WARMUP_STEPS) ** -0.5:.3g}")
        choose("learning_rate", rate, f"the paper's peak, (d_model * {WARMUP_STEPS})^-0.5")


def has_bfloat16_products() -> bool:
    """Whether this CPU has instructions that multiply in bfloat16. Without them it takes many times
    as long as float32, even where oneDNN supports it with AVX-512 alone."""
    has = torch.cpu.get_capabilities()
    instructions = any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # bf16: ARM
    return instructions and torch.backends.mkldnn.is_available()


def advise_on_precision(arguments: Any) -> None:
    """Warn about half precision that a CPU lacks, and suggest bfloat16 on one that has it."""
    if arguments.device.type != "cpu":
        return
    if arguments.fp16:
        logger.warning("fp16=True has no effect on a CPU: training is in float32")
    if arguments.bf16 and not has_bfloat16_products():
        logger.warning(
            "bf16=True: this CPU has no bfloat16 instructions, so training is many times slower"
        )
    elif not arguments.bf16 and has_bfloat16_products():
        logger.info("This CPU has bfloat16 instructions: --bf16 may train faster")


def extend_output_limit(
    model: PreTrainedModel, size: TextSize | None, longest_target: int = 0
) -> None:
    """Let translations be as long as the targets of the text, and a tenth longer. The paper's
    limit, input length + 50 (section 6.1), would cut the targets of some tasks, and so would that
    of a stock model, its own or the one from `set_output_limit`: ByT5's tokens are bytes. A
    checkpoint keeps a higher limit.

    Args:
        longest_target: The tokens of the longest target, for stock models.
    """
    set_output_limit(model)
    if not hasattr(model, "extra_output_tokens"):
        _extend_limit_of_stock_model(model, longest_target + longest_target // 10)
        return
    own = getattr(model.generation_config, "extra_output_tokens", None)
    limit = first_given(own, model.extra_output_tokens)
    if size is not None and size.longest_excess > limit:
        extra = size.longest_excess + size.longest_excess // 10
        model.generation_config.extra_output_tokens = extra
        logger.info(
            "extra_output_tokens=%d: a target is %d tokens longer than its source",
            extra, size.longest_excess,
        )  # fmt: skip


def _extend_limit_of_stock_model(model: PreTrainedModel, tokens: int) -> None:
    config, longest = model.generation_config, min(tokens, position_limits(model)[1])
    for name, wanted in (("max_length", 1 + longest), ("max_new_tokens", longest)):
        if (limit := getattr(config, name)) is not None and wanted > limit:
            setattr(config, name, int(wanted))
            logger.info("%s=%d in place of %d, as a target is longer", name, wanted, limit)


def tokens_per_update(size: TextSize | None) -> int:
    """Tokens of a batch, on either side: three times the square root of those on the text's longer
    side. That makes 2,000 for Multi30k, 6,000 for IWSLT 2014, and the paper's 25,000 for WMT 2014.
    """
    if size is None:
        return UNKNOWN_SIZE_TOKENS
    return min(max(round(3 * math.sqrt(size.tokens)), FEWEST_TOKENS), MOST_TOKENS)


def updates_per_epoch(arguments: Any, size: TextSize | None) -> float:
    """About how many updates an epoch takes; 0 if the size is unknown."""
    if size is None:
        return 0.0
    batches = arguments.world_size * arguments.gradient_accumulation_steps
    if arguments.max_tokens is None:
        return max(1.0, size.pairs / (arguments.train_batch_size * batches))
    return max(1.0, size.tokens / (arguments.max_tokens * batches))

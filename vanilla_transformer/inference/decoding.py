"""Options of `generate()`: errors for those that can't work, and the limits of length."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    SequenceBiasLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation import GenerationMode

from ..model.generation_options import (
    LIMITS,
    OWN_OPTIONS,
    GenerationOptions,
    expect_generation_options,
    first_given,
)
from ..model.output_length import use_length_penalty_type

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 256  # as in the pipelines of transformers 4

# The searches that transformers moved out of the library, each with the option that selects it.
MOVED_SEARCHES = {
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "force_words_ids",
    GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha",
    GenerationMode.DOLA_GENERATION: "dola_layers",
    GenerationMode.GROUP_BEAM_SEARCH: "num_beam_groups",
}

# The names of tables of positions, as in BART, BERT and GPT-2.
POSITION_TABLES = ("embed_positions", "position_embeddings", "wpe")


def expect_valid_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Raise a ValueError unless the model can generate with these options and its generation
    config."""
    for name in OWN_OPTIONS:
        if name in options and not hasattr(model, "extra_output_tokens"):
            raise ValueError(
                f"{name}={options[name]!r} with {type(model).__name__}: expected a model of this "
                "package, which `vanilla-transformer convert` can make of some others"
            )
    limits = [name for name in LIMITS if options.get(name) is not None]
    if len(limits) > 1:
        given = " and ".join(f"{name}={options[name]!r}" for name in limits)
        raise ValueError(f"{given}: expected one limit of length, as the others have no effect")
    config = {**model.generation_config.to_dict(), "num_return_sequences": 1, **options}
    expect_generation_options(config, getattr(model.config, "target_vocab_size", 2**31))
    for name, most in _most_tokens(model).items():
        if (value := config.get(name)) is not None and value > most:
            raise ValueError(
                f"{name}={value}: expected at most {most}, where the table of positions ends"
            )
    expect_known_search(model, options)
    use_length_penalty_type(options_of(model, options))
    _expect_processors(config, model.config)
    try:
        GenerationConfig(**config)
    except ValueError as error:  # about an option: as a single line, like our own errors
        raise ValueError(str(error)) from error


def _expect_processors(options: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise a ValueError unless transformers can make its logits processors from the options, which
    it (5.17 to 5.24) only reads when it generates."""

    def size() -> int:
        own = getattr(config, "target_vocab_size", None)
        return own or config.get_text_config(decoder=True).vocab_size

    def watermark(value: Any) -> LogitsProcessor:
        given = WatermarkingConfig.from_dict(value) if isinstance(value, dict) else value
        return given.construct_processor(size(), "cpu")

    makers: dict[str, Callable[[Any], LogitsProcessor]] = {
        "bad_words_ids": NoBadWordsLogitsProcessor,
        "sequence_bias": SequenceBiasLogitsProcessor,
        "watermarking_config": watermark,
    }
    for name, make in makers.items():
        if (value := options.get(name)) is None:
            continue
        try:
            make(value)(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, size()))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{name}={value!r}: {error}") from error


def expect_known_search(
    model: PreTrainedModel, options: dict[str, Any], batch_size: int = 1
) -> None:
    """Raise a ValueError if the options, or the generation config, select a search that
    transformers lacks, or that does not work for an encoder-decoder or a batch of this size."""
    merged, search = options_of(model, options), GenerationConfig()
    for name in ("stop_strings", "token_healing"):
        if merged[name] not in (None, False):
            raise ValueError(
                f"{name}={merged[name]!r} in the generation config: expected null, as translations "
                "end with an eos_token, and begin with whole tokens"
            )
    if merged["custom_generate"] is not None:
        return
    for name in ("num_beams", "do_sample", "top_k", *MOVED_SEARCHES.values()):
        setattr(search, name, merged[name])
    search.top_k = first_given(search.top_k, 50)  # transformers' default
    if (mode := search.get_generation_mode()) in MOVED_SEARCHES:
        name = MOVED_SEARCHES[mode]
        raise ValueError(
            f"{name}={merged[name]!r} in the generation config: expected null, as transformers has "
            f"no {mode.value} any more; `translate` takes one as --custom_generate"
        )
    _expect_possible_options(merged, model.device, batch_size)


def _expect_possible_options(
    options: GenerationOptions, device: torch.device, batch_size: int
) -> None:
    """Raise a ValueError for options that transformers (5.17 to 5.24) rejects while generating."""
    has_beams = (options["num_beams"] or 1) > 1
    cache = str(options["cache_implementation"] or "")
    is_batch = batch_size > 1 and not has_beams
    for name, is_refused, expected in (
        ("low_memory", has_beams, "null with beams"),
        ("cache_implementation", cache == "quantized", "another one for an encoder-decoder"),
        (
            "cache_implementation",
            cache.startswith("offloaded") and device.type == "cpu",
            "an accelerator",
        ),
        ("prompt_lookup_num_tokens", is_batch, "batch_size=1 or beams"),
        ("assistant_early_exit", is_batch, "batch_size=1 or beams"),
        ("prefill_chunk_size", True, "null for an encoder-decoder"),
    ):
        if options[name] and is_refused:
            raise ValueError(f"{name}={options[name]!r}: expected {expected}")


def expect_hypotheses(
    n_best: int, model: PreTrainedModel, generate_kwargs: dict[str, Any], name: str = "n_best"
) -> None:
    """Raise a ValueError, with the name of the option, unless `generate` can return this many
    hypotheses."""
    beams = options_of(model, generate_kwargs)["num_beams"] or 1
    if samples(model, generate_kwargs) and n_best >= 1:
        return
    if not 1 <= n_best <= beams or beams < 2:
        raise ValueError(
            f"{name}={n_best} with num_beams={beams}: expected a positive number, 2 beams or more, "
            "and as many beams as hypotheses; or do_sample=True"
        )


def draws(model: PreTrainedModel, generate_kwargs: dict[str, Any]) -> bool:
    """Whether `generate` draws tokens at random, with or without beams."""
    return bool(options_of(model, generate_kwargs)["do_sample"])


def samples(model: PreTrainedModel, generate_kwargs: dict[str, Any]) -> bool:
    """Whether `generate` draws translations at random, without beams."""
    beams = options_of(model, generate_kwargs)["num_beams"]
    return draws(model, generate_kwargs) and (beams or 1) == 1


def runs_in_torch(model: Any) -> bool:
    """Whether torch computes the model, so that it can be compiled and shows its attention. The
    model of an engine has no parameters, even if its class is one of transformers."""
    return isinstance(model, torch.nn.Module) and next(model.parameters(), None) is not None


def position_limits(model: PreTrainedModel) -> tuple[float, float]:
    """The largest numbers of tokens in a source and in a target for a model's tables of positions;
    infinity without a table, or with one that grows."""
    encoding = getattr(model.config, "position_encoding", None)  # of our models
    is_ctranslate2 = not isinstance(model, torch.nn.Module)  # its sinusoids are also a table
    if is_ctranslate2 or encoding == "learned":
        return (model.config.max_position_embeddings,) * 2
    if encoding == "sinusoidal":
        return math.inf, math.inf
    return _smallest_table(model.get_encoder()), _smallest_table(model.get_decoder())


def as_option(limit: float) -> int | None:
    """One of `position_limits` as an option: None for infinity."""
    return None if limit == math.inf else int(limit)


def expect_positions(name: str, rows: Iterable[Sequence[int]], limit: float, first: int) -> None:
    """Raise a ValueError if a row of token ids is longer than a model's table of positions: torch's
    error does not say which, and on a GPU no later call works.

    Args:
        name: What a row is, for the message, before its number.
        rows: The token ids of each text.
        limit: The largest number of tokens, one of `position_limits`.
        first: The number of the first row.
    """
    for number, row in enumerate(rows, first):
        if len(row) > limit:
            raise ValueError(
                f"{name} {number} has {len(row)} tokens: expected at most {limit}, where the "
                "model's table of positions ends"
            )


def _smallest_table(model: torch.nn.Module) -> float:
    limits = [
        _positions(module)
        for name, module in model.named_modules()
        if name.split(".")[-1] in POSITION_TABLES
        and isinstance(module, torch.nn.Embedding)
        and not hasattr(module, "make_weight")  # FSMT's, which grow
    ]
    return min(limits, default=math.inf)


def _positions(table: torch.nn.Embedding) -> int:
    """The rows for positions: BART's come after an offset, RoBERTa's after the padding row."""
    padding = -1 if table.padding_idx is None else table.padding_idx
    return table.num_embeddings - getattr(table, "offset", padding + 1)


def set_output_limit(model: PreTrainedModel) -> None:
    """Let a model without its own limit, such as T5, generate up to 256 tokens, or as many as its
    positions. transformers' default is 20. A saved limit beyond its table of positions is lowered,
    with a warning. The limit of our models grows with the source, even if a `Seq2SeqTrainer` has
    saved that default."""
    if hasattr(model, "forget_defaults_of_trainer"):  # one of ours
        model.forget_defaults_of_trainer()
    config = model.generation_config
    limited = config.max_length is not None or config.max_new_tokens is not None
    if not limited and not hasattr(model, "extra_output_tokens"):
        longest = min(DEFAULT_NEW_TOKENS, position_limits(model)[1])
        config.max_length = int(1 + longest)  # with the start token
    for name, most in _most_tokens(model).items():
        if (value := getattr(config, name)) is not None and value > most:
            logger.warning(
                "%s=%d in the generation config becomes %d: the table of positions ends there",
                name, value, most,
            )  # fmt: skip
            setattr(config, name, most)


def _most_tokens(model: PreTrainedModel) -> dict[str, int]:
    """The largest limits of length for the decoder's table of positions: the last token is never
    read, and only `max_length` counts the first. Our models stop there by themselves."""
    is_ours = hasattr(model, "extra_output_tokens")
    limit = math.inf if is_ours else position_limits(model)[1]
    return {} if limit == math.inf else {"max_length": int(limit) + 1, "max_new_tokens": int(limit)}


def decoder_start(
    model: PreTrainedModel, generate_kwargs: dict[str, Any] | None = None
) -> int | None:
    """The id of the token with which `generate` starts each target."""
    options = options_of(model, generate_kwargs or {})
    return first_given(options["decoder_start_token_id"], options["bos_token_id"])


def options_of(model: PreTrainedModel, generate_kwargs: dict[str, Any]) -> GenerationOptions:
    """The options of `generate`, with the generation config as their defaults."""
    if hasattr(model, "forget_defaults_of_trainer"):  # one of ours
        model.forget_defaults_of_trainer()
    kwargs = dict(generate_kwargs)
    return GenerationOptions(model.generation_config, kwargs.pop("generation_config", None), kwargs)

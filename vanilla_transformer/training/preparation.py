"""Makes the tokenizer, the token ids and the model of a training run from its options."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import has_length

from ..data.bpe_dropout import BPEDropout, with_bpe_dropout
from ..data.data_options import DataArguments
from ..data.parallel_text import load_parallel_dataset, tokenize_dataset
from ..data.token_batches import arrow_tables, count_tokens
from ..data.tokenizer_options import log_coverage, warn_of_split_tokens
from ..data.vocabularies import rows
from ..inference.decoding import as_option, position_limits
from ..inference.loading import (
    expect_to_read_targets,
    expect_tokenizer,
    lacks_target_language,
    load_intact,
    load_tokenizer,
    read_config,
)
from ..inference.metrics import OTHER_METRICS, has_4_tokens, make_metrics
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .arguments import ModelArguments, TranslationTrainingArguments
from .defaults import (
    TextSize,
    advise_on_precision,
    choose_dropout,
    choose_open_options,
    extend_output_limit,
)
from .distributed import run_on_main_process
from .languages import language_to_start_with, set_languages, start_in_target_language

logger = logging.getLogger(__name__)

SAMPLE = 100  # references to check


class Preparation(NamedTuple):
    """Everything that a trainer needs.

    Attributes:
        pairs: The splits as text, with columns `source` and `target`.
        splits: The same as token ids, with columns `input_ids` and `labels`.
        size: The size of the training text; None if it is a stream.
        target_tokens: Target tokens in an epoch: `oversized="drop"` leaves pairs out. None for a
            stream.
    """

    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    pairs: Any
    splits: dict[str, Any]
    size: TextSize | None
    target_tokens: int | None


def prepare(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TranslationTrainingArguments,
    checkpoint: str | None = None,
) -> Preparation:
    """Load the text, make or load the tokenizer and the model, and choose the options that are not
    set. `checkpoint` is the one to resume from.

    Raises:
        ValueError, FileNotFoundError: Training can't use an option, a file or the text.
    """
    training_args.limit(data_args)
    if model_args.model_name_or_path is not None:
        read_config(model_args.model_name_or_path)  # fails before the text is read, if at all
    if (name := model_args.tokenizer_name or model_args.model_name_or_path) is not None:
        expect_tokenizer(name)
    model_args.warn_of_what_has_no_effect()
    wanted = with_tags(model_args, data_args)
    set_label_smoothing(model_args, training_args)
    set_seed(training_args.seed)
    pairs = load_parallel_dataset(data_args, training_args.seed)
    training_args.expect_data(pairs, data_args.streaming)
    expect_bleu_above_0(pairs.get("validation"), training_args)
    tokenizer = make_tokenizer(wanted, pairs["train"], checkpoint)
    set_languages(tokenizer, data_args.source_lang, data_args.target_lang)
    expect_end_of_targets(tokenizer)
    warn_of_split_tokens(wanted.user_tokens, tokenizer)
    warn_of_another_vocabulary(model_args, tokenizer)
    with training_args.main_process_first(desc="tokenizing"):
        splits = dict(tokenize_dataset(pairs, tokenizer, data_args))
    log_coverage(splits["train"], tokenizer)
    warn_of_changed_references(pairs, tokenizer)
    size = TextSize.of(splits["train"])
    model = make_model(model_args, tokenizer, checkpoint, size)
    known = {name: split for name, split in splits.items() if has_length(split)}  # no stream
    expect_embeddings(model, tokenizer, known)
    expect_texts_to_fit(model, known)
    start_in_target_language(model, tokenizer)
    if model_args.model_name_or_path is not None:
        training_args.left_open &= {"max_tokens"}  # transformers' defaults are for fine-tuning
    choose_open_options(training_args, getattr(model.config, "d_model", None), size)
    advise_on_precision(training_args)
    longest_target = 0 if size is None else count_tokens(splits["train"])[1].max()
    extend_output_limit(model, size, int(longest_target))
    if data_args.bpe_dropout:
        encoder = BPEDropout(tokenizer, data_args.bpe_dropout, training_args.seed)
        limits = longest_texts(model, data_args)
        splits["train"] = with_bpe_dropout(pairs["train"], splits["train"], encoder, *limits)
    target_tokens = None
    if size is not None:
        target_tokens = target_tokens_of_epoch(splits["train"], size, training_args)
    logger.info("%s parameters, %d tokens", f"{model.num_parameters():,}", len(tokenizer))
    return Preparation(tokenizer, model, pairs, splits, size, target_tokens)


def with_tags(model_args: ModelArguments, data_args: DataArguments) -> ModelArguments:
    """The options of the model, whose `user_tokens` include the tags of corpora. A tag may consist
    of several user tokens, and for an existing tokenizer it may be a text, such as T5's prefix."""
    user_tokens = model_args.user_tokens
    tags = [tag for tag in data_args.tags() if not {*tag.split()} <= {*user_tokens}]
    texts = [tag for tag in tags if any(map(str.isspace, tag))]
    if model_args.tokenizer_name or model_args.model_name_or_path:
        tags = [tag for tag in tags if tag not in texts]
    elif texts:
        raise ValueError(
            f"corpus_tags has {texts[0]!r}: expected one token, or several that user_tokens names"
        )
    return replace(model_args, user_tokens=[*user_tokens, *tags])


def longest_texts(model: PreTrainedModel, data_args: DataArguments) -> list[int | None]:
    """The largest numbers of tokens in a source and in a target that BPE-dropout, which makes texts
    longer, must not exceed; None without a limit."""
    given = data_args.max_source_length or math.inf, data_args.max_target_length or math.inf
    return list(map(as_option, map(min, given, position_limits(model))))


def target_tokens_of_epoch(
    train: Any, size: TextSize, training_args: TranslationTrainingArguments
) -> int:
    """The number in an epoch: `oversized="drop"` leaves pairs out, and BPE-dropout, on average,
    makes targets longer than in `size`."""
    tokens, (_, growth) = size.target_tokens, getattr(train, "growth", (1.0, 1.0))
    if training_args.oversized == "drop" and training_args.max_tokens:
        is_kept = np.maximum(*count_tokens(train)) <= training_args.max_tokens
        tokens = int(count_tokens(getattr(train, "tokenized", train))[1][is_kept].sum())
    return round(growth * tokens)


def set_label_smoothing(
    model_args: ModelArguments, training_args: TranslationTrainingArguments
) -> None:
    """Move `label_smoothing_factor`, which transformers has for models without their own label
    smoothing, to the configuration of ours. On a command line it overrides `config_overrides`; in a
    recipe, `config_overrides` win."""
    option, name = "label_smoothing_factor", model_args.model_name_or_path
    on_command_line = option in training_args.on_command_line
    if not on_command_line and option not in training_args.in_recipe:
        return
    if name and not isinstance(read_config(name), VanillaTransformerConfig):
        return
    overrides = model_args.overrides()
    if on_command_line or "label_smoothing" not in overrides:
        overrides["label_smoothing"] = training_args.label_smoothing_factor
        model_args.config_overrides = overrides  # type: ignore[assignment]  # as recipes have it
    training_args.label_smoothing_factor = 0.0
    training_args.on_command_line.discard(option)
    training_args.in_recipe.discard(option)


def expect_bleu_above_0(
    pairs: Sequence[Mapping[str, str]] | None, arguments: TranslationTrainingArguments
) -> None:
    """Raise a ValueError if BLEU selects the best checkpoint but all targets are so short that it
    is 0 for perfect translations."""
    best = (arguments.metric_for_best_model or "").removeprefix("eval_")
    if pairs is None or best != "bleu":
        return
    (bleu,) = make_metrics(["bleu"], tokenize=arguments.bleu_tokenize).values()
    if not has_4_tokens((pair["target"] for pair in pairs), bleu):
        raise ValueError(
            f"metric_for_best_model={arguments.metric_for_best_model}: no validation target has 4 "
            f"tokens, so that BLEU is 0 for perfect translations. {OTHER_METRICS}"
        )


def make_tokenizer(
    arguments: ModelArguments, training_data: Any, checkpoint: str | None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the checkpoint or of the options, or train a new one on the data (on
    the main process, for all).

    Raises:
        ValueError: The named tokenizer has no padding token or no `eos_token`, or has two
            vocabularies, like one of FSMT or, for a new model, of Marian.
    """
    name = checkpoint or arguments.tokenizer_name or arguments.model_name_or_path
    if name is not None:
        tokenizer = load_tokenizer(name)
        for kind in ("pad_token", "eos_token"):
            if getattr(tokenizer, kind) is None:
                raise ValueError(f"{name}: the tokenizer has no {kind}, expected one")
        if not lacks_target_language(tokenizer):  # `set_languages` follows
            expect_to_read_targets(tokenizer)
        if arguments.model_name_or_path is None and getattr(tokenizer, "separate_vocabs", False):
            raise ValueError(
                f"tokenizer_name={name!r} with separate_vocabs=True: expected one vocabulary; "
                "separate_vocabularies trains a tokenizer for each side"
            )
        return tokenizer
    return run_on_main_process(lambda: arguments.train(training_data))


def make_model(
    arguments: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: str | None,
    size: TextSize | None = None,
) -> PreTrainedModel:
    """Make a new model with the tokenizer's vocabulary and special tokens, or load the one to
    fine-tune. A target starts with `bos_token` or, if there is none, with `pad_token`, as in T5 and
    Marian. Without a dropout in the options, the size of the text decides.

    Raises:
        ValueError: The checkpoint to resume from holds a model with a different configuration, or
            the model to fine-tune lacks weights.
    """
    if arguments.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(arguments.float32_matmul_precision)
    attention = {"attn_implementation": arguments.attn_implementation}
    saved = None if checkpoint is None else AutoConfig.from_pretrained(checkpoint)
    if arguments.model_name_or_path is not None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # our own models never use it
        name = arguments.model_name_or_path
        config, unknown = AutoConfig.from_pretrained(
            name, return_unused_kwargs=True, **arguments.overrides()
        )
        if unknown:
            first, kind = next(iter(unknown)), type(config).__name__
            raise ValueError(f"config_overrides has {first!r}: no field of {kind}")
        _expect_same_shapes(arguments, config)
        if saved is not None:  # training has set its special tokens by tokenizer and language
            _expect_same_model(config, saved, checkpoint, with_tokens=False)
        # Training float16 weights destroys a model. --bf16 and --fp16 mix precisions.
        model = load_intact(
            AutoModelForSeq2SeqLM, name, config=config, dtype=torch.float32, **attention
        )
        _freeze_what_is_not_saved(model)
        return model
    overrides = {**_special_tokens(tokenizer), **arguments.overrides()}
    if (language := language_to_start_with(tokenizer)) is not None:
        overrides["decoder_start_token_id"] = language
    config = VanillaTransformerConfig.from_preset(
        arguments.preset, **_vocabulary_sizes(tokenizer), **attention, **overrides
    )
    if size is not None and not arguments.states_dropout():
        if saved is None:
            config.dropout = choose_dropout(config, size)
        else:  # the text may have changed
            config.dropout = getattr(saved, "dropout", config.dropout)
    if saved is not None:
        _expect_same_model(config, saved, checkpoint)
    return VanillaTransformerForConditionalGeneration(config)


def _expect_same_shapes(arguments: ModelArguments, config: PreTrainedConfig) -> None:
    """Raise a ValueError if `config_overrides` give the model to fine-tune weights, or shapes of
    weights, that it does not have. Those would be random, or fail to load."""
    if not arguments.overrides():
        return
    found = []
    for each in (AutoConfig.from_pretrained(str(arguments.model_name_or_path)), config):
        with torch.device("meta"):
            model = AutoModelForSeq2SeqLM.from_config(each)
        unsaved = model._keys_to_ignore_on_save or ()  # Marian's sinusoids
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        found.append({(name, shape) for name, shape in shapes.items() if name not in unsaved})
    for name, shape in sorted(found[1] - found[0]):
        raise ValueError(
            f"config_overrides={arguments.overrides()}: {arguments.model_name_or_path} has no "
            f"{name} of shape {shape}, expected fields that leave its weights as they are"
        )


def _freeze_what_is_not_saved(model: PreTrainedModel) -> None:
    """Freeze Marian's tables of sinusoids: if trained, they would be lost. transformers (5.17 to
    5.24) makes them trainable when it loads a model."""
    for name, weight in model.named_parameters():
        if name in (model._keys_to_ignore_on_save or ()):
            weight.requires_grad_(False)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    pad, bos, eos = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    tokens = {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos}
    return {**tokens, "decoder_start_token_id": pad if bos is None else bos}


def _vocabulary_sizes(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The rows of a new model's embeddings: up to the largest id, as some ids may be unused."""
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        return {"vocab_size": rows(tokenizer), "decoder_vocab_size": tokenizer.target_vocab_size}
    # M2M-100's vocabulary may lack its languages.
    marks = [*tokenizer("")["input_ids"], *tokenizer(text_target="")["input_ids"]]
    return {"vocab_size": max([rows(tokenizer), *(mark + 1 for mark in marks)])}


def _expect_same_model(
    config: PreTrainedConfig,
    saved: PreTrainedConfig,
    checkpoint: str | None,
    with_tokens: bool = True,
) -> None:
    """Raise a ValueError unless the checkpoint's model computes the same as this one."""
    for name in ("model_type", *type(config).__dataclass_fields__):
        if name in ("architectures", "dtype", "transformers_version", "use_cache"):
            continue
        if name.endswith("_token_id") and not with_tokens:
            continue
        theirs, ours = getattr(saved, name, None), getattr(config, name)
        if isinstance(theirs, PreTrainedConfig) and isinstance(ours, PreTrainedConfig):
            _expect_same_model(ours, theirs, f"{checkpoint}, in its {name},", with_tokens)
        elif theirs != ours:
            raise ValueError(
                f"{checkpoint} holds a different model: its {name} is {theirs!r}, this run's is "
                f"{ours!r}"
            )


def expect_end_of_targets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError unless a tokenizer ends its targets with its `eos_token` and doesn't begin
    them with it. A language token may follow."""
    name, eos = tokenizer.name_or_path, tokenizer.eos_token
    labels = empty = tokenizer(text_target="")["input_ids"]
    with suppress(Exception):  # for an unknown word, without an unknown token
        labels = tokenizer(text_target="a")["input_ids"]
    is_read = labels != empty  # otherwise the tokenizer lacks the letter
    if tokenizer.eos_token_id not in (labels[1:] if is_read else labels):
        raise ValueError(
            f"{name}: the tokenizer does not add its eos_token {eos!r} to the end of a text: "
            "expected one that does, or a model can't learn where a target ends"
        )
    if is_read and labels[0] == tokenizer.eos_token_id:
        raise ValueError(
            f"{name}: the tokenizer begins a target with its eos_token {eos!r}: expected it only "
            "at the end, or every translation ends before its first word"
        )


def warn_of_another_vocabulary(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Warn if a model to fine-tune comes with a tokenizer that gives its tokens other ids."""
    if arguments.model_name_or_path is None or arguments.tokenizer_name is None:
        return
    try:
        own = load_tokenizer(arguments.model_name_or_path)
    except (OSError, ValueError):  # the model has no tokenizer
        return
    if own.get_vocab() != tokenizer.get_vocab():
        logger.warning(
            "tokenizer_name=%s has a different vocabulary than model_name_or_path=%s: the model's "
            "embeddings belong to other tokens",
            arguments.tokenizer_name, arguments.model_name_or_path,
        )  # fmt: skip


def warn_of_changed_references(
    pairs: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Warn if the tokenizer changes most of the first reference targets, by case, Unicode normal
    form or unknown words: no translation can equal them. Streams are not checked."""
    for name in ("validation", "test"):
        if not hasattr(pairs.get(name), "__len__"):
            continue
        texts = pairs[name][:SAMPLE]["target"]
        ids = tokenizer(text_target=texts)["input_ids"]
        returned = tokenizer.batch_decode(ids, skip_special_tokens=True)
        changed = [
            (text, back)
            for text, back in zip(texts, returned, strict=True)
            if text.split() != back.split()
        ]
        if 2 * len(changed) > len(texts):
            logger.warning(
                "The tokenizer changes %d of the first %d targets of the %s data, such as %r to "
                "%r: no translation can equal these, which lowers the scores after training",
                len(changed), len(texts), name, *changed[0],
            )  # fmt: skip


def expect_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, splits: Mapping[str, Any]
) -> None:
    """Raise a ValueError if a text has a token that is not among this model's embeddings, as after
    `add_tokens`: torch's error does not say which."""
    targets = getattr(tokenizer, "target_tokenizer", tokenizer)
    outputs = model.get_output_embeddings() or model.get_input_embeddings()
    for column, matrix, names in (
        ("input_ids", model.get_input_embeddings(), tokenizer.convert_ids_to_tokens),
        ("labels", outputs, getattr(targets, "id_to_token", tokenizer.convert_ids_to_tokens)),
    ):
        # ZeRO 3 leaves no rows in the weight.
        size = getattr(matrix, "num_embeddings", None) or matrix.out_features
        for name, split in splits.items():
            tables = arrow_tables(split, [column])
            largest = max(pc.max(pc.list_flatten(table[column])).as_py() or 0 for table in tables)
            if largest >= size:
                raise ValueError(
                    f"the {name} data has the token {names(largest)!r} with the id {largest}: "
                    f"expected less than {size}, the number of the model's embeddings; "
                    "model.resize_token_embeddings(len(tokenizer)) adds some"
                )


def expect_texts_to_fit(model: PreTrainedModel, splits: Mapping[str, Any]) -> None:
    """Raise a ValueError if a text is longer than this model's table of positions."""
    limits = position_limits(model)
    if min(limits) == math.inf:
        return
    for name, split in splits.items():
        for side, lengths, limit in zip(
            ("source", "target"), count_tokens(split), limits, strict=True
        ):
            longest = lengths.max(initial=0)
            if longest > limit:
                raise ValueError(
                    f"the {name} data has a {side} of {longest} tokens: expected at most {limit}, "
                    f"where the model's table of positions ends; max_{side}_length truncates texts"
                )

"""The families of `fuzz.py`: kinds of input, and the properties that must hold for each.

A case is right if all properties of its family hold. It is refused if this package, or the
validation of transformers, deliberately raises an error that names an argument: see `is_refusal`.
"""

import csv
import io
import itertools
import json
import math
import tempfile
import traceback
import unicodedata
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from datasets import config as datasets_config
from huggingface_hub.errors import StrictDataclassError
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import vanilla_transformer
from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerEncoderModel,
    VanillaTransformerForCausalLM,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.data.parallel_text import DataArguments, load_parallel_dataset
from vanilla_transformer.data.tokenization import train_tokenizer
from vanilla_transformer.model.cache import CACHE_NAME

PACKAGE = str(Path(vanilla_transformer.__file__).parent)
VALIDATION = (
    "transformers/configuration_utils.py",
    "transformers/generation/",
    "huggingface_hub/dataclasses.py",
)
VOCABULARY, TARGET_VOCABULARY, D_MODEL = 12, 15, 8


def is_refusal(error: Exception, names: Collection[str]) -> bool:
    """Whether an error comes from a `raise` statement in this package or in the validation of
    transformers, has a suitable type, and names one of the arguments in its message."""
    said = error.__cause__ if isinstance(error, StrictDataclassError) else error
    innermost = traceback.extract_tb((said or error).__traceback__)[-1]
    ours = innermost.filename.startswith(PACKAGE)
    validated = any(place in innermost.filename for place in VALIDATION)
    return (
        isinstance(error, (ValueError, TypeError, IndexError, StrictDataclassError))
        and (ours or validated)
        and (innermost.line or "").startswith("raise")
        and any(name in str(error) for name in names)
    )


@dataclass(frozen=True)
class Family:
    """Cases of one kind, and a check for each. A refusal must contain one of the names."""

    cases: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    names: Callable[[Any], Collection[str]]
    share: int  # of all cases

    def outcome(self, case: Any) -> str:
        """Either "right" or "refused".

        Raises:
            Exception: The case failed.
        """
        try:
            self.check(case)
        except Exception as error:
            if not is_refusal(error, self.names(case)):
                raise
            return "refused"
        return "right"


def mostly(valid: st.SearchStrategy[Any], hostile: st.SearchStrategy[Any]) -> Any:
    """Valid input in nine of ten cases, so that hostile input meets otherwise valid arguments."""
    return st.integers(0, 9).flatmap(lambda n: hostile if n == 9 else valid)


def some_of(options: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    """A few of the options."""
    names = st.lists(st.sampled_from(sorted(options)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({n: options[n] for n in chosen}))


NO_NUMBERS = st.sampled_from([None, "2", "", [], [1], {}, True, False, b"1", (1, 2), 1 + 2j])
INTEGERS = st.sampled_from([-(2**63), -1, 0, 1, 3, 2**24, 2**31, 2**40, 10**9, 10**12, 10**30])
FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, -0.5, 0.0, 0.5, 1.0, 1e-300, 1e300])
ANYTHING = NO_NUMBERS | INTEGERS | FLOATS | st.text(max_size=3)

# ---------------------------------------------------------------- Configurations

SIZES = st.sampled_from([1, 2, 4, 6, 8, 12, 24])
IDS = st.none() | st.integers(0, 5)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "vocab_size": st.integers(6, 50),
    "decoder_vocab_size": st.none() | st.integers(6, 50),
    "d_model": SIZES,
    "hidden_size": SIZES,
    "encoder_layers": st.integers(1, 3),
    "decoder_layers": st.integers(1, 3),
    "encoder_attention_heads": SIZES,
    "decoder_attention_heads": SIZES,
    "encoder_ffn_dim": SIZES,
    "decoder_ffn_dim": SIZES,
    "head_dim": st.none() | SIZES,
    "value_head_dim": st.none() | SIZES,
    "attention_bias": st.booleans(),
    "dropout": st.sampled_from([0, 0.0, 0.1, 0.99]),
    "attention_dropout": st.sampled_from([0, 0.5]),
    "activation_dropout": st.sampled_from([0, 0.5]),
    "activation_function": st.sampled_from(["relu", "gelu", "silu"]),
    "label_smoothing": st.sampled_from([0, 0.1]),
    "norm_position": st.sampled_from(["post", "pre"]),
    "decoder_norm_position": st.sampled_from([None, "post", "pre"]),
    "layer_norm_eps": st.sampled_from([1e-6, 1e-3]),
    "position_encoding": st.sampled_from(["sinusoidal", "learned"]),
    "max_position_embeddings": st.integers(4, 2000),
    "scale_embedding": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "pad_token_id": IDS,
    "bos_token_id": IDS,
    "eos_token_id": IDS | st.lists(st.integers(0, 5), max_size=3),
    "decoder_start_token_id": IDS,
    "is_encoder_decoder": st.booleans(),
    "use_cache": st.booleans(),
}


def configurations() -> st.SearchStrategy[dict[str, Any]]:
    """Fields as in a `config.json`, or as arguments of the configuration."""
    return some_of({name: mostly(valid, ANYTHING) for name, valid in FIELDS.items()}, most=8)


def check_configuration(fields: dict[str, Any]) -> None:
    """A configuration survives saving and loading, and its model computes finite logits. A large
    model is only built on the meta device."""
    config = VanillaTransformerConfig(**fields)
    read = VanillaTransformerConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert read.to_dict() == config.to_dict()
    if max(config.encoder_layers, config.decoder_layers) > 10:
        return
    if max(value for value in config.to_dict().values() if isinstance(value, int)) > 2000:
        with torch.device("meta"):
            VanillaTransformerForConditionalGeneration(config)
        return
    model = VanillaTransformerForConditionalGeneration(config).eval()
    ids = torch.tensor([[3, 4, 5]])
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert logits.shape == (1, 3, config.target_vocab_size)
    assert logits.isfinite().all()


# ---------------------------------------------------------------- Token ids and masks


@lru_cache
def small_model(kind: str, positions: str, attention: str) -> Any:
    """A tiny model whose sizes all differ."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=VOCABULARY, d_model=D_MODEL, encoder_layers=2, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=4, encoder_ffn_dim=10,
        decoder_ffn_dim=14, position_encoding=positions, max_position_embeddings=20,
        decoder_vocab_size=TARGET_VOCABULARY if kind == "two vocabularies" else None,
        attn_implementation=attention,
    )  # fmt: skip
    classes = {
        "encoder": VanillaTransformerEncoderModel,
        "language model": VanillaTransformerForCausalLM,
    }
    return classes.get(kind, VanillaTransformerForConditionalGeneration)(config).eval()


@dataclass(frozen=True)
class Call:
    """A call of a model."""

    model: tuple[str, str, str]
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        return f"small_model{self.model}(**{self.arguments})"


MODELS = st.tuples(
    st.sampled_from(["seq2seq", "two vocabularies", "language model", "encoder"]),
    st.sampled_from(["sinusoidal", "learned"]),
    st.sampled_from(["eager", "sdpa"]),
)
DTYPES = st.sampled_from(
    [
        torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32,
        torch.float64, torch.float16, torch.complex64,
    ]
)  # fmt: skip


@st.composite
def tensors(draw: Any, shape: tuple[int, ...], values: Any, dtype: Any = torch.int64) -> Any:
    """A tensor of this shape with values drawn from `values`."""
    size = math.prod(shape)
    drawn = draw(st.lists(values, min_size=size, max_size=size))
    return torch.tensor(drawn).reshape(shape).to(dtype)


@st.composite
def hostile_tensors(draw: Any) -> Any:
    """Tensors of any shape and dtype with values out of range, or other objects."""
    if draw(st.integers(0, 4)) == 0:
        return draw(NO_NUMBERS | st.just([[1, 2]]) | st.integers(-2, 2))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    values = st.sampled_from([-(2**40), -101, -100, -1, 0, 1, 5, VOCABULARY, 2**31, 2**62])
    return draw(tensors(shape, values, draw(DTYPES)))


def ids_of(rows: int, length: int, vocabulary: int = VOCABULARY) -> Any:
    """Token ids, occasionally hostile ones."""
    sound = tensors((rows, length), st.integers(0, vocabulary - 1))
    outside = tensors((rows, length), st.integers(-1, vocabulary))
    return mostly(sound, outside | hostile_tensors())


@st.composite
def masks_of(draw: Any, rows: int, length: int) -> Any:
    """Masks of any dtype: mixed, all zeros, or with four dimensions."""
    shape = draw(
        st.sampled_from(
            [(rows, length)] * 6
            + [(rows, 1, length, length), (1, 1, length, length), (rows, 1, 1, length)]
            + [(rows, length + 1), (rows + 1, length), (length,), (rows, length, length)]
        )
    )
    kind = draw(st.sampled_from([torch.int64, torch.int64, torch.bool, torch.float32]) | DTYPES)
    values = draw(st.sampled_from([st.integers(0, 1), st.just(1), st.just(0)]))
    return draw(st.none() | tensors(shape, values, kind) | hostile_tensors())


EMBEDDINGS = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype),
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from([D_MODEL, D_MODEL, 1, 0])),
    st.sampled_from([torch.float32] * 4) | DTYPES,
)


@st.composite
def calls(draw: Any, extra: bool) -> Call:
    """Ids and masks of a call; with `extra`, also other arguments of a model."""
    model = draw(MODELS)
    rows, length = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    arguments: dict[str, Any] = {"input_ids": draw(ids_of(rows, length))}
    if draw(st.booleans()):
        arguments["attention_mask"] = draw(masks_of(rows, length))
    if model[0] in ("seq2seq", "two vocabularies"):
        targets, size = draw(st.sampled_from([rows, rows, 2 * rows, 1])), draw(st.integers(0, 4))
        vocabulary = TARGET_VOCABULARY if model[0] == "two vocabularies" else VOCABULARY
        given = draw(st.sampled_from(["decoder_input_ids", "decoder_input_ids", "labels", None]))
        if given is not None:
            arguments[given] = draw(ids_of(targets, size, vocabulary))
        if draw(st.booleans()):
            arguments["decoder_attention_mask"] = draw(masks_of(targets, size))
    if extra:
        arguments |= draw(some_of(EXTRA, most=2))
    return Call(model, arguments)


EXTRA: dict[str, st.SearchStrategy[Any]] = {
    "position_ids": hostile_tensors() | tensors((1, 5), st.integers(0, 25)),
    "decoder_position_ids": hostile_tensors() | tensors((1, 4), st.integers(0, 25)),
    "inputs_embeds": EMBEDDINGS | hostile_tensors(),
    "decoder_inputs_embeds": EMBEDDINGS | hostile_tensors(),
    "encoder_outputs": st.tuples(EMBEDDINGS) | hostile_tensors(),
    "labels": hostile_tensors() | tensors((2, 4), st.integers(0, 11)),
    "logits_to_keep": st.integers(-3, 7) | hostile_tensors(),
    "num_items_in_batch": st.integers(-1, 7) | hostile_tensors(),
    "past_key_values": hostile_tensors(),
    "use_cache": st.booleans() | ANYTHING,
    "output_attentions": st.booleans(),
    "output_hidden_states": st.booleans(),
    "return_dict": st.booleans(),
    "unheard_of": ANYTHING,
}


def check_call(call: Call) -> None:
    """Predictions are finite, have the right shape and do not depend on padding."""
    model = small_model(*call.model)
    outputs = read(model, call.arguments)
    states = outputs[0]
    width = D_MODEL if call.model[0] == "encoder" else model.config.target_vocab_size
    target = first_given(call.arguments, "decoder_input_ids", "decoder_inputs_embeds", "labels")
    source = first_given(call.arguments, "input_ids", "inputs_embeds")
    reads_target = model.config.is_encoder_decoder and target is not None
    shape = (target if reads_target else source).shape
    if "logits_to_keep" not in call.arguments:
        assert states.shape == (*shape[:2], width)
    assert states.isfinite().all()
    assert_padding_is_ignored(model, call.arguments, states)


def read(model: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Hidden states or logits. The loss, if there is one, must be one number."""
    with torch.no_grad():
        outputs = model(**{**arguments, "return_dict": True})
    loss = outputs.get("loss")
    assert loss is None or loss.numel() == 1
    return (outputs["last_hidden_state" if "last_hidden_state" in outputs else "logits"],)


def first_given(arguments: dict[str, Any], *names: str) -> Any:
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def assert_padding_is_ignored(model: Any, arguments: dict[str, Any], states: Any) -> None:
    """Different tokens where the source mask is 0 change nothing, in rows with any token."""
    mask, ids = arguments.get("attention_mask"), arguments.get("input_ids")
    is_source = model.config.is_encoder_decoder
    if mask is None or ids is None or mask.ndim != 2 or not is_source or len(states) != len(ids):
        return
    padding = ~mask.bool()
    others = {**arguments, "input_ids": torch.where(padding, (ids + 1) % VOCABULARY, ids)}
    told = mask.bool().any(1)
    torch.testing.assert_close(read(model, others)[0][told], states[told], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- Generation

TOKENS = st.integers(0, VOCABULARY - 1)
RATES = st.sampled_from([0.1, 0.5, 0.9])
GENERATION: dict[str, st.SearchStrategy[Any]] = {
    "num_beams": st.integers(1, 4),
    "max_new_tokens": st.integers(1, 6),
    "max_length": st.integers(2, 8),
    "min_length": st.integers(0, 4),
    "min_new_tokens": st.integers(0, 4),
    "num_return_sequences": st.integers(1, 3),
    "length_penalty": st.sampled_from([0.0, 0.6, 1.0, -1.0]),
    "length_penalty_type": st.sampled_from(["power", "gnmt"]),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([0.5, 1.0, 3.0]),
    "top_k": st.integers(1, 20),
    "top_p": RATES,
    "min_p": RATES,
    "typical_p": RATES,
    "epsilon_cutoff": st.sampled_from([0.0, 1e-3]),
    "eta_cutoff": st.sampled_from([0.0, 1e-3]),
    "repetition_penalty": st.sampled_from([0.5, 1.2]),
    "encoder_repetition_penalty": st.sampled_from([0.5, 1.2]),
    "no_repeat_ngram_size": st.integers(0, 3),
    "encoder_no_repeat_ngram_size": st.integers(0, 3),
    "renormalize_logits": st.booleans(),
    "remove_invalid_values": st.booleans(),
    "exponential_decay_length_penalty": st.just((1, 1.5)),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=2),
    "suppress_tokens": st.lists(TOKENS, max_size=3),
    "begin_suppress_tokens": st.lists(TOKENS, max_size=3),
    "forced_bos_token_id": TOKENS,
    "forced_eos_token_id": TOKENS,
    "eos_token_id": TOKENS | st.lists(TOKENS, max_size=2),
    "pad_token_id": TOKENS,
    "bos_token_id": TOKENS,
    "decoder_start_token_id": TOKENS,
    "use_cache": st.booleans(),
    "return_dict_in_generate": st.booleans(),
    "output_scores": st.booleans(),
}
OUTSIDE = ANYTHING | st.integers(-5, 40) | st.lists(st.integers(-3, 20), max_size=3)
LIMITS = {"max_new_tokens", "max_length", "min_length", "min_new_tokens"}
LONGEST = 60  # tokens, to limit the time


@st.composite
def generations(draw: Any) -> Call:
    """Sources and options, alone or contradicting each other."""
    kind = draw(st.sampled_from(["seq2seq", "two vocabularies", "language model"]))
    model = (kind, draw(st.sampled_from(["sinusoidal", "learned"])), "sdpa")
    rows, length = draw(st.integers(0, 2)), draw(st.integers(0, 4))
    arguments: dict[str, Any] = {"input_ids": draw(ids_of(rows, length))}
    if draw(st.booleans()):
        arguments["attention_mask"] = draw(masks_of(rows, length))
    options = {name: mostly(valid, OUTSIDE) for name, valid in GENERATION.items()}
    options["unheard_of"] = ANYTHING
    arguments |= draw(some_of(options, most=5))
    return Call(model, arguments)


def check_generation(call: Call) -> None:
    """There are as many sequences as requested, of known tokens and within the limits."""
    model, asked = small_model(*call.model), dict(call.arguments)
    for name in LIMITS & asked.keys():
        if type(asked[name]) is int and LONGEST < asked[name] < 2**31:
            asked[name] = LONGEST
    torch.manual_seed(0)
    output = model.generate(**{"max_new_tokens": 5, **asked} if no_limit(asked) else asked)
    sequences = getattr(output, "sequences", output)
    rows = len(asked["input_ids"]) if asked.get("input_ids") is not None else 1
    assert len(sequences) == rows * (asked.get("num_return_sequences") or 1)
    assert sequences.dtype == torch.int64
    assert ((sequences >= 0) & (sequences < model.config.target_vocab_size)).all()
    begins_anew = model.config.is_encoder_decoder or asked.get("input_ids") is None
    prompt = 1 if begins_anew else asked["input_ids"].shape[1]
    if asked.get("max_new_tokens") is not None:
        assert sequences.shape[1] <= prompt + asked["max_new_tokens"]
    elif asked.get("max_length") is not None:
        assert sequences.shape[1] <= max(asked["max_length"], prompt)


def no_limit(asked: dict[str, Any]) -> bool:
    return not LIMITS & asked.keys()


# ---------------------------------------------------------------- Files

PIECES = st.sampled_from(
    [
        b"a", b"a b", b" ", b"\t", b"\n", b"\n", b"\r\n", b"\r", b"\x00", b"\xef\xbb\xbf", b"\x0b",
        b"\xff", b"\xc3", b"\xc3\xa4", b"\xe2\x80\xa8", b"\xc2\x85", b"\xed\xa0\x80", b"\x1a",
        b'"', b'""', b",", b"{", b"[", b"]", b"}", b'{"source": "a", "target": "b"}\n',
        b'{"source": "\\ud800", "target": "b"}\n', b"source,target\n", b"source\ttarget\n",
        b"a,b\n", b"a\tb\n", b'"a\nb",c\n', b"1e999", b"null", b'{"a": 1, "b": {"c": 2}}\n',
        b"[" * 100_000, b"x" * 10_000_000, b"9" * 10_000, b"NaN", b'{"source": 7, "target": "b"}',
    ]
)  # fmt: skip
CONTENTS = st.lists(PIECES, max_size=8).map(b"".join)
SOUND = st.lists(st.text("aé ,\"'\r\0\u2028", min_size=1, max_size=4), min_size=1, max_size=4)


@dataclass(frozen=True)
class Files:
    """Contents of the files of a training set, and how they are read."""

    contents: dict[str, bytes]
    streaming: bool
    lines: tuple[list[str], list[str]] | None = None  # that must be read

    def __repr__(self) -> str:
        shown = {name: content[:300] for name, content in self.contents.items()}
        return f"Files({shown}, streaming={self.streaming}, lines={self.lines})"


@st.composite
def texts(draw: Any) -> Files:
    """Two sides of parallel text, with equally many lines or with any content."""
    streaming = draw(st.booleans())
    if draw(st.booleans()):
        sides = draw(CONTENTS), draw(CONTENTS)
        return Files(dict(zip(("train.en", "train.de"), sides, strict=True)), streaming)
    source = draw(SOUND)
    target = [f"{line}x" for line in source]
    end = draw(st.sampled_from(["\n", "\r\n"]))
    contents = {
        name: "".join(f"{line}{end}" for line in side).encode()
        for name, side in (("train.en", source), ("train.de", target))
    }
    return Files(contents, streaming)


@st.composite
def tables(draw: Any) -> Files:
    """A table, with certain rows or with any content."""
    suffix, streaming = draw(st.sampled_from(["csv", "tsv", "json", "jsonl"])), draw(st.booleans())
    if draw(st.booleans()):
        return Files({f"train.{suffix}": draw(CONTENTS)}, streaming)
    source = draw(SOUND)
    target = [f"{line}x" for line in source]
    content = io.StringIO(newline="")
    if suffix == "csv":
        rows = [("source", "target"), *zip(source, target, strict=True)]
        csv.writer(content, quoting=csv.QUOTE_ALL).writerows(rows)
    elif suffix == "tsv":
        rows = [("source", "target"), *zip(source, target, strict=True)]
        content.write("".join(f"{a}\t{b}\n" for a, b in rows))
    else:
        rows = [{"source": a, "target": b} for a, b in zip(source, target, strict=True)]
        one_a_line = "\n".join(map(json.dumps, rows))
        content.write(one_a_line if suffix == "jsonl" else json.dumps(rows))
    return Files({f"train.{suffix}": content.getvalue().encode()}, streaming, (source, target))


def check_files(files: Files) -> None:
    """As many pairs as lines, and the same text; blank pairs are left out of training data."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch) / name for name in files.contents]
        for path, content in zip(paths, files.contents.values(), strict=True):
            path.write_bytes(content)
        names = ("train_source", "train_target") if len(paths) == 2 else ("train_file",)
        options = {name: str(path) for name, path in zip(names, paths, strict=True)}
        datasets_config.HF_DATASETS_CACHE = Path(scratch) / "cache"
        arguments = DataArguments(**options, streaming=files.streaming)
        pairs = [
            (row["source"], row["target"]) for row in load_parallel_dataset(arguments)["train"]
        ]
        expected = files.lines
        if expected is None and len(paths) == 2:
            expected = tuple(map(lines_of, files.contents.values()))
    assert all(map(is_visible, itertools.chain(*pairs)))
    if expected is not None:
        both = zip(*expected, strict=True)
        assert pairs == [pair for pair in both if all(map(is_visible, pair))]


def is_visible(text: str) -> bool:
    """Whether a text has more than white space, control characters and format characters."""
    return any(
        not char.isspace() and unicodedata.category(char) not in ("Cc", "Cf") for char in text
    )


def lines_of(content: bytes) -> list[str]:
    """The lines of a text, which only newlines end; a byte order mark is not part of it."""
    *lines, rest = content.decode("utf-8-sig").split("\n")
    return [line.removesuffix("\r") for line in lines] + [rest] * bool(rest)


# ---------------------------------------------------------------- Tokenizers

UNICODE = st.text(st.characters(exclude_categories=[]), max_size=20)
MARKS = st.sampled_from(
    ["</s>", "<pad>", "<s>", "<unk>", "<0x41>", "▁", "\u0308", "\x00", "\ud800"]
)
SOURCES = st.lists(UNICODE | MARKS, max_size=4).map("".join)


@lru_cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    lines = ["a house by the lake", "ein Haus am See", "the lake is deep", "der See ist tief"] * 3
    return train_tokenizer(lines, 300, show_progress=False)


@lru_cache
def small_pipeline() -> TranslationPipeline:
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), d_model=8, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config)
    return TranslationPipeline(model, tokenizer=tokenizer, task="translation")


def check_tokenizer(text: str) -> None:
    """Text is preserved up to Unicode normalization, never becomes a special token, and a tokenizer
    can be trained on it."""
    train_tokenizer([text, "a"], 300, show_progress=False)
    tokenizer = small_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert not set(tokenizer.all_special_ids) & set(ids[:-1])
    expected = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected


def check_pipeline(source: Any) -> None:
    """A text for each source."""
    records = list(small_pipeline()(source, max_new_tokens=2, num_beams=1))
    assert len(records) == (1 if isinstance(source, str) else len(source))
    assert all(isinstance(record["translation_text"], str) for record in records)


def named(*names: str) -> Callable[[Any], Collection[str]]:
    return lambda case: names


def _argument_names(call: Call) -> Iterator[str]:
    yield from call.arguments
    yield from (name.replace("_", " ") for name in call.arguments)  # "attention mask of shape"
    if "repetition_penalty" in call.arguments or "encoder_repetition_penalty" in call.arguments:
        yield "`penalty`"  # the name in errors of transformers
    if "forced_eos_token_id" in call.arguments:
        yield "`eos_token_id`"  # the same
    yield CACHE_NAME  # what transformers 5.24 calls past_key_values
    yield from ("token id", "position", "label", "targets", "input_ids", "inputs_embeds", "mask")


FAMILIES = {
    "configurations": Family(configurations(), check_configuration, lambda fields: FIELDS, 25),
    "token ids and masks": Family(calls(False), check_call, lambda c: [*_argument_names(c)], 20),
    "other inputs": Family(calls(True), check_call, lambda c: [*_argument_names(c)], 10),
    "generation": Family(generations(), check_generation, lambda c: [*_argument_names(c)], 20),
    "parallel text": Family(texts(), check_files, lambda files: [*files.contents], 8),
    "tables": Family(tables(), check_files, lambda files: [*files.contents], 7),
    "tokenizers": Family(SOURCES, check_tokenizer, named("text"), 8),
    "pipelines": Family(SOURCES | ANYTHING, check_pipeline, named("TranslationPipeline"), 2),
}

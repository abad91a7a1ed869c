"""The attention modules of a model, their attention over a text, and a page that shows it."""

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.collation import shift_right
from ..inference.decoding import decoder_start
from ..inference.scoring import pair_batches
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import VanillaTransformerAttention
from ..model.pipelines import evaluation_mode, is_blank
from ..plotting import DESCRIPTIONS, KINDS, AttentionMaps, Kind

VIEWS = ("head", "model")  # of bertviz
# In place of "<" until tokens are JSON: "</script>" in a token would end the page's script. It is a
# noncharacter, intended for internal use like this.
_HIDDEN = "\ufdd0"


def expect_both_stacks(config: PreTrainedConfig) -> None:
    """Raise a ValueError unless this is a vanilla_transformer with an encoder and a decoder."""
    if config.model_type != VanillaTransformerConfig.model_type or not config.is_encoder_decoder:
        raise ValueError(
            f"{config.name_or_path or 'the model'} is of type {config.model_type}: expected "
            "vanilla_transformer, with an encoder and a decoder"
        )


def attention_modules(model: PreTrainedModel) -> dict[Kind, list[VanillaTransformerAttention]]:
    """The attention of each layer by its use (section 3.2.3), also in a model with adapters."""
    encoder, decoder = model.get_encoder().layers, model.get_decoder().layers
    return {
        "encoder": [layer.self_attn for layer in encoder],
        "decoder": [layer.self_attn for layer in decoder],
        "cross": [layer.encoder_attn for layer in decoder],
    }


def expect_eager(model: PreTrainedModel) -> None:
    """Raise a ValueError unless attention is eager, the only one that gives its weights."""
    implementation = model.config._attn_implementation
    if implementation != "eager":
        raise ValueError(f"attn_implementation={implementation!r}: expected 'eager'")


def read_batches(
    pairs: Iterable[tuple[str, str]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int = 2048,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Yield batches of similar length with `input_ids`, `labels` and other inputs of the model.
    Until it ends or is closed, the model is in evaluation mode.

    Args:
        pairs: Sources and targets.
        model: A model with eager attention, the only one that gives its weights.
        tokenizer: Its tokenizer.
        max_tokens: Source tokens, and target tokens, in a batch, including padding. A longer pair
            is a batch of its own.

    Raises:
        ValueError: There is no pair, a source or target has no token, or attention is not eager.
    """
    expect_eager(model)
    pairs = list(pairs)
    if not pairs:
        raise ValueError("the text is empty: expected one pair of sentences at least")
    source_ids = tokenizer([source for source, _ in pairs])["input_ids"]
    target_ids = tokenizer(text_target=[target for _, target in pairs])["input_ids"]
    with evaluation_mode(model):
        for _, inputs in pair_batches(source_ids, target_ids, model, tokenizer, max_tokens):
            yield inputs


def query_masks(inputs: Mapping[str, torch.Tensor]) -> dict[Kind, torch.Tensor]:
    """The query positions of a batch that hold a token, (batch, query_length), for each use of
    attention."""
    source, target = inputs["attention_mask"].bool(), inputs["labels"] != -100
    return {"encoder": source, "decoder": target, "cross": target}


def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    kind: Kind = "cross",
) -> AttentionMaps:
    """The attention of each layer and head over a pair of sentences.

    Each position is labelled with the token that it reads. The queries of "cross" are labelled with
    the token that they predict, as attention to the source serves to predict it.

    Args:
        model: Any sequence-to-sequence model of transformers, with eager attention, the only one
            that gives its weights.
        tokenizer: Its tokenizer.
        source: What the encoder reads.
        target: What the decoder reads and predicts; the model's own translation by default.
        kind: "encoder" or "decoder" for self-attention, or "cross" from the decoder to the source.

    Raises:
        ValueError: A sentence is empty, `kind` is none of the three, or attention is not eager.
    """
    expect_sentences(source=source, target=target)
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    expect_eager(model)
    inputs = tokenizer(source, return_tensors="pt").to(model.device)
    with evaluation_mode(model), torch.inference_mode():
        if target is None:
            plain = {"num_return_sequences": 1, "return_dict_in_generate": False}
            generated = model.generate(**inputs, **plain)  # whatever the saved config says
            read, predicted = generated[:, :-1], generated[:, 1:]
        else:
            predicted = tokenizer(text_target=target, return_tensors="pt")["input_ids"]
            predicted = predicted.to(model.device)
            start = decoder_start(model)
            assert start is not None  # or `generate` would have failed
            read = shift_right(predicted, start, tokenizer.pad_token_id)
        outputs = model(**inputs, decoder_input_ids=read, output_attentions=True)
    queries, keys = {
        "encoder": (inputs["input_ids"], inputs["input_ids"]),
        "decoder": (read, read),
        "cross": (predicted, inputs["input_ids"]),
    }[kind]
    return AttentionMaps(
        torch.cat(outputs[f"{kind}_attentions"]).float().cpu(),
        _readable(queries[0].tolist(), tokenizer, of_source=kind == "encoder"),
        _readable(keys[0].tolist(), tokenizer, of_source=kind != "decoder"),
        kind,
    )


def expect_sentences(**sentences: str | None) -> None:
    """Raise a ValueError if a given sentence is blank."""
    for name, sentence in sentences.items():
        if sentence is not None and not sentence.strip():
            raise ValueError(f"{name}={sentence!r}: expected a sentence")


def _readable(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, of_source: bool
) -> list[str]:
    """Tokens as in a text, with invisible characters made visible; a part of a character stays as
    in the vocabulary."""
    to_token, side = tokenizer.convert_ids_to_tokens, {}
    if hasattr(tokenizer, "target_tokenizer"):  # it has two vocabularies
        side = {"use_source_tokenizer": of_source}
        if not of_source:
            to_token = tokenizer.target_tokenizer.id_to_token
    readable = []
    for token_id in token_ids:
        token, text = to_token(token_id), tokenizer.decode([token_id], **side).strip()
        if not is_blank(text) and "\N{REPLACEMENT CHARACTER}" not in text:
            readable.append(text)
        elif is_blank(token):
            readable.append(repr(token)[1:-1].replace(" ", "\N{OPEN BOX}"))
        else:
            readable.append(token)
    return readable


def expect_bertviz() -> None:
    """Raise a ModuleNotFoundError if bertviz is not installed."""
    for package in ("bertviz", "IPython"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(
                f"needs the package {package}; 'vanilla-transformer[analysis]' brings it"
            )


def attention_page(maps: Sequence[AttentionMaps], view: str = "head") -> str:
    """An HTML page with a view by bertviz (Vig, 2019, https://aclanthology.org/P19-3007) for each
    of these maps. A browser that shows it loads jQuery and D3 from the web.

    Args:
        maps: The attention of one pair of sentences, by its uses.
        view: "head" draws lines between tokens, one layer at a time; "model" draws all heads of all
            layers.

    Raises:
        ValueError: There is no such view.
        ModuleNotFoundError: bertviz is not installed.
    """
    if view not in VIEWS:
        raise ValueError(f"view={view!r}: expected one of {', '.join(VIEWS)}")
    expect_bertviz()
    import bertviz

    draw = {"head": bertviz.head_view, "model": bertviz.model_view}[view]
    parts = []
    for attention in maps:
        options: dict[str, Any] = {f"{attention.kind}_attention": list(attention.weights[:, None])}
        if attention.kind != "decoder":
            options["encoder_tokens"] = [key.replace("<", _HIDDEN) for key in attention.keys]
        if attention.kind != "encoder":
            options["decoder_tokens"] = [each.replace("<", _HIDDEN) for each in attention.queries]
        html = draw(**options, prettify_tokens=False, html_action="return").data
        html = html.replace(json.dumps(_HIDDEN)[1:-1], r"\u003c")
        parts.append(f"<h2>{DESCRIPTIONS[attention.kind][0]}</h2>\n{html}")
    head = '<meta charset="utf-8">\n<title>Attention</title>'
    body = "\n".join(parts)
    return f"<!DOCTYPE html>\n<html>\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n"

"""The attention modules of a model, what they do over a text, and a page to look at it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..inference.scoring import pair_batches
from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import VanillaTransformerAttention
from ..plotting import DESCRIPTIONS, AttentionMaps, Kind

VIEWS = ("head", "model")  # of bertviz


def expect_both_stacks(config: PreTrainedConfig) -> None:
    """Raises ValueError unless this is a vanilla_transformer with an encoder and a decoder."""
    if config.model_type != VanillaTransformerConfig.model_type or not config.is_encoder_decoder:
        raise ValueError(
            f"{config.name_or_path or 'the model'} is of type {config.model_type}: expected "
            "vanilla_transformer, with an encoder and a decoder"
        )


def attention_modules(model: PreTrainedModel) -> dict[Kind, list[VanillaTransformerAttention]]:
    """The attention of each layer by its use (section 3.2.3)."""
    encoder, decoder = model.model.encoder.layers, model.model.decoder.layers
    return {
        "encoder": [layer.self_attn for layer in encoder],
        "decoder": [layer.self_attn for layer in decoder],
        "cross": [layer.encoder_attn for layer in decoder],
    }


def read_batches(
    pairs: Iterable[tuple[str, str]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int = 2048,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of similar length with `input_ids`, `labels` and what else the model takes.

    Args:
        pairs: Sources and targets.
        model: A model with eager attention, the only one that gives its weights.
        tokenizer: Its tokenizer.
        max_tokens: Source tokens, and target tokens, in a batch, including padding. A longer pair
            is a batch of its own.

    Raises:
        ValueError: There is no pair, a source or target has no token, or attention is not eager.
    """
    implementation = model.config._attn_implementation
    if implementation != "eager":
        raise ValueError(f"attn_implementation={implementation!r}: expected 'eager'")
    pairs = list(pairs)
    if not pairs:
        raise ValueError("the text is empty: expected one pair of sentences at least")
    model.eval()
    source_ids = tokenizer([source for source, _ in pairs])["input_ids"]
    target_ids = tokenizer(text_target=[target for _, target in pairs])["input_ids"]
    for _, inputs in pair_batches(source_ids, target_ids, model, tokenizer, max_tokens):
        yield inputs


def query_masks(inputs: Mapping[str, torch.Tensor]) -> dict[Kind, torch.Tensor]:
    """Which positions of a batch ask, (batch, query_length), for each use of attention."""
    source, target = inputs["attention_mask"].bool(), inputs["labels"] != -100
    return {"encoder": source, "decoder": target, "cross": target}


def expect_bertviz() -> None:
    """Raises ModuleNotFoundError where bertviz is not installed."""
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
    for one in maps:
        options: dict[str, Any] = {f"{one.kind}_attention": list(one.weights[:, None])}
        if one.kind != "decoder":
            options["encoder_tokens"] = one.keys
        if one.kind != "encoder":
            options["decoder_tokens"] = one.queries
        html = draw(**options, prettify_tokens=False, html_action="return").data
        parts.append(f"<h2>{DESCRIPTIONS[one.kind][0]}</h2>\n{html}")
    head = '<meta charset="utf-8">\n<title>Attention</title>'
    body = "\n".join(parts)
    return f"<!DOCTYPE html>\n<html>\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n"

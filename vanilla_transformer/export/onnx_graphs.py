"""ONNX: an encoder and a decoder graph, with the names that Optimum and transformers.js use.

| graph   | inputs                                                                  | outputs        |
|---------|-------------------------------------------------------------------------|----------------|
| encoder | `input_ids`, `attention_mask` (batch, source_length)                    | `last_hidden_state` (batch, source_length, d_model) |
| decoder | `input_ids` (batch, length); `encoder_hidden_states`, `encoder_attention_mask`; `past_key_values.N.{decoder,encoder}.{key,value}` (batch, heads, past_length, head_dim) | `logits` (batch, length, vocabulary), `present.N.{decoder,encoder}.{key,value}` |

One decoder graph serves every step. In the first, all of `past_key_values` have length 0. Then
`present.N.encoder` holds the keys and values of the source; pass them on unchanged, as later steps
return none for it.
"""  # noqa: E501

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxscript import optimizer
from torch import nn

from ..inference.engines.onnxruntime_engine import DECODER, ENCODER
from ..model.cache import new_cache
from ..model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..model.pretrained import count_positions
from .source import portable_fields, read_model

QUANTIZATIONS = ("int8", "float16")
# Sizes of the traced examples: all different, and above 1, which torch would treat as constant.
BATCH, SOURCE, PAST_SOURCE, TARGET, PAST_TARGET = 2, 7, 4, 3, 5


def write(model_folder: Path, output: Path, quantization: str | None) -> None:
    """Write the graphs, the configurations and the tokenizer into an empty folder.

    Args:
        quantization: One of `QUANTIZATIONS`: "int8" rounds matrices and embeddings to 8 bits,
            "float16" halves all weights, for GPUs. None: single precision.
    """
    model, tokenizer = read_model(model_folder)
    write_graphs(model, output / ENCODER, output / DECODER, quantization)
    fields = json.dumps(portable_fields(model.config), indent=2)
    (output / "config.json").write_text(fields + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(output)
    tokenizer.save_pretrained(output)


def write_graphs(
    model: VanillaTransformerForConditionalGeneration,
    encoder: Path,
    decoder: Path,
    quantization: str | None,
) -> None:
    """Write both graphs of a model, a file each. This changes the model's type to that of the
    graphs, and its attention to the plain equation."""
    model.set_attn_implementation("eager")
    model.to(torch.float16 if quantization == "float16" else torch.float32)
    for graph, path in ((EncoderGraph(model), encoder), (DecoderGraph(model), decoder)):
        with TemporaryDirectory(dir=path.parent) as folder, _quietly():
            traced = Path(folder) / path.name if quantization == "int8" else path
            trace(graph, traced)
            if quantization == "int8":
                round_to_int8(traced, path)
        onnx.checker.check_model(path, full_check=True)


class EncoderGraph(nn.Module):
    """The encoder, with its inputs and outputs in the order of `examples` and `output_names`."""

    output_names = ["last_hidden_state"]

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.encoder, self.dtype = model.get_encoder(), model.dtype

    def examples(self) -> dict[str, tuple[torch.Tensor, dict[int, str]]]:
        """By name, an example of each input and the names of its dynamic dimensions."""
        axes = {0: "batch_size", 1: "encoder_sequence_length"}
        names = ("input_ids", "attention_mask")
        # Separate tensors, because the same tensor would be traced as one input.
        return {name: (torch.ones(BATCH, SOURCE, dtype=torch.long), axes) for name in names}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(batch, source_length) ids and mask to (batch, source_length, d_model) states."""
        positions = count_positions(input_ids, attention_mask)
        mask = added_mask(attention_mask.bool(), self.dtype)[:, None, None]
        return self.encoder(input_ids, mask, positions).last_hidden_state


class DecoderGraph(nn.Module):
    """The decoder and the projection, with inputs and outputs ordered likewise."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.config, self.decoder = model.config, model.get_decoder()
        self.is_tied = model.lm_head.weight is self.decoder.embed_tokens.weight
        # Stored as the projection multiplies it, and only once, for the embedding too.
        self.matrix = nn.Parameter(model.lm_head.weight.detach().t().contiguous())
        self.bias = model.lm_head.bias
        self.cache_names = [
            f"{layer}.{stack}.{kind}"
            for layer in range(self.config.decoder_layers)
            for stack in ("decoder", "encoder")
            for kind in ("key", "value")
        ]
        self.output_names = ["logits", *(f"present.{name}" for name in self.cache_names)]

    def examples(self) -> dict[str, tuple[torch.Tensor, dict[int, str]]]:
        """By name, an example of each input and the names of its dynamic dimensions."""
        config, dtype = self.config, self.matrix.dtype
        attention = self.decoder.layers[0].self_attn
        widths = {"key": attention.d_k, "value": attention.d_v}
        past = {"decoder": PAST_TARGET, "encoder": PAST_SOURCE}
        batch = {0: "batch_size"}
        source = {**batch, 1: "encoder_sequence_length"}
        ids, mask = (torch.ones(BATCH, n, dtype=torch.long) for n in (TARGET, SOURCE))
        states = torch.ones(BATCH, SOURCE, config.d_model, dtype=dtype)
        examples: dict[str, tuple[torch.Tensor, dict[int, str]]] = {
            "input_ids": (ids, {**batch, 1: "decoder_sequence_length"}),
            "encoder_hidden_states": (states, source),
            "encoder_attention_mask": (mask, source),
        }
        for name in self.cache_names:
            _, stack, kind = name.split(".")
            shape = BATCH, config.decoder_attention_heads, past[stack], widths[kind]
            axes = {**batch, 2: f"past_{stack}_sequence_length"}
            examples[f"past_key_values.{name}"] = torch.ones(shape, dtype=dtype), axes
        return examples

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Logits (batch, length, vocabulary), then keys and values: the target's so far, and those
        of the source that `past` lacks."""
        cache = new_cache(self.config)
        stacks = cache.self_attention_cache, cache.cross_attention_cache
        for place in range(0, len(past), 2):
            layer, stack = divmod(place // 2, 2)
            stacks[stack].update(past[place], past[place + 1], layer)
        past_length, known = past[0].shape[2], past[2].shape[2]
        source_length, length = encoder_hidden_states.shape[1], input_ids.shape[1]
        torch._check(known <= source_length)
        new_states = encoder_hidden_states.narrow(1, known, source_length - known)
        positions = torch.arange(past_length, past_length + length)
        sees = torch.arange(past_length + length) <= positions[:, None]
        dtype = self.matrix.dtype
        states = self.decoder(
            attention_mask=added_mask(sees, dtype)[None, None],
            position_ids=positions[None],
            encoder_hidden_states=new_states,
            encoder_attention_mask=added_mask(encoder_attention_mask.bool(), dtype)[:, None, None],
            cache=cache,
            inputs_embeds=self._embed(input_ids),
            use_cache=True,
        ).last_hidden_state
        logits = states @ self.matrix
        if self.bias is not None:
            logits = logits + self.bias
        present = []
        for own, cross in zip(*(stack.layers for stack in stacks), strict=True):
            present += [own.keys, own.values, cross.keys[:, :, known:], cross.values[:, :, known:]]
        return logits, *present

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) ids to (batch, length, d_model) rows of the embedding."""
        if not self.is_tied:
            return self.decoder.embed_tokens(input_ids)
        columns = self.matrix.index_select(1, input_ids.flatten())
        return columns.t().unflatten(0, input_ids.shape)


def added_mask(sees: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask to add to scores: 0 where a query sees a key."""
    nothing, hidden = torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype)
    return torch.where(sees, nothing, hidden)


def trace(graph: EncoderGraph | DecoderGraph, path: Path) -> None:
    """Export a graph to one file, with every matrix stored as products read it."""
    examples = graph.examples()
    inputs, axes = zip(*examples.values(), strict=True)
    if isinstance(graph, DecoderGraph):
        axes = (*axes[:3], axes[3:])
    program = torch.onnx.export(
        graph.eval(),
        inputs,
        dynamo=True,
        input_names=list(examples),
        output_names=graph.output_names,
        dynamic_shapes=axes,
        verbose=False,
    )
    assert program is not None
    no_limit: dict[str, Any] = {"input_size_limit": 2**62, "output_size_limit": 2**62}
    optimizer.fold_constants(program.model, **no_limit)
    optimizer.remove_unused_nodes(program.model)
    ClearMetadataAndDocStringPass()(program.model)  # the place in the code of each node
    program.save(path)


def round_to_int8(graph: Path, output: Path) -> None:
    """Write a graph with matrices of 8 bits, and products of 8-bit integers.

    The weights take 7 of these bits. With 8, the sums overflow on CPUs without AVX-VNNI.
    """
    quantize_dynamic(
        graph, output, weight_type=QuantType.QInt8, reduce_range=True, per_channel=True
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide the exporter's warnings, which don't apply to our models."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)

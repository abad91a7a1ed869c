"""How important each attention head is, and models without the least important ones."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.configuration_vanilla_transformer import VanillaTransformerConfig
from ..model.modeling_vanilla_transformer import label_smoothed_cross_entropy
from ..plotting import Kind
from .attention import attention_modules, expect_both_stacks, query_masks, read_batches

ByHead = Mapping[Kind, torch.Tensor]  # (layers, heads) for each use of attention


class HeadReport(NamedTuple):
    """Measurements of a model's heads on a text.

    `importance` is how much the loss changes without the head, to first order: |d loss / d mask|,
    where the mask multiplies the head's output and is 1 (Michel et al., 2019,
    https://arxiv.org/abs/1905.10650), summed over the pairs, in nats per target token. `confidence`
    is the mean of the largest weight of each query (Voita et al., 2019,
    https://aclanthology.org/P19-1580). `loss` is the cross-entropy without label smoothing, in nats
    per target token.
    """

    importance: dict[Kind, torch.Tensor]
    confidence: dict[Kind, torch.Tensor]
    loss: float


@torch.inference_mode(False)  # even if the caller has switched gradients off
def analyze_heads(
    pairs: Iterable[tuple[str, str]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int = 2048,
) -> HeadReport:
    """Measure the heads of a model on parallel text.

    Args:
        pairs, model, tokenizer, max_tokens: As for `read_batches`.

    Raises:
        ValueError: As `read_batches`, or the model is not one of this package.
    """
    expect_both_stacks(model.config)
    modules = attention_modules(model)
    shapes = {kind: (len(layers), heads_of(layers[0])) for kind, layers in modules.items()}
    importance = {kind: torch.zeros(shape, device="cpu") for kind, shape in shapes.items()}
    confidence = {kind: torch.zeros(shape, device="cpu") for kind, shape in shapes.items()}
    loss, asked = 0.0, dict.fromkeys(shapes, 0)
    with closing(read_batches(pairs, model, tokenizer, max_tokens)) as batches:
        for inputs in batches:
            batch = len(inputs["labels"])
            masks = {  # each pair has its own
                kind: torch.ones(layers, batch, 1, heads, device=model.device, requires_grad=True)
                for kind, (layers, heads) in shapes.items()
            }
            labels, queries = inputs["labels"], query_masks(inputs)
            with masked_heads(model, masks):
                outputs = model(
                    **{name: value for name, value in inputs.items() if name != "labels"},
                    use_cache=False,
                    output_attentions=True,
                )
            of_batch = label_smoothed_cross_entropy(outputs.logits, labels, num_items_in_batch=1)
            gradients = torch.autograd.grad(of_batch, list(masks.values()))
            loss += of_batch.item()
            for kind, gradient in zip(masks, gradients, strict=True):
                importance[kind] += gradient.abs().sum((1, 2)).cpu()
                largest = torch.stack(outputs[f"{kind}_attentions"]).detach().amax(-1).float()
                confidence[kind] += (largest * queries[kind][:, None]).sum((1, 3)).cpu()
                asked[kind] += int(queries[kind].sum())
    tokens = asked["decoder"]
    return HeadReport(
        {kind: values / tokens for kind, values in importance.items()},
        {kind: values / asked[kind] for kind, values in confidence.items()},
        loss / tokens,
    )


def heads_of(attention: nn.Module) -> int:
    """The number of heads of an attention module."""
    return attention.v_proj.out_features // attention.d_v


@contextmanager
def masked_heads(model: PreTrainedModel, masks: ByHead) -> Iterator[None]:
    """Multiply the output of each head by its mask in this context.

    Args:
        model: A vanilla_transformer.
        masks: (layers, heads), or (layers, batch, 1, heads) with a mask for each row of a batch.
    """

    def multiply(
        mask: torch.Tensor, d_v: int, module: nn.Module, inputs: tuple[torch.Tensor]
    ) -> tuple[torch.Tensor]:
        heads = inputs[0].unflatten(-1, (-1, d_v))
        return ((heads * mask[..., None].to(heads)).flatten(-2),)

    with ExitStack() as hooks:
        for kind, layers in attention_modules(model).items():
            for attention, mask in zip(layers, masks[kind], strict=True):
                hook = partial(multiply, mask, attention.d_v)
                hooks.enter_context(attention.out_proj.register_forward_pre_hook(hook))
        yield


# ---------------------------------------------------------------- Pruning


def expect_prunable(config: VanillaTransformerConfig, share: float) -> dict[str, int]:
    """The number of heads that `share` leaves in each layer of encoder and decoder.

    Raises:
        ValueError: The share is not between 0 and 1, or removes no head; or heads of encoder and
            decoder differ in width, which a configuration can't express without `head_dim`.
    """
    if not 0 < share < 1:
        raise ValueError(f"prune={share}: expected a share of the heads between 0 and 1")
    if config.head_dim is None:
        raise ValueError(
            f"prune={share}: heads of encoder and decoder differ in width, d_model / h: expected a "
            "model with head_dim"
        )
    heads = {stack: getattr(config, f"{stack}_attention_heads") for stack in ("encoder", "decoder")}
    kept = {stack: max(1, number - round(share * number)) for stack, number in heads.items()}
    if kept == heads:
        raise ValueError(
            f"prune={share}: removes none of {heads['encoder']} and {heads['decoder']} heads, "
            "expected a larger share"
        )
    return kept


def most_important(
    config: VanillaTransformerConfig, importance: ByHead, share: float
) -> dict[Kind, torch.Tensor]:
    """Masks (layers, heads), False for the least important heads of each layer. Each layer of a
    stack loses the same number, since a configuration has one number of heads for a stack.

    Raises:
        ValueError: The share is not between 0 and 1, or removes no head; or heads of encoder and
            decoder differ in width.
    """
    kept = expect_prunable(config, share)
    masks = {}
    for kind, values in importance.items():
        best = values.topk(kept["encoder" if kind == "encoder" else "decoder"]).indices
        masks[kind] = torch.zeros_like(values, dtype=torch.bool).scatter(1, best, True)
    return masks


def prune_heads(model: PreTrainedModel, masks: ByHead) -> PreTrainedModel:
    """A smaller model that computes what `model` computes with these masks, up to rounding.

    Args:
        model: A vanilla_transformer.
        masks: The result of `most_important`.
    """
    config, weights = deepcopy(model.config), model.state_dict()
    config.encoder_attention_heads = int(masks["encoder"][0].sum())
    config.decoder_attention_heads = int(masks["decoder"][0].sum())
    config.head_dim = model.config.head_dim  # the remaining heads are as wide as before
    names = {module: name for name, module in model.named_modules()}
    for kind, layers in attention_modules(model).items():
        for attention, mask in zip(layers, masks[kind].to(model.device), strict=True):
            for name, _ in attention.named_parameters():
                matrix, full_name = name.partition(".")[0], f"{names[attention]}.{name}"
                is_query_or_key = matrix in ("q_proj", "k_proj")
                is_kept = mask.repeat_interleave(
                    attention.d_k if is_query_or_key else attention.d_v
                )
                if matrix != "out_proj":
                    weights[full_name] = weights[full_name][is_kept]
                elif name == "out_proj.weight":
                    weights[full_name] = weights[full_name][:, is_kept]
    pruned = type(model)(config).to(model.device, model.dtype)
    pruned.load_state_dict(weights)
    pruned.generation_config = deepcopy(model.generation_config)
    return pruned.eval()

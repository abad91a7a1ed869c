"""Faster steps of a search: the decoder alone, and, on a CPU, only the logits that are needed."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, LogitsProcessor
from transformers.utils import ModelOutput

from .cache import CACHE_NAME, is_generation_cache, rename_cache
from .hooks import are_all_watched, hooks_of
from .loss import at_least_float32, is_plain_matrix
from .validation import expect_in_range

LARGE, PIECE = 2**24, 2**21  # bytes of a projection, and of what a CPU's caches hold
FEW = 512  # rows of states
# All that transformers passes in a step without a request for states or attentions.
OF_A_STEP = {
    "decoder_input_ids", "decoder_attention_mask", "attention_mask", "encoder_outputs", CACHE_NAME,
    "use_cache", "return_dict",
}  # fmt: skip
# transformers 5.17 takes the size of the vocabulary from the configuration instead.
_continuations = getattr(GenerationMixin, "_get_top_k_continuations", None)
COUNTS_TOKENS_BY_SCORES = (
    _continuations is not None and "vocab_size" not in inspect.signature(_continuations).parameters
)


def shallow_copy(model: Any) -> Any:
    """A model with the same modules, weights and hooks, whose attributes may be changed while other
    threads use the original. `copy.copy` would build FSDP's again."""
    copied = object.__new__(type(model))
    copied.__dict__.update(model.__dict__)
    return copied


def may_replace_forward(model: Any) -> bool:
    """Whether no subclass, hook, or replaced or compiled method reads or changes what this model's
    `forward` returns, and the model runs the fast paths."""
    kind, ours = type(model), f"{__package__}.modeling_vanilla_transformer"
    is_ours = kind.__module__ == kind.forward.__module__ == ours and "forward" not in vars(model)
    is_ours = is_ours and model._compiled_call_impl is None
    is_fast = model.config._attn_implementation != "eager"
    return is_ours and is_fast and not (model._forward_hooks or are_all_watched())


# ---------------------------------------------------------------- The decoder alone


def with_fast_steps(model: Any, cache: object) -> Any:
    """The model, or a copy whose later steps call the decoder alone, and which projects onto a
    large vocabulary piece by piece."""
    if not may_replace_forward(model):
        return model
    if not is_generation_cache(cache) and not _pays_in_pieces(model.lm_head):
        return model
    return with_logits(model, project)


def with_logits(model: Any, project: Callable[[torch.Tensor, nn.Linear], torch.Tensor]) -> Any:
    """A copy of the model for one search, whose `forward` returns as logits what `project` computes
    from the last states (batch, 1, d_model) and the projection. The first step checks the inputs
    and adds the source to the cache; the others call the decoder alone."""
    copied, stacks = shallow_copy(model), model.model
    is_ours, is_first = may_replace_forward(stacks) and not hooks_of(stacks), True

    @wraps(model.forward)
    def forward(logits_to_keep: int = 1, **inputs: Any) -> ModelOutput:
        nonlocal is_first
        is_plain = is_generation_cache(inputs.get(CACHE_NAME)) and inputs.keys() <= OF_A_STEP
        alone = is_ours and is_plain and not is_first
        outputs = decode(stacks, **inputs) if alone else stacks(**inputs)
        is_first = False
        outputs["logits"] = project(outputs.last_hidden_state[:, -1:], model.lm_head)
        return outputs

    copied.forward = forward
    return copied


def decode(
    stacks: Any,
    decoder_input_ids: torch.Tensor,
    encoder_outputs: Any,
    attention_mask: torch.Tensor | None = None,
    decoder_attention_mask: torch.Tensor | None = None,
    **cache: Any,
) -> ModelOutput:
    """The decoder's output for the inputs of both stacks.

    Raises:
        IndexError: A position is beyond the learned ones (on the CPU).
    """
    try:
        outputs: ModelOutput = stacks.decoder(
            decoder_input_ids, decoder_attention_mask, encoder_hidden_states=encoder_outputs[0],
            encoder_attention_mask=attention_mask, **cache,
        )  # fmt: skip
    except IndexError:
        tokens = {"decoder_input_ids": decoder_input_ids}
        expect_in_range(stacks, {**tokens, **rename_cache(cache, "cache")})
        raise
    return outputs


# ---------------------------------------------------------------- The projection in pieces


def project(states: torch.Tensor, projection: nn.Linear) -> torch.Tensor:
    """`projection(states)` of (batch, length, d_model), in pieces that a CPU's caches hold: for a
    few rows and a large vocabulary that takes a third less time."""
    rows = states.flatten(0, -2)
    if not _pays_in_pieces(projection, rows):
        return projection(states)
    logits = rows.new_empty(len(rows), len(projection.weight))
    for first, piece in _pieces(projection.weight):
        torch.mm(rows, piece.t(), out=logits[:, first : first + len(piece)])
    return logits.unflatten(0, states.shape[:-1])


def _pays_in_pieces(projection: nn.Module, rows: torch.Tensor | None = None) -> bool:
    """Whether pieces are faster for this matrix, and for these rows if they are known."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_plain_matrix(projection):
        return False
    weight = projection.weight
    if weight.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if weight.dtype != torch.float32 or weight.nbytes <= LARGE:
        return False
    return rows is None or (1 < len(rows) <= FEW and type(rows) is torch.Tensor)


def _pieces(matrix: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The first token of each piece of the vocabulary, and the piece of its matrix."""
    width = PIECE // matrix[0].nbytes
    for first in range(0, len(matrix), width):
        yield first, matrix[first : first + width]


# ---------------------------------------------------------------- The best tokens


def best_tokens(
    model: Any, options: dict[str, Any], expand: Callable[[torch.Tensor], torch.Tensor]
) -> "BestTokens | None":
    """The only tokens that a beam search on a CPU needs; None if the scores of all are returned,
    changed or sampled. `expand` turns computed rows into all rows of a batch."""
    config = options["generation_config"]
    if model.device.type != "cpu" or not COUNTS_TOKENS_BY_SCORES:
        return None
    asked_for = config.output_scores or config.output_logits
    changed = options["logits_processor"] or config.do_sample or options.get("synced_gpus")
    if asked_for or changed or not may_replace_forward(model):
        return None
    ends = config._eos_token_tensor
    beams_to_keep = max(2, 1 + (0 if ends is None else len(ends))) * config.num_beams
    return BestTokens(model, min(beams_to_keep, model.config.target_vocab_size), expand)


class BestTokens(LogitsProcessor):
    """Beam search over the `count` best tokens of each row.

    A step needs no more: the best continuations of a sentence are among the best of its beams. They
    take far less memory than the logits of a vocabulary, of which transformers holds four copies.
    As the only logits processor, this replaces log-probabilities over these tokens with those over
    the vocabulary.

    Attributes:
        model: A copy of the model whose `forward` returns logits of the best tokens, best first,
            and which tells transformers what tokens these are.
        tokens: Their ids in the last step, (rows, count).
        log_probs: (rows, count).
    """

    def __init__(self, model: Any, count: int, expand: Callable[[torch.Tensor], torch.Tensor]):
        self.count, self.expand = count, expand
        self.tokens = self.log_probs = torch.empty(0)
        self.model = with_logits(model, self.logits)
        self.model._get_top_k_continuations = self.continuations

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Log-probabilities (rows, count) over the whole vocabulary."""
        return self.log_probs

    def continuations(self, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Same as `GenerationMixin._get_top_k_continuations` (5.18 to 5.24), which returns tokens
        as indices of the best ones."""
        found = GenerationMixin._get_top_k_continuations(self.model, **kwargs)
        _, sequences, beams = found
        now = kwargs["cur_len"]
        rows = beams[:, :, now - kwargs["decoder_prompt_len"]]
        sequences[:, :, now] = self.tokens[rows, sequences[:, :, now]]
        return found

    def logits(self, states: torch.Tensor, projection: nn.Linear) -> torch.Tensor:
        """(rows, 1, d_model) states to (rows, 1, count) logits."""
        rows, found, log_normalizers = states[:, 0], [], []
        parts: Iterable[tuple[int, torch.Tensor]]
        if _pays_in_pieces(projection, rows):
            parts = ((first, rows @ piece.t()) for first, piece in _pieces(projection.weight))
        else:
            parts = [(0, projection(states)[:, 0])]
        hooked = not is_plain_matrix(projection)  # a hook or module may keep its output, so copy it
        for first, narrow in parts:
            scores = narrow.to(at_least_float32(narrow.dtype), copy=hooked)
            values, places = topk(scores, min(self.count, scores.shape[1]))
            found.append((values, places + first))
            highest = values[:, :1]
            normalizer = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            log_normalizers.append(highest + normalizer.log())
        values, tokens = (torch.cat(side, -1) for side in zip(*found, strict=True))
        best, places = values.topk(self.count)
        self.tokens = self.expand(tokens.gather(-1, places))
        log_normalizer = torch.cat(log_normalizers, -1).logsumexp(-1, keepdim=True)
        self.log_probs = self.expand(best - log_normalizer)
        return best[:, None]


def topk(scores: torch.Tensor, count: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as `scores.topk(count)`, in half the time for few of many. Scores are arranged in
    columns of `rows`: the `count` columns with the highest maxima contain the best."""
    if scores.shape[1] % rows or scores.shape[1] < rows * count:
        return scores.topk(count)
    columns = scores.unflatten(1, (rows, -1))
    best = columns.amax(1).topk(count, sorted=False).indices
    among = columns.gather(2, best[:, None].expand(-1, rows, -1)).flatten(1)
    values, places = among.topk(count)
    return values, best.gather(1, places % count) + places // count * columns.shape[2]

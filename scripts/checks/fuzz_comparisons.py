"""The comparisons of `fuzz.py`: two ways to compute the same numbers, for random models and inputs.

A case draws a model, a batch of sources and targets of any lengths, and options. It is right if
both ways agree. These are families as in `fuzz_families.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from transformers import BartConfig, BartForConditionalGeneration

from scripts.checks.fuzz_families import Family, named, some_of
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.token_batches import TokenBudgetSampler
from vanilla_transformer.model.cache import CACHE_NAME

VOCABULARY, TARGET_VOCABULARY, LONGEST = 20, 23, 7
SIZES = {
    "vocab_size": VOCABULARY, "d_model": 8, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 10,
    "decoder_ffn_dim": 14, "max_position_embeddings": 80, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
VARIANTS = some_of(
    {
        "norm_position": st.just("pre"),
        "position_encoding": st.just("learned"),
        "decoder_vocab_size": st.just(TARGET_VOCABULARY),
        "tie_word_embeddings": st.just(False),
        "attn_implementation": st.just("eager"),
    },
    most=3,
)
SENTENCES = st.lists(
    st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=LONGEST), min_size=1, max_size=4
)
DECODING = some_of(
    {
        "num_beams": st.integers(1, 4),
        "length_penalty": st.sampled_from([0.0, 0.6, 2.0]),
        "length_penalty_type": st.just("gnmt"),
        "early_stopping": st.sampled_from([True, "never"]),
        "max_new_tokens": st.integers(1, 6),
        "min_new_tokens": st.integers(1, 3),
        "no_repeat_ngram_size": st.integers(1, 3),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
    },
    most=4,
)


@dataclass(frozen=True)
class Batch:
    """A model, a batch of sources and targets, and options of `generate`."""

    fields: tuple[tuple[str, Any], ...]
    sources: list[list[int]]
    targets: list[list[int]]
    options: dict[str, Any]
    seed: int
    left: bool

    @property
    def model(self) -> VanillaTransformerForConditionalGeneration:
        """The model, with peaked predictions, so that ties between tokens are rare."""
        return make_model(self.fields, self.seed, scale=2.0)

    def pad(self, rows: list[list[int]], value: int = 0) -> torch.Tensor:
        """(rows, longest) token ids, padded on the side of this batch."""
        side = "left" if self.left else "right"
        tensors = list(map(torch.tensor, rows))
        return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)

    def inputs(self, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Sources and their mask. No source contains the padding token."""
        ids = self.pad(self.sources[rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def pairs(self, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Sources and labels. Labels are padded on the right, as in data collators."""
        labels = list(map(torch.tensor, self.targets[rows]))
        padded = pad_sequence(labels, batch_first=True, padding_value=-100)
        return {**self.inputs(rows), "labels": padded}


@lru_cache(maxsize=64)
def make_model(fields: tuple[tuple[str, Any], ...], seed: int, scale: float = 1.0) -> Any:
    """A small model. Larger weights make predictions more peaked, and rounding errors larger."""
    torch.manual_seed(seed)
    config = VanillaTransformerConfig(**{**SIZES, "dropout": 0.0, **dict(fields)})
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    model.extra_output_tokens = 3
    return model


@st.composite
def batches(draw: Any, options: st.SearchStrategy[dict[str, Any]] = DECODING) -> Batch:
    """Batches in which each source has a target."""
    sources = draw(SENTENCES)
    targets = [draw(st.permutations(source)) for source in sources]
    fields = tuple(draw(VARIANTS).items())
    return Batch(
        fields, sources, targets, draw(options), draw(st.integers(0, 9)), draw(st.booleans())
    )


def assert_near(ours: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Assert that they are close, relative to the largest value, whose rounding affects small
    logits too."""
    largest = max(1.0, other.abs().max().item())
    torch.testing.assert_close(ours, other, atol=tolerance * largest, rtol=0)


def tokens_and_scores(
    batch: Batch, rows: slice, **more: Any
) -> tuple[list[list[int]], list[float]]:
    """The translation of each row without padding, and its score in beam search."""
    model = batch.model
    options = {**batch.options, **more, "return_dict_in_generate": True, "output_scores": True}
    output = model.generate(**batch.inputs(rows), **options)
    found = output.sequences.tolist()
    for row in found:
        while len(row) > 1 and row[-1] in (0, 2):
            row.pop()
    scores = output.get("sequences_scores")
    return found, [] if scores is None else scores.tolist()


def assert_same_search(ours: Any, other: Any) -> None:
    """Assert the same tokens, or others with the same score: rounding may break a tie."""
    if ours[0] == other[0]:
        return
    assert ours[1], f"{ours[0]} and {other[0]} by greedy search"
    assert_near(torch.tensor(ours[1]), torch.tensor(other[1]), 1e-3)


def check_alone(batch: Batch) -> None:
    """Loss, logits and translation of a row do not depend on the other rows."""
    model, pairs = batch.model, batch.pairs()
    together = model(**pairs)
    count = (pairs["labels"] != -100).sum()
    total = torch.zeros(())
    found = tokens_and_scores(batch, slice(None))
    for row in range(len(batch.sources)):
        only = slice(row, row + 1)
        alone = model(**batch.pairs(only), num_items_in_batch=count)
        assert_near(together.logits[row, : len(batch.targets[row])], alone.logits[0])
        total = total + alone.loss
        mine = tuple(values[only] for values in found)
        assert_same_search(mine, tokens_and_scores(batch, only))
    assert_near(together.loss, total)


def check_cached(batch: Batch) -> None:
    """Neither logits nor translations depend on the cache, or on its kind."""
    expected = tokens_and_scores(batch, slice(None), use_cache=False)
    assert_same_search(tokens_and_scores(batch, slice(None)), expected)
    static = tokens_and_scores(batch, slice(None), cache_implementation="static")
    assert_same_search(static, expected)
    model, inputs = batch.model, batch.inputs()
    target = batch.pairs()["labels"].clamp(min=0)
    expected_logits = model(**inputs, decoder_input_ids=target).logits
    past, steps = None, []
    for token in target.split(1, 1):
        output = model(**inputs, decoder_input_ids=token, past_key_values=past, use_cache=True)
        past = getattr(output, CACHE_NAME)
        steps.append(output.logits)
    assert_near(torch.cat(steps, 1), expected_logits)


def check_autocast(batch: Batch) -> None:
    """A training step under autocast has almost the same loss and gradient as one in float32."""
    model, pairs = make_model(batch.fields, batch.seed), batch.pairs()
    results = []
    try:
        model.train()
        for enabled in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = model(**pairs)
            output.loss.backward()
            gradient = torch.cat([one.grad.flatten() for one in model.parameters()])
            results.append((sorted(output.keys()), output.loss.detach(), gradient))
    finally:
        model.zero_grad()
        model.eval()
    (keys, loss, gradient), (narrow_keys, narrow_loss, narrow_gradient) = results
    assert keys == narrow_keys
    assert narrow_loss.dtype == loss.dtype
    assert_near(narrow_loss, loss, 0.02)
    assert (narrow_gradient - gradient).norm() < 0.4 * gradient.norm()


def check_ranks(batch: Batch) -> None:
    """The batches and gradients of several processes add up to those of one process."""
    lengths = [len(row) for row in batch.sources], [len(row) for row in batch.targets]
    options = {"max_tokens": 2 * LONGEST, "multiple_of": 2, "seed": batch.seed}
    if len(batch.sources) >= 2:
        one = list(TokenBudgetSampler(*lengths, **options))
        two = [
            list(TokenBudgetSampler(*lengths, **options, num_replicas=2, rank=r)) for r in (0, 1)
        ]
        assert [step for pair in zip(*two, strict=True) for step in pair] == one
        assert sorted(row for step in one for row in step) == list(range(len(batch.sources)))
        assert all(one)
    model, pairs = batch.model, batch.pairs()
    count = (pairs["labels"] != -100).sum()
    expected = torch.autograd.grad(model(**pairs).loss, list(model.parameters()))
    middle = len(batch.sources) // 2
    parts = [slice(0, middle), slice(middle, None)] if middle else [slice(None)]
    losses = [model(**batch.pairs(part), num_items_in_batch=count).loss for part in parts]
    shared = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for gradient, *of_ranks in zip(expected, *shared, strict=True):
        assert_near(sum(of_ranks), gradient, 1e-3)


@lru_cache
def bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    config = BartConfig(**SIZES, forced_eos_token_id=None)
    return BartForConditionalGeneration(config).eval()


IDS = torch.tensor([[3, 4, 5], [6, 7, 2]])
MISUSES: dict[str, dict[str, Any]] = {
    "no input": {},
    "both inputs": {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 3, 8)},
    "a token outside": {"input_ids": IDS + VOCABULARY, "decoder_input_ids": IDS},
    "a negative token": {"input_ids": -IDS, "decoder_input_ids": IDS},
    "a label outside": {"input_ids": IDS, "labels": IDS + VOCABULARY},
    "floats": {"input_ids": IDS.float(), "decoder_input_ids": IDS},
    "a flat source": {"input_ids": IDS[0], "decoder_input_ids": IDS},
    "a flat target": {"input_ids": IDS, "decoder_input_ids": IDS[0]},
    "fewer sources": {"input_ids": IDS[:1].repeat(3, 1), "decoder_input_ids": IDS},
    "a short mask": {"input_ids": IDS, "attention_mask": IDS[:, :2], "decoder_input_ids": IDS},
    "a long mask": {
        "input_ids": IDS, "attention_mask": torch.ones(2, 4), "decoder_input_ids": IDS,
    },
    "a short target mask": {
        "input_ids": IDS, "decoder_input_ids": IDS, "decoder_attention_mask": IDS[:, :2],
    },
    "narrow embeddings": {"inputs_embeds": torch.zeros(2, 3, 7), "decoder_input_ids": IDS},
    "doubles": {"inputs_embeds": torch.zeros(2, 3, 8).double(), "decoder_input_ids": IDS},
    "labels of another length": {
        "input_ids": IDS, "decoder_input_ids": IDS, "labels": IDS[:, :2],
    },
    "no cache": {"input_ids": IDS, "decoder_input_ids": IDS, "past_key_values": 7},
    "a wide source": {"input_ids": IDS[None], "decoder_input_ids": IDS},
}  # fmt: skip


def check_misuse(name: str) -> None:
    """If BART rejects a call, our model must reject it with an error that names the argument."""
    arguments = MISUSES[name]
    model = make_model((), 0)
    try:
        with torch.no_grad():
            bart()(**arguments)
    except Exception:
        model(**arguments)
        raise AssertionError(f"BART refuses {name}, our model accepts it") from None
    model(**arguments)  # right or refused


def _names(name: str) -> list[str]:
    said = ["input_ids", "inputs_embeds", "labels", "mask", "token id", "label", "targets"]
    return [*said, CACHE_NAME]


def comparison(check: Callable[[Batch], None], share: int) -> Family:
    """A family of batches. None of them may be refused."""
    return Family(batches(), check, named(), share)


COMPARISONS = {
    "batched or alone": comparison(check_alone, 4),
    "cached or not": comparison(check_cached, 4),
    "plain or autocast": comparison(check_autocast, 2),
    "one process or several": comparison(check_ranks, 2),
    "as BART": Family(st.sampled_from(sorted(MISUSES)), check_misuse, _names, 2),
}

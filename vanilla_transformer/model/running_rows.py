"""Rows of a batch whose search has ended, which `generate()` no longer computes on a CPU."""

from functools import wraps
from typing import Any

import torch
from transformers import Cache, GenerationMixin, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from .cache import CACHE_NAME, is_generation_cache
from .decoding_steps import may_replace_forward, shallow_copy

MOST_RUNNING = 0.75  # of the computed rows: with more, copying the cache costs more than it saves
MASKS = {"attention_mask", "decoder_attention_mask"}


def running_rows(
    model: Any, input_ids: torch.LongTensor, options: dict[str, Any]
) -> "RunningRows | None":
    """The rows of a search with these options; None if the caller may see ended rows or the cache,
    also in a logits processor, which may compare rows, or if beams are sampled: fewer random
    numbers would change the samples of the next batch."""
    config = options["generation_config"]
    cache: Any = options.get(CACHE_NAME)
    if model.device.type != "cpu" or not may_replace_forward(model):
        return None
    if not is_generation_cache(cache):
        return None
    if cache.get_seq_length() > 0:  # a cache from the caller
        return None
    if config.return_dict_in_generate or options.get("synced_gpus"):
        return None
    if config.do_sample and config.num_beams > 1:
        return None
    modules = [type(each).__module__ for each in options["logits_processor"]]
    if not all(name.startswith(("transformers.", f"{__package__}.")) for name in modules):
        return None
    tensors = {name for name, value in options.items() if isinstance(value, torch.Tensor)}
    rows_per_source = cache.cross_attention_cache.layers[0].rows_per_source
    return RunningRows(len(input_ids), rows_per_source) if tensors <= MASKS else None


class RunningRows:
    """The rows of a batch that a search still needs: all beams or samples of some of its sources.

    Args:
        rows: Number of rows in the batch.
        rows_per_source: Beams or samples of each source, which are adjacent rows.
    """

    def __init__(self, rows: int, rows_per_source: int):
        self.number, self.rows_per_source = rows, rows_per_source
        self._sources = _count(rows // rows_per_source)  # that are computed
        self._has_ended = torch.zeros(len(self._sources), dtype=torch.bool, device="cpu")
        self._rows = _count(rows)

    def of(self, model: Any) -> Any:
        """A copy of the model that computes these rows alone. Its logits of the others are 0."""
        copied = shallow_copy(model)

        @wraps(model.forward)
        def forward(**inputs: Any) -> ModelOutput:
            outputs = model.forward(**self.select(inputs))
            outputs["logits"] = self.expand(outputs["logits"])
            return outputs

        copied.forward = forward
        copied._reorder_cache = self.reorder
        copied._beam_search_has_unfinished_sequences = self.has_unfinished
        return copied

    # ------------------------------------------------------------ What has ended

    def end(self, rows: torch.Tensor) -> None:
        """Leave out the sources for which all rows have ended, (rows,)."""
        self._has_ended = rows.unflatten(0, (-1, self.rows_per_source)).all(1)

    def has_unfinished(
        self, can_improve: torch.Tensor, is_finished: torch.Tensor, hits: torch.Tensor, early: Any
    ) -> torch.Tensor:
        """Same as `GenerationMixin._beam_search_has_unfinished_sequences` (5.17 to 5.24). A source
        has ended if it can't improve, (sources, 1), or, with `early_stopping=True`, if all of its
        hypotheses, (sources, beams), are finished."""
        self._has_ended = ~can_improve[:, 0]
        if early is True:
            self._has_ended = self._has_ended | is_finished.all(1)
        continues = GenerationMixin._beam_search_has_unfinished_sequences(
            can_improve, is_finished, hits, early
        )
        return continues & ~self._has_ended.all()

    # ------------------------------------------------------------ What is computed

    def select(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of `forward` for the rows that are computed."""
        running = (~self._has_ended).nonzero()[:, 0]
        if 0 < len(running) <= MOST_RUNNING * len(self._sources):
            self._keep(running, inputs[CACHE_NAME])
        if len(self._rows) == self.number:
            return inputs
        selected: dict[str, Any] = {
            name: inputs[name][self._rows]
            for name in (*MASKS, "decoder_input_ids")
            if inputs.get(name) is not None
        }
        selected["encoder_outputs"] = BaseModelOutput(inputs["encoder_outputs"][0][self._rows])
        return inputs | selected

    def _keep(self, sources: torch.Tensor, cache: Any) -> None:
        """Compute only these sources from now on."""
        places = torch.searchsorted(self._sources, sources)
        cache.self_attention_cache.batch_select_indices(self._rows_of(places))
        cache.cross_attention_cache.batch_select_indices(places)
        self._sources, self._rows = sources, self._rows_of(sources)

    def _rows_of(self, sources: torch.Tensor) -> torch.Tensor:
        first = sources * self.rows_per_source
        return (first[:, None] + _count(self.rows_per_source)).flatten()

    def expand(self, states: torch.Tensor) -> torch.Tensor:
        """(computed rows, ...) to (rows, ...), 0 for rows that have ended."""
        if len(self._rows) == self.number:
            return states
        return states.new_zeros(self.number, *states.shape[1:]).index_copy_(0, self._rows, states)

    def reorder(self, cache: Cache, beam_idx: torch.LongTensor) -> Cache:
        """Same as transformers' `reorder_cache`, by rows of the batch: row i becomes what row
        beam_idx[i] was."""
        cache.reorder_cache(torch.searchsorted(self._rows, beam_idx[self._rows]))
        return cache


def _count(number: int) -> torch.Tensor:
    """0, 1, ..., number - 1, on the CPU, even if torch's default device is another."""
    return torch.arange(number, device="cpu")


class WatchedCriteria(StoppingCriteriaList):
    """Stopping criteria that tell `rows` which rows have ended."""

    def __init__(self, criteria: StoppingCriteriaList, rows: RunningRows):
        super().__init__(criteria)
        self._rows = rows
        self._have_ended = torch.zeros(rows.number, dtype=torch.bool, device="cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> torch.BoolTensor:
        """Whether each of (rows, length) targets ends, (rows,)."""
        ends: torch.BoolTensor = super().__call__(*args, **kwargs)
        self._have_ended = self._have_ended | ends
        self._rows.end(self._have_ended)
        return ends

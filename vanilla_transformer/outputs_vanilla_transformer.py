# Copyright 2026 The vanilla_transformer authors. Licensed under the Apache License, Version 2.0.
"""Outputs whose logits are computed when they are asked for: a training step has no use for them.

By attribute, by name, by index or in a tuple they are what they always are; only iteration over
keys and values leaves them out until then.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils import ModelOutput


class LateLogits(ModelOutput):
    """Mixed into an output class, before it."""

    _known: torch.Tensor | None = None
    _project: Callable[[], torch.Tensor] | None = None

    def later(self, project: Callable[[], torch.Tensor]) -> "LateLogits":
        """This output, with `project()` for its logits, with gradients if there are any now."""
        with_gradients = torch.set_grad_enabled(torch.is_grad_enabled())
        object.__setattr__(self, "_project", with_gradients(project))
        return self

    @property
    def logits(self) -> torch.Tensor | None:
        """(batch, length, vocabulary)."""
        if self._known is None and self._project is not None:
            self.logits = self._project()
        return self._known

    @logits.setter
    def logits(self, value: torch.Tensor | None) -> None:
        object.__setattr__(self, "_known", value)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.logits if key == "logits" else super().__getitem__(key)
        return self.to_tuple()[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def to_tuple(self) -> tuple[Any, ...]:
        """All that is not None, in the order of the fields."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if value is not None)


class Seq2SeqTrainingOutput(LateLogits, Seq2SeqLMOutput):
    """What a training step of the encoder-decoder returns."""


class CausalTrainingOutput(LateLogits, CausalLMOutputWithPast):
    """What a training step of the language model returns."""

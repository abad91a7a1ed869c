"""Batches of tokenized pairs."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DataCollatorForSeq2Seq, PreTrainedModel

from ..model.pretrained import own_class

LENGTH = "length"  # the column with the number of tokens on a pair's longer side


class PairCollator(DataCollatorForSeq2Seq):
    """`DataCollatorForSeq2Seq` that always pads labels on the right, whatever the tokenizer's
    `padding_side`, and always returns an `attention_mask`, even if the tokenizer's
    `model_input_names` lack one.

    It also makes `decoder_input_ids` for models such as M2M100 and NLLB, which have no method to
    make them from labels. Columns that are only needed to choose batches are left out. The worker
    processes of a data loader get the collator without the model's weights."""

    def __getstate__(self) -> dict[str, Any]:
        """The state, with a model that can only make `decoder_input_ids`. Otherwise the complete
        model would be sent to each worker, which fails with compiled layers or a class made by
        FSDP2."""
        model = self.model
        if not isinstance(model, PreTrainedModel):
            return self.__dict__
        bare = object.__new__(own_class(model))
        nn.Module.__init__(bare)
        bare.config = model.config
        return {**self.__dict__, "model": bare}

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> Any:
        """Turn token ids `input_ids` and `labels` of each pair into tensors (pairs, length).
        Sources to translate have no labels."""
        padded = [dict(pair) for pair in features]
        if "labels" in features[0]:
            longest = max(len(pair["labels"]) for pair in features)
            longest += -longest % (self.pad_to_multiple_of or 1)
            for pair in padded:
                missing = longest - len(pair["labels"])
                pair["labels"] = [*pair["labels"], *[self.label_pad_token_id] * missing]
        for pair in padded:
            pair.pop(LENGTH, None)
        batch = super().__call__(padded, return_tensors)
        if batch.get("labels") is not None:  # FSMT's model has changed them in place
            batch["labels"] = torch.tensor([pair["labels"] for pair in padded])
        else:  # `Seq2SeqTrainer` would take None for labels, and compute a loss
            batch.pop("labels", None)
        if "attention_mask" not in batch:
            lengths = torch.tensor([len(pair["input_ids"]) for pair in features])[:, None]
            is_token = torch.arange(batch["input_ids"].shape[1]) < lengths
            on_left = self.tokenizer.padding_side == "left"
            batch["attention_mask"] = (is_token.flip(1) if on_left else is_token).long()
        if "labels" in batch and "decoder_input_ids" not in batch and self.model is not None:
            start, pad = self.model.config.decoder_start_token_id, self.tokenizer.pad_token_id
            batch["decoder_input_ids"] = shift_right(batch["labels"], start, pad)
        return batch


def shift_right(labels: torch.Tensor, start: int, pad: int) -> torch.Tensor:
    """The decoder's inputs (pairs, length) for labels (pairs, length), in which -100 is padding."""
    shifted = F.pad(labels[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted == -100, pad)

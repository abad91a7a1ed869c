"""The interface of models that their own toolkits run, which `check.py` compares with ours.

A format has a function `load_toolkit(path, options)`, which imports the toolkit and returns a
`Toolkit`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel


class Toolkit(ABC):
    """A model that its own toolkit runs. Ids are the toolkit's; a source has the special tokens
    that the toolkit expects, and a target ends in its end token.

    Attributes:
        module: The model.
        pad: The id under the padding, the same on both sides.
        start: The id that the decoder starts from.
        unk: The unknown token of the source.
        source_size: The rows of the source embedding. Higher ids, which only the converted model
            has, are unknown tokens.
    """

    module: torch.nn.Module
    pad: int
    start: int
    unk: int
    source_size: int

    @abstractmethod
    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """Logits or log-probabilities (batch, target_length, vocabulary) after each prefix of the
        decoder's inputs, (batch, target_length). Sources are (batch, source_length), and both are
        padded on the right."""

    @abstractmethod
    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """The best translations that the toolkit's own search finds.

        Args:
            sources: Ids of the lines of a batch.
            num_beams: 1 is greedy search.
            longest: Maximum number of tokens in a translation.

        Raises:
            NotImplementedError: The toolkit has no beam search.
        """

    @abstractmethod
    def encode(self, line: str) -> list[int]:
        """The ids of a source line, as the toolkit's own pipeline makes them."""

    @abstractmethod
    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """The toolkit's own loss without label smoothing, the mean over tokens. Arguments are as in
        `logits`, with targets (batch, target_length) that end in their end token."""

    @torch.no_grad()
    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[Tensor]:
        """Log-probabilities of every token after each prefix of a target: a tensor (length,
        vocabulary) for each target, or (length, 1) if the toolkit reports only the target's own
        tokens."""
        sources = self.padded(self.known(sources))
        rows = self.logits(sources, self.inputs(self.padded(targets))).log_softmax(-1)
        return [row[: len(target)] for row, target in zip(rows, targets, strict=True)]

    def padded(self, rows: list[list[int]]) -> Tensor:
        """Ids in a tensor (rows, longest), padded on the right."""
        return pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=self.pad)

    def inputs(self, targets: Tensor) -> Tensor:
        """What the decoder reads for these targets: the start token and all but the last."""
        return torch.cat([torch.full_like(targets[:, :1], self.start), targets[:, :-1]], dim=1)

    def known(self, sources: list[list[int]]) -> list[list[int]]:
        """The sources, with unknown tokens in place of ids that only the converted model has."""
        return [[i if i < self.source_size else self.unk for i in source] for source in sources]


class TransformersModel(Toolkit):
    """A model of transformers.

    Args:
        module: The model, in float32.
        source_size: See `Toolkit`.
        unk: See `Toolkit`.
        encode: Turns a line into ids.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        source_size: int,
        unk: int,
        encode: Callable[[str], list[int]],
    ):
        self.module, self.source_size, self.unk = module.eval(), source_size, unk
        self._encode = encode
        self.pad, self.start = module.config.pad_token_id, module.config.decoder_start_token_id

    def logits(self, sources: Tensor, inputs: Tensor) -> Tensor:
        """See `Toolkit`."""
        # With a cache, FSMT would not mask later target positions.
        return self.module(
            **self._with_mask(sources), decoder_input_ids=inputs, use_cache=False
        ).logits

    def translate(
        self, sources: list[list[int]], num_beams: int = 1, longest: int = 200
    ) -> list[list[int]]:
        """See `Toolkit`."""
        outputs = self.module.generate(
            **self._with_mask(self.padded(self.known(sources))),
            num_beams=num_beams,
            do_sample=False,
            max_new_tokens=longest,
        )
        return outputs[:, 1:].tolist()

    def encode(self, line: str) -> list[int]:
        """See `Toolkit`."""
        return self._encode(line)

    def loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        """See `Toolkit`."""
        labels = targets.masked_fill(targets == self.pad, -100)
        inputs = {"decoder_input_ids": self.inputs(targets), "use_cache": False}
        return self.module(**self._with_mask(sources), **inputs, labels=labels).loss

    def _with_mask(self, sources: Tensor) -> dict[str, Tensor]:
        return {"input_ids": sources, "attention_mask": sources.ne(self.pad).long()}


def subwords(codes: str | Path | None) -> Callable[[str], list[str]]:
    """The function that splits a line for toolkits that read subwords separated by spaces.

    Args:
        codes: Codes of subword-nmt, a SentencePiece model, or None for words.

    Raises:
        ImportError: subword-nmt or sentencepiece is not installed.
    """
    if codes is None:
        return str.split
    if Path(codes).suffix in (".model", ".spm"):
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=str(codes))
        return lambda line: model.encode(line, out_type=str)
    from subword_nmt.apply_bpe import BPE

    with Path(codes).open(encoding="utf-8") as file:
        bpe = BPE(file)
    return lambda line: bpe.process_line(line).split()

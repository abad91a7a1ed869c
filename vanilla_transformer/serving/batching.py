"""Batches of sentences from requests that wait at the same time."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from fastapi import HTTPException
from prometheus_client import Counter, Histogram
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..inference.decoding import position_limits
from ..inference.loading import LoadingArguments
from ..inference.translation import translate, translate_n_best
from .arguments import ServingArguments

SENTENCES = Histogram(
    "vanilla_transformer_batch_sentences", "Sentences per batch", buckets=[2**n for n in range(11)]
)
TOKENS = Counter("vanilla_transformer_source_tokens", "Source tokens, without padding")


def load_translator(
    name: str, arguments: ServingArguments, loading: LoadingArguments
) -> "BatchingTranslator":
    """The translator of a model. It translates a word first, so that a server does not start if all
    requests would fail.

    Raises:
        ValueError: The model can't generate with its generation config and the options.
    """
    model, tokenizer = loading.load(name)
    try:
        list(translate(["one"], model, tokenizer, **arguments.generate_kwargs()))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return BatchingTranslator(model, tokenizer, arguments)


class Translator(Protocol):
    """Translates sentences of one language into another."""

    async def translate(self, sentences: Sequence[str], n_best: int = 1) -> list[list[str]]:
        """The `n_best` best translations of each sentence, best first. Sentences are not blank."""


@dataclass(eq=False)
class _Waiting:
    sentence: str
    tokens: int
    n_best: int
    result: asyncio.Future[list[str]]


class BatchingTranslator:
    """A `Translator` with one model, in one thread.

    All waiting sentences make a round: they are sorted by length and split into batches of up to
    `max_batch_tokens`. Sentences that arrive in the meantime wait for the next round, so none waits
    longer than two rounds, whatever its length.

    Args:
        model: Any sequence-to-sequence model of transformers.
        tokenizer: Its tokenizer.
        arguments: The options of the server.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        arguments: ServingArguments,
    ) -> None:
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.longest_source, _ = position_limits(model)
        self.thread = ThreadPoolExecutor(1)
        self.waiting: list[_Waiting] = []
        self.worker: asyncio.Task[None] | None = None

    async def translate(self, sentences: Sequence[str], n_best: int = 1) -> list[list[str]]:
        """See `Translator`.

        Raises:
            HTTPException: A sentence is longer than the model's table of positions, or the model
                can't find alternatives with its options (400).
            RuntimeError: `generate()` failed for one of the sentences, for example for lack of
                memory.
        """
        if not sentences:
            return []
        loop = asyncio.get_running_loop()
        ids = self.tokenizer(list(sentences))["input_ids"]
        longest = max(map(len, ids))
        if longest > self.longest_source:
            raise HTTPException(
                400, f"a sentence of {longest} tokens: expected at most {self.longest_source}"
            )
        added = [
            _Waiting(sentence, len(row), n_best, loop.create_future())
            for sentence, row in zip(sentences, ids, strict=True)
        ]
        self.waiting += added
        if self.worker is None or self.worker.done():
            self.worker = loop.create_task(self._work())
        return await asyncio.gather(*(one.result for one in added))

    async def _work(self) -> None:
        await asyncio.sleep(self.arguments.batch_wait)
        while self.waiting:
            waiting, self.waiting = self.waiting, []
            for batch in self._round(waiting):
                # without those of dropped requests
                if batch := [one for one in batch if not one.result.done()]:
                    await self._finish(batch)

    def _round(self, waiting: Sequence[_Waiting]) -> list[list[_Waiting]]:
        """Batches of similar length. The batch that has waited longest is first."""
        batches: list[list[_Waiting]] = []
        for one in sorted(waiting, key=lambda one: (one.n_best, one.tokens)):
            last = batches[-1] if batches else []
            padded = one.tokens * (len(last) + 1)
            if not last or one.n_best != last[0].n_best or padded > self.arguments.max_batch_tokens:
                batches.append([])
            batches[-1].append(one)
        place = {one: number for number, one in enumerate(waiting)}
        return sorted(batches, key=lambda batch: min(place[one] for one in batch))

    async def _finish(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            translations = await loop.run_in_executor(self.thread, self._translate, batch)
        except Exception as error:
            if len(batch) > 1:  # one sentence must not make other requests fail
                for one in batch:
                    await self._finish([one])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        SENTENCES.observe(len(batch))
        TOKENS.inc(sum(one.tokens for one in batch))
        for one, best in zip(batch, translations, strict=True):
            if not one.result.done():
                one.result.set_result(best)

    def _translate(self, batch: list[_Waiting]) -> list[list[str]]:
        sentences = [one.sentence for one in batch]
        options = {"batch_size": len(batch), **self.arguments.generate_kwargs()}
        n_best, models = batch[0].n_best, (self.model, self.tokenizer)
        beams = self.arguments.num_beams or self.model.generation_config.num_beams or 1
        found: list[list[str]] = [[] for _ in batch]
        if beams < n_best or n_best == 1:  # alternatives need more beams, which may change the best
            found = [[text] for text in translate(sentences, *models, **options)]
        if n_best > 1:
            options["num_beams"] = max(beams, n_best)
            try:
                hypotheses = list(translate_n_best(sentences, *models, n_best, **options))
            except ValueError as error:  # an option that does not work with so many beams
                raise HTTPException(400, f"alternatives: {error}") from error
            for texts, others in zip(found, hypotheses, strict=True):
                more = [other.text for other in others]
                if texts and texts[0] in more:
                    more.remove(texts[0])
                texts += more
        # A blank line has no alternatives.
        return [(texts + texts[:1] * n_best)[:n_best] for texts in found]

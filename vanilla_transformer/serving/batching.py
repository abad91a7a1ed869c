"""Batches of sentences from requests that wait at the same time."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Counter, Histogram
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..inference.translation import translate, translate_n_best
from .arguments import ServingArguments

SENTENCES = Histogram(
    "vanilla_transformer_batch_sentences", "Sentences per batch", buckets=[2**n for n in range(11)]
)
TOKENS = Counter("vanilla_transformer_source_tokens", "Source tokens, without padding")


class Translator(Protocol):
    """Translates sentences of one language into another."""

    async def translate(self, sentences: Sequence[str], n_best: int = 1) -> list[list[str]]:
        """The `n_best` best translations of each sentence, best first. No sentence is blank."""


@dataclass(eq=False)
class _Waiting:
    sentence: str
    tokens: int
    n_best: int
    result: asyncio.Future[list[str]]


class BatchingTranslator:
    """A `Translator` with one model, in one thread.

    While a batch is in the model, other requests arrive. The next batch has the sentence that has
    waited longest and those that are closest to it in length, up to `max_batch_tokens`.

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
        self.thread = ThreadPoolExecutor(1)
        self.waiting: list[_Waiting] = []
        self.worker: asyncio.Task[None] | None = None

    async def translate(self, sentences: Sequence[str], n_best: int = 1) -> list[list[str]]:
        """As in `Translator`.

        Raises:
            RuntimeError: What `generate()` raises for one of the sentences, such as a lack of
                memory.
        """
        if not sentences:
            return []
        loop = asyncio.get_running_loop()
        ids = self.tokenizer(list(sentences))["input_ids"]
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
        while batch := self._next_batch():
            await self._finish(batch)

    def _next_batch(self) -> list[_Waiting]:
        self.waiting = [one for one in self.waiting if not one.result.done()]  # of dropped requests
        if not self.waiting:
            return []
        first = self.waiting[0]
        alike = [one for one in self.waiting if one.n_best == first.n_best]
        alike.sort(key=lambda one: abs(one.tokens - first.tokens))
        batch: list[_Waiting] = []
        longest = 0
        for one in alike:
            longest = max(longest, one.tokens)
            if batch and longest * (len(batch) + 1) > self.arguments.max_batch_tokens:
                break
            batch.append(one)
        chosen = set(batch)
        self.waiting = [one for one in self.waiting if one not in chosen]
        return batch

    async def _finish(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            translations = await loop.run_in_executor(self.thread, self._translate, batch)
        except Exception as error:
            if len(batch) > 1:  # one sentence must not fail the requests of others
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
        n_best = batch[0].n_best
        if n_best == 1:
            return [[text] for text in translate(sentences, self.model, self.tokenizer, **options)]
        beams = self.arguments.num_beams or self.model.generation_config.num_beams or 1
        options["num_beams"] = max(beams, n_best)
        hypotheses = translate_n_best(sentences, self.model, self.tokenizer, n_best, **options)
        return [[hypothesis.text for hypothesis in best] for best in hypotheses]

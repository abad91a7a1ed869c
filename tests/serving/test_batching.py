"""Which sentences share a batch, and what happens to those that fail or are cancelled."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="needs vanilla-transformer[serve]")

from prometheus_client import REGISTRY

from vanilla_transformer.serving import batching
from vanilla_transformer.serving.arguments import ServingArguments
from vanilla_transformer.serving.batching import BatchingTranslator


class Recording(BatchingTranslator):
    """Records its batches, and translates to upper case."""

    def __init__(self, **options):
        config = SimpleNamespace(position_encoding="learned", max_position_embeddings=99)
        model = SimpleNamespace(config=config)
        super().__init__(model, self.tokenize, ServingArguments(batch_wait=0.0, **options))
        self.batches = []

    def tokenize(self, sentences):
        return {"input_ids": [sentence.split() for sentence in sentences]}

    def _translate(self, batch):
        sentences = [one.sentence for one in batch]
        self.batches.append(sentences)
        if any("bad" in sentence for sentence in sentences):
            raise RuntimeError("a bad sentence")
        return [[sentence.upper()] * batch[0].n_best for sentence in sentences]


def together(translator, *requests):
    """The results of requests that arrive at the same time."""

    async def run():
        calls = [translator.translate(*request) for request in requests]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


def test_requests_that_wait_together_share_a_batch():
    translator = Recording()
    results = together(translator, (["a", "b"],), ([],), (["c"],))
    assert results == [[["A"], ["B"]], [], [["C"]]]
    assert translator.batches == [["a", "b", "c"]]


def test_a_sentence_beyond_the_table_of_positions_only_fails_its_request():
    translator = Recording()
    longest = "a " * 99
    fine, error = together(translator, ([longest],), (["b", "c " * 100],))
    assert fine == [[longest.upper()]]
    assert (error.status_code, error.detail) == (
        400,
        "a sentence of 100 tokens: expected at most 99",
    )
    assert translator.batches == [[longest]]


def test_batches_have_similar_lengths_and_the_longest_wait_is_first():
    """Up to 6 tokens with padding: two sentences of 3, or one of 2 words with two of 1."""
    translator = Recording(max_batch_tokens=6)
    results = together(translator, (["a a a", "b", "c c", "d d d", "e e e", "f"],))
    assert [best[0] for best in results[0]] == ["A A A", "B", "C C", "D D D", "E E E", "F"]
    assert translator.batches == [["a a a", "d d d"], ["b", "f", "c c"], ["e e e"]]


def test_later_requests_do_not_overtake_a_sentence_of_a_different_length():
    """c, d and e fit a better than b b does, but arrive while x x x x is translated."""

    class Busy(Recording):
        async def _finish(self, batch):
            if batch[0].sentence == "x x x x":
                self.later = asyncio.create_task(self.translate(["c", "d", "e"]))
            await super()._finish(batch)

    translator = Busy(max_batch_tokens=4)

    async def run():
        return [*await translator.translate(["x x x x", "a", "b b"]), *await translator.later]

    assert asyncio.run(run()) == [["X X X X"], ["A"], ["B B"], ["C"], ["D"], ["E"]]
    assert translator.batches == [["x x x x"], ["a", "b b"], ["c", "d", "e"]]


def test_a_sentence_above_the_limit_has_a_batch_of_its_own():
    translator = Recording(max_batch_tokens=2)
    together(translator, (["a a a", "b b b b"],))
    assert translator.batches == [["a a a"], ["b b b b"]]


def test_alternatives_have_batches_of_their_own():
    translator = Recording()
    results = together(translator, (["a"], 2), (["b"],), (["c"], 2))
    assert results == [[["A", "A"]], [["B"]], [["C", "C"]]]
    assert translator.batches == [["a", "c"], ["b"]]


@pytest.mark.parametrize(
    ("served", "own", "searches"),
    [
        (5, 1, [5]),  # enough beams for both, the server's before the model's
        (2, 1, [2]),
        (None, 4, [4]),
        (1, 4, ["best", 2]),  # two beams can find a different best translation
        (None, None, ["best", 2]),
    ],
)
@pytest.mark.parametrize("others", [["a", "b"], ["b", "a"], ["b", "c"]])
def test_alternatives_are_added_to_the_best_translation(monkeypatch, served, own, searches, others):
    made = []

    def translate(sentences, *_, **options):
        made.append("best")
        return ["a" for _ in sentences]

    def translate_n_best(sentences, *_, num_beams, **options):
        made.append(num_beams)
        return [[SimpleNamespace(text=text) for text in others] for _ in sentences]

    monkeypatch.setattr(batching, "translate", translate)
    monkeypatch.setattr(batching, "translate_n_best", translate_n_best)
    config = SimpleNamespace(max_position_embeddings=99)
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(num_beams=own))
    arguments = ServingArguments(batch_wait=0.0, num_beams=served)
    translator = BatchingTranslator(model, Recording().tokenize, arguments)
    first = ["a", "b"] if "best" in searches else others
    assert together(translator, (["one"], 2)) == [[first]]
    assert made == searches


def test_metrics_count_what_was_translated():
    names = ("batch_sentences_count", "batch_sentences_sum", "source_tokens_total")

    def counts():
        return [REGISTRY.get_sample_value(f"vanilla_transformer_{name}") for name in names]

    before = counts()
    together(Recording(max_batch_tokens=4), (["a a", "b", "c c"],), (["d d d bad"],))
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 3, 5]


def test_a_failing_sentence_only_fails_its_request():
    translator = Recording()
    first, failed, last = together(translator, (["a"],), (["b", "bad"],), (["c"],))
    assert (first, last) == ([["A"]], [["C"]])
    assert str(failed) == "a bad sentence"
    first, failed = together(translator, (["a"],), (["bad"],))
    assert (first, str(failed)) == ([["A"]], "a bad sentence")
    assert together(translator, (["d"],)) == [[["D"]]]


def test_cancelled_requests_are_not_translated():
    translator = Recording()

    async def run():
        dropped = asyncio.create_task(translator.translate(["a"]))
        kept = asyncio.create_task(translator.translate(["b"]))
        await asyncio.sleep(0)
        dropped.cancel()
        return await kept

    assert asyncio.run(run()) == [["B"]]
    assert translator.batches == [["b"]]


def test_requests_cancelled_during_a_round_are_not_translated():
    class Dropping(Recording):
        async def _finish(self, batch):
            self.dropped.cancel()
            await super()._finish(batch)

    translator = Dropping(max_batch_tokens=1)

    async def run():
        kept = asyncio.create_task(translator.translate(["a"]))
        translator.dropped = asyncio.create_task(translator.translate(["b"]))
        return await kept, await translator.translate(["c"])

    assert asyncio.run(run()) == ([["A"]], [["C"]])
    assert translator.batches == [["a"], ["c"]]

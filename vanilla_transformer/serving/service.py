"""Answers the requests of a translation server, independent of HTTP."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from fastapi import HTTPException

from .arguments import ServingArguments
from .batching import Translator
from .languages import Pair, detect, language_name
from .requests import DetectedLanguage, Language, TranslateRequest
from .segments import Segment, join, split_html, split_text, with_spaces


class TranslationService:
    """Translates requests with the translator of their language pair.

    Args:
        translators: The translator of each language pair.
        arguments: The options of the server.
    """

    def __init__(self, translators: Mapping[Pair, Translator], arguments: ServingArguments) -> None:
        self.translators, self.arguments = translators, arguments

    def languages(self) -> list[Language]:
        """All languages, each with its targets: source languages, then those without a target."""
        targets: dict[str, list[str]] = {source: [] for source, _ in self.translators}
        for source, target in self.translators:
            targets[source].append(target)
            targets.setdefault(target, [])
        return [
            Language(code=code, name=language_name(code), targets=sorted(reached))
            for code, reached in targets.items()
        ]

    def detect(self, text: str, languages: Iterable[str] | None = None) -> list[DetectedLanguage]:
        """The languages that a text may be in, out of all source languages by default.

        Raises:
            HTTPException: The package that detects languages is not installed (400).
        """
        if languages is None:
            languages = dict.fromkeys(source for source, _ in self.translators)
        try:
            found = detect(text, languages)
        except ModuleNotFoundError as error:
            raise HTTPException(400, f"no detection of languages: needs {error.name}") from error
        return [
            DetectedLanguage(confidence=round(100 * probability, 1), language=language)
            for language, probability in found
        ]

    def check_limits(self, texts: list[str], alternatives: int = 0) -> None:
        """Raise an HTTPException if a request exceeds the server's limits (400)."""
        for name, value, limit in (
            ("characters", sum(map(len, texts)), self.arguments.max_characters),
            ("texts", len(texts), self.arguments.max_texts),
            ("alternatives", alternatives, self.arguments.max_alternatives),
        ):
            if value > limit:
                raise HTTPException(400, f"{value} {name}: expected at most {limit}")

    def find_pair(self, request: TranslateRequest) -> tuple[Pair, DetectedLanguage | None]:
        """The language pair of a request, and the detected language if the client requests
        detection.

        Raises:
            HTTPException: The server has no such pair, or cannot detect languages (400).
        """
        detected, source = None, request.source
        sources = [one for one, target in self.translators if target == request.target]
        if source == "auto" and sources:
            detected = self.detect(_readable(request), sources)[0]
            source = detected.language
        if source not in sources:
            known = ", ".join(sorted(map("-".join, self.translators)))
            pair = f"source={source!r}, target={request.target!r}"
            raise HTTPException(400, f"{pair}: expected one of {known}")
        return (source, request.target), detected

    async def translate(
        self, request: TranslateRequest, pair: Pair, detected: DetectedLanguage | None
    ) -> dict[str, Any]:
        """The fields of a `TranslateResponse`."""
        documents = [await self._split(text, request, pair) for text in request.texts]
        results = await self._translate_documents(documents, request, pair)
        content: dict[str, list[Any]] = {"translatedText": [best[0] for best in results]}
        if detected:
            content["detectedLanguage"] = [detected.model_dump()] * len(results)
        if request.alternatives:
            content["alternatives"] = [
                [other for other in dict.fromkeys(best) if other != best[0]] for best in results
            ]
        if isinstance(request.q, list):
            return content
        return {name: values[0] for name, values in content.items()}

    async def stream(self, request: TranslateRequest, pair: Pair) -> AsyncIterator[str]:
        """The pieces of a translation, each of which ends with a translated sentence.

        Raises:
            HTTPException: A sentence is rejected, before the first piece (400).
        """
        segments = await self._split(request.texts[0], request, pair)
        translate = self.translators[pair].translate
        tasks = [
            asyncio.ensure_future(translate([one.text])) for one in segments if one.is_sentence
        ]
        rest, start = iter(tasks), 0
        try:
            if tasks:  # a rejected sentence is done at once
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*done)
            for end, segment in enumerate(segments, start=1):
                if segment.is_sentence or end == len(segments):
                    best = [(await next(rest))[0][0]] if segment.is_sentence else []
                    yield join(segments[start:end], best, request.format == "html")
                    start = end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # their errors are not logged

    async def _split(self, text: str, request: TranslateRequest, pair: Pair) -> list[Segment]:
        split = split_html if request.format == "html" else split_text
        # In a thread, because it takes up to a second for a long text.
        segments = await asyncio.to_thread(split, text, pair[0], self.arguments.split_over)
        return with_spaces(segments, pair[1])

    async def _translate_documents(
        self, documents: list[list[Segment]], request: TranslateRequest, pair: Pair
    ) -> list[list[str]]:
        """The translations of each document: the first has the best translation of each sentence,
        the second has the second best, and so on."""
        wanted = request.alternatives + 1
        sentences = [one.text for segments in documents for one in segments if one.is_sentence]
        rest = iter(await self.translators[pair].translate(sentences, wanted))
        results = []
        for segments in documents:
            ranked = [next(rest) for one in segments if one.is_sentence]
            by_rank = [[best[rank] for best in ranked] for rank in range(wanted)]
            results.append([join(segments, one, request.format == "html") for one in by_rank])
        return results


def _readable(request: TranslateRequest) -> str:
    """The texts of a request, without the names and URLs in tags."""
    if request.format == "text":
        return " ".join(request.texts)
    segments = (one for text in request.texts for one in split_html(text, "en", len(text)))
    return " ".join(one.text for one in segments if one.is_sentence)

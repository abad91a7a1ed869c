"""Splits texts into sentences to translate, and parts to keep, such as line breaks and tags."""

import html
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from typing import NamedTuple

import pysbd
from pysbd.languages import LANGUAGE_CODES

from .languages import main_language

# Sentences are searched for in this many characters at a time, because pysbd's time grows with the
# square of the length. No sentence is longer.
WINDOW = 1000

# Instructions to a model of several languages or tasks at the beginning of a line: tags of
# `train --corpus_tags` and of Marian, and T5's prefix. Their length is limited because they are
# repeated in each sentence of the line.
TAGS = re.compile(
    r"\s*((?:(?:<2[^<>\s]{1,20}>|>>[^<>\s]{1,20}<<|translate \w{1,20} to \w{1,20}:)\s(?=\S)){1,2})"
)

UNSPACED = {"zh", "yue", "ja"}  # Chinese and Japanese have no space between sentences

# pysbd splits at the Arabic comma, at colons in Arabic, and before closing quotation marks.
INNER_SPLIT = re.compile(r"[،:]\s*\0|\S\0[«»”’」』）》〉】]")

LINE_END = re.compile("([\n\r\u2028\u2029])")  # the last two separate lines and paragraphs
HTML_SPACE = " \t\r\n\f"
KEPT_TAGS = {"code", "pre", "script", "style", "textarea"}
VOID_TAGS = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track",
    "wbr",
}  # fmt: skip
# The end tags of these may be omitted. A start tag ends them if they are innermost.
CELLS, ROWS = {"p", "td", "th"}, {"p", "td", "th", "tr"}
SECTIONS = ROWS | {"caption", "colgroup", "tbody", "tfoot", "thead"}
BLOCKS = (
    "address article aside blockquote details div dl fieldset figcaption figure footer form h1 h2 "
    "h3 h4 h5 h6 header hgroup hr main menu nav ol p pre search section table ul"
)
ENDED_BY = {block: {"p"} for block in BLOCKS.split()} | {
    "dd": {"dd", "dt", "p"}, "dt": {"dd", "dt", "p"}, "li": {"li", "p"},
    "optgroup": {"optgroup", "option"}, "option": {"option"},
    "tbody": SECTIONS, "td": CELLS, "tfoot": SECTIONS, "th": CELLS, "tr": ROWS,
}  # fmt: skip
# HTML parsers resolve character references in text and in these two tags, but not in scripts.
TEXT_TAGS = {None, "textarea", "title"}


class Segment(NamedTuple):
    """A piece of a text, and whether it is a sentence to translate."""

    text: str
    is_sentence: bool


def split_text(text: str, language: str, split_over: int) -> list[Segment]:
    """Split a text into lines, and lines longer than `split_over` characters into sentences. White
    space around sentences is a segment of its own. Tags at the beginning of a line are repeated in
    each of its sentences."""
    segments = []
    for line in LINE_END.split(text):
        if LINE_END.fullmatch(line):
            segments.append(Segment(line, False))
            continue
        tags = found[1] if (found := TAGS.match(line)) else ""
        segments += [
            Segment(tags + piece.text, True) if piece.is_sentence else piece
            for sentence in _sentences(line.replace(tags, "", 1), language, split_over)
            for piece in _without_space(sentence)
        ]
    return segments


def split_html(text: str, language: str, split_over: int) -> list[Segment]:
    """Split the text between tags as `split_text` does, with character references resolved. Tags,
    comments, and the contents of `KEPT_TAGS` and of tags with translate="no" are kept. These end at
    their end tag, or where HTML allows omitting it."""
    parser = _SegmentingParser(language, split_over)
    parser.feed(text)
    parser.close()
    return parser.segments


def join(segments: Iterable[Segment], translations: Iterable[str], is_html: bool) -> str:
    """Join segments to a text, with a translation in place of each sentence."""
    rest = iter(translations)

    def translated() -> str:
        return html.escape(next(rest), quote=False) if is_html else next(rest)

    return "".join(translated() if one.is_sentence else one.text for one in segments)


def with_spaces(segments: Iterable[Segment], language: str) -> list[Segment]:
    """The segments, with a space between adjacent sentences, as after "。", if the target language
    has one there. After ASCII nothing changes, as "?" in a URL does not end a sentence."""
    if main_language(language) in UNSPACED:
        return list(segments)
    spaced: list[Segment] = []
    for segment in segments:
        touches = segment.is_sentence and spaced and spaced[-1].is_sentence
        if touches and not spaced[-1].text[-1].isascii():
            spaced.append(Segment(" ", False))
        spaced.append(segment)
    return spaced


def _without_space(text: str, space: str | None = None) -> Iterator[Segment]:
    core = text.strip(space)
    before, _, after = text.partition(core) if core else (text, "", "")
    for segment in (Segment(before, False), Segment(core, True), Segment(after, False)):
        if segment.text:
            yield segment


def _sentences(line: str, language: str, split_over: int) -> Iterator[str]:
    """Split a line into pieces that add up to it."""
    if len(line) <= split_over:
        yield line
        return
    language = main_language(language)  # pysbd's codes have no region
    segmenter = pysbd.Segmenter(language if language in LANGUAGE_CODES else "en", clean=False)
    core = line.lstrip()  # pysbd drops white space at the beginning
    yield line.removesuffix(core)
    line = core
    while line:
        window = line[:WINDOW]
        try:
            sentences = segmenter.segment(window)
        except ValueError:  # pysbd treats "\x1f1." as a list number
            sentences = []
        if "".join(sentences) != window:
            sentences = [window]
        sentences = _whole(sentences)
        if len(line) > WINDOW:  # the last sentence may continue
            complete = sentences[:-1]
            sentences = complete or [window[: window.rfind(" ") + 1] or window]
        yield from sentences
        line = line[sum(map(len, sentences)) :]


def _whole(sentences: Iterable[str]) -> list[str]:
    """The sentences, joined where pysbd has split inside them."""
    whole: list[str] = []
    for sentence in sentences:
        if whole and INNER_SPLIT.search(f"{whole[-1]}\0{sentence[:1]}"):
            whole[-1] += sentence
        else:
            whole.append(sentence)
    return whole


class _Element(NamedTuple):
    """An open element, and whether its contents are kept."""

    tag: str
    is_kept: bool


class _SegmentingParser(HTMLParser):
    def __init__(self, language: str, split_over: int) -> None:
        super().__init__(convert_charrefs=True)
        self.language, self.split_over = language, split_over
        self.segments: list[Segment] = []
        self.text = ""  # text since the last tag
        self.open = [_Element("", False)]  # the document, and the open elements

    def close(self) -> None:
        super().close()
        self._keep(self.rawdata)  # left by a script without an end tag in older versions of Python

    def check_for_whole_start_tag(self, i: int) -> int:
        """The end of a tag, or -1. Older Python versions look for it for as long as the square of
        the length."""
        return super().check_for_whole_start_tag(i) if self.rawdata.find(">", i) > 0 else -1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._keep(self.get_starttag_text() or "")
        while self.open[-1].tag in ENDED_BY.get(tag, ()):
            self.open.pop()
        if tag not in VOID_TAGS:
            is_kept = tag in KEPT_TAGS or any(
                name == "translate" and (value or "").lower() == "no" for name, value in attrs
            )
            self.open.append(_Element(tag, is_kept or self.open[-1].is_kept))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._keep(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._keep(f"</{tag}>")
        if any(element.tag == tag for element in self.open):
            while self.open.pop().tag != tag:
                pass  # the end of an element ends all elements inside it

    def handle_comment(self, data: str) -> None:
        self._keep(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._keep(f"<!{decl}>")

    def unknown_decl(self, data: str) -> None:
        """CDATA, or Microsoft's conditional comments, which end in one bracket."""
        is_conditional = re.match("if|else|endif", data, re.IGNORECASE)
        self._keep(f"<![{data}]>" if is_conditional else f"<![{data}]]>")

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Treat a broken section as a comment, like browsers. Older Python versions fail on it."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def parse_bogus_comment(self, i: int, report: bool = True) -> int:
        """Keep what newer versions of Python, like browsers, read as a comment."""
        end = super().parse_bogus_comment(i, report=False)
        if end > 0:
            self._keep(self.rawdata[i:end])
        return end

    def handle_pi(self, data: str) -> None:
        self._keep(f"<?{data}>")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in TEXT_TAGS:
            self.text += data
        else:
            self._keep(data)

    def _keep(self, markup: str) -> None:
        """Add the text before a piece of markup, and the markup."""
        text, self.text = self.text, ""
        if self.open[-1].is_kept:
            self.segments.append(Segment(html.escape(text, quote=False), False))
        else:
            for segment in _without_space(text, HTML_SPACE):
                if segment.is_sentence:
                    line = re.sub(f"[{HTML_SPACE}]+", " ", segment.text)
                    self.segments += split_text(line, self.language, self.split_over)
                else:
                    self.segments.append(segment)
        self.segments.append(Segment(markup, False))

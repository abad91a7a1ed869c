"""Texts are split into sentences without other changes."""

import time

import pytest

pytest.importorskip("pysbd", reason="needs vanilla-transformer[serve]")

from hypothesis import given, settings
from hypothesis import strategies as st

from vanilla_transformer.serving.segments import (
    WINDOW,
    join,
    split_html,
    split_text,
    with_spaces,
)


def sentences(segments):
    return [one.text for one in segments if one.is_sentence]


def same(segments, is_html=False):
    return join(segments, sentences(segments), is_html)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="ab. !?\n\r\t\u00a0\u2028é😀", max_size=80), st.integers(1, 20))
def test_the_segments_of_a_text_add_up_to_it(text, split_over):
    segments = split_text(text, "en", split_over)
    assert same(segments) == text
    assert all(one == one.strip() != "" for one in sentences(segments))


def test_a_control_character_before_a_number_does_not_fail():
    text = "a \x1f1. b \x1e2. c"
    assert join(split_text(text, "en", 2), [text], is_html=False) == text


def test_a_line_is_a_sentence_until_it_is_long():
    text = "Mr. Smith came at 3 p.m. yesterday. He left.\nHe was late."
    assert sentences(split_text(text, "en", 100)) == text.split("\n")
    assert sentences(split_text(text, "en", 20)) == [
        "Mr. Smith came at 3 p.m. yesterday.", "He left.", "He was late.",
    ]  # fmt: skip
    assert sentences(split_text(f" \t{text}", "en", 20)) == sentences(split_text(text, "en", 20))
    assert sentences(split_text("One. Two.", "en", 9)) == ["One. Two."]
    assert sentences(split_text("One. Two.", "en", 8)) == ["One.", "Two."]
    german = "Das ist z.B. gut. Er kam am 3. Mai."
    assert sentences(split_text(german, "de", 9)) == ["Das ist z.B. gut.", "Er kam am 3. Mai."]
    assert split_text(german, "de-AT", 9) == split_text(german, "de", 9)
    assert same(split_text(german, "unknown", 9)) == german


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("ar", ["بالطبع، أنا سعيد.", "قال: نعم!", "لا؟"]),
        ("zh", ["他说：“走吧！”她笑了。", "然后走了。"]),
        ("ja", ["「はい。」と彼は言った。", "そうか。"]),
        ("sv", ["Han kom hem. ", "”Hej!” sa han."]),
        ("de", ["Er kam. ", "»Hallo!« rief er."]),
    ],
)
def test_a_comma_with_a_closing_quotation_mark_does_not_end_a_sentence(language, expected):
    space = " " * (language == "ar")
    found = sentences(split_text(space.join(expected), language, 5))
    assert found == list(map(str.strip, expected))


@pytest.mark.parametrize("language", ["de", "de-AT", "deu-Latn"])
def test_a_region_or_script_does_not_change_how_a_language_is_split(language):
    segments = split_text("Er kam am 3. März. Ja.", language, 5)
    assert sentences(segments) == ["Er kam am 3. März.", "Ja."]


@pytest.mark.parametrize(
    ("target", "joined"),
    [
        ("en", "It rains. Why? / a?b"),
        ("zh-Hant", "It rains.Why? / a?b"),
        ("jpn-Jpan", "It rains.Why? / a?b"),
    ],
)
def test_adjacent_sentences_get_a_space_if_the_target_language_has_one(target, joined):
    segments = split_text("下雨了。为什么？ / a?b", "zh", 5)
    assert sentences(segments) == ["下雨了。", "为什么？", "/ a?", "b"]
    spaced = with_spaces(segments, target)
    assert join(spaced, ["It rains.", "Why?", "/ a?", "b"], is_html=False) == joined


@pytest.mark.parametrize(
    ("text", "spaced"),
    [
        ("于 3。为什么？", "于 3。 为什么？"),
        ("好。\u3000好。", "好。\u3000好。"),
        ("好 a?b", "好 a?b"),
    ],
)
def test_the_end_of_a_sentence_decides_whether_a_space_is_added(text, spaced):
    segments = split_text(text, "zh", 1)
    assert len(sentences(segments)) == 2
    assert same(with_spaces(segments, "en")) == spaced


@pytest.mark.parametrize("split", [split_text, split_html])
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\u2028", "\u2029\u2029"])
def test_line_breaks_are_kept(split, end):
    if split is split_html and end.isascii():
        end = "<br>"  # the others count as spaces in HTML
    segments = split(f"One line{end}and another.", "en", 100)
    assert sentences(segments) == ["One line", "and another."]
    assert join(segments, ["Eins", "zwei."], False) == f"Eins{end}zwei."


@pytest.mark.parametrize(
    "tag", ["<2de> ", ">>deu<< ", "<2pt-BR> <2formal> ", "translate English to German: "]
)
def test_each_sentence_of_a_line_gets_the_tag_of_the_line(tag):
    text = f"  {tag}This is one. This is two.\nAnd this is three."
    found = sentences(split_text(text, "en", 20))
    assert found == [f"{tag}This is one.", f"{tag}This is two.", "And this is three."]
    assert sentences(split_text(text, "en", 100))[0] == text.split("\n")[0].strip()
    assert sentences(split_text(f"{tag}\n<b> One.", "en", 9)) == [tag.strip(), "<b> One."]
    assert sentences(split_text(f"{tag}One {tag}two.", "en", 100)) == [f"{tag}One {tag}two."]


@pytest.mark.parametrize("unit", ["This is a sentence. ", "word ", "x", "a. b. ", "( ", "1) a "])
def test_a_sentence_has_a_maximum_length(unit):
    text = unit * (3 * WINDOW // len(unit))
    start = time.perf_counter()
    segments = split_text(text, "en", 200)
    assert time.perf_counter() - start < 10
    assert same(segments) == text
    assert max(map(len, sentences(segments))) <= WINDOW


def test_a_window_does_not_cut_a_sentence():
    text = "This is one more sentence of it. " * 100
    assert set(sentences(split_text(text, "en", 200))) == {"This is one more sentence of it."}


@pytest.mark.parametrize("word", ["dogs", "house"])
def test_a_window_without_a_sentence_end_does_not_cut_a_word(word):
    found = sentences(split_text(f"{word} " * 500, "en", 200))
    assert len(found) > 1
    assert " ".join(found).split() == [word] * 500


# Rewritten, with the same meaning.
REWRITTEN = {
    "a &amp; b &lt;c&gt; &eacute;": "a &amp; b &lt;c&gt; é",
    "<p>one\n   two</p>": "<p>one two</p>",
    "a < b": "a &lt; b",
    "Q&A": "Q&amp;A",
}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain", ["plain"]),
        ("<p>one</p>\n <p> two </p>", ["one", "two"]),
        ("<p>Hello <b>you</b> all</p>", ["Hello", "you", "all"]),
        ("a &amp; b &lt;c&gt; &eacute;", ["a & b <c> é"]),
        ("<p>one\n   two</p>", ["one two"]),
        ("<script>if (a < b) {}</script><style>p > b {}</style>x", ["x"]),
        ("<!DOCTYPE html><!-- no --><?php no ?><title>yes</title>", ["yes"]),
        ("<code>a &lt; b</code><pre>no\n no</pre><textarea>&amp;</textarea>", []),
        ('<div translate="no">no <div>no</div> no</div>yes', ["yes"]),
        ('<div translate="no">no</p> <br> no</div>yes', ["yes"]),
        ("<div TRANSLATE=NO>no</div>yes", ["yes"]),
        ('<label lang="no" title="no">yes</label>', ["yes"]),
        ('<p translate>yes</p><p translate="yes">yes</p>', ["yes", "yes"]),
        ('<ul><li translate="no">no<li>yes</ul>', ["yes"]),
        ('<ul><li translate="no">no <ul><li>no</ul> no</ul>yes', ["yes"]),
        ('<ul><li translate="no"><p>no<li>yes</ul>', ["yes"]),
        ('<p translate="no">no <b>no</b><p>yes<p translate="no">no<h1>yes</h1>', ["yes", "yes"]),
        ('<dl><dt translate="no">no<dd>yes<dt>yes</dl>', ["yes", "yes"]),
        ('<select><option translate="no">no<option>yes</select>', ["yes"]),
        ('<table><tr><td translate="no">no<td>yes<tr><th>yes</table>', ["yes", "yes"]),
        ('<table><tr translate="no"><td>no<td>no<tr><td>yes</table>', ["yes"]),
        ('<section><p translate="no">no</section>yes', ["yes"]),
        ('<img translate="no">yes', ["yes"]),
        ("<a href=\"?a=1&amp;b=2\" title='x'>y</a><br/><hr>", ["y"]),
        ("a < b", ["a < b"]),
        ("Q&A", ["Q&A"]),
        ("", []),
    ],
)
def test_html_has_its_texts_translated_and_its_tags_kept(text, found):
    segments = split_html(text, "en", 200)
    assert sentences(segments) == found
    again = same(segments, is_html=True)
    assert again == REWRITTEN.get(text, text)
    assert sentences(split_html(again, "en", 200)) == found


@pytest.mark.parametrize(
    "section",
    [
        "<svg><![CDATA[x < y]]></svg>",
        "<![if !mso]><b></b><![endif]>",
        "<![CDATA[a]] b]]>",
        "<!x><b></b></1>",
    ],
)
def test_a_marked_section_is_unchanged(section):
    segments = split_html(f"{section}<p>yes</p>", "en", 200)
    assert sentences(segments) == ["yes"]
    assert same(segments, is_html=True) == f"{section}<p>yes</p>"


@pytest.mark.parametrize("text", ["<p>yes<script>if (a < b) no()", "<p>yes<style>p > b"])
def test_an_unclosed_script_is_unchanged(text):
    segments = split_html(text, "en", 200)
    assert sentences(segments) == ["yes"]
    assert same(segments, is_html=True) == text


@pytest.mark.parametrize("tag", ["<a ", "<a b=", "<a b='", "<a/"])
def test_many_tags_without_an_end_are_split_at_once(tag):
    """Before 3.11.14, 3.12.12 and 3.13.6, Python's parser takes the square of their length."""
    start = time.process_time()
    assert split_html(tag * 5000, "en", 10**6)
    assert time.process_time() - start < 2


def test_a_translation_cannot_add_a_tag():
    segments = split_html("<p>a</p>", "en", 200)
    assert join(segments, ['<b> & "c"'], True) == '<p>&lt;b&gt; &amp; "c"</p>'


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="<>/!-&;ab=\"' \n?[]", max_size=60))
def test_any_markup_can_be_split(text):
    segments = split_html(text, "en", 10)
    assert sentences(split_html(same(segments, True), "en", 10)) is not None

"""LibreTranslate's interface, through the application only: without a socket or process."""

import asyncio
import gc
import io
import json
import sys

import httpx
import pytest

pytest.importorskip("fastapi", reason="needs vanilla-transformer[serve]")

from fastapi import HTTPException
from fastapi.testclient import TestClient
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.inference.translation import translate, translate_n_best
from vanilla_transformer.serving import languages
from vanilla_transformer.serving.app import make_app
from vanilla_transformer.serving.arguments import KEYS_VARIABLE, RayArguments, ServingArguments
from vanilla_transformer.serving.batching import BatchingTranslator

LINE = "a house by the lake"
PAIR = {"source": "en", "target": "de"}


class UpperCase:
    """A translator with predictable answers."""

    async def translate(self, sentences, n_best=1):
        await asyncio.sleep(0)
        return [[sentence.upper() + "!" * rank for rank in range(n_best)] for sentence in sentences]


class Failing:
    async def translate(self, sentences, n_best=1):
        raise RuntimeError("the secret of the failure")


class Slow:
    async def translate(self, sentences, n_best=1):
        await asyncio.sleep(60)


def client(translator=None, **options):
    pairs = dict.fromkeys([("en", "fr"), ("en", "de"), ("de", "en")], translator or UpperCase())
    app = make_app(pairs, ServingArguments(**options))
    return TestClient(app, raise_server_exceptions=False)


def post(server, **fields):
    return server.post("/translate", json={"q": LINE, **PAIR, **fields})


def test_it_translates_json_and_both_kinds_of_forms():
    server, fields = client(), {"q": LINE, **PAIR}
    files = {name: (None, value) for name, value in fields.items()}
    for answer in (
        server.post("/translate", json=fields),
        server.post("/translate", data=fields),
        server.post("/translate", files=files),
    ):
        assert answer.status_code == 200
        assert answer.json() == {"translatedText": LINE.upper()}


def test_a_form_is_read_as_utf8_with_or_without_percent_encoding():
    """Browsers and `curl --data-urlencode` encode it, and `curl -d` does not."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    for text, expected in (
        (b"M%C3%A4dchen+%26+%2B", "MÄDCHEN & +"),
        ("Mädchen 😀".encode(), "MÄDCHEN 😀"),
    ):
        form = b"source=en&target=de&q=" + text
        answer = client().post("/translate", content=form, headers=headers)
        assert answer.json() == {"translatedText": expected}
    for text in (b"M%E4dchen", b"M\xe4dchen"):
        form = b"source=en&target=de&q=" + text
        answer = client().post("/translate", content=form, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("not a form: 'utf-8' codec can't decode byte 0xe4")
    for text, status in (("Mädchen".encode(), 200), (b"M\xe4dchen", 400)):
        answer = client().post("/translate", files={"q": (None, text)}, data=PAIR)
        assert answer.status_code == status
        assert "MÄDCHEN" in answer.text or "can't decode byte 0xe4" in answer.text


def test_a_charset_that_reads_nothing_is_a_bad_request():
    part = b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\nM\xc3\xa4dchen.\r\n--x--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x; charset=undefined"}
    answer = client().post("/translate", content=part, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("not a form: ")


def test_it_accepts_empty_fields_and_fields_in_the_url():
    """As from deep-translator, whose body is empty, and from forms with empty fields."""
    server, fields = client(), {"q": LINE, **PAIR}
    for answer in (
        server.post("/translate", params=fields),
        server.post("/translate", json={**fields, "format": None, "alternatives": None}),
        server.post("/translate", data={**fields, "format": "", "alternatives": ""}),
    ):
        assert answer.json() == {"translatedText": LINE.upper()}


def test_lists_and_alternatives_keep_the_order_of_the_texts():
    answer = post(client(), q=["b", "", "a\nc"], alternatives=1).json()
    assert answer == {
        "translatedText": ["B", "", "A\nC"],
        "alternatives": [["B!"], [], ["A!\nC!"]],
    }
    assert post(client(), alternatives=2).json()["alternatives"] == [
        LINE.upper() + mark for mark in ("!", "!!")
    ]


def test_the_answer_is_the_same_as_without_a_server(checkpoint, tokenizer):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    model.generation_config.max_new_tokens = 9  # a random model does not stop by itself
    for name, parameter in model.named_parameters():  # and gives the same output for every input
        parameter.data *= 10 if parameter.dim() > 1 and "embed" not in name else 1
    lines = [LINE, "der See", "the lake is deep"]
    arguments = ServingArguments(num_beams=2, batch_wait=0.0)
    translator = BatchingTranslator(model, tokenizer, arguments)
    server = TestClient(make_app({("en", "de"): translator}, arguments))
    expected = list(translate(lines, model, tokenizer, num_beams=2))
    assert post(server, q=lines).json()["translatedText"] == expected
    (hypotheses,) = translate_n_best([LINE], model, tokenizer, 3, num_beams=3)
    texts = [hypothesis.text for hypothesis in hypotheses]
    if expected[0] in texts:
        texts.remove(expected[0])
    best, *others = dict.fromkeys([expected[0], *texts[:2]])
    answer = post(server, alternatives=2).json()
    assert answer == {"translatedText": best, "alternatives": others}


def test_it_lists_its_languages():
    assert client().get("/languages").json() == [
        {"code": "en", "name": "English", "targets": ["de", "fr"]},
        {"code": "de", "name": "German", "targets": ["en"]},
        {"code": "fr", "name": "French", "targets": []},
    ]
    settings = client(max_characters=7).get("/frontend/settings").json()
    assert settings["charLimit"] == 7
    assert settings["keyRequired"] is False
    assert client().get("/health").json() == {"status": "ok"}
    assert client().head("/health").status_code == 200  # as some monitors send it


def test_it_detects_the_languages_that_it_translates():
    pytest.importorskip("py3langid")
    text = "Der Zug nach Hamburg fährt heute leider nicht, weil die Strecke gesperrt ist."
    server = client()
    best, other = server.post("/detect", data={"q": text}).json()
    assert (best["language"], other["language"]) == ("de", "en")
    assert 90 < best["confidence"] <= 100
    assert other["confidence"] < 10
    answer = post(server, q=text, source="auto", target="en").json()
    assert answer["detectedLanguage"] == best
    # The only language that can be translated to French; its confidence stays low.
    answer = post(server, q=[text], source="auto", target="fr").json()
    assert answer["detectedLanguage"] == [other]


def test_a_confidence_is_in_percent_and_each_text_has_one(monkeypatch):
    found = [("de", 0.98765), ("en", 0.0042)]
    monkeypatch.setattr("vanilla_transformer.serving.service.detect", lambda *arguments: found)
    german = {"confidence": 98.8, "language": "de"}
    expected = [german, {"confidence": 0.4, "language": "en"}]
    assert client().post("/detect", data={"q": "x"}).json() == expected
    answer = post(client(), q=["x", "y"], source="auto", target="en").json()
    assert answer["detectedLanguage"] == [german] * 2


def test_a_missing_language_detector_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    languages._identifier.cache_clear()
    for answer in (client().post("/detect", data={"q": "x"}), post(client(), source="auto")):
        assert answer.status_code == 400
        assert answer.json()["error"] == "no detection of languages: needs py3langid.langid"
    assert post(client()).status_code == 200


def test_html_tags_do_not_affect_language_detection():
    pytest.importorskip("py3langid")
    tag = '<a href="https://www.example.com/the-news-of-the-day" title="more about this">'
    text = "Wir gehen heute Abend ins Kino"
    plain = post(client(), q=text, source="auto", target="en").json()
    pairs = dict.fromkeys([("en", "fr"), ("de", "fr")], UpperCase())
    server = TestClient(make_app(pairs, ServingArguments()))
    answer = post(server, q=f"{tag}{text}</a>", source="auto", target="fr", format="html").json()
    assert answer["detectedLanguage"] == plain["detectedLanguage"]


@pytest.mark.parametrize("codes", [("de", "pt-BR"), ("deu-Latn", "por-Latn")])
def test_a_language_with_a_region_or_script_is_detected(codes):
    pytest.importorskip("py3langid")
    german, portuguese = codes
    pairs = dict.fromkeys([(german, "en"), (portuguese, "en")], UpperCase())
    server = TestClient(make_app(pairs, ServingArguments()))
    text = "Você não sabe quanto eu gosto de morar no Brasil."
    best, other = server.post("/detect", data={"q": text}).json()
    assert (best["language"], other["language"]) == (portuguese, german)
    assert best["confidence"] > 90


@pytest.mark.parametrize(
    ("code", "expected"),
    [("deu-Latn", "de"), ("pt-BR", "pt"), ("tgl", "tgl"), ("no", "no"), ("iw", "iw")],
)
def test_only_a_code_of_three_letters_is_replaced_by_one_of_two(code, expected):
    """CLDR has other aliases: no is nb there, and tgl is fil."""
    assert languages.main_language(code) == expected


def test_a_blank_text_has_no_alternatives(checkpoint, tokenizer):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    server = client(BatchingTranslator(model, tokenizer, ServingArguments(num_beams=2)))
    answer = post(server, q=[LINE, "\u200b"], alternatives=1).json()
    assert answer["translatedText"][1] == ""
    assert answer["alternatives"][1] == []


def test_alternatives_that_a_search_cannot_find_are_refused(checkpoint, tokenizer):
    """As with CTranslate2, which has a repetition_penalty only without beams."""
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    model.generation_config.low_memory = True  # which transformers only has without beams
    server = client(BatchingTranslator(model, tokenizer, ServingArguments()))
    assert post(server).status_code == 200
    answer = post(server, alternatives=1)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("alternatives: low_memory=True: expected null")


def test_html_keeps_its_tags():
    text = '<p title="a">a &lt; <b>b</b></p><!-- c --><script>if (a < b) c()</script>'
    expected = '<p title="a">A &lt; <b>B</b></p><!-- c --><script>if (a < b) c()</script>'
    assert post(client(), q=text, format="html").json() == {"translatedText": expected}


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("text", "a < b.\n\n  c. c. c. \n", "A < B.\n\n  C. C. C. \n"),
        ("html", "a &lt; <b>b</b>.<br>", "A &lt; <b>B</b>.<br>"),
    ],
)
def test_a_stream_adds_up_to_the_translation(format, text, expected):
    fields = {"q": text, **PAIR, "format": format, "stream": True}
    with client().stream("POST", "/translate", json=fields) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        pieces = [json.loads(line)["translatedText"] for line in answer.iter_lines()]
    assert len(pieces) > 2
    assert "".join(pieces) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_translated_chinese_sentences_are_separated_by_a_space(stream):
    app = make_app({("zh", "en"): UpperCase()}, ServingArguments(split_over=5))
    fields = {"q": "我在a。他在b。", "source": "zh", "target": "en", "stream": stream}
    answers = TestClient(app).post("/translate", json=fields).text.splitlines()
    assert "".join(json.loads(one)["translatedText"] for one in answers) == "我在A。 他在B。"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q": None}, "q.str: Input should be a valid string"),
        ({"target": "fi"}, "expected one of de-en, en-de, en-fr"),
        ({"source": "auto", "target": "fi"}, "expected one of de-en, en-de, en-fr"),
        ({"format": "pdf"}, "format: Input should be 'text' or 'html'"),
        ({"alternatives": -1}, "alternatives: Input should be greater than or equal to 0"),
        ({"alternatives": 4}, "4 alternatives: expected at most 3"),
        ({"q": "x" * 51}, "51 characters: expected at most 50"),
        ({"q": ["x"] * 6}, "6 texts: expected at most 5"),
        ({"q": ["x"], "stream": True}, "stream: expected q to be one text"),
        ({"alternatives": 1, "stream": True}, "stream: expected q to be one text, and no alter"),
    ],
)
def test_an_invalid_value_is_refused_by_name(fields, message):
    server = client(max_characters=50, max_texts=5)
    assert post(server, q=["x" * 10] * 5, alternatives=3).status_code == 200
    answer = post(server, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"", b"\xff\xfe", b'{"q": "\\ud800"}', b"[" * 100_000, b'{"q": 1e999}', b"null"],
)
def test_invalid_json_is_refused(content):
    answer = client().post("/translate", content=content)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"}


def test_a_list_without_texts_has_a_short_error():
    answer = client().post("/translate", json={"q": [1] * 100_000, **PAIR})
    assert answer.status_code == 400
    assert "q.list[str].0: Input should be a valid string" in answer.json()["error"]
    assert len(answer.text) < 1000


def test_a_form_with_too_many_fields_is_refused():
    answer = client().post("/translate", data={f"x{number}": "" for number in range(1001)})
    assert answer.status_code == 400
    assert answer.json() == {"error": "not a form: Max number of fields exceeded"}


def test_an_invalid_form_or_url_is_refused():
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = client().post("/translate", content=b"--y\r\nbroken", headers=headers)
    assert answer.status_code == 400
    for place in ("data", "params"):
        answer = client().post("/translate", **{place: {"q": [LINE, LINE], **PAIR}})
        assert answer.status_code == 400
        assert answer.json() == {"error": "q: expected one, not 2"}
    answer = client().post("/translate?source=en&target=de&q=M%E4dchen")
    assert answer.status_code == 400
    assert "can't decode byte 0xe4" in answer.text
    file = {"q": ("name", io.BytesIO(b"text"))}
    answer = client().post("/translate", files=file, data=PAIR)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])


def test_a_body_that_is_too_long_is_refused():
    answer = client(max_body=1000).post("/translate", content=iter([b"x" * 600] * 2))
    assert answer.status_code == 413
    assert answer.json() == {"error": "request of 1200 bytes: expected at most 1000"}


def test_the_only_size_limit_of_a_form_is_that_of_the_body():
    server = client(max_body=3_000_000, max_characters=2_000_000)
    text = LINE + " " * 1_500_000
    form = {key: (None, value) for key, value in {"q": text, **PAIR}.items()}
    answers = (
        server.post("/translate", files=form),
        server.post("/translate", data={"q": text, **PAIR}),
    )
    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("path", ["/nothing", "/translate/../etc/passwd", "/%2e%2e/x", "//"])
def test_other_paths_are_not_found(path):
    answer = client().get(path)
    assert (answer.status_code, answer.json()) == (404, {"error": "Not Found"})


def test_a_valid_api_key_is_required(tmp_path, monkeypatch, caplog):
    (tmp_path / "keys").write_text("\ufeffone-key\n\nother-key\n", encoding="utf-8")
    monkeypatch.setenv(KEYS_VARIABLE, "third-key, fourth-key")
    for server, key in (
        (client(api_keys=str(tmp_path / "keys")), "one-key"),
        (client(api_keys=str(tmp_path / "keys")), "other-key"),
        (client(), "fourth-key"),
    ):
        for wrong in ({}, {"api_key": "other"}, {"api_key": ""}, {"api_key": "one-key\n"}):
            answer = post(server, **wrong)
            assert answer.status_code == 403
            assert answer.json() == {"error": "api_key: expected a valid API key"}
        assert post(server, api_key=key).status_code == 200
        for scheme, status in (("Bearer", 200), ("bearer", 200), ("Basic", 403)):
            header = {"authorization": f"{scheme} {key}"}
            answer = server.post("/translate", json={"q": "a", **PAIR}, headers=header)
            assert answer.status_code == status
        assert server.get("/languages").status_code == 200
        assert server.get("/frontend/settings").json()["keyRequired"] is True
    assert "-key" not in caplog.text


def test_a_missing_key_file_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="api_keys='nowhere': expected a file"):
        ServingArguments(api_keys="nowhere")
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ValueError, match="expected an API key, found none"):
        ServingArguments(api_keys=str(tmp_path / "keys"))
    monkeypatch.setenv(KEYS_VARIABLE, "")
    with pytest.raises(ValueError, match="expected an API key, found none"):
        ServingArguments()


def test_a_failure_is_answered_without_its_details():
    origin = {"Origin": "https://example.org"}
    answer = client(Failing()).post("/translate", json={"q": LINE, **PAIR}, headers=origin)
    assert (answer.status_code, answer.json()) == (500, {"error": "The translation failed"})
    assert answer.headers["access-control-allow-origin"] == "*"  # or browsers hide the answer
    answer = post(client(Failing()), stream=True)
    assert json.loads(answer.text) == {"error": "The translation failed"}


def test_an_error_before_the_first_piece_of_a_stream_has_its_status(caplog):
    class Choosy(UpperCase):
        async def translate(self, sentences, n_best=1):
            if "long" in sentences[0]:
                raise HTTPException(400, "a sentence of 9 tokens: expected at most 8")
            return await super().translate(sentences, n_best)

    for translator, fields, status, options in (
        (Choosy(), {"q": "short\nlong\nlong"}, 400, {}),
        (Failing(), {"q": "a\nb"}, 500, {}),
        (Slow(), {"q": "a\nb"}, 503, {"timeout": 0.1}),
    ):
        counter = f'vanilla_transformer_requests_total{{path="/translate",status="{status}"}}'
        before = float(metrics(client()).get(counter, 0))
        answer = post(client(translator, **options), **fields, stream=True)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
        assert float(metrics(client())[counter]) == before + 1
    gc.collect()
    assert "Traceback" not in caplog.text


def test_an_error_in_a_stream_is_its_last_line(caplog):
    class Stopping(UpperCase):
        async def translate(self, sentences, n_best=1):
            if sentences == ["b"]:
                await asyncio.sleep(60)
            return await super().translate(sentences, n_best)

    answer = post(client(Stopping(), timeout=0.1), q="a\nb", stream=True)
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        {"translatedText": "A"}, {"error": "The translation took too long"},
    ]  # fmt: skip
    assert "Traceback" not in caplog.text


def test_a_request_has_a_time_limit():
    answer = post(client(Slow(), timeout=0.1))
    assert answer.status_code == 503
    answer = post(client(Slow(), timeout=0.1), stream=True)
    assert json.loads(answer.text) == {"error": "The translation took too long"}


def test_a_translation_is_cancelled_if_the_client_disconnects():
    ended, sent = [], []
    started = asyncio.Event()

    class Watched:
        async def translate(self, sentences, n_best=1):
            started.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.extend(sentences)

    body = json.dumps({"q": LINE, **PAIR}).encode()
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body}]

    async def receive():
        if len(messages) == 1:
            await started.wait()
        return messages.pop()

    async def send(message):
        sent.append(message.get("status"))

    app = make_app({("en", "de"): Watched()}, ServingArguments())
    scope = {"type": "http", "method": "POST", "path": "/translate", "query_string": b""}
    asyncio.run(asyncio.wait_for(app({**scope, "headers": []}, receive, send), 10))
    assert ended == [LINE]
    assert sent[0] == 499  # no client reads it, but it is in the log and the metrics


def test_requests_above_the_limit_get_status_429_and_retry_after():
    async def three() -> list[httpx.Response]:
        app = make_app({("en", "de"): UpperCase()}, ServingArguments(max_requests=2))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as requests:
            posts = [requests.post("/translate", json={"q": "a", **PAIR}) for _ in range(3)]
            first = await asyncio.gather(*posts)
            return [*first, await requests.post("/translate", json={"q": "a", **PAIR})]

    refusals = 'vanilla_transformer_requests_total{path="/translate",status="429"}'
    before = float(metrics(client()).get(refusals, 0))
    *first, later = asyncio.run(three())
    assert float(metrics(client())[refusals]) == before + 1
    assert sorted(answer.status_code for answer in first) == [200, 200, 429]
    refused = next(answer for answer in first if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert "2 requests are under way" in refused.json()["error"]
    assert later.status_code == 200


def test_each_request_logs_one_line_without_its_text(caplog):
    caplog.set_level("INFO", "vanilla_transformer")
    post(client())
    (record,) = caplog.records
    assert "POST /translate 200" in record.message
    assert record.message.endswith("en-de 19 characters")
    client().post("/a%0Ab" + "c" * 1000)
    assert "POST /a%0Abccc" in caplog.records[-1].message
    assert len(caplog.records[-1].message) < 200


def test_metrics_count_requests_and_characters():
    server = client()
    before = metrics(server)
    post(server)
    post(server, target="fi")
    server.post("/nothing")
    after = metrics(server)
    grown = {name for name in after if after[name] != before.get(name)}
    labels = 'path="/translate",status='
    assert {
        f'vanilla_transformer_requests_total{{{labels}"200"}}',
        f'vanilla_transformer_requests_total{{{labels}"400"}}',
        'vanilla_transformer_requests_total{path="other",status="404"}',
        'vanilla_transformer_characters_total{pair="en-de"}',
    } <= grown
    assert after["vanilla_transformer_requests_under_way"] == "0.0"


def metrics(server):
    lines = server.get("/metrics").text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_pages_of_other_origins_can_send_requests():
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = "content-type, authorization"
    answer = client().options("/translate", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in ("*", headers["origin"])
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert post(client(max_requests=1)).status_code == 200


def test_the_description_has_every_route_with_its_fields():
    description = client().get("/spec").json()
    assert description["paths"].keys() == {
        "/translate", "/detect", "/languages", "/health", "/frontend/settings",
    }  # fmt: skip
    body = description["paths"]["/translate"]["post"]["requestBody"]["content"]
    assert {"q", "source", "target", "format", "alternatives", "api_key"} <= body[
        "application/json"
    ]["schema"]["properties"].keys()
    assert client().get("/docs").status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port=70000: expected 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0: expected at least 1"),
        ({"num_beams": 0}, "num_beams=0: expected at least 1"),
        ({"timeout": 0.0}, r"timeout=0.0: expected seconds"),
        ({"timeout": float("inf")}, "timeout=inf: expected seconds"),
    ],
)
def test_an_invalid_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ServingArguments(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 2}, "num_replicas=2: expected --ray"),
        ({"ray": True, "num_replicas": 0}, "num_replicas=0: expected at least 1"),
        ({"ray": True, "num_replicas": 3, "max_replicas": 2}, "max_replicas=2: expected at least"),
        ({"ray": True, "num_cpus": -1.0}, "num_cpus=-1.0"),
    ],
)
def test_an_invalid_option_of_ray_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        RayArguments(**options)

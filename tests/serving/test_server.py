"""The command: what it checks before it loads a model, and a server in its own process."""

import json
import shutil
import signal
import socket
import threading
import time
from http.client import HTTPConnection
from urllib import request

import pytest

pytest.importorskip("uvicorn", reason="needs vanilla-transformer[serve]")

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.serving.arguments import ServingArguments
from vanilla_transformer.serving.languages import find_pairs
from vanilla_transformer.serving.server import make_url, serve


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders with a config.json, the first two of which have a model card."""
    for name in ("one", "two", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for name in ("one", "two"):
        (tmp_path / name / "README.md").write_text("---\nlanguage:\n- en\n- de\n---\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)


def test_the_languages_come_from_the_card_or_the_command_line(folders):
    pairs = find_pairs(["./one/", "de-en=two", "zh-pt=bare"])
    assert pairs == {("en", "de"): "./one/", ("de", "en"): "two", ("zh", "pt"): "bare"}
    for regional in ("pt-BR-en", "en-pt-BR", "zh-Hant-TW-en", "en-es-419"):
        ((source, target),) = find_pairs([f"{regional}=bare"])
        assert f"{source}-{target}" == regional
        assert "en" in (source, target)


def test_a_card_can_name_norwegian_and_a_folder_can_contain_an_equals_sign(folders, tmp_path):
    shutil.copytree("one", "lr=1")
    assert find_pairs(["lr=1", "fr-de=lr=1"]) == {("en", "de"): "lr=1", ("fr", "de"): "lr=1"}
    (tmp_path / "two" / "README.md").write_text("---\nlanguage:\n- en\n- no\n---\n")
    assert find_pairs(["two"]) == {("en", "no"): "two"}


def test_a_peft_adapter_can_be_served(folders, tmp_path):
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert find_pairs(["en-de=empty"]) == {("en", "de"): "empty"}


@pytest.mark.parametrize(
    ("models", "kind", "message"),
    [
        (["one", "two"], ValueError, "en-de: expected one model, got one and two"),
        (["one", "en-de=bare"], ValueError, "en-de: expected one model, got one and bare"),
        (["one", "bare"], ValueError, "does not name two languages, expected .* en-de=bare"),
        (["one", "ende=two"], ValueError, "'ende=two': expected SOURCE-TARGET=MODEL, .* en-de=two"),
        (["one", "absent"], FileNotFoundError, "absent: expected a model folder or a name"),
        (["one", "./a/b/c"], FileNotFoundError, "./a/b/c: expected a model folder or a name"),
        (["one", "empty"], FileNotFoundError, "empty: expected a model folder, with a config"),
    ],
)
def test_an_invalid_model_is_refused_before_one_is_loaded(
    folders, no_loading, models, kind, message
):
    with pytest.raises(kind, match=message):
        serve(models, ServingArguments(port=0), no_loading)


def test_a_model_that_cannot_translate_as_it_was_saved_is_refused(checkpoint, tmp_path):
    """Otherwise each request would fail with status 500."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "stop_strings": ["x"]}))
    with pytest.raises(ValueError, match=r"/model: stop_strings=\['x'\] in the generation config"):
        serve([f"en-de={folder}"], ServingArguments(port=0), LoadingArguments(device="cpu"))


def test_a_port_in_use_is_refused_before_a_model_is_loaded(folders, no_loading):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port}: expected a free address"):
            serve(["one"], ServingArguments(port=port), no_loading)
    with pytest.raises(ValueError, match="host='no host', port=80"):
        serve(["one"], ServingArguments(host="no host", port=80), no_loading)


def test_the_url_of_a_server_has_an_ipv6_address_in_brackets():
    assert make_url("::1", 8000) == "http://[::1]:8000"
    assert make_url("127.0.0.1", 8000) == "http://127.0.0.1:8000"


def test_a_client_translates_and_a_server_answers_before_it_stops(checkpoint, start_server):
    """libretranslatepy is an independent client."""
    client = pytest.importorskip("libretranslatepy")
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    line = "a house by the lake & deep = 100 %"
    (expected,) = translate([line], model, tokenizer)
    keys = {"VANILLA_TRANSFORMER_API_KEYS": "a-key"}
    with start_server(f"en-de={checkpoint}", fresh=False, **keys) as (process, url):
        api = client.LibreTranslateAPI(url, api_key="a-key")
        assert api.translate(line, "en", "de") == expected
        assert api.languages() == [
            {"code": "en", "name": "English", "targets": ["de"]},
            {"code": "de", "name": "German", "targets": []},
        ]
        with pytest.raises(Exception, match="403"):
            client.LibreTranslateAPI(url, api_key="b-key").translate(line, "en", "de")

        answers = []
        fields = {"q": [line] * 50, "source": "en", "target": "de", "api_key": "a-key"}
        post = request.Request(
            f"{url}/translate", json.dumps(fields).encode(), {"content-type": "application/json"}
        )
        asking = threading.Thread(
            target=lambda: answers.append(json.load(request.urlopen(post, timeout=60)))
        )
        asking.start()
        wait_until(lambda: b"requests_under_way 1.0" in request.urlopen(f"{url}/metrics").read())
        process.send_signal(signal.SIGTERM)
        asking.join()
        assert answers == [{"translatedText": [expected] * 50}]
        assert process.wait(30) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_a_connection_can_be_idle_for_longer_than_httpx_keeps_it(checkpoint, start_server):
    with start_server(f"en-de={checkpoint}") as (_, url):
        connection = HTTPConnection(url.removeprefix("http://"))
        for pause in (0, 6):
            time.sleep(pause)
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            assert connection.sock is not None  # http.client would open a new one


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
    raise AssertionError("not within 1000 attempts")

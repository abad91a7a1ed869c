"""The server on a Ray cluster when one of its processes is killed."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from urllib import request

import pytest

pytest.importorskip("ray.serve", reason="needs vanilla-transformer[ray]")

import psutil
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.inference.loading import LoadingArguments
from vanilla_transformer.inference.translation import translate
from vanilla_transformer.serving import ray_serving
from vanilla_transformer.serving.arguments import RayArguments, ServingArguments

REQUESTS = 120


@pytest.mark.slow
def test_a_killed_replica_loses_no_request(checkpoint, start_server, ray_environment):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = ["a house", "the lake is deep", "der See"]
    expected = list(translate(lines, model, tokenizer))
    ray_environment["VANILLA_TRANSFORMER_API_KEYS"] = "a-key"
    words = [f"en-de={checkpoint}", "--ray", "--num_replicas", "2", "--num_cpus", "0.5"]
    with start_server(*words, **ray_environment) as (process, url):

        def ask(number):
            if number == REQUESTS // 4:
                replicas(process)[0].kill()
            fields = {"q": lines, "source": "en", "target": "de", "api_key": "a-key"}
            data = json.dumps(fields).encode()
            post = request.Request(f"{url}/translate", data, {"content-type": "application/json"})
            return json.load(request.urlopen(post, timeout=120))["translatedText"]

        assert len(replicas(process)) == 2
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(ask, range(REQUESTS)))
        assert answers == [expected] * REQUESTS
    assert not replicas(process)


def test_port_0_selects_a_free_port_and_logs_it(monkeypatch, caplog):
    started = []

    def stop():
        raise KeyboardInterrupt

    class Serve:
        def start(self, http_options):
            started.append(http_options["port"])

        def run(self, application, **options):
            pass

        def delete(self, name):
            pass

    for name in ("init", "shutdown"):
        monkeypatch.setattr(ray_serving.ray, name, lambda *_: None)
    monkeypatch.setattr(ray_serving, "serve", Serve())
    monkeypatch.setattr(ray_serving, "find_pairs", lambda models: {("en", "de"): "model"})
    monkeypatch.setattr(ray_serving, "make_deployments", lambda *_: None)
    monkeypatch.setattr(ray_serving.signal, "signal", lambda *_: None)
    monkeypatch.setattr(ray_serving.signal, "pause", stop)
    caplog.set_level(logging.INFO)
    options = ServingArguments(port=0), LoadingArguments(), RayArguments(ray=True)
    ray_serving.serve_with_ray(["model"], *options)
    (port,) = started
    assert port > 0
    assert f"Serving en-de at http://127.0.0.1:{port}" in caplog.text


def test_all_processes_finish_their_requests_before_they_stop():
    arguments = ServingArguments(timeout=45.0)
    options = arguments, LoadingArguments(), RayArguments(ray=True)
    front = ray_serving.make_deployments({("en", "de"): "model"}, *options)._bound_deployment
    (model,) = front.init_args
    for deployment in (front, model._bound_deployment):
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 45


def replicas(process):
    """The processes with the model."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [one for one in family if "ServeReplica:translation:en-de" in " ".join(one.cmdline())]

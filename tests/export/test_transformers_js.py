"""A folder for transformers.js translates in Node and in a browser, offline."""

import functools
import json
import os
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, GenerationConfig

from export.onnx_folder import TEXTS, saved_model
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data import vocabularies
from vanilla_transformer.data.tokenization import SPECIAL_TOKENS, train_tokenizer
from vanilla_transformer.data.vocabularies import Specials
from vanilla_transformer.export import export, onnx_graphs, transformers_js
from vanilla_transformer.inference.engines import onnxruntime_engine
from vanilla_transformer.inference.translation import translate

LINES = ["the lake is deep", "", "der See ist tief"]
BROWSER = "/usr/bin/chromium-headless-shell"
FOLDERS = [Path(entry) for entry in os.environ.get("NODE_PATH", "").split(os.pathsep) if entry]
NODE_MODULES = next(
    (each for each in FOLDERS if (each / "@huggingface/transformers").is_dir()), None
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
needs_npm = pytest.mark.skipif(
    NODE_MODULES is None or shutil.which("node") is None,
    reason=f"needs node, and NODE_PATH with what `{transformers_js.INSTALL}` installs",
)


def test_the_configuration_is_readable_by_transformers_js():
    config = VanillaTransformerConfig(position_encoding="learned", max_position_embeddings=99)
    fields = transformers_js.config_of(config, "m30k", "q8")
    assert fields["model_type"] == "marian"
    assert fields["transformers.js_config"] == {"dtype": "q8"}
    assert fields["max_position_embeddings"] == 99
    sinusoids = transformers_js.config_of(VanillaTransformerConfig(), "m30k", "q8")
    assert "max_position_embeddings" not in sinusoids  # the page would stop translations there


@pytest.mark.parametrize(
    ("fields", "prefix"),
    [({}, None), ({"prefix": "a: "}, "a: "),
     ({"prefix": "a: ", "task_specific_params": {"translation": {"prefix": "b: "}}}, "b: ")],
)  # fmt: skip
def test_the_prefix_of_the_pipeline_is_kept(fields, prefix):
    config = transformers_js.config_of(VanillaTransformerConfig(**fields), "m30k", "q8")
    assert config.get("prefix") == prefix


def test_a_slow_tokenizer_is_refused(saved, tmp_path):
    _, folder = saved(ByT5Tokenizer(extra_ids=3))
    with pytest.raises(ValueError, match="ByT5Tokenizer: expected a fast tokenizer"):
        export(folder, tmp_path / "exported", "transformers.js")


def converted_tokenizers():
    """By name, tokenizers converted from other toolkits, and one with a user token."""
    characters = dict.fromkeys("".join(TEXTS) + "\\_u;0123456789")
    symbols = dict.fromkeys((*SPECIAL_TOKENS, *characters, "the", "l@@", "a@@", "ke", "is_"))
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    merges = [("l", "a"), ("k", "e</w>"), ("t", "h"), ("th", "e</w>")]
    user_tokens = ["<2de>"]
    return {
        "words": vocabularies.words(vocab, Specials(), spaces_only=True),
        "codes": vocabularies.bpe_codes(merges, vocab, Specials()),
        "subwords": vocabularies.subwords(vocab, Specials(bos=None, unk=None)),
        "user token": train_tokenizer(TEXTS, 300, user_tokens=user_tokens, show_progress=False),
    }


@needs_npm
def test_node_encodes_text_as_python_does(tmp_path):
    lines = ["the lake is deep", "<2de> the lake", "the 😀 é", " der  See", "la_ke"]
    expected = {}
    for name, tokenizer in converted_tokenizers().items():
        expected[name] = [tokenizer(line)["input_ids"] for line in lines]
        transformers_js.save_tokenizer(tokenizer, tmp_path / name)
    library = NODE_MODULES / "@huggingface/tokenizers/dist/tokenizers.mjs"
    script = tmp_path / "read.mjs"
    script.write_text(
        f"""import fs from "node:fs";
        import {{ Tokenizer }} from {json.dumps(str(library))};
        const results = {{}};
        for (const name of {json.dumps(list(expected))}) {{
          const read = (file) => JSON.parse(fs.readFileSync(`{tmp_path}/${{name}}/${{file}}`));
          const tokenizer = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"));
          results[name] = {json.dumps(lines)}.map((line) => tokenizer.encode(line).ids);
        }}
        console.log(JSON.stringify(results));"""
    )
    run = subprocess.run(["node", script], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == expected


def test_a_vocabulary_of_words_names_its_unknown_token(tmp_path):
    """Without the name, transformers.js fails on every text with an unknown word."""
    tokenizer = converted_tokenizers()["words"]
    assert tokenizer.unk_token is None
    transformers_js.save_tokenizer(tokenizer, tmp_path)
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert fields["unk_token"] == "<unk>"


def test_a_length_limit_that_would_truncate_a_source_is_not_saved(tmp_path):
    """transformers.js would truncate it, including its `</s>`, and translate the rest."""
    tokenizer = train_tokenizer(TEXTS, 300, model_max_length=5, show_progress=False)
    transformers_js.save_tokenizer(tokenizer, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length > 1e6


def test_a_warning_says_that_unigrams_have_no_byte_fallback(tmp_path, caplog):
    for kind in ("bpe", "unigram"):
        tokenizer = train_tokenizer(TEXTS, 300, tokenizer_type=kind, show_progress=False)
        assert not caplog.text
        transformers_js.save_tokenizer(tokenizer, tmp_path)
    assert "reads characters outside the vocabulary as <unk>" in caplog.text


def test_options_that_it_would_ignore_are_left_out_and_reported(caplog):
    config = GenerationConfig(sequence_bias=[[[5], -2.0]], no_repeat_ngram_size=3)
    fields = transformers_js.generation_config_of(config)
    assert "sequence_bias" not in fields
    assert fields["no_repeat_ngram_size"] == 3
    assert "left out, because transformers.js lacks it: sequence_bias" in caplog.text


def test_sampling_options_that_it_lacks_and_length_limits_are_reported(caplog):
    config = GenerationConfig(do_sample=True, top_k=9, top_p=0.5, max_length_factor=3)
    fields = transformers_js.generation_config_of(config)
    assert fields["top_k"] == 9
    assert "top_p" not in fields
    assert fields["max_length_factor"] == 3
    assert "lacks it: top_p" in caplog.text
    assert "the page reads max_length_factor, but transformers.js does not" in caplog.text


def test_the_generation_config_says_that_there_is_no_beam_search():
    config = GenerationConfig(
        num_beams=4, length_penalty=0.6, early_stopping="never", eos_token_id=2
    )
    fields = transformers_js.generation_config_of(config)
    assert fields["num_beams"] == 1
    assert fields["eos_token_id"] == 2
    assert not {"length_penalty", "early_stopping"} & fields.keys()


def test_without_npm_packages_a_warning_says_what_to_install(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("NODE_PATH", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    transformers_js.copy_scripts(tmp_path)
    assert transformers_js.INSTALL in caplog.text
    assert str(tmp_path) not in caplog.text  # of a folder that has its place later
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("listed", [True, False])
def test_scripts_are_copied_from_npm_packages(tmp_path, monkeypatch, listed):
    monkeypatch.setenv("NODE_PATH", str(tmp_path / "node_modules") if listed else "")
    monkeypatch.chdir(Path("/") if listed else tmp_path)
    for script in transformers_js.SCRIPTS:
        path = tmp_path / "node_modules" / script
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    (tmp_path / "output").mkdir()
    transformers_js.copy_scripts(tmp_path / "output")
    names = {path.name for path in (tmp_path / "output").iterdir()}
    assert names == {Path(script).name for script in transformers_js.SCRIPTS}


@needs_node
@pytest.mark.parametrize(
    ("generation_config", "positions", "most"),
    [
        ({}, None, 53),
        ({"extra_output_tokens": 90}, None, 93),
        ({"extra_output_tokens": 90, "max_length_factor": 2.5}, None, 7),
        ({"extra_output_tokens": 90, "max_length": 20}, None, 19),
        ({"max_length": 20, "max_new_tokens": 12}, None, 12),
        ({"max_new_tokens": 50}, 40, 39),
    ],
)
def test_the_page_has_the_limits_of_generate(generation_config, positions, most, tmp_path):
    """Of the new tokens for a source of three tokens."""
    model = {"generation_config": generation_config, "config": {}}
    if positions is not None:
        model["config"]["max_position_embeddings"] = positions  # learned
    shutil.copy(Path(transformers_js.__file__).parent / "page/worker.js", tmp_path / "worker.mjs")
    (tmp_path / "transformers.min.js").symlink_to(tmp_path / "library.mjs")
    (tmp_path / "library.mjs").write_text(
        f"""export const env = {{ backends: {{ onnx: {{ wasm: {{}} }} }} }};
        const translate = async (line, options) => [{{ translation_text: options.max_new_tokens }}];
        translate.tokenizer = () => ({{ input_ids: {{ dims: [1, 3] }} }});
        translate.model = {json.dumps(model)};
        export const pipeline = async () => translate;"""
    )
    (tmp_path / "page.mjs").write_text(
        """globalThis.onmessage = null;
        globalThis.postMessage = ({ text }) => text && console.log(text);
        await import("./worker.mjs");
        onmessage({ data: ["a b"] });"""
    )
    run = subprocess.run(["node", tmp_path / "page.mjs"], capture_output=True, text=True)
    assert run.stdout.strip() == str(most), run.stderr


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """The folder, and the greedy translations of the same graphs in ONNX Runtime. The model only
    writes ASCII, because decoders replace invalid UTF-8 in different ways."""
    folder = tmp_path_factory.mktemp("web")
    model = saved_model(folder / "model", encoder_layers=1, decoder_layers=1, lm_head_bias=True)
    texts = AutoTokenizer.from_pretrained(folder / "model").batch_decode(
        [[token] for token in range(model.config.vocab_size)]
    )
    for token, text in enumerate(texts):
        if not text.isascii():
            model.lm_head.bias.data[token] = -100
    model.save_pretrained(folder / "model")
    for name, target in (("web", transformers_js), ("onnx", onnx_graphs)):
        (folder / name).mkdir()
        target.write(folder / "model", folder / name, None)
    engine = onnxruntime_engine.load(folder / "onnx")
    tokenizer = AutoTokenizer.from_pretrained(folder / "onnx")
    return folder / "web", list(translate(LINES, engine, tokenizer, num_beams=1))


@pytest.mark.slow
@needs_npm
def test_node_translates(web, tmp_path):
    folder, expected = web
    library = NODE_MODULES / "@huggingface/transformers/dist/transformers.node.mjs"
    script = tmp_path / "translate.mjs"
    script.write_text(
        f"""import {{ env, pipeline }} from {json.dumps(str(library))};
        env.allowRemoteModels = false;
        const translate = await pipeline("translation", {json.dumps(str(folder))});
        const results = [];
        for (const line of {json.dumps(LINES)}.filter(Boolean)) {{
          const length = translate.tokenizer(line).input_ids.dims[1];
          const [result] = await translate(line, {{ max_new_tokens: length + 50 }});
          results.push(result.translation_text);
        }}
        console.log(JSON.stringify(results));"""
    )
    run = subprocess.run(["node", script], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1]) == [line for line in expected if line]


class Handler(SimpleHTTPRequestHandler):
    """Records its requests."""

    paths = set()

    def do_GET(self):
        self.paths.add(self.path)
        super().do_GET()


@pytest.mark.slow
@needs_npm
@pytest.mark.skipif(not Path(BROWSER).is_file(), reason=f"needs {BROWSER}")
def test_the_page_translates_without_a_request_to_another_host(web):
    """And requests the model from its own host each time, because it can have changed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    folder, expected = web
    handler = functools.partial(Handler, directory=folder)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        playwright.sync_playwright() as p,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{server.server_port}"
        browser = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page, urls = browser.new_page(), []
        page.on("request", lambda request: urls.append(request.url))
        for _ in range(2):
            Handler.paths.clear()
            page.goto(host)
            page.get_by_role("button", name="Translate", disabled=False).wait_for(timeout=120_000)
            files = {"config.json", "tokenizer.json", "onnx/encoder_model.onnx"}
            assert {f"/{file}" for file in files} <= Handler.paths
        page.get_by_label("Text", exact=True).fill("\n".join(LINES))
        page.get_by_role("button", name="Translate").click()
        page.locator("#status").filter(has_text=re.compile(r"\d s")).wait_for(timeout=60_000)
        assert page.get_by_label("Translation").text_content() == "\n".join(expected)
        assert all(url.startswith((host, "blob:", "data:")) for url in urls)
        browser.close()
        server.shutdown()

// Loads the model beside this file and translates lines, without a request to another host.
import { env, pipeline } from "./transformers.min.js";

env.allowRemoteModels = false;
env.allowLocalModels = true;
// transformers.js would keep a model under its address for ever, also where another one is there now.
env.useBrowserCache = false;
env.fetch = (url, options) => fetch(url, { ...options, cache: "no-cache" });
env.backends.onnx.wasm.wasmPaths = {
  mjs: new URL("ort-wasm-simd-threaded.mjs", import.meta.url).href,
  wasm: new URL("ort-wasm-simd-threaded.wasm", import.meta.url).href,
};

const loading = pipeline("translation", ".", { device: "wasm" });
loading.then(() => postMessage({ kind: "ready" }), fail);

function fail(error) {
  postMessage({ kind: "error", text: `Error: ${error.message ?? error}` });
}

// The most new tokens for a source of this length, by the first limit that the generation config sets,
// else the paper's: 50 more than the source. Learned positions end where their table does.
function mostTokens(length, { generation_config, config }) {
  const { max_new_tokens, max_length, max_length_factor, extra_output_tokens } = generation_config;
  const byFactor = max_length_factor && Math.max(1, Math.floor(max_length_factor * length));
  const bySource = byFactor ?? Math.max(1, length + (extra_output_tokens ?? 50));
  const most = max_new_tokens ?? (max_length ? max_length - 1 : bySource);
  return Math.min(most, (config.max_position_embeddings ?? Infinity) - 1);
}

async function translate(lines) {
  const translator = await loading;
  for (const line of lines) {
    let text = "";
    if (line.trim()) {
      const length = translator.tokenizer(line).input_ids.dims[1];
      const max_new_tokens = mostTokens(length, translator.model);
      const [result] = await translator(line, { max_new_tokens });
      text = result.translation_text;
    }
    postMessage({ kind: "line", text });
  }
  postMessage({ kind: "done" });
}

onmessage = ({ data }) => translate(data).catch(fail);

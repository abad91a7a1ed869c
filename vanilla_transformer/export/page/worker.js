// Loads the model beside this file and translates lines, without a request to another host.
import { env, pipeline } from "./transformers.min.js";

env.allowRemoteModels = false;
env.allowLocalModels = true;
env.backends.onnx.wasm.wasmPaths = {
  mjs: new URL("ort-wasm-simd-threaded.mjs", import.meta.url).href,
  wasm: new URL("ort-wasm-simd-threaded.wasm", import.meta.url).href,
};
const extraTokens = 50; // of a translation, beyond its source: the paper's limit

const loading = pipeline("translation", ".", { device: "wasm" });
loading.then(() => postMessage({ kind: "ready" }), fail);

function fail(error) {
  postMessage({ kind: "error", text: `Error: ${error.message ?? error}` });
}

async function translate(lines) {
  const translator = await loading;
  const { max_position_embeddings: positions = Infinity } = translator.model.config; // if learned
  for (const line of lines) {
    let text = "";
    if (line.trim()) {
      const length = translator.tokenizer(line).input_ids.dims[1];
      const max_new_tokens = Math.min(length + extraTokens, positions - 1);
      const [result] = await translator(line, { max_new_tokens });
      text = result.translation_text;
    }
    postMessage({ kind: "line", text });
  }
  postMessage({ kind: "done" });
}

onmessage = ({ data }) => translate(data).catch(fail);

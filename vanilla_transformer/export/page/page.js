// The page: what is typed goes to the worker, which translates line by line.
"use strict";

const [form, source, target, button, progress, status] =
  ["form", "source", "target", "translate", "progress", "status"].map((id) => document.getElementById(id));

function show(text, isWorking) {
  status.textContent = text;
  progress.hidden = !isWorking;
  button.disabled = isWorking;
}

function start() {
  const worker = new Worker("worker.js", { type: "module" });
  let began = 0;
  let lines = [];

  worker.onmessage = ({ data }) => {
    if (data.kind === "ready") {
      show("Ready", false);
    } else if (data.kind === "line") {
      lines.push(data.text);
    } else if (data.kind === "done") {
      target.textContent = lines.join("\n");
      show(`${((performance.now() - began) / 1000).toFixed(2)} s`, false);
    } else {
      show(data.text, false);
    }
  };
  worker.onerror = () => show("worker.js or transformers.min.js can't be loaded. See README.md.", false);

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (button.disabled || !source.value.trim()) return;
    began = performance.now();
    lines = [];
    show("Translating…", true);
    worker.postMessage(source.value.split("\n"));
  });
  source.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

if (location.protocol === "file:") {
  progress.hidden = true;
  status.textContent = "Browsers open models over http alone: run “python -m http.server” in this folder.";
} else {
  start();
}

/**
 * For which operators and element types onnxruntime-web has WebGPU kernels, as its own log says.
 *
 *   python js/bench/webgpu_models.py models.json 18 21
 *   node js/bench/webgpu-kernels.mjs models.json
 *
 * What it prints is what `src/onnxtrain/offline/passes/webgpu/kernels.py` has as a table.
 */

import { readFileSync } from "node:fs";

import { launch, serveTests } from "../test/chromium.js";

const models = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const browser = await launch(["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]);
const { server, address } = await serveTests();
const page = await browser.newPage();
let log = "";
page.on("console", (message) => (log += message.text()));
await page.goto(`${address}test/pages/index.html`);
await page.evaluate(async () => {
  window.ort = await import("/node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs");
  ort.env.logLevel = "verbose";
  ort.env.wasm.numThreads = 1;
});

const covered = {};
for (const { op, type, opset, model } of models) {
  log = "";
  const refused = await page.evaluate(async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const options = {
      executionProviders: ["webgpu"],
      logSeverityLevel: 1,
      graphOptimizationLevel: "disabled",
    };
    return ort.InferenceSession.create(bytes, options).then(
      (session) => session.release().then(() => ""),
      String,
    );
  }, model);
  const isMissing = /webgpu kernel not found in registries/.test(log);
  const isMalformed = /attribute '\w+' is missing|TypeInferenceError|not in range/.test(refused);
  ((covered[op] ??= {})[opset] ??= []).push(...(isMissing || isMalformed ? [] : [type]));
}
for (const [op, opsets] of Object.entries(covered)) {
  for (const [opset, types] of Object.entries(opsets)) {
    console.log(`${op} (${opset}): ${types.join(" ") || "-"}`);
  }
}
await browser.close();
server.close();

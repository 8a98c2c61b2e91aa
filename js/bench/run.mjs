/** Times a step of one network in Python, Node and Chromium, and in TensorFlow.js. See README.md. */

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { TrainingSession } from "../dist/index.js";
import { launch, serveTests } from "../test/chromium.js";
import { node } from "../test/runtimes.js";

const ROUNDS = Number(process.env.ROUNDS ?? 3);
const STEPS = 15;
const python = process.env.ONNXTRAIN_PYTHON ?? "python3";
const script = fileURLToPath(new URL("networks.py", import.meta.url));
const scratch = mkdtempSync(fileURLToPath(new URL("./artifacts-", import.meta.url)));
const folders = { cnn: join(scratch, "cnn"), mlp: join(scratch, "mlp") };
const found = new Map();

const note = (name, times) => found.set(name, [...(found.get(name) ?? []), ...times]);

const stepsOf = (name) => (name === "mlp" ? 20 * STEPS : STEPS);

function inPython(name) {
  const args = [script, "run", name, folders[name], String(stepsOf(name))];
  note(`${name}: Python, onnxruntime`, JSON.parse(execFileSync(python, args, { encoding: "utf-8" })));
}

async function inNode(name) {
  const ort = await node();
  const session = await TrainingSession.fromFolder({ ort, folder: folders[name] });
  const x = Float32Array.from({ length: 64 * 784 }, () => Math.random());
  const labels = Array.from({ length: 64 }, (_, i) => i % 10);
  const times = [];
  for (let i = 0; i < stepsOf(name) + 3; i++) {
    const began = performance.now();
    await session.step({ x, labels });
    times.push(performance.now() - began);
  }
  await session.release();
  note(`${name}: Node, onnxruntime-node`, times.slice(3));
}

async function inChromium(browser, address, threads) {
  const page = await browser.newPage();
  await page.goto(`${address}test/pages/index.html`);
  const times = await page.evaluate(
    async ([path, count, steps]) => {
      const ort = await import("/node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs");
      const { TrainingSession } = await import("/dist/index.js");
      ort.env.wasm.numThreads = count;
      const session = await TrainingSession.fromFolder({ ort, folder: path });
      const x = Float32Array.from({ length: 64 * 784 }, () => Math.random());
      const labels = Array.from({ length: 64 }, (_, i) => i % 10);
      const measured = [];
      for (let i = 0; i < steps + 2; i++) {
        const began = performance.now();
        await session.step({ x, labels });
        measured.push(performance.now() - began);
      }
      return measured.slice(2);
    },
    [`/bench/${scratch.split("/").pop()}/cnn`, threads, 8],
  );
  await page.close();
  note(`cnn: Chromium, onnxruntime-web, ${threads} thread${threads > 1 ? "s" : ""}`, times);
}

async function inTensorFlow(browser, address, backend) {
  const page = await browser.newPage();
  await page.goto(`${address}test/pages/index.html`);
  await page.addScriptTag({ url: `${address}node_modules/@tensorflow/tfjs/dist/tf.min.js` });
  await page.addScriptTag({
    url: `${address}node_modules/@tensorflow/tfjs-backend-wasm/dist/tf-backend-wasm.min.js`,
  });
  const result = await page.evaluate(async (wanted) => {
    tf.wasm.setWasmPaths("/node_modules/@tensorflow/tfjs-backend-wasm/dist/");
    await tf.setBackend(wanted);
    await tf.ready();
    const model = tf.sequential({
      layers: [
        tf.layers.conv2d({
          inputShape: [28, 28, 1],
          filters: 32,
          kernelSize: 3,
          activation: "relu",
        }),
        tf.layers.conv2d({ filters: 64, kernelSize: 3, activation: "relu" }),
        tf.layers.maxPooling2d({ poolSize: 2 }),
        tf.layers.flatten(),
        tf.layers.dense({ units: 128, activation: "relu" }),
        tf.layers.dense({ units: 10, activation: "softmax" }),
      ],
    });
    model.compile({ optimizer: tf.train.adam(0.001), loss: "categoricalCrossentropy" });
    const x = tf.randomUniform([64, 28, 28, 1]);
    const y = tf.oneHot(tf.range(0, 64, 1, "int32").mod(tf.scalar(10, "int32")), 10);
    const times = [];
    try {
      for (let i = 0; i < 3; i++) {
        const began = performance.now();
        await model.trainOnBatch(x, y);
        times.push(performance.now() - began);
      }
    } catch (error) {
      return error.message.slice(0, 200);
    }
    return times.slice(1);
  }, backend);
  await page.close();
  const name = `cnn: Chromium, TensorFlow.js 4.22, backend ${backend}`;
  if (typeof result === "string") found.set(`${name}: ${result}`, []);
  else note(name, result);
}

try {
  for (const [name, folder] of Object.entries(folders)) {
    execFileSync(python, [script, "write", name, folder]);
  }
  const browser = await launch();
  const { server, address } = await serveTests();
  for (let round = 0; round < ROUNDS; round++) {
    for (const name of Object.keys(folders)) {
      inPython(name);
      await inNode(name);
    }
    await inChromium(browser, address, 1);
    await inChromium(browser, address, 2);
    // A step of its cpu backend takes longer than all of the others together.
    if (round === 0) {
      for (const backend of ["wasm", "cpu"]) await inTensorFlow(browser, address, backend);
    }
  }
  await browser.close();
  server.close();
} finally {
  rmSync(scratch, { recursive: true });
}
for (const [name, times] of found) {
  const sorted = times.sort((a, b) => a - b);
  const [median, best] = [sorted[sorted.length >> 1], sorted[0]];
  console.log(
    times.length ? `${name}: median ${median.toFixed(1)} ms, best ${best.toFixed(1)} ms` : name,
  );
}

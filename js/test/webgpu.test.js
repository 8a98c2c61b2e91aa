/** Training on WebGPU, which Chromium computes on the CPU here: SwiftShader. */

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { launch, serveTests, skip } from "./chromium.js";

let browser, served, hasAdapter;

before(async () => {
  if (skip) return;
  browser = await launch(["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]);
  served = await serveTests();
  const page = await browser.newPage();
  await page.goto(`${served.address}test/pages/index.html`);
  hasAdapter = await page.evaluate(async () => Boolean(await navigator.gpu?.requestAdapter()));
  await page.close();
});

after(async () => {
  await browser?.close();
  served?.server.close();
});

async function onPage(work, argument) {
  const page = await browser.newPage();
  const logs = [];
  page.on("console", (message) => logs.push(message.text()));
  await page.goto(`${served.address}test/pages/index.html`);
  await page.evaluate(async () => {
    const [ort, onnxtrain, golden] = await Promise.all([
      import("/node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs"),
      import("/dist/index.js"),
      import("/test/golden.js"),
    ]);
    ort.env.wasm.numThreads = 1;
    Object.assign(window, { ort, ...onnxtrain, golden });
  });
  const found = await page.evaluate(work, argument);
  await page.close();
  return [found, logs];
}

for (const name of ["mlp", "cnn"]) {
  test(`${name} trains on WebGPU as in Python`, { skip }, async (context) => {
    if (!hasAdapter) {
      context.skip("this Chromium has no WebGPU");
      return;
    }
    const [found, logs] = await onPage(async (network) => {
      const expected = await (await fetch(`/test/golden/${network}/expected.json`)).json();
      const folder = `/test/golden/webgpu/${network}`;
      const sessionOptions = { executionProviders: ["webgpu"] };
      const session = await TrainingSession.fromFolder({ ort, folder }, sessionOptions);
      session.setLearningRate(expected.learning_rate);
      const differences = [];
      const take = async (from, step) => {
        const { loss } = await from.step(golden.batch(step, expected));
        differences.push(golden.difference(loss, expected.losses[step]));
      };
      for (let step = 0; step < 6; step++) await take(session, step);
      // What is on the GPU comes back for a checkpoint, with which the CPU goes on.
      const checkpoint = await session.saveCheckpoint();
      const later = await TrainingSession.fromFolder({ ort, folder, checkpoint });
      for (let step = 6; step < 8; step++) await take(later, step);
      return differences;
    }, name);
    assert.equal(found.length, 8);
    for (const difference of found) assert.ok(difference <= 1e-5, `${found}`);
    assert.deepEqual(logs.filter((line) => /not run by WebGPU/.test(line)), []);
  });
}

test("graphs that were not made for WebGPU are told apart", { skip }, async (context) => {
  if (!hasAdapter) {
    context.skip("this Chromium has no WebGPU");
    return;
  }
  const [message] = await onPage(async () => {
    const expected = await (await fetch("/test/golden/mlp/expected.json")).json();
    const session = await TrainingSession.fromFolder(
      { ort, folder: "/test/golden/mlp" },
      { executionProviders: ["webgpu"] },
    );
    return session.step(golden.batch(0, expected)).then(String, String);
  });
  assert.match(message, /ModelError: .*not made for WebGPU: make it with prepare/);
});

test("a browser without WebGPU trains on the CPU instead", { skip }, async () => {
  const plain = await launch(["--disable-features=WebGPU"]);
  try {
    const page = await plain.newPage();
    await page.goto(`${served.address}test/pages/index.html`);
    const [has, found, told] = await page.evaluate(async () => {
      const ort = await import("/node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs");
      const { TrainingSession } = await import("/dist/index.js");
      const golden = await import("/test/golden.js");
      ort.env.wasm.numThreads = 1;
      const expected = await (await fetch("/test/golden/mlp/expected.json")).json();
      const session = await TrainingSession.fromFolder(
        { ort, folder: "/test/golden/webgpu/mlp" },
        { executionProviders: ["webgpu", "wasm"] },
      );
      session.setLearningRate(expected.learning_rate);
      const losses = [];
      for (let step = 0; step < 3; step++) {
        losses.push((await session.step(golden.batch(step, expected))).loss);
      }
      const alone = await TrainingSession.fromFolder(
        { ort, folder: "/test/golden/webgpu/mlp" },
        { executionProviders: ["webgpu"] },
      );
      const told = await alone.step(golden.batch(0, expected)).then(String, String);
      const worst = losses.map((loss, i) => golden.difference(loss, expected.losses[i]));
      return [Boolean(await navigator.gpu?.requestAdapter()), Math.max(...worst), told];
    });
    assert.equal(has, false);
    assert.ok(found <= 1e-5);
    assert.match(told, /ModelError: there is no WebGPU here: .*'wasm'/);
  } finally {
    await plain.close();
  }
});

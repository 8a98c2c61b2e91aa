/** One run that goes from Node to Chromium to Python and back, in each direction once. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { TrainingSession } from "../dist/index.js";
import { launch, serveTests, skip as noBrowser } from "./chromium.js";
import { golden } from "./folders.js";
import { batch, difference, NETWORKS } from "./golden.js";
import { node } from "./runtimes.js";

const python = process.env.ONNXTRAIN_PYTHON;
const skip = noBrowser || (python ? false : "ONNXTRAIN_PYTHON is not set to a Python with onnxtrain");
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-relay-"));
let browser, served, page;

before(async () => {
  if (skip) return;
  browser = await launch();
  served = await serveTests();
  page = await browser.newPage();
  await page.goto(`${served.address}test/pages/index.html`);
});

after(async () => {
  await browser?.close();
  served?.server.close();
  rmSync(scratch, { recursive: true });
});

// Each takes the steps from `start` to `stop` and saves; returns the losses.
const RUNNERS = {
  async node(name, file, start, stop, expected) {
    const session = await TrainingSession.fromFolder({
      ort: await node(),
      folder: golden(name),
      checkpoint: file,
    });
    const losses = [];
    for (let step = start; step < stop; step++) {
      losses.push((await session.step(batch(step, expected))).loss);
    }
    writeFileSync(file, await session.saveCheckpoint());
    await session.release();
    return losses;
  },

  async chromium(name, file, start, stop, expected) {
    const [losses, saved] = await page.evaluate(
      async ([network, given, from, to, data]) => {
        const ort = await import("/node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs");
        const onnxtrain = await import("/dist/index.js");
        const { batch } = await import("/test/golden.js");
        const session = await onnxtrain.TrainingSession.fromFolder({
          ort,
          folder: `/test/golden/${network}`,
          checkpoint: Uint8Array.from(atob(given), (letter) => letter.charCodeAt(0)),
        });
        const found = [];
        for (let step = from; step < to; step++) {
          found.push((await session.step(batch(step, data))).loss);
        }
        const bytes = await session.saveCheckpoint();
        await session.release();
        return [found, btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))];
      },
      [name, readFileSync(file, "base64"), start, stop, expected],
    );
    writeFileSync(file, saved, "base64");
    return losses;
  },

  python(name, file, start, stop) {
    const script = fileURLToPath(new URL("continue.py", import.meta.url));
    const folder = fileURLToPath(golden(name));
    const printed = execFileSync(python, [script, "leg", folder, file, file], {
      input: JSON.stringify([start, stop]),
      encoding: "utf-8",
    });
    return JSON.parse(printed).losses;
  },
};

// All six ways from one to another.
const LEGS = ["node", "chromium", "python", "node", "python", "chromium", "node"];

for (const name of NETWORKS) {
  test(`a run of ${name} goes through ${LEGS.join(", ")}`, { skip }, async () => {
    const expected = JSON.parse(readFileSync(new URL("expected.json", golden(name)), "utf-8"));
    const file = join(scratch, name);
    const first = await TrainingSession.fromFolder({ ort: await node(), folder: golden(name) });
    first.setLearningRate(expected.learning_rate);
    writeFileSync(file, await first.saveCheckpoint());
    let step = 0;
    for (const leg of LEGS) {
      const stop = Math.min(step + 3, expected.losses.length);
      const losses = await RUNNERS[leg](name, file, step, stop, expected);
      losses.forEach((loss, i) => {
        const found = difference(loss, expected.losses[step + i]);
        assert.ok(found <= 1e-5, `step ${step + i} in ${leg}: ${found}`);
      });
      step = stop;
    }
    assert.equal(step, 20);
  });
}

/** What was begun here goes on in Python and the other way round. Needs ONNXTRAIN_PYTHON. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { fileURLToPath } from "node:url";

import { fit, TrainingSession } from "../dist/index.js";
import { golden, numbers, python as pythonFolder } from "./folders.js";
import { batch, difference, NETWORKS } from "./golden.js";
import { node } from "./runtimes.js";

const python = process.env.ONNXTRAIN_PYTHON;
const skip = python ? false : "ONNXTRAIN_PYTHON is not set to a Python with onnxtrain";
const ort = await node();
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-"));
after(() => rmSync(scratch, { recursive: true }));

function run(action, input, ...paths) {
  const script = fileURLToPath(new URL("continue.py", import.meta.url));
  const printed = execFileSync(python, [script, action, ...paths], { input, encoding: "utf-8" });
  return JSON.parse(printed);
}

for (const name of NETWORKS) {
  test(`${name} goes on in Python`, { skip }, async () => {
    const folder = golden(name);
    const expected = JSON.parse(readFileSync(new URL("expected.json", folder), "utf-8"));
    const session = await TrainingSession.fromFolder({ ort, folder });
    session.setLearningRate(expected.learning_rate);
    for (let step = 0; step < 10; step++) await session.step(batch(step, expected));
    session.state.properties.set("onnxtrain.classes", '["Käse", "Brot"]');
    session.state.properties.set("onnxtrain.image", '{"mean": [0.5]}').set("mine", "stays here");
    const [checkpoint, exported] = [join(scratch, name), join(scratch, `${name}.onnx`)];
    writeFileSync(checkpoint, await session.saveCheckpoint());
    writeFileSync(exported, await session.exportModelForInferencing(["y"]));
    const found = run("steps", "", fileURLToPath(folder), checkpoint, exported);
    assert.equal(found["same bytes"], true);
    assert.equal(found["same export"], true);
    assert.deepEqual(found.metadata, {
      "onnxtrain.classes": '["Käse", "Brot"]',
      "onnxtrain.image": '{"mean": [0.5]}',
    });
    assert.ok(found.difference < 1e-5);
    found.losses.forEach((loss, i) => assert.ok(difference(loss, expected.losses[10 + i]) <= 1e-5));
  });
}

test("a run of fit changes the language in the middle of an epoch, twice", { skip }, async () => {
  const random = numbers(9);
  const input = Float32Array.from({ length: 40 * 8 }, () => random() - 0.5);
  const labels = Array.from({ length: 40 }, (_, i) => i % 3);
  const folder = pythonFolder("mlp");
  const options = { epochs: 3, batchSize: 6, seed: 77, scheduler: "linear" };
  const data = { arrays: { input, labels } };
  const open = (checkpoint) => TrainingSession.fromFolder({ ort, folder, checkpoint });
  const whole = await fit(await open(), data, options);
  const controller = new AbortController();
  const [first, second] = [join(scratch, "first"), join(scratch, "second")];
  await fit(await open(), data, {
    ...options,
    signal: controller.signal,
    save: (bytes) => writeFileSync(first, bytes),
    onProgress: ({ step }) => step === 4 && controller.abort(),
  });
  const record = { input: [...input], labels, stop: 10, epochs: 3, batchSize: 6 };
  const middle = run("fit", JSON.stringify(record), fileURLToPath(folder), first, second);
  assert.deepEqual(middle.losses, whole.losses.slice(0, 10));
  const last = await fit(await open(second), data, { ...options, seed: undefined, resume: true });
  assert.deepEqual(last.losses, whole.losses);
});

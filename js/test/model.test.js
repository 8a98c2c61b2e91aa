import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { test } from "node:test";

import { CheckpointState, ModelError, OnnxTrainError, TrainingSession } from "../dist/index.js";
import { readModel } from "../dist/model-file.js";
import { findNeeded, takeApart } from "../dist/model-parts.js";
import { bytes, numbers, python } from "./folders.js";
import { node } from "./runtimes.js";

const ort = await node();

test("broken and hostile models are refused with words, or read", async () => {
  const folder = new URL("models/", python("hostile"));
  const names = readdirSync(folder);
  assert.ok(names.length > 10);
  for (const name of names) tryToRead(await bytes(folder, name), name);
});

test("whatever is damaged in a model, nothing but an error of this package comes of it", async () => {
  const good = await bytes(python("cnn"), "eval_model.onnx");
  const random = numbers(4);
  for (let round = 0; round < 2000; round++) {
    const damaged = good.slice(0, round % 5 ? good.length : Math.floor(random() * good.length));
    for (let k = 0; k < 1 + (round % 3); k++) {
      damaged[Math.floor(random() * damaged.length)] = Math.floor(random() * 256);
    }
    tryToRead(damaged, `round ${round}`);
  }
});

function tryToRead(data, name) {
  try {
    const model = readModel(data, name);
    const parts = takeApart(model);
    findNeeded(parts, [...parts.outputs.keys()], name);
  } catch (error) {
    assert.ok(error instanceof ModelError, `${name}: ${error.stack}`);
    assert.ok(error.message.length > 15);
  }
}

test("a model of the right form and wrong content is refused when it runs", async () => {
  const folder = python("mlp");
  const text = Buffer.from(await bytes(folder, "training_model.onnx"));
  // An operator that does not exist.
  const at = text.indexOf("Gemm");
  text.write("Gomm", at);
  const state = await CheckpointState.load(await bytes(folder, "checkpoint"));
  state.generation = null; // the graph is not the one that it was written with
  const trainModel = new Uint8Array(text);
  const session = await TrainingSession.create({ ort, checkpointState: state, trainModel });
  await assert.rejects(
    session.runTrainStep([new Float32Array(8), [0]]),
    (error) => error instanceof OnnxTrainError && /onnxruntime does not load/.test(error.message),
  );
});

import assert from "node:assert/strict";
import { test } from "node:test";

import { CheckpointState, TrainingSession } from "../dist/index.js";
import { bytes, golden, python } from "./folders.js";
import { compare, NETWORKS } from "./golden.js";
import { runtimes } from "./runtimes.js";

for (const [runtime, ort] of Object.entries(await runtimes())) {
  for (const name of NETWORKS) {
    test(`${name} trains in ${runtime} as in Python`, async () => {
      const worst = await compare(ort, (file) => bytes(golden(name), file));
      for (const [way, difference] of Object.entries(worst)) {
        assert.ok(difference <= 1e-5, `${way}: ${difference}`);
      }
    });
  }
}

test("frozen weights come from any checkpoint, in all runtimes alike", async () => {
  const x = Float32Array.from({ length: 32 }, (_, i) => Math.sin(i));
  const labels = [0, 1, 2, 0];
  const losses = [];
  for (const ort of Object.values(await runtimes())) {
    const folder = python("head");
    const first = await TrainingSession.fromFolder({ ort, folder });
    losses.push((await first.step([x, labels])).loss);
    const checkpoint = await CheckpointState.load(await first.saveCheckpoint());
    checkpoint.parameters.get("fc1.weight").data = new Float32Array(128).fill(0.1);
    const second = await TrainingSession.fromFolder({ ort, folder, checkpoint });
    losses.push((await second.evaluate([x, labels])).loss);
  }
  const [before, after, ...others] = losses;
  assert.ok(Math.abs(before - after) > 1e-3);
  assert.ok(Math.abs(others[0] - before) < 1e-5 && Math.abs(others[1] - after) < 1e-5);
});

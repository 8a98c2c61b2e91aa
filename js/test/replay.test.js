import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { CheckpointState, clearReplay, evaluate, fit, TrainingSession } from "../dist/index.js";
import { golden, numbers, python } from "./folders.js";
import { batch, difference } from "./golden.js";
import { node } from "./runtimes.js";

const ort = await node();
const folder = golden("mlp");
const read = (name) => JSON.parse(readFileSync(new URL(name, folder), "utf-8"));
const expected = read("expected.json");
const isMinified = Boolean(process.env.ONNXTRAIN_MINIFIED); // then private names are others

/** What the checkpoint keeps, as plain data. */
function keptBy(session) {
  const record = session.state.privateRecord.get("replay");
  const plain = (value) => (Array.isArray(value) ? value.map(plain) : Number(value));
  return Object.fromEntries(
    ["run", "runs", "classes", "seen", "full"].map((name) => [name, plain(record.get(name))]),
  );
}

function dataOf(number, classes) {
  const steps = Array.from({ length: 10 }, (_, i) => 10 * number + i);
  const x = Float32Array.from(steps.flatMap((step) => [...batch(step, expected)[0].data]));
  const labels = Array.from({ length: 60 }, (_, i) => classes[i % classes.length]);
  return { arrays: [{ data: x, dims: [60, 12] }, labels] };
}

for (const [name, { options, runs, losses, kept }] of Object.entries(read("../replay.json"))) {
  test(`old samples are those of Python: ${name}`, async () => {
    let session = await TrainingSession.fromFolder({ ort, folder: folder.href });
    session.setLearningRate(0.01);
    const replay = { size: options.size, share: options.share, keep: options.keep };
    for (const [number, classes] of runs.entries()) {
      const how = { epochs: 2, batchSize: 7, seed: 5 + number, replay };
      const history = await fit(session, dataOf(number, classes), how);
      assert.equal(history.losses.length, losses[number].length);
      history.losses.forEach((loss, i) => assert.ok(difference(loss, losses[number][i]) <= 1e-5));
      // The memory is in the checkpoint.
      const checkpoint = await CheckpointState.load(await session.saveCheckpoint());
      await session.release();
      session = await TrainingSession.fromFolder({ ort, folder: folder.href, checkpoint });
    }
    if (!isMinified) assert.deepEqual(keptBy(session), kept);
    await session.release();
  });
}

const random = numbers(4);
const input = Float32Array.from({ length: 90 * 8 }, () => random() * 2 - 1);
const labels = Array.from({ length: 90 }, (_, i) => {
  const row = [...input.subarray(8 * i, 8 * i + 3)];
  return row.indexOf(Math.max(...row));
});
const open = (checkpoint) => TrainingSession.fromFolder({ ort, folder: python("mlp"), checkpoint });

/** The samples of some classes. */
function only(...classes) {
  const rows = labels.flatMap((label, i) => (classes.includes(label) ? [i] : []));
  const x = Float32Array.from(rows.flatMap((i) => [...input.subarray(8 * i, 8 * i + 8)]));
  return { arrays: { input: x, labels: rows.map((i) => labels[i]) } };
}

test("old classes are not forgotten", async () => {
  const accuracies = [];
  for (const replay of [undefined, 30]) {
    const session = await open();
    session.setLearningRate(0.03);
    await fit(session, only(0, 1), { epochs: 12, batchSize: 16, seed: 1, replay });
    await fit(session, only(2), { epochs: 12, batchSize: 16, seed: 2, replay });
    accuracies.push((await evaluate(session, only(0, 1), { metrics: ["accuracy"] })).accuracy);
    await session.release();
  }
  assert.ok(accuracies[1] > accuracies[0] + 0.3, `${accuracies}`);
});

test("a run that is aborted and resumed draws the same samples", async () => {
  const begun = await open();
  begun.setLearningRate(0.02);
  const how = { epochs: 2, batchSize: 8, replay: { size: 12, share: 0.4 } };
  await fit(begun, only(0), { ...how, seed: 1 });
  const start = await begun.saveCheckpoint();
  const whole = await fit(await open(start), only(1, 2), { ...how, seed: 3 });
  for (const stopAt of [2, 9]) {
    const controller = new AbortController();
    let saved;
    await fit(await open(start), only(1, 2), {
      ...how,
      seed: 3,
      signal: controller.signal,
      save: (bytes) => (saved = bytes),
      onProgress: ({ step }) => step === stopAt && controller.abort(),
    });
    const again = await fit(await open(saved), only(1, 2), { ...how, resume: true });
    assert.deepEqual(again.losses, whole.losses);
    const other = fit(await open(saved), only(1, 2), { ...how, replay: 12, resume: true });
    await assert.rejects(other, /cannot go on there with other batches: (batches|replay)/);
  }
});

test("what does not fit is said", async () => {
  const session = await open();
  const refused = (replay, words, more = {}) =>
    assert.rejects(fit(session, only(0, 1, 2), { replay, ...more }), words);
  await refused(0, /a number of samples/);
  await refused(true, /a number of samples/);
  await refused("much", /a size like '5MB'/);
  await refused({ share: 1 }, /between 0 and 1/);
  await refused({ keep: "all" }, /'balanced' or 'reservoir'/);
  await refused("0.001KB", /a sample has 40 bytes/);
  clearReplay(session);
  await fit(session, only(0), { replay: 5 });
  await refused(5, /batchSize: 2 or more/, { batchSize: 1 });
  if (!isMinified) {
    session.state.privateRecord.set("replay", new Map([["format", 1n]]));
    await refused(5, /memory for replay cannot be read/);
    clearReplay(session);
    await fit(session, only(1), { replay: 5 });
  }
  await session.release();
});

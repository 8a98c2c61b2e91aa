import assert from "node:assert/strict";
import { test } from "node:test";

import {
  ArgumentError,
  evaluate,
  fit,
  InputError,
  setSeed,
  TrainingSession,
} from "../dist/index.js";
import { numbers, python } from "./folders.js";
import { node } from "./runtimes.js";

const ort = await node();
const open = (checkpoint) => TrainingSession.fromFolder({ ort, folder: python("mlp"), checkpoint });

const random = numbers(3);
const SAMPLES = 50;
const input = Float32Array.from({ length: SAMPLES * 8 }, () => random() * 2 - 1);
const labels = Array.from({ length: SAMPLES }, (_, i) =>
  input[8 * i] > 0.3 ? 2 : input[8 * i + 1] > 0 ? 1 : 0,
);
const data = { arrays: { input, labels } };

test("fit learns, and tells how it goes", async () => {
  const session = await open();
  session.setLearningRate(0.02);
  const events = [];
  const history = await fit(session, data, {
    epochs: 12,
    batchSize: 16,
    evaluate: data,
    metrics: ["accuracy"],
    scheduler: "cosine",
    onProgress: (event) => events.push(event),
  });
  assert.equal(history.losses.length, 12 * 4);
  assert.equal(history.epochs.length, 12);
  assert.ok(history.epochs[11].values.accuracy > 0.85, `${history.epochs[11].values.accuracy}`);
  assert.ok(history.epochs[11].values.evalLoss < history.epochs[0].values.evalLoss);
  assert.equal(events.filter(({ type }) => type === "step").length, 48);
  assert.equal(events.filter(({ type }) => type === "epoch").length, 12);
  assert.equal(events[0].batches, 4);
  assert.equal(history.epochs[11].learningRate, 0);
  assert.equal(session.getLearningRate(), Math.fround(0.02));
  const values = await evaluate(session, data, { metrics: { accuracy: "accuracy", two: () => 2 } });
  assert.equal(values.two, 2);
  assert.ok(Math.abs(values.accuracy - history.epochs[11].values.accuracy) < 1e-12);
});

test("a run that is aborted and resumed is the run that was not", async () => {
  setSeed(11);
  const options = { epochs: 4, batchSize: 8, scheduler: { name: "linear", warmupStepCount: 3 } };
  const whole = await open();
  const expected = await fit(whole, data, options);
  for (const stopAt of [3, 7, 20]) {
    const controller = new AbortController();
    let saved;
    const first = await open();
    const begun = await fit(first, data, {
      ...options,
      seed: 11,
      signal: controller.signal,
      save: (checkpoint) => (saved = checkpoint),
      onProgress: ({ type, step }) => type === "step" && step === stopAt && controller.abort(),
    });
    assert.equal(begun.aborted, true);
    assert.equal(begun.stopped, "aborted");
    assert.equal(begun.losses.length, stopAt);
    const resumed = await open(saved);
    // A new run from the checkpoint would not begin within the old schedule.
    assert.equal(resumed.getLearningRate(), whole.getLearningRate());
    const history = await fit(resumed, data, { ...options, resume: true });
    assert.deepEqual(history.losses, expected.losses);
    assert.deepEqual(
      resumed.state.parameters.get("fc1.weight").data,
      whole.state.parameters.get("fc1.weight").data,
    );
  }
});

test("accumulated batches are as one large batch", async () => {
  const [large, small] = [await open(), await open()];
  const options = { epochs: 2, shuffle: false };
  const one = await fit(large, data, { ...options, batchSize: 24 });
  const other = await fit(small, data, { ...options, batchSize: 8, accumulate: 3 });
  assert.equal(one.losses.length, other.losses.length);
  one.losses.forEach((loss, i) => assert.ok(Math.abs(loss - other.losses[i]) < 1e-5));
  const [a, b] = [large, small].map((session) => session.state.parameters.get("fc2.weight").data);
  a.forEach((value, i) => assert.ok(Math.abs(value - b[i]) < 1e-5));
});

test("early stopping ends a run and brings the best parameters back", async () => {
  const session = await open();
  session.setLearningRate(1);
  const history = await fit(session, data, {
    epochs: 60,
    evaluate: data,
    earlyStopping: { patience: 2, restoreBest: true },
  });
  assert.ok(history.epochs.length < 60);
  assert.match(history.stopped, /no better evalLoss for 2 epochs/);
  const best = history.epochs[history.bestEpoch - 1].values.evalLoss;
  assert.ok(Math.abs((await evaluate(session, data)).evalLoss - best) < 1e-5);
});

test("batches of an iterable, or of a function", async () => {
  const session = await open();
  const made = [0, 1].map((k) => ({
    input: input.subarray(64 * k, 64 * k + 64),
    labels: labels.slice(8 * k, 8 * k + 8),
  }));
  assert.equal((await fit(session, { batches: made }, { epochs: 3 })).losses.length, 6);
  async function* generate(epoch) {
    for (let i = 0; i <= epoch; i++) yield made[i % 2];
  }
  const history = await fit(session, { batches: generate }, { epochs: 3 });
  assert.equal(history.losses.length, 6);
  assert.equal(history.epochs[2].samples, 24);
  await assert.rejects(fit(session, { batches: generate(0) }, { epochs: 2 }), /gone through once/);
});

test("what makes no sense is refused before anything happens", async () => {
  const session = await open();
  const refused = (words, options, other = data) =>
    assert.rejects(fit(session, other, options), words);
  await refused(/metrics are measured/, { metrics: ["accuracy"] });
  await refused(/no scheduler 'magic'/, { scheduler: "magic" });
  await refused(/whole number/, { epochs: -1 });
  await refused(/whole number/, { batchSize: 0 });
  await refused(/cannot watch 'accuracy'/, { earlyStopping: { monitor: "accuracy" } });
  await refused(/no samples for the input 'labels'/, {}, { arrays: { input } });
  await refused(/has 50 samples and 'labels' 3/, {}, { arrays: { input, labels: [1, 2, 0] } });
  await refused(ArgumentError, {}, [input, labels]);
  await refused(InputError, {}, { arrays: { input, labels: labels.map((l) => l + 0.5) } });
  await refused(/totalStepCount/, { scheduler: "linear" }, { batches: async function* () {} });
  const saved = await open();
  await fit(saved, data, { epochs: 1 });
  await saved.step([input.subarray(0, 8), [0]]);
  const resumed = await open(await saved.saveCheckpoint());
  await assert.rejects(fit(resumed, data, { epochs: 2, resume: true }), /outside of fit/);
});

test("a loss that is not a number ends the run", async () => {
  const session = await open();
  const broken = input.slice();
  broken[100] = NaN;
  await assert.rejects(
    fit(session, { arrays: { input: broken, labels } }, { epochs: 1 }),
    /the loss is NaN/,
  );
});

test("the record of a long run does not grow, and does not depend on interruptions", async () => {
  const { thinned, stepsOf } = await import("../dist/history.js");
  const loss = (step) => (step === 700 ? 0 : 1 / step);
  const grown = (history, end) => {
    const steps = [...history.lossSteps];
    for (let step = (steps.at(-1) ?? 0) + 1; step <= end; step++) steps.push(step);
    const known = new Map(history.lossSteps.map((step, i) => [step, history.losses[i]]));
    return {
      losses: steps.map((step) => known.get(step) ?? loss(step)),
      lossSteps: steps,
      epochs: [],
      bestEpoch: null,
    };
  };
  const none = { losses: [], lossSteps: [] };
  const whole = thinned(grown(none, 20_000));
  let broken = none;
  for (const stop of [3, 900, 1001, 1005, 9999, 20_000]) broken = thinned(grown(broken, stop));
  assert.deepEqual(broken, whole);
  assert.ok(whole.losses.length <= 1002);
  assert.equal(Math.min(...whole.losses), 0);
  assert.equal(stepsOf(whole), 20_000);
  assert.equal(thinned(grown(none, 1000)).losses.length, 1000);
});

test("a run of more than a thousand steps is resumed", async () => {
  const few = { arrays: { input: input.slice(0, 16), labels: labels.slice(0, 2) } };
  const options = { epochs: 1300, batchSize: 2, seed: 1 };
  const whole = await open();
  assert.equal((await fit(whole, few, options)).losses.length, 1300);
  const first = await open();
  await fit(first, few, { ...options, epochs: 1200 });
  const second = await open(await first.saveCheckpoint());
  const resumed = await fit(second, few, { ...options, resume: true });
  assert.equal(resumed.lossSteps.at(-1), 1300);
  assert.ok(resumed.losses.length < 750, `${resumed.losses.length}`);
  assert.deepEqual(
    second.state.parameters.get("fc1.weight").data,
    whole.state.parameters.get("fc1.weight").data,
  );
  // The record is JSON in the checkpoint.
  const kept = async (session) => {
    const text = new TextDecoder("latin1").decode(await session.saveCheckpoint());
    return [text.match(/"losses": ?\{[^}]*\}/)[0], JSON.parse(text.match(/"kept_steps": ?(\[[^\]]*\])/)[1])];
  };
  const [losses, steps] = await kept(second);
  assert.deepEqual([losses, steps], await kept(whole));
  assert.ok(steps.length <= 1002 && losses.length < 12_000);
});

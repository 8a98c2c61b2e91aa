/** Compares training here with the losses that Python wrote; runs in Node and in a page. */

import { CheckpointState, TrainingSession } from "../dist/index.js";

export const NETWORKS = ["mlp", "cnn", "bert", "lstm", "int8"];

/** The numbers of a batch, by the formula of make.py. */
export function batch(step, { shape, words, classes }) {
  const count = shape.reduce((a, b) => a * b, 1);
  const drawn = Array.from({ length: count }, (_, i) => (i * 7919 + step * 104729) % 1009);
  const x = words
    ? drawn.map((value) => value % words)
    : Float32Array.from(drawn, (value) => (value / 1009) * 2 - 1);
  const labels = Array.from({ length: shape[0] }, (_, i) => (i * 5 + step * 3) % classes);
  return [{ data: x, dims: shape }, labels];
}

/** The relative difference of two numbers. */
export const difference = (a, b) => Math.abs(a - b) / Math.max(Math.abs(b), 1e-12);

/**
 * Train one network in several ways; returns the largest difference of each from Python.
 *
 * @param load gives the bytes of a file of the folder.
 */
export async function compare(ort, load, sessionOptions) {
  const expected = JSON.parse(new TextDecoder().decode(await load("expected.json")));
  const graphs = {
    trainModel: await load("training_model.onnx"),
    evalModel: await load("eval_model.onnx"),
    optimizerModel: await load("optimizer_model.onnx"),
  };
  const stepModel = await load("step_model.onnx");
  const open = async (checkpoint, more = {}) =>
    TrainingSession.create(
      { ort, checkpointState: await CheckpointState.load(checkpoint), ...graphs, ...more },
      sessionOptions,
    );
  const worst = {};
  const note = (way, found, wanted) => {
    worst[way] = Math.max(worst[way] ?? 0, difference(found, wanted));
  };

  const fused = await open(await load("checkpoint"), { stepModel });
  fused.setLearningRate(expected.learning_rate);
  for (let step = 0; step < expected.losses.length; step++) {
    note("step", (await fused.step(batch(step, expected))).loss, expected.losses[step]);
  }
  const after = batch(expected.losses.length, expected);
  note("evaluation", (await fused.evaluate(after)).loss, expected.evaluation);
  await fused.release();

  // The first ten steps with three graphs; then a save, and another session that goes on.
  let session = await open(await load("checkpoint"));
  session.setLearningRate(expected.learning_rate);
  for (let step = 0; step < 20; step++) {
    if (step === 10) {
      const bytes = await session.saveCheckpoint();
      await session.release();
      session = await open(bytes, { stepModel });
    }
    const feeds = batch(step, expected);
    if (step < 10) {
      const made = await session.runTrainStep(feeds);
      await session.runOptimizerStep();
      await session.lazyResetGrad();
      note("three graphs", made[session.lossName].data[0], expected.losses[step]);
    } else note("resumed", (await session.step(feeds)).loss, expected.losses[step]);
  }
  await session.release();

  // Go on from the checkpoint that Python saved after ten steps.
  const python = await open(await load("at10"), { stepModel });
  for (let step = 10; step < 20; step++) {
    note("from Python", (await python.step(batch(step, expected))).loss, expected.losses[step]);
  }
  await python.release();
  return worst;
}

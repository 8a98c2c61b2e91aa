/** Trains low-rank factors, and applies adapters; runs in Node and in a page. */

import { Adapter, applyAdapter, openSlots, TrainingSession } from "../dist/index.js";
import { batch } from "./golden.js";

/**
 * Compare with Python: losses, the scores of the adapter in the model, and in open slots.
 *
 * @param load gives the bytes of a file of the folder.
 * @returns the largest difference of each.
 */
export async function compareAdapter(ort, load) {
  const expected = JSON.parse(new TextDecoder().decode(await load("expected.json")));
  const baseData = await load("base.data");
  const session = await TrainingSession.create({
    ort,
    checkpointState: await load("checkpoint"),
    trainModel: await load("training_model.onnx"),
    evalModel: await load("eval_model.onnx"),
    stepModel: await load("step_model.onnx"),
    baseData,
  });
  session.setLearningRate(expected.learning_rate);
  const worst = { losses: 0, factors: 0 };
  for (const [step, wanted] of expected.losses.entries()) {
    const { loss } = await session.step(batch(step, expected));
    worst.losses = Math.max(worst.losses, Math.abs(loss - wanted));
  }
  const theirs = await Adapter.read(await load("after10.onnx_adapter"));
  const ours = await Adapter.read(await session.exportAdapter());
  for (const name of theirs.tensors.keys()) {
    ours.get(name).forEach((value, index) => {
      worst.factors = Math.max(worst.factors, Math.abs(value - theirs.get(name)[index]));
    });
  }
  const [{ data, dims }] = batch(20, expected);
  const x = new ort.Tensor("float32", data, dims);
  const run = async (model, feeds = {}) => {
    const external = { externalData: [{ path: "base.data", data: baseData }] };
    const made = await ort.InferenceSession.create(model, external);
    const scores = Object.values(await made.run({ x, ...feeds }))[0];
    await made.release();
    return [...scores.data];
  };
  const apart = (a, b) => Math.max(...a.map((value, i) => Math.abs(value - b[i])));
  const model = await load("inference_model.onnx");
  worst.applied = apart(await run(applyAdapter(model, theirs)), expected.scores);
  worst.trained = apart(await run(applyAdapter(model, ours)), expected.scores);
  worst.nothing = apart(await run(model), expected.scores);
  const factors = new Map([...theirs.tensors].filter(([name]) => name.includes(".lora_")));
  const low = new Adapter(factors, theirs.pairs);
  const slots = openSlots(model);
  worst.fed = apart(await run(slots, low.feeds(ort, slots)), await run(applyAdapter(model, low)));
  await session.release();
  return worst;
}

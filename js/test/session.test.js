import assert from "node:assert/strict";
import { test } from "node:test";

import {
  ArgumentError,
  CheckpointError,
  CheckpointState,
  InputError,
  LinearLRScheduler,
  ModelError,
  Module,
  Optimizer,
  setSeed,
  StateError,
  TrainingSession,
} from "../dist/index.js";
import { bytes, golden, python } from "./folders.js";
import { batch } from "./golden.js";
import { node, runtimes } from "./runtimes.js";

const ort = await node();
const x = Float32Array.from({ length: 32 }, (_, i) => Math.sin(i));
const labels = [0, 1, 2, 0];
const open = (name, more = {}) =>
  TrainingSession.fromFolder({ ort, folder: python(name), ...more });
const lossOf = (session, made) => made[session.lossName].data[0];

test("what upstream's users know", async () => {
  const session = await open("mlp");
  assert.deepEqual(session.trainingInputNames, ["input", "labels"]);
  assert.deepEqual(session.evalInputNames, ["input", "labels"]);
  assert.equal(session.trainingOutputNames[1], "output");
  assert.deepEqual(session.evalOutputNames, session.trainingOutputNames);
  const feeds = {
    input: new ort.Tensor("float32", x, [4, 8]),
    labels: new ort.Tensor("int64", BigInt64Array.from(labels.map(BigInt)), [4]),
  };
  const first = await session.runTrainStep(feeds);
  await session.runOptimizerStep();
  await session.lazyResetGrad();
  const second = await session.runEvalStep(feeds);
  assert.ok(lossOf(session, second) < lossOf(session, first));
  assert.deepEqual(Object.keys(await session.runEvalStep(feeds, ["output"])), ["output"]);
  assert.deepEqual(Object.keys(await session.runEvalStep(feeds, { output: null })), ["output"]);
  assert.equal(Object.keys(await session.runTrainStep(feeds, { logSeverityLevel: 2 })).length, 2);
  await assert.rejects(session.runEvalStep(feeds, ["nothing"]), /no output 'nothing'/);

  const size = await session.getParametersSize(true);
  assert.equal(size, 16 * 8 + 16 + 3 * 16 + 3);
  const parameters = await session.getContiguousParameters(true);
  assert.deepEqual(parameters.dims, [size]);
  const moved = parameters.data.map((value) => value + 1);
  await session.loadParametersBuffer(new Uint8Array(moved.buffer), true);
  assert.deepEqual((await session.getContiguousParameters()).data, moved);
  await assert.rejects(session.loadParametersBuffer(new Uint8Array(8)), /the buffer has 2 numbers/);
  await session.release();
  await assert.rejects(session.runTrainStep(feeds), /released/);
});

test("gradients accumulate until they are reset", async () => {
  const session = await open("mlp");
  await session.runTrainStep([x, labels]);
  const { parameters } = session.state;
  const once = parameters.get("fc2.bias").grad.slice();
  assert.ok(once.some((value) => value !== 0));
  await session.runTrainStep([x, labels]);
  parameters
    .get("fc2.bias")
    .grad.forEach((value, i) => assert.ok(Math.abs(value - 2 * once[i]) < 1e-6));
  await session.lazyResetGrad();
  await session.runTrainStep([x, labels]);
  assert.deepEqual(parameters.get("fc2.bias").grad, once);
  parameters.get("fc2.bias").grad = new Float32Array(3);
  assert.deepEqual(parameters.get("fc2.bias").grad, new Float32Array(3));
});

test("calls that are made at once happen one after the other", async () => {
  const [one, other] = [await open("mlp"), await open("mlp")];
  const together = await Promise.all(Array.from({ length: 6 }, () => one.step([x, labels])));
  for (const { loss } of together) assert.equal((await other.step([x, labels])).loss, loss);
});

test("a run that is saved and loaded goes on as if it had not stopped, random numbers included", async () => {
  setSeed(5);
  const images = Float32Array.from({ length: 4 * 36 }, (_, i) => Math.cos(i));
  const whole = await open("cnn");
  const half = await open("cnn");
  const saved = await half.saveCheckpoint();
  const losses = [];
  for (let i = 0; i < 6; i++) losses.push((await whole.step([images, labels])).loss);
  const session = await open("cnn", { checkpoint: saved });
  for (let i = 0; i < 3; i++) assert.equal((await session.step([images, labels])).loss, losses[i]);
  const resumed = await open("cnn", { checkpoint: await session.saveCheckpoint() });
  for (let i = 3; i < 6; i++) assert.equal((await resumed.step([images, labels])).loss, losses[i]);
  assert.deepEqual(await resumed.saveCheckpoint(), await whole.saveCheckpoint());
});

test("learning rate and scheduler are saved and go on", async () => {
  const session = await open("mlp");
  assert.equal(session.getLearningRate(), Math.fround(0.001));
  session.registerLinearLRScheduler(2, 10, 0.1);
  assert.equal(session.getLearningRate(), 0);
  for (let i = 0; i < 3; i++) {
    await session.step([x, labels]);
    session.schedulerStep();
  }
  assert.equal(session.getLearningRate(), Math.fround(0.1 * (7 / 8)));
  const resumed = await open("mlp", { checkpoint: await session.saveCheckpoint() });
  assert.equal(resumed.getLearningRate(), session.getLearningRate());
  new LinearLRScheduler(resumed.optimizer, {
    warmupStepCount: 2,
    totalStepCount: 10,
    initialLr: 0.1,
  });
  await resumed.step([x, labels]);
  resumed.schedulerStep();
  assert.equal(resumed.getLearningRate(), Math.fround(0.1 * (6 / 8)));
  assert.throws(() => session.setLearningRate(NaN), ArgumentError);
});

test("frozen parameters: constants that can be set, and that any checkpoint brings", async () => {
  const session = await open("head");
  const first = (await session.evaluate([x, labels])).loss;
  await session.step([x, labels]);
  // A saved checkpoint has another layout than the one that the graphs name.
  const again = await open("head", { checkpoint: await session.saveCheckpoint() });
  assert.equal(
    (await again.evaluate([x, labels])).loss,
    (await session.evaluate([x, labels])).loss,
  );
  const frozen = again.state.parameters.get("fc1.weight");
  assert.equal(frozen.requiresGrad, false);
  assert.equal(frozen.grad, null);
  frozen.data = new Float32Array(128);
  again.state.parameters.get("fc1.bias").data = new Float32Array(16); // in the graph itself
  const zeroed = (await again.evaluate([x, labels])).outputs.output.data;
  const bias = again.state.parameters.get("fc2.bias").data;
  zeroed.forEach((value, i) => assert.ok(Math.abs(value - bias[i % 3]) < 1e-6));
  assert.notEqual(first, (await again.evaluate([x, labels])).loss);
});

test("a nominal checkpoint is completed by a buffer", async () => {
  const full = await open("mlp");
  const buffer = await full.getContiguousParameters(false);
  const nominal = await open("mlp", { checkpoint: new URL("nominal_checkpoint", python("mlp")) });
  assert.equal(await nominal.getParametersSize(), buffer.size);
  await assert.rejects(nominal.step([x, labels]), /Please load the model parameters first/);
  await assert.rejects(nominal.loadParametersBuffer(buffer, true), StateError);
  await nominal.loadParametersBuffer(buffer, false);
  assert.equal((await nominal.step([x, labels])).loss, (await full.step([x, labels])).loss);
});

test("the export is a model that gives what evaluation gives", async () => {
  for (const name of ["mlp", "head", "cnn"]) {
    const size = name === "cnn" ? 144 : 32;
    const input = Float32Array.from({ length: size }, (_, i) => Math.sin(i));
    const session = await open(name);
    await session.step([input, labels]);
    const { outputs } = await session.evaluate([input, labels]);
    const exported = await ort.InferenceSession.create(
      await session.exportModelForInferencing(["output"]),
    );
    assert.deepEqual(exported.inputNames, ["input"]);
    const dims = name === "cnn" ? [4, 1, 6, 6] : [4, 8];
    const made = await exported.run({ input: new ort.Tensor("float32", input, dims) });
    made.output.data.forEach((value, i) =>
      assert.ok(Math.abs(value - outputs.output.data[i]) < 1e-5),
    );
  }
  const session = await open("mlp");
  const between = await ort.InferenceSession.create(
    await session.exportModelForInferencing(["active", "fc1.bias"]),
  );
  assert.deepEqual(between.outputNames, ["active", "fc1.bias"]);
  await assert.rejects(session.exportModelForInferencing(["nothing"]), /has no value 'nothing'/);
  await assert.rejects(session.exportModelForInferencing([]), ArgumentError);
  await assert.rejects(session.exportModelForInferencing(["output", "output"]), /twice/);
});

test("module and optimizer, as in Python", async () => {
  const state = await CheckpointState.load(new URL("checkpoint", python("mlp")));
  const file = (name) => new URL(`${name}_model.onnx`, python("mlp"));
  const module = await Module.create({
    ort,
    state,
    trainModel: file("training"),
    evalModel: file("eval"),
  });
  const optimizer = await Optimizer.create(file("optimizer"), module);
  optimizer.learningRate = 0.01;
  const [loss] = module.outputNames();
  const losses = [];
  for (let i = 0; i < 5; i++) {
    losses.push((await module.run([x, labels]))[loss].data[0]);
    await optimizer.step();
    module.lazyResetGrad();
  }
  assert.ok(losses[4] < losses[0]);
  module.eval();
  assert.ok((await module.run([x, labels]))[loss].data[0] < losses[4]);
  assert.equal(optimizer.stepCount, 5);
});

test("a fixed batch size", async () => {
  const fixed = await open("mlp", { batchSize: 4 });
  const plain = await open("mlp");
  assert.equal((await fixed.step([x, labels])).loss, (await plain.step([x, labels])).loss);
  await assert.rejects(fixed.step([x.subarray(8), [0, 1, 2]]), /batchSize 4 fixed it/);
  const automatic = await open("mlp", { batchSize: "auto" });
  await automatic.step([x, labels]);
  await automatic.step([x.subarray(8), [0, 1, 2]]);
  await assert.rejects(open("mlp", { batchSize: 0 }), ArgumentError);
});

test("inputs that do not fit are refused with what is expected", async () => {
  const session = await open("mlp");
  const refused = (feeds, words) =>
    assert.rejects(
      session.step(feeds),
      (error) => error instanceof InputError && words.test(error.message),
    );
  await refused(
    [x],
    /1 inputs were given, and there are 2.*input: float32 \[N, 8\]; labels: int64/,
  );
  await refused({ input: x }, /missing: 'labels'/);
  await refused({ input: x, labels, more: x }, /unknown: 'more'/);
  await refused([x.subarray(1), labels], /not clear/);
  await refused(
    [{ data: x, dims: [8, 4] }, labels],
    /has the shape \[N, 8\], and was given \[8, 4\]/,
  );
  await refused([x, [0, 1, 2]], /labels/);
  await refused([x, [0, 1, 2, 0.5]], /int64, and 0.5 at 3 is not/);
  await refused([x, "abcd"], /neither a tensor nor numbers/);
  await refused(null, /by name, or as a list/);
  assert.ok((await session.step([[...x], new Int32Array(labels)])).loss > 0);
});

test("files that do not belong together are refused", async () => {
  const files = async (name) => ({
    trainModel: await bytes(python(name), "training_model.onnx"),
    evalModel: await bytes(python(name), "eval_model.onnx"),
    optimizerModel: await bytes(python(name), "optimizer_model.onnx"),
  });
  const checkpoint = await bytes(python("mlp"), "checkpoint");
  const create = async (more) =>
    TrainingSession.create({ ort, checkpointState: checkpoint, ...(await files("mlp")), ...more });
  await assert.rejects(create(await files("cnn")), CheckpointError);
  await assert.rejects(create(await files("head")), CheckpointError);
  await assert.rejects(
    create({ checkpointState: await bytes(golden("mlp"), "at10") }),
    /do not belong together|different runs of prepare/,
  );
  await assert.rejects(create({ optimizerModel: (await files("mlp")).trainModel }), ModelError);
  const { trainModel } = await files("mlp");
  for (const length of [0, 1, 10, 1000, trainModel.length - 1]) {
    await assert.rejects(create({ trainModel: trainModel.slice(0, length) }), ModelError);
  }
  await assert.rejects(
    create({ trainModel: new TextEncoder().encode("<html>not a model</html>") }),
    ModelError,
  );
  await assert.rejects(create({ ort: undefined }), /ort is the package of onnxruntime/);
  await assert.rejects(
    TrainingSession.fromFolder({ ort, folder: "/nowhere" }),
    /not a folder of training/,
  );
  const moments = await (await open("head")).saveCheckpoint();
  await assert.rejects(open("mlp", { checkpoint: moments }), CheckpointError);
});

test("without an optimizer or an evaluation graph, what needs them says so", async () => {
  const session = await TrainingSession.create({
    ort,
    checkpointState: await bytes(python("mlp"), "checkpoint"),
    trainModel: await bytes(python("mlp"), "training_model.onnx"),
  });
  await session.runTrainStep([x, labels]);
  await assert.rejects(session.runOptimizerStep(), /no optimizer graph/);
  await assert.rejects(session.evaluate([x, labels]), /no evaluation graph/);
  await assert.rejects(session.exportModelForInferencing(["output"]), /no evaluation graph/);
  assert.throws(() => session.getLearningRate(), /no optimizer/);
  const fused = await TrainingSession.create({
    ort,
    checkpointState: await bytes(python("mlp"), "checkpoint"),
    trainModel: await bytes(python("mlp"), "training_model.onnx"),
    stepModel: await bytes(python("mlp"), "step_model.onnx"),
  });
  assert.ok((await fused.step([x, labels])).loss > (await fused.step([x, labels])).loss);
});

test("an error in the middle leaves the state as it was", async () => {
  const session = await TrainingSession.fromFolder({ ort, folder: golden("bert") });
  const expected = { shape: [6, 7], words: 20, classes: 3 };
  await session.step(batch(0, expected));
  const before = await session.saveCheckpoint();
  const [tokens, classes] = batch(1, expected);
  await assert.rejects(
    session.step([{ ...tokens, data: tokens.data.map(() => 999) }, classes]),
    /failed to run/,
  );
  assert.deepEqual(await session.saveCheckpoint(), before);
  await session.step(batch(1, expected));
});

for (const [runtime, own] of Object.entries(await runtimes())) {
  const once = process.env.ONNXTRAIN_MINIFIED ? "is tested with the single files" : false;
  test(`a thousand steps do not fill the memory in ${runtime}`, { skip: once }, async () => {
    // Parameters and moments have 60 kB: kept from each step, they would be 60 MB.
    const session = await TrainingSession.fromFolder({ ort: own, folder: golden("bert") });
    const feeds = batch(0, { shape: [6, 7], words: 20, classes: 3 });
    const used = async (steps) => {
      for (let i = 0; i < steps; i++) await session.step(feeds);
      globalThis.gc?.();
      const { heapUsed, external, arrayBuffers, rss } = process.memoryUsage();
      return { held: heapUsed + external + arrayBuffers, rss };
    };
    const before = await used(200);
    const after = await used(1000);
    const mebibytes = (key) => (after[key] - before[key]) / 2 ** 20;
    assert.ok(mebibytes("held") < 8, `${mebibytes("held")} MiB more are held`);
    // Compiling WebAssembly takes memory for a while, so that this says little there.
    if (own === ort) assert.ok(mebibytes("rss") < 32, `${mebibytes("rss")} MiB more`);
    await session.release();
  });
}

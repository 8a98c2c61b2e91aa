/** Models that train for integers: ranges, and what is exported. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { CheckpointState, fit, ModelError, RunError, StateError, TrainingSession } from "../dist/index.js";
import { exportModel } from "../dist/export.js";
import { readModel, readTensorType } from "../dist/model-file.js";
import { takeApart } from "../dist/model-parts.js";
import { bytes, golden, python } from "./folders.js";
import { batch } from "./golden.js";
import { node, runtimes } from "./runtimes.js";

const ort = await node();
const [RANGES, MOMENTUM] = ["quantization.ranges", "quantization.momentum"];
const [FLOAT, INT8, INT32] = [1, 3, 6];
const expected = JSON.parse(new TextDecoder().decode(await bytes(golden("int8"), "expected.json")));
const open = (runtime = ort, folder = golden("int8")) =>
  TrainingSession.fromFolder({ ort: runtime, folder });

/** The element types of the initializers of a model, by name. */
function typesIn(model) {
  const { initializers } = takeApart(readModel(model, "the model"));
  return new Map([...initializers].map(([name, tensor]) => [name, readTensorType(tensor).code]));
}

for (const [name, runtime] of Object.entries(await runtimes())) {
  test(`${name} exports integers and no copy of floats`, async () => {
    const session = await open(runtime);
    for (let step = 0; step < 3; step++) await session.step(batch(step, expected));
    const model = await session.exportModelForInferencing(["y"]);
    const types = typesIn(model);
    for (const weight of session.state.parameters.names().filter((item) => item.endsWith(".weight"))) {
      assert.ok(!types.has(weight));
      assert.equal(types.get(`${weight}_quantized`), INT8);
      assert.equal(types.get(`${weight}_scale`), FLOAT);
    }
    assert.ok([...types].some(([item, code]) => item.endsWith("bias_quantized") && code === INT32));
    const [x, labels] = batch(9, expected);
    const { outputs } = await session.evaluate([x, labels]);
    const exported = await runtime.InferenceSession.create(model, {
      graphOptimizationLevel: "disabled",
    });
    const made = await exported.run({
      [exported.inputNames[0]]: new runtime.Tensor("float32", x.data, x.dims),
    });
    made.y.data.forEach((score, i) => assert.ok(Math.abs(score - outputs.y.data[i]) < 1e-6));
    await session.release();
  });
}

test("values that are computed before export can be outputs", async () => {
  const session = await open();
  const name = session.state.parameters.names().find((item) => item.endsWith(".weight"));
  const model = await session.exportModelForInferencing([`${name}_quantized`, name, "y"]);
  const exported = await ort.InferenceSession.create(model);
  assert.deepEqual(exported.outputNames, [`${name}_quantized`, name, "y"]);
  const only = await session.exportModelForInferencing([`${name}_scale`]);
  assert.deepEqual((await ort.InferenceSession.create(only)).inputNames, []);
});

test("ranges follow training until they are frozen", async () => {
  const session = await open();
  const first = session.getParameter(RANGES);
  await session.step(batch(0, expected));
  const second = session.getParameter(RANGES);
  assert.notDeepEqual(second, first);
  session.freezeRanges();
  await session.step(batch(1, expected));
  assert.deepEqual(session.getParameter(RANGES), second);
  const checkpoint = await CheckpointState.load(await session.saveCheckpoint());
  assert.deepEqual([...checkpoint.parameters.get(MOMENTUM).data], [0]);
  const float = await open(ort, python("mlp"));
  assert.throws(() => float.freezeRanges(), StateError);
});

test("fit lets ranges rest for its last quarter", async () => {
  const session = await open();
  const [{ data: input }] = batch(0, { ...expected, shape: [24, 1, 4, 4] });
  const labels = Array.from({ length: 24 }, (_, i) => i % 4);
  const seen = [];
  const onProgress = ({ type }) => {
    if (type !== "step") return;
    seen.push(session.getParameter(RANGES));
    assert.ok(Math.abs(session.getParameter(MOMENTUM)[0] - 0.1) < 1e-6);
  };
  const [name] = session.inputNames();
  const options = { epochs: 2, batchSize: 4, onProgress };
  await fit(session, { arrays: { [name]: input, labels } }, options);
  const moved = seen.slice(1).map((ranges, i) => ranges.some((value, k) => value !== seen[i][k]));
  assert.deepEqual(moved, Array.from({ length: 11 }, (_, i) => i + 1 < 9));
});

test("a batch that is not finite changes no range", async () => {
  const session = await open();
  for (const bad of [NaN, Infinity]) {
    const before = session.getParameter(RANGES);
    const [x, labels] = batch(0, expected);
    x.data[7] = bad;
    await session.step([x, labels]);
    assert.deepEqual(session.getParameter(RANGES), before);
  }
  assert.equal(session.skippedSteps, 2);
});

test("a wrong list of what to compute is refused", async () => {
  const session = await open();
  const { model } = session.module.evalPass.graph;
  const values = new Map(session.state.names().map((name) => [name, session.state.held(name)]));
  const exported = (...folded) =>
    exportModel({ ...model, notes: { ...model.notes, folded } }, ["y"], values, ort);
  await assert.rejects(exported("nothing"), (error) => error instanceof ModelError && /'nothing'/.test(error.message));
  await assert.rejects(exported("y"), /'y' among what depends on parameters alone .* the input/);
  const [first] = model.notes.folded;
  await exported(first, first, "quantization.ranges");
  const broken = { InferenceSession: { create: () => Promise.reject(new Error("no memory")) } };
  await assert.rejects(
    exportModel(model, ["y"], values, broken),
    (error) => error instanceof RunError && /could not quantize the parameters: no memory/.test(error.message),
  );
});

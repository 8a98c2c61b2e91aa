/** A step that is not finite changes nothing, and training goes on as if it had not been there. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { fit, NonFiniteError, setSeed, TrainingSession } from "../dist/index.js";
import { golden, python } from "./folders.js";
import { runtimes } from "./runtimes.js";

const SHAPES = { mlp: [8], cnn: [1, 6, 6], head: [8] };
const MODELS = Object.keys(SHAPES);
const ORTS = await runtimes();
const ort = ORTS["onnxruntime-node"];

const open = (name, package_ = ort) => {
  setSeed(3);
  return TrainingSession.fromFolder({ ort: package_, folder: python(name) });
};
const everything = (session) =>
  session.saveCheckpoint(true, { allowNonfinite: true }).then((bytes) => Buffer.from(bytes));

function batch(name, number, bad) {
  const dims = [4, ...SHAPES[name]];
  const size = dims.reduce((a, b) => a * b, 1);
  const data = Float32Array.from({ length: size }, (_, i) => Math.sin(i * 1.7 + number));
  if (bad !== undefined) data[5] = bad;
  return { input: { data, dims }, labels: [0, 1, 2, number % 3] };
}

for (const [name, package_] of Object.entries(ORTS)) {
  for (const model of MODELS) {
    test(`a fused step, ${model}, ${name}`, async () => {
      const [session, other] = [await open(model, package_), await open(model, package_)];
      for (const [number, bad] of [NaN, Infinity, -Infinity, NaN].entries()) {
        const before = await everything(session);
        const { loss } = await session.step(batch(model, number, bad));
        assert.ok(!Number.isFinite(loss));
        assert.ok(before.equals(await everything(session)));
        const good = batch(model, number);
        assert.equal((await session.step(good)).loss, (await other.step(good)).loss);
      }
      assert.ok((await everything(session)).equals(await everything(other)));
      assert.equal(session.skippedSteps, 4);
      assert.equal(session.skippedBatches, 4);
      assert.equal(session.optimizer.stepCount, 4);
    });
  }
}

for (const model of MODELS) {
  test(`separate steps, ${model}`, async () => {
    const [session, other] = [await open(model), await open(model)];
    for (let number = 0; number < 3; number++) {
      await session.runTrainStep(batch(model, number, NaN));
      for (const each of [session, other]) await each.runTrainStep(batch(model, number));
      await session.runTrainStep(batch(model, number, Infinity));
      for (const each of [session, other]) {
        await each.runOptimizerStep();
        await each.lazyResetGrad();
      }
      const before = await everything(session);
      await session.runTrainStep(batch(model, number, NaN));
      await session.runOptimizerStep(); // the gradients of the last step are still in memory
      assert.ok(before.equals(await everything(session)));
    }
    assert.ok((await everything(session)).equals(await everything(other)));
    assert.deepEqual([session.skippedBatches, session.skippedSteps], [9, 3]);
  });

  for (const accumulate of [1, 3]) {
    test(`fit skips, ${model}, accumulate ${accumulate}`, async () => {
      const [session, other] = [await open(model), await open(model)];
      const good = Array.from({ length: 6 }, (_, number) => batch(model, number));
      const bad = batch(model, 0, NaN);
      const given = [bad, bad, bad, ...good.slice(0, 3), bad, bad, bad, ...good.slice(3)];
      const events = [];
      const history = await fit(session, { batches: () => given }, {
        accumulate,
        nonfinite: "skip",
        onProgress: (event) => event.type === "skipped" && events.push(event),
      });
      const plain = await fit(other, { batches: () => good }, { accumulate });
      assert.deepEqual(history.losses, plain.losses);
      assert.equal(history.skipped, 6);
      assert.equal(events.length, 6);
      assert.match(events[0].why, /the loss is NaN/);
      for (const each of [session, other]) each.state.privateRecord.clear();
      assert.ok((await everything(session)).equals(await everything(other)));
    });
  }
}

test("fit stops by default, and in the end anyway", async () => {
  const session = await open("mlp");
  const before = await everything(session);
  const bad = batch("mlp", 0, NaN);
  await assert.rejects(fit(session, { batches: () => [bad] }), NonFiniteError);
  async function* forever() {
    for (;;) yield bad;
  }
  await assert.rejects(fit(session, { batches: forever }, { nonfinite: "skip" }), NonFiniteError);
  assert.equal(session.skippedBatches, 12);
  assert.ok(before.equals(await everything(session)));
  await assert.rejects(fit(session, { batches: () => [bad] }, { nonfinite: "ignore" }), /nonfinite/);
});

test("an accumulated gradient and a statistic", async () => {
  const session = await open("cnn");
  const { input, labels } = batch("cnn", 0);
  await session.step({ input, labels });
  const before = await everything(session);
  const huge = { data: input.data.map((value) => value * 1e25), dims: input.dims };
  assert.ok(Number.isFinite((await session.step({ input: huge, labels })).loss));
  assert.ok(before.equals(await everything(session)));
  await session.runTrainStep({ input, labels });
  const parameter = session.state.parameters.get("conv.weight");
  const gradient = parameter.grad.slice();
  gradient[0] = Infinity;
  parameter.grad = gradient;
  const again = await everything(session);
  await session.runOptimizerStep();
  assert.ok(again.equals(await everything(session)));
});

test("a step of graphs for WebGPU, which are not updated in place", async () => {
  setSeed(3);
  const folder = golden("webgpu/mlp");
  const [session, other] = await Promise.all(
    [0, 1].map(() => TrainingSession.fromFolder({ ort, folder })),
  );
  const feeds = (number, bad) => {
    const data = Float32Array.from({ length: 72 }, (_, i) => Math.sin(i + number));
    if (bad !== undefined) data[7] = bad;
    return [{ data, dims: [6, 12] }, [0, 1, 2, 3, 0, 1]];
  };
  for (let number = 0; number < 3; number++) {
    const before = await everything(session);
    await session.step(feeds(number, NaN));
    await session.runTrainStep(feeds(number, NaN));
    await session.runOptimizerStep();
    assert.ok(before.equals(await everything(session)));
    for (const each of [session, other]) await each.step(feeds(number));
  }
  assert.ok((await everything(session)).equals(await everything(other)));
  assert.deepEqual([session.skippedSteps, session.skippedBatches], [6, 6]);
});

test("artifacts of earlier versions", async () => {
  const [session, other] = [await open("earlier"), await open("mlp")];
  assert.ok(!session.checksFinite && other.checksFinite);
  for (let number = 0; number < 3; number++) {
    const feeds = batch("mlp", number);
    assert.equal((await session.step(feeds)).loss, (await other.step(feeds)).loss);
  }
  await assert.rejects(fit(session, { batches: () => [batch("mlp", 0)] }, { nonfinite: 1 }), /generate them anew/);
});

test("saving what is not finite needs a word", async () => {
  const session = await open("mlp");
  await session.step(batch("mlp", 0));
  const values = session.getParameter("fc1.weight");
  values[3] = NaN;
  session.updateParameter("fc1.weight", values);
  await assert.rejects(session.saveCheckpoint(), /'fc1.weight' .* nothing was saved/);
  await assert.rejects(session.exportModelForInferencing(["output"]), /nothing was exported/);
  assert.ok((await session.saveCheckpoint(true, { allowNonfinite: true })).length);
  assert.ok((await session.exportModelForInferencing(["output"], { allowNonfinite: true })).length);
});

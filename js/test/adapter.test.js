import assert from "node:assert/strict";
import { test } from "node:test";

import { Adapter, AdapterError, applyAdapter, openSlots, TrainingSession } from "../dist/index.js";
import { compareAdapter } from "./adapter.js";
import { bytes, golden, numbers, python } from "./folders.js";
import { batch } from "./golden.js";
import { node, runtimes } from "./runtimes.js";

const folder = golden("lora");
const ort = await node();

function adapter(rank, seed, layers = ["fc"], inputs = 3, outputs = 4) {
  const random = numbers(seed);
  const tensor = (...dims) => ({
    code: 1,
    dims,
    data: new Uint8Array(Float32Array.from({ length: dims[0] * dims[1] }, () => random() - 0.5).buffer),
  });
  const tensors = new Map();
  const pairs = layers.map((layer) => {
    const [a, b] = ["A", "B"].map((letter) => `${layer}.lora_${letter}.weight`);
    tensors.set(a, tensor(inputs, rank)).set(b, tensor(rank, outputs));
    return { layer, a, b, rank, scale: 2, kind: "linear" };
  });
  return new Adapter(tensors, pairs, "0123456789abcdef0123456789abcdef");
}

for (const [runtime, package_] of Object.entries(await runtimes())) {
  test(`low-rank factors train in ${runtime} as in Python, and adapters apply`, async () => {
    const worst = await compareAdapter(package_, (file) => bytes(folder, file));
    for (const way of ["losses", "factors", "applied", "trained", "fed"]) {
      assert.ok(worst[way] <= 2e-5, `${way}: ${worst[way]}`);
    }
    assert.ok(worst.nothing > 0.01); // without the adapter
  });
}

test("a folder finds its base; exported models have it inside", async () => {
  const session = await TrainingSession.fromFolder({ ort, folder: folder.href });
  const x = new Float32Array(12).fill(0.5);
  const { loss } = await session.step([{ data: x, dims: [1, 12] }, [1]]);
  assert.ok(Number.isFinite(loss));
  const outputs = session.outputNames(false).slice(1);
  const model = await session.exportModelForInferencing(outputs);
  const made = await ort.InferenceSession.create(model);
  const scores = await made.run({ x: new ort.Tensor("float32", x, [1, 12]) });
  const evaluated = (await session.evaluate([{ data: x, dims: [1, 12] }, [1]])).outputs[outputs[0]];
  scores[outputs[0]].data.forEach((value, i) => assert.ok(Math.abs(value - evaluated.data[i]) < 1e-5));
  await session.release();
});

test("a session goes on from an adapter, its own and Python's", async () => {
  const expected = JSON.parse(new TextDecoder().decode(await bytes(folder, "expected.json")));
  const made = () => TrainingSession.fromFolder({ ort, folder: folder.href });
  const [one, two] = [await made(), await made()];
  for (const session of [one, two]) session.setLearningRate(expected.learning_rate);
  for (let step = 0; step < 4; step++) await one.step(batch(step, expected));
  const file = await one.exportAdapter();
  await two.step(batch(9, expected)); // moments, which the adapter begins without
  await two.loadAdapter(file);
  assert.equal(two.optimizer.stepCount, 0);
  assert.equal(two.getLearningRate(), Math.fround(expected.learning_rate));
  for (const name of (await Adapter.read(file)).tensors.keys()) {
    one.getParameter(name).forEach((value, i) => {
      assert.ok(Math.abs(value - two.getParameter(name)[i]) <= 1e-7 * Math.abs(value));
    });
  }
  const again = await made(); // the same from the start, without moments
  again.setLearningRate(expected.learning_rate);
  await again.loadAdapter(await Adapter.read(file));
  assert.equal((await two.step(batch(4, expected))).loss, (await again.step(batch(4, expected))).loss);
  await two.loadAdapter(new URL("after10.onnx_adapter", folder));
  const theirs = await Adapter.read(await two.exportAdapter());
  const before = await Adapter.read(await bytes(folder, "after10.onnx_adapter"));
  for (const name of before.tensors.keys()) assert.deepEqual(theirs.get(name), before.get(name));
  const { outputs } = await two.evaluate(batch(20, expected));
  const scores = outputs[two.outputNames(false)[1]].data;
  expected.scores.forEach((value, i) => assert.ok(Math.abs(value - scores[i]) < 2e-5));
  for (const session of [one, two, again]) await session.release();
});

test("an adapter that a session does not train is refused, and changes nothing", async () => {
  const session = await TrainingSession.fromFolder({ ort, folder: folder.href });
  const theirs = await Adapter.read(await bytes(folder, "after10.onnx_adapter"));
  const refused = (given, words) => assert.rejects(session.loadAdapter(given), words);
  await refused(adapter(2, 1), /another base than the session/);
  const [pair] = theirs.pairs;
  const part = [...theirs.tensors].filter(([name]) => [pair.a, pair.b].includes(name));
  await refused(new Adapter(new Map(part), [pair]), /the adapter lacks \d+ of the \d+ tensors/);
  const other = adapter(2, 1, ["fc"]);
  await refused(new Adapter(other.tensors, other.pairs), /the session has no slot 'fc.lora_A/);
  await refused(new Uint8Array(40), AdapterError);
  await refused(undefined, /the bytes of a file/);
  const fresh = await TrainingSession.fromFolder({ ort, folder: folder.href });
  assert.deepEqual(await session.exportAdapter(), await fresh.exportAdapter());
  const plain = await TrainingSession.fromFolder({ ort, folder: python("mlp") });
  await assert.rejects(plain.loadAdapter(theirs), /train='lora'/);
  for (const each of [session, fresh, plain]) await each.release();
});

test("what is written is read, with pairs and base", async () => {
  const made = adapter(2, 1, ["a", "b"]);
  const read = await Adapter.read(made.toBytes());
  assert.deepEqual(read.pairs, made.pairs);
  assert.equal(read.base, made.base);
  for (const name of made.tensors.keys()) assert.deepEqual(read.get(name), made.get(name));
});

test("stacked adapters add up", () => {
  const [one, two] = [adapter(2, 1), adapter(3, 2)];
  const both = Adapter.stack([one, two], [0.5, 2]);
  assert.equal(both.rank, 5);
  const product = (from, i, j) => {
    const [a, b] = [from.get("fc.lora_A.weight"), from.get("fc.lora_B.weight")];
    const rank = from.rank;
    let sum = 0;
    for (let k = 0; k < rank; k++) sum += a[i * rank + k] * b[k * 4 + j];
    return sum;
  };
  for (let i = 0; i < 3; i++) {
    for (let j = 0; j < 4; j++) {
      const wanted = 0.5 * product(one, i, j) + 2 * product(two, i, j);
      assert.ok(Math.abs(product(both, i, j) - wanted) < 1e-5);
    }
  }
  assert.throws(() => Adapter.stack([one], [1, 2]), /a finite weight for each/);
});

test("what does not fit a model is said", async () => {
  const model = await bytes(folder, "inference_model.onnx");
  const theirs = await Adapter.read(await bytes(folder, "after10.onnx_adapter"));
  theirs.check(model);
  assert.throws(() => adapter(2, 1).check(model), /another base/);
  const nameless = new Adapter(adapter(2, 1).tensors, adapter(2, 1).pairs);
  assert.throws(() => applyAdapter(model, nameless), /no slot 'fc.lora_A.weight'; its slots are '0/);
  const other = adapter(2, 1, ["0"]);
  assert.throws(() => new Adapter(other.tensors, other.pairs).check(model), /float32 \[3, 2\] in the/);
  const session = await TrainingSession.fromFolder({ ort, folder: python("mlp") });
  await assert.rejects(session.exportAdapter(), /train='lora'/);
});

test("damaged and hostile adapters are refused", async () => {
  const good = adapter(1, 1).toBytes();
  const refused = (data) => assert.rejects(Adapter.read(data), AdapterError);
  for (let at = 0; at < good.length; at++) {
    const damaged = good.slice();
    damaged[at] ^= 0x11;
    await refused(damaged);
  }
  for (let length = 0; length < good.length - 300; length += 7) await refused(good.slice(0, length));
  const random = numbers(3);
  // Without its end, the file has no checksum.
  const open = good.slice(0, good.length - 40);
  for (let round = 0; round < 3000; round++) {
    const damaged = open.slice();
    for (let k = 0; k < 1 + (round % 3); k++) {
      damaged[Math.floor(random() * damaged.length)] = Math.floor(random() * 256);
    }
    await Adapter.read(damaged).catch((error) => {
      assert.ok(error instanceof AdapterError, error.stack);
    });
  }
  await assert.rejects(Adapter.read(await bytes(python("mlp"), "checkpoint")), /not an adapter/);
});

test("open slots are inputs, and slots without factors have rank 0", async () => {
  const model = openSlots(await bytes(folder, "inference_model.onnx"));
  const baseData = await bytes(folder, "base.data");
  const session = await ort.InferenceSession.create(model, {
    externalData: [{ path: "base.data", data: baseData }],
  });
  assert.ok(session.inputNames.includes("0.lora_A.weight"));
  const theirs = await Adapter.read(await bytes(folder, "after10.onnx_adapter"));
  const [pair] = theirs.pairs;
  const one = new Adapter(
    new Map([...theirs.tensors].filter(([name]) => [pair.a, pair.b].includes(name))),
    [pair],
  );
  const feeds = one.feeds(ort, model);
  assert.deepEqual([...feeds["2.lora_A.weight"].dims], [16, 0]);
  const x = new ort.Tensor("float32", new Float32Array(12), [1, 12]);
  const scores = Object.values(await session.run({ x, ...feeds }))[0];
  assert.equal(scores.data.length, 4);
  assert.throws(() => theirs.feeds(ort, model), /applyAdapter/); // it has a bias, too
});

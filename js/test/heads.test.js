import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { CheckpointState, fitHead, TrainingSession } from "../dist/index.js";
import { eigen, gram, matrix, product, rowOf, transposed } from "../dist/eigen.js";
import { golden, numbers, python } from "./folders.js";
import { batch } from "./golden.js";
import { node } from "./runtimes.js";

const ort = await node();
const folder = golden("mlp");
const read = (url) => JSON.parse(readFileSync(url, "utf-8"));
const expected = read(new URL("expected.json", folder));
const heads = read(new URL("../heads.json", folder));

function samples(count) {
  const batches = Array.from({ length: count }, (_, step) => batch(step, expected));
  const x = Float32Array.from(batches.flatMap(([{ data }]) => [...data]));
  const y = batches.flatMap(([, labels]) => labels);
  return { arrays: [{ data: x, dims: [y.length, 12] }, y] };
}

const near = (found, wanted, within) => {
  const size = Math.max(...wanted.map(Math.abs));
  found.forEach((value, i) => assert.ok(Math.abs(value - wanted[i]) <= within * size, `${i}: ${value}, ${wanted[i]}`));
};

test("heads are those of Python", async () => {
  const session = await TrainingSession.fromFolder({ ort, folder: folder.href });
  for (const [name, wanted] of Object.entries(heads)) {
    const { regularization, ...rest } = wanted.options;
    const found = await fitHead(session, samples(wanted.batches), { ...rest, regularization });
    assert.equal(found.accuracy, wanted.accuracy, name);
    assert.equal(found.samples, 6 * wanted.batches);
    if (wanted.regularization === null) assert.equal(found.regularization, null);
    else near([found.regularization], [wanted.regularization], 1e-4);
    near(session.getParameter("2.weight"), wanted.weight, 2e-4);
    near(session.getParameter("2.bias"), wanted.bias, 2e-4);
  }
  // Sums are in the checkpoint, and refined from there.
  const saved = await CheckpointState.load(await session.saveCheckpoint());
  const later = await TrainingSession.fromFolder({ ort, folder: folder.href, checkpoint: saved });
  const how = { method: "class-means", metric: "euclidean", add: true };
  const [one, two] = [await fitHead(session, samples(4), how), await fitHead(later, samples(4), how)];
  assert.equal(one.accuracy, two.accuracy);
  assert.deepEqual(session.getParameter("2.weight"), later.getParameter("2.weight"));
  for (const each of [session, later]) await each.release();
});

test("a head that fits is found, and training goes on from it", async () => {
  const session = await TrainingSession.fromFolder({ ort, folder: python("mlp").href });
  const random = numbers(5);
  const x = Float32Array.from({ length: 300 * 8 }, () => random() * 2 - 1);
  const labels = Array.from({ length: 300 }, (_, i) => {
    const row = [...x.subarray(i * 8, i * 8 + 3)];
    return row.indexOf(Math.max(...row));
  });
  const data = { arrays: { input: x, labels } };
  const before = await session.evaluate({ input: x, labels });
  const { accuracy, seconds } = await fitHead(session, data);
  assert.ok(accuracy > 0.6, `${accuracy}`);
  assert.ok(seconds > 0);
  const after = await session.evaluate({ input: x, labels });
  assert.ok(after.loss < before.loss);
  session.setLearningRate(0.001);
  const { loss } = await session.step({ input: x, labels });
  assert.ok(Math.abs(loss - after.loss) < 1e-4);
  await session.release();
});

test("what does not fit is said, and changes nothing", async () => {
  const session = await TrainingSession.fromFolder({ ort, folder: folder.href });
  const weight = session.getParameter("2.weight");
  const refused = (options, words, data = samples(2)) =>
    assert.rejects(fitHead(session, data, options), words);
  await refused({ method: "other" }, /'ridge' or 'class-means'/);
  await refused({ metric: "other" }, /'cosine' or 'euclidean'/);
  await refused({ add: true }, /needs all samples at once/);
  await refused({ regularization: -1 }, /a finite number of at least 0/);
  await refused({ method: "class-means", regularization: 1 }, /is for method: 'ridge'/);
  await refused({ layer: "0.weight" }, /no linear layer with the weight '0.weight'/);
  const { arrays } = samples(1);
  await refused({}, /the label 4 is no class/, { arrays: [arrays[0], [0, 1, 2, 3, 4, 0]] });
  const wrong = { data: new Float32Array(72).fill(NaN), dims: [6, 12] };
  await refused({}, /not finite/, { arrays: [wrong, arrays[1]] });
  await refused({}, /give \{data, dims\}|samples/, { arrays: [arrays[0], [0]] });
  if (!process.env.ONNXTRAIN_MINIFIED) {
    session.state.privateRecord.set("class_means", new Map([["metric", "cosine"]]));
    await refused({ method: "class-means", add: true }, /cannot be read: its metric or shape/);
  }
  assert.deepEqual(session.getParameter("2.weight"), weight);
  await fitHead(session, samples(1), { method: "class-means" });
  await refused({ method: "class-means", metric: "euclidean", add: true }, /start with add: false/);
  await session.release();
});

test("eigenvectors of symmetric matrices", () => {
  const random = numbers(1);
  for (const n of [1, 2, 3, 10, 60]) {
    for (const rank of [1, n]) {
      const a = matrix(n, rank, Array.from({ length: n * rank }, () => random() - 0.5));
      const symmetric = gram(a);
      const { values, vectors } = eigen(symmetric);
      const back = product(
        transposed(vectors),
        matrix(n, n, [...vectors.data].map((v, i) => v * values[Math.floor(i / n)])),
      );
      back.data.forEach((value, i) => assert.ok(Math.abs(value - symmetric.data[i]) < 1e-12 * n));
      gram(vectors).data.forEach((value, i) => {
        assert.ok(Math.abs(value - (i % (n + 1) ? 0 : 1)) < 1e-12);
      });
      assert.equal([...values].filter((value) => value > 1e-12).length, rank);
      assert.equal(rowOf(vectors, 0).length, n);
    }
  }
});

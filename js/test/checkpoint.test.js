import assert from "node:assert/strict";
import { test } from "node:test";

import { CheckpointError, CheckpointState } from "../dist/index.js";
import { writeChecksum } from "../dist/checksum.js";
import { bytes, golden, numbers, python } from "./folders.js";

for (const name of ["mlp", "cnn", "bert", "lstm"]) {
  test(`a checkpoint of ${name} that Python saved is written byte for byte`, async () => {
    const saved = await bytes(golden(name), "at10");
    const state = await CheckpointState.load(saved);
    assert.deepEqual(await state.toBytes(true), saved);
  });
}

test("files of ONNX Runtime are read", async () => {
  const folder = python("checkpoints");
  const generated = await CheckpointState.load(await bytes(folder, "generated"));
  assert.deepEqual(generated.parameters.names(), ["fc.bias", "fc.weight", "scale", "shape"]);
  assert.deepEqual(
    [...generated.parameters.get("fc.weight").data],
    [0.5, -1, 1.5, 2, -0.25, 0.125],
  );
  assert.deepEqual([...generated.parameters.get("shape").data], [-1n, 2n]);
  assert.equal(generated.parameters.get("fc.bias").requiresGrad, true);
  assert.equal(generated.parameters.get("scale").requiresGrad, false);

  const saved = await CheckpointState.load(await bytes(folder, "saved"));
  assert.deepEqual(
    [...saved.properties],
    [
      ["best loss", Math.fround(0.1)],
      ["empty", ""],
      ["epoch", 3],
      ["name", "trié"],
      ["negative", -5],
      ["zero", 0],
    ],
  );
  const nominal = await CheckpointState.load(await bytes(folder, "nominal"));
  assert.equal(nominal.nominal, true);
  assert.throws(
    () => nominal.parameters.get("fc.weight"),
    /Please load the model parameters first/,
  );
  await CheckpointState.load(await bytes(folder, "version1"));

  await assert.rejects(CheckpointState.load(await bytes(folder, "external")), /pass its bytes/);
  const external = await CheckpointState.load(await bytes(folder, "external"), {
    externalData: await bytes(folder, "external.data"),
  });
  assert.deepEqual(
    [...external.parameters.get("table").data],
    Array.from({ length: 40 }, (_, i) => i),
  );
  // It is written as one file.
  const again = await CheckpointState.load(await external.toBytes());
  assert.deepEqual(again.parameters.get("table").data, external.parameters.get("table").data);
});

test("properties keep their kinds", async () => {
  const state = await CheckpointState.load(await bytes(golden("mlp"), "checkpoint"));
  const { properties } = state;
  properties
    .set("whole", 3)
    .set("float", 3, "float")
    .set("half", 0.5)
    .set("text", "é😀")
    .set("yes", true);
  properties
    .set("large", 2n ** 62n)
    .set("b\uffff", 1)
    .set("b😀", 2);
  properties.set("float", 4);
  const loaded = await CheckpointState.load(await state.toBytes());
  assert.deepEqual(
    [...loaded.properties],
    [
      ["b\uffff", 1],
      ["b😀", 2],
      ["float", 4],
      ["half", 0.5],
      ["large", 2n ** 62n],
      ["text", "é😀"],
      ["whole", 3],
      ["yes", 1],
    ],
  );
  loaded.properties.set("float", 5);
  assert.deepEqual(
    await loaded.toBytes(),
    await (await CheckpointState.load(await loaded.toBytes())).toBytes(),
  );
  assert.throws(() => properties.set("__onnxtrain__.x", 1), /reserved/);
  assert.throws(() => properties.set("x", null), /numbers and strings/);
  assert.equal(properties.delete("whole"), true);
  assert.equal(properties.get("whole"), undefined);
});

test("parameters are set with arrays of their type and size", async () => {
  const state = await CheckpointState.load(await bytes(golden("mlp"), "checkpoint"));
  const parameter = state.parameters.get("0.bias");
  assert.equal(parameter.type, "float32");
  assert.deepEqual(parameter.dims, [16]);
  parameter.data = new Float32Array(16).fill(2);
  assert.equal(state.parameters.get("0.bias").data[3], 2);
  assert.throws(() => (parameter.data = new Float32Array(15)), /16 numbers, not 15/);
  assert.throws(() => (parameter.data = new Float64Array(16)), /Float32Array/);
  assert.throws(() => state.parameters.get("nothing"), /Parameter nothing not found/);
});

test("damaged files are refused with words, whatever is damaged", async () => {
  const good = await bytes(golden("mlp"), "at10");
  const tryToLoad = async (data) => {
    try {
      await (await CheckpointState.load(data)).toBytes(true);
      return true;
    } catch (error) {
      assert.ok(error instanceof CheckpointError, `${error.stack}`);
      assert.ok(error.message.length > 20);
      return false;
    }
  };
  for (let length = 0; length < good.length; length += 61) {
    assert.equal(await tryToLoad(good.slice(0, length)), false, `${length} bytes`);
    assert.equal(await tryToLoad(good.slice().fill(0, length)), false, `${length} bytes, zeros`);
  }
  const random = numbers(1);
  for (let round = 0; round < 1500; round++) {
    const damaged = good.slice();
    for (let k = 0; k < 1 + (round % 4); k++) {
      // Most of what can break is in the first part of the file.
      const at = Math.floor(random() * (round % 2 ? good.length : 1500));
      damaged[at] = Math.floor(random() * 256);
    }
    if (round % 3 === 0) assert.equal(await tryToLoad(damaged), String(damaged) === String(good));
    else await tryToLoad(writeChecksum(damaged));
  }
  await assert.rejects(
    CheckpointState.load(new TextEncoder().encode("<!doctype html><html>")),
    /not a checkpoint/,
  );
  await assert.rejects(CheckpointState.load("nowhere/checkpoint"), /cannot read/);
  await assert.rejects(CheckpointState.load(3), /bytes of a file or its address/);
});

test("every flipped bit is found, and older files are read", async () => {
  const good = await bytes(golden("mlp"), "at10");
  const isRefused = async (data, options) => {
    try {
      await CheckpointState.load(data, options);
      return false;
    } catch (error) {
      assert.ok(error instanceof CheckpointError, `${error.stack}`);
      return true;
    }
  };
  for (let bit = 0; bit < 8 * good.length; bit += bit < 4000 || bit > 8 * good.length - 400 ? 1 : 97) {
    const damaged = good.slice();
    damaged[bit >> 3] ^= 1 << (bit & 7);
    assert.equal(await isRefused(damaged), true, `bit ${bit}`);
  }
  // What others verify need not be verified here.
  const unverified = good.slice();
  unverified[good.length - 100] ^= 1;
  assert.equal(await isRefused(unverified, { verify: false }), false);
  // A version before wrote the checksum alone, ONNX Runtime none.
  const older = writeChecksum(good.slice().fill(0, 8, 32));
  assert.equal(await isRefused(older), false);
  older[older.length - 100] ^= 1;
  assert.equal(await isRefused(older), true);
  assert.equal(await isRefused(good.slice(0, -16).fill(0, 8, 32)), false);
});

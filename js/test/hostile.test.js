/** Files that others may have written: what cannot be right is our error, whatever it is. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";
import { test } from "node:test";

import { CheckpointState, fit, InputError, ModelError, OnnxTrainError, TrainingSession } from "../dist/index.js";
import { readCheckpoint, writeCheckpoint } from "../dist/checkpoint-file.js";
import { revived } from "../dist/errors.js";
import { arranged } from "../dist/inputs.js";
import { fromJson, toJson } from "../dist/json.js";
import { inlineData, readModel } from "../dist/model-file.js";
import { readResumeState } from "../dist/resume-state.js";
import { Chunks, Message } from "../dist/wire.js";
import { bytes, python } from "./folders.js";
import { node } from "./runtimes.js";

const KEYS = ["__proto__", "constructor", "toString", "__defineGetter__", "hasOwnProperty", "valueOf"];
const TRAINING = "__onnxtrain__.training";

async function withRecord(text) {
  const content = readCheckpoint(await bytes(python("mlp"), "checkpoint"), undefined, "checkpoint");
  const properties = new Map([...content.properties, [TRAINING, text]]);
  return CheckpointState.load(writeCheckpoint({ ...content, properties }));
}

test("keys that every object has are keys like others", async () => {
  for (const key of KEYS) {
    const state = await withRecord(`{"${key}": 1, "learning_rate": 0.5}`);
    assert.equal(state.savedLearningRate, 0.5);
    state.properties.set(key, "x");
    const again = await CheckpointState.load(await state.toBytes(true));
    assert.equal(again.properties.get(key), "x");
    assert.ok(revived(key, "m") instanceof OnnxTrainError);
    assert.equal(revived(key, "m").message, `${key}: m`);
    assert.throws(() => arranged([{ name: key, code: 1, dims: [] }], {}), InputError);
    const found = fromJson(`{"${key}": {"${key}": 2}}`);
    assert.deepEqual([...found.keys()], [key]);
    assert.equal(found.get(key).get(key), 2n);
    assert.equal(toJson(found), `{"${key}": {"${key}": 2}}`);
  }
  assert.equal({}.polluted, undefined);
});

test("a scheduler is none of those that every object has", async () => {
  const ort = await node();
  const session = await TrainingSession.fromFolder({ ort, folder: python("mlp") });
  const arrays = { input: new Float32Array(8), labels: [0] };
  for (const scheduler of ["constructor", "toString", "__proto__"]) {
    await assert.rejects(fit(session, { arrays }, { scheduler }), /there is no scheduler/);
  }
});

test("JSON that is made to do harm is none", () => {
  const many = "[".repeat(200) + "]".repeat(200);
  for (const text of ['{"a": 1, "a": 2}', many, "[".repeat(1e5), "9".repeat(301), "{", '{"a":}']) {
    assert.throws(() => fromJson(text), SyntaxError, text.slice(0, 20));
  }
  assert.deepEqual(fromJson('["a:b{[", 1e999, NaN]'), ["a:b{[", Infinity, NaN]);
});

test("records that cannot be right are refused, by name", async () => {
  const epoch = '{"epoch": 1, "steps": 1, "samples": 1, "loss": 1.0, "learning_rate": 0.1, "seconds": 0.1, "values": {"__proto__": 1.0}}';
  const good =
    '{"format": 1, "step": 1, "seed": 1, "epoch": 1, "batch": 0, "samples": 0, "loss_sum": 0.0, "seconds": 0.0, ' +
    '"first_step": 0, "scheduler": {"name": "linear", "initial_lr": 0.1}, "rate": 0.1, "order": {}, "best": null, ' +
    `"history": {"format": 1, "losses": {"type": "<f4", "data": "AACAPw=="}, "epochs": [${epoch}], "best_epoch": null}}`;
  const { position } = readResumeState(fromJson(good), 1);
  assert.deepEqual(Object.keys(position.history.epochs[0].values), ["__proto__"]);
  for (const [old, wrong, says] of [
    ['"seed": 1', '"seed": "Infinity"', /seed is Infinity/],
    ['"seed": 1', '"seed": -1', /seed is -1/],
    ['"seed": 1', '"x": 1', /seed is undefined/],
    ['"loss_sum": 0.0', '"loss_sum": "NaN"', /loss_sum is NaN/],
    ['"batch": 0', '"batch": 9007199254740993', /batch is/],
    ['"batch": 0, "samples": 0', '"batch": 0, "samples": 2', /0 batches cannot have 2 samples/],
    ['"initial_lr": 0.1', '"initial_lr": []', /initial_lr is missing/],
    ['"initial_lr": 0.1', '"initial_lr": -1', /initial_lr is negative/],
    ['"name": "linear"', '"name": 3', /the scheduler has no name/],
    [`[${epoch}]`, "{}", /epochs is not a list/],
    ['"<f4"', '"<f9"', /losses of type/],
    ['"AACAPw=="', '"AACA"', /cannot be read/],
    ['"AACAPw=="', '"!"', /cannot be read/],
    ['"order": {}', '"order": []', /order is not an object/],
  ]) {
    assert.ok(good.includes(old));
    assert.throws(
      () => readResumeState(fromJson(good.replace(old, wrong)), 1),
      (error) => error instanceof OnnxTrainError && says.test(error.message) && /resume: false/.test(error.message),
      wrong,
    );
  }
});

test("a shape that asks for more than the file has is not believed", () => {
  for (const field of [4, 5, 7, 10, 11]) {
    for (const code of [1, 6, 7, 10, 11, 13]) {
      const data = new Chunks().number(1, 2 ** 40).number(2, code).bytes(field, new Uint8Array(64));
      assert.throws(() => inlineData(Message.of(data.join(), "model")), ModelError);
    }
  }
});

test("numbers of each kind are read from their fields", () => {
  const read = (code, field, content, count) =>
    inlineData(Message.of(new Chunks().number(1, count).number(2, code).bytes(field, content).join(), "m"));
  assert.deepEqual([...read(6, 5, Uint8Array.of(1, 0x80, 1), 2)], [1, 0, 0, 0, 128, 0, 0, 0]);
  assert.deepEqual([...read(3, 5, Uint8Array.of(1, 2, 3), 3)], [1, 2, 3]);
  const minusOne = Uint8Array.of(255, 255, 255, 255, 255, 255, 255, 255, 255, 1);
  assert.deepEqual(read(7, 7, minusOne, 1), new Uint8Array(8).fill(255));
  assert.deepEqual([...read(1, 4, Uint8Array.of(0, 0, 128, 63), 1)], [0, 0, 128, 63]);
  assert.throws(() => read(6, 5, Uint8Array.of(1, 2, 3), 2), ModelError);
});

test("a file of millions of small fields takes little memory", () => {
  const data = new Uint8Array(4_000_000);
  for (let at = 0; at < data.length; at += 2) data[at] = 0x08; // ir_version, again and again
  globalThis.gc?.();
  const before = process.memoryUsage();
  assert.throws(() => readModel(data, "model"), ModelError);
  const after = process.memoryUsage();
  const taken = after.heapUsed + after.external - before.heapUsed - before.external;
  assert.ok(taken < 400e6, `${taken}`);
});

test("an input called __proto__, which no runtime can take, is refused", () => {
  const value = (name) => new Chunks().text(1, name);
  const model = (name) => new Chunks().message(7, new Chunks().message(11, value(name))).join();
  assert.throws(() => readModel(model("__proto__"), "model"), /is called '__proto__': rename it/);
  for (const name of KEYS.slice(1)) assert.equal(readModel(model(name), "m").inputs[0].name, name);
});

test("messages are safe on a terminal", () => {
  const { message } = new OnnxTrainError("a \x1b[2J\x07\u202e\ud800 größer 😀\n");
  assert.equal(message, "a \\u001b[2J\\u0007\\u202e\\ud800 größer 😀\n");
});

const interpreter = process.env.ONNXTRAIN_PYTHON;
const skip = interpreter ? false : "ONNXTRAIN_PYTHON is not set to a Python with onnxtrain";

test("a short run of the fuzzer breaks no reader", { skip }, () => {
  const program = fileURLToPath(new URL("../../tests/fuzz/run.py", import.meta.url));
  const kinds = ["checkpoint", "external_data", "records", "generation", "graphs", "adapter"];
  const readers = kinds.map((kind) => `js_${kind}`);
  const args = [program, "--files", "150", "--seed", "0", ...readers];
  const said = execFileSync(interpreter, args, { encoding: "utf-8" });
  for (const reader of readers) assert.match(said, new RegExp(`${reader} +150 files: .*read, .*refused`));
});

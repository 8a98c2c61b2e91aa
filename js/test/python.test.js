/** What was begun here goes on in Python and the other way round. Needs ONNXTRAIN_PYTHON. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

import { CheckpointState, fit, setSeed, TrainingSession } from "../dist/index.js";
import { bytes, golden, numbers, python as pythonFolder } from "./folders.js";
import { batch, difference, NETWORKS } from "./golden.js";
import { node } from "./runtimes.js";

const python = process.env.ONNXTRAIN_PYTHON;
const skip = python ? false : "ONNXTRAIN_PYTHON is not set to a Python with onnxtrain";
const ort = await node();
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-"));
after(() => rmSync(scratch, { recursive: true }));

/** A folder that a Python program, called with it, has written files into. */
function written(program) {
  const folder = mkdtempSync(join(scratch, "written-"));
  const device = fileURLToPath(new URL("../../tests/device", import.meta.url));
  execFileSync(python, ["-c", program, folder, device]);
  return pathToFileURL(`${folder}/`);
}

function run(action, input, ...paths) {
  const script = fileURLToPath(new URL("continue.py", import.meta.url));
  const printed = execFileSync(python, [script, action, ...paths], { input, encoding: "utf-8" });
  return JSON.parse(printed);
}

for (const name of NETWORKS) {
  test(`${name} goes on in Python`, { skip }, async () => {
    const folder = golden(name);
    const expected = JSON.parse(readFileSync(new URL("expected.json", folder), "utf-8"));
    const session = await TrainingSession.fromFolder({ ort, folder });
    session.setLearningRate(expected.learning_rate);
    for (let step = 0; step < 10; step++) await session.step(batch(step, expected));
    session.state.properties.set("onnxtrain.classes", '["Käse", "Brot"]');
    session.state.properties.set("onnxtrain.image", '{"mean": [0.5]}').set("mine", "stays here");
    const [checkpoint, exported] = [join(scratch, name), join(scratch, `${name}.onnx`)];
    writeFileSync(checkpoint, await session.saveCheckpoint());
    writeFileSync(exported, await session.exportModelForInferencing(["y"]));
    const found = run("steps", "", fileURLToPath(folder), checkpoint, exported);
    assert.equal(found["same bytes"], true);
    assert.equal(found["same export"], true);
    assert.deepEqual(found.metadata, {
      "onnxtrain.activation": '{"y": "softmax"}',
      "onnxtrain.classes": '["Käse", "Brot"]',
      "onnxtrain.image": '{"mean": [0.5]}',
    });
    assert.ok(found.difference < 1e-5);
    found.losses.forEach((loss, i) => assert.ok(difference(loss, expected.losses[10 + i]) <= 1e-5));
  });
}

for (const [name, shape] of Object.entries({ mlp: [8], int8: [1, 6, 6] })) {
  test(`a run of fit changes the language in the middle of an epoch, twice: ${name}`, { skip }, async () => {
    const random = numbers(9);
    const length = shape.reduce((a, b) => a * b);
    const input = Float32Array.from({ length: 40 * length }, () => random() - 0.5);
    const labels = Array.from({ length: 40 }, (_, i) => i % 3);
    const folder = pythonFolder(name);
    const options = { epochs: 3, batchSize: 6, seed: 77, scheduler: "linear" };
    const data = { arrays: { input, labels } };
    const open = (checkpoint) => TrainingSession.fromFolder({ ort, folder, checkpoint });
    const whole = await fit(await open(), data, options);
    const controller = new AbortController();
    const [first, second] = [join(scratch, "first"), join(scratch, "second")];
    await fit(await open(), data, {
      ...options,
      signal: controller.signal,
      save: (bytes) => writeFileSync(first, bytes),
      onProgress: ({ step }) => step === 4 && controller.abort(),
    });
    // Ranges of integers rest from step 16 on, in either language.
    const record = { input: [...input], labels, shape, stop: 17, epochs: 3, batchSize: 6 };
    const middle = run("fit", JSON.stringify(record), fileURLToPath(folder), first, second);
    assert.deepEqual(middle.losses, whole.losses.slice(0, 17));
    const last = await fit(await open(second), data, { ...options, seed: undefined, resume: true });
    assert.deepEqual(last.losses, whole.losses);
  });
}

const INTEGERS = `
import pathlib, sys
import numpy as np, onnxtrain
from onnx import helper, numpy_helper
rng = np.random.default_rng(0)
shapes = {"c": (6, 2, 3, 3), "w": (96, 33), "b": (33,), "v": (5, 33)}
graph = helper.make_graph(
    [helper.make_node("Conv", ["x", "c"], ["t"], pads=[1, 1, 1, 1]),
     helper.make_node("Relu", ["t"], ["r"]), helper.make_node("Flatten", ["r"], ["f"]),
     helper.make_node("Gemm", ["f", "w", "b"], ["h"]), helper.make_node("Relu", ["h"], ["k"]),
     helper.make_node("Gemm", ["k", "v"], ["y"], transB=1)],
    "graph", [helper.make_tensor_value_info("x", 1, ["n", 2, 4, 4])],
    [helper.make_tensor_value_info("y", 1, ["n", 5])],
    [numpy_helper.from_array(rng.normal(size=s).astype("f4") / 4, n) for n, s in shapes.items()])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
x = rng.normal(size=(16, 2, 4, 4)).astype("f4")
for place, how in enumerate(("int8", "int8:scales=learned", "int4-weights", "int4-weights:block=16")):
    folder = pathlib.Path(sys.argv[1], str(place))
    onnxtrain.prepare(model, folder, quantize=how, calibration=[x])
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(0.01)
    for _ in range(3):
        session.step(x, np.arange(16) % 5)
    session.save_checkpoint(folder / "c")
    session.export_model_for_inferencing(folder / "exported.onnx", ["y"])
    session.export_model_for_inferencing(folder / "values.onnx", ["w_quantized", "k", "w_scale"])
`;

test("models of integers are exported byte for byte as in Python", { skip }, async () => {
  const integers = written(INTEGERS);
  for (const place of ["0", "1", "2", "3"]) {
    const folder = new URL(`${place}/`, integers);
    const checkpoint = await bytes(folder, "c");
    const session = await TrainingSession.fromFolder({ ort, folder: fileURLToPath(folder), checkpoint });
    for (const [file, names] of [["exported", ["y"]], ["values", ["w_quantized", "k", "w_scale"]]]) {
      const made = await session.exportModelForInferencing(names);
      assert.ok(Buffer.from(made).equals(await bytes(folder, `${file}.onnx`)), `${place} ${file}`);
    }
    await session.release();
  }
});

test("external data of Python are read, and damage to them is found", { skip }, async () => {
  const folder = written(`
import sys
from pathlib import Path
import numpy as np
from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import write_checkpoint
w = np.arange(400_000, dtype=np.float32)
content = CheckpointContent(trainable={"w": w, "v": w[:50]}, has_external_data=True)
write_checkpoint(Path(sys.argv[1], "c"), content)
`);
  const main = await bytes(folder, "c");
  const data = await bytes(folder, "c.data");
  const load = (externalData, options = {}) => CheckpointState.load(main, { externalData, ...options });
  assert.equal((await load(data)).parameters.get("w").data[399_999], 399_999);
  const changed = (change) => {
    const copy = data.slice();
    return change(copy) ?? copy;
  };
  const flipped = (at) => changed((copy) => void (copy[at] ^= 4));
  for (const at of [0, 999_999, 1_048_576, 1_500_000, data.length - 40, data.length - 60]) {
    await assert.rejects(load(flipped(at)), /external data given with checkpoint are damaged/);
  }
  await load(flipped(0), { verify: false });
  // A flipped digit of the identifier is another digit, or none.
  await assert.rejects(load(flipped(data.length - 3)), /of another checkpoint|lost their end/);
  await assert.rejects(load(flipped(data.length - 20)), /lost their end/);
  await assert.rejects(load(data.subarray(0, 1_600_256)), /lost their end/);
  await assert.rejects(load(changed((copy) => copy.fill(0, copy.length - 4096))), /lost their end/);
  const longer = new Uint8Array(data.length + 64);
  longer.set(data.subarray(0, 64));
  longer.set(data, 64);
  await assert.rejects(load(longer), /more or fewer bytes/);
});

test("tensors that share bytes are refused", { skip }, async () => {
  const folder = written(`
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from forger import Forger
def tensors(forger, offsets):
    forger.builder.ForceDefaults(True)
    return [forger.tensor(f"w{i}", raw=b"", q6=at) for i, at in enumerate(offsets)]
for name, offsets in {"apart": (0, 8), "same": (0, 0), "over": (0, 4), "odd": (0, 9)}.items():
    forger = Forger()
    data = forger.file(u1=forger.module(*tensors(forger, offsets), b3=True))
    Path(sys.argv[1], name).write_bytes(data)
`);
  const externalData = new Uint8Array(32);
  const load = async (name) => CheckpointState.load(await bytes(folder, name), { externalData });
  await load("apart");
  await assert.rejects(load("same"), /overlap/);
  await assert.rejects(load("over"), /overlap/);
  await assert.rejects(load("odd"), /not a multiple of 4/);
});

const MEZO = `
import json, pathlib, sys
import numpy as np, onnx, onnxtrain
from onnx import helper, numpy_helper
wide = np.sin(np.arange(6 * 100_000, dtype=np.float32)).reshape(6, 100_000) / 10
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["wide"]),
     helper.make_node("Floor", ["wide"], ["whole"]),
     helper.make_node("Add", ["wide", "whole"], ["both"]),
     helper.make_node("ReduceMean", ["both", "axis"], ["y"])],
    "graph", [helper.make_tensor_value_info("x", 1, ["n", 6])],
    [helper.make_tensor_value_info("y", 1, ["n", 1])],
    [numpy_helper.from_array(wide, "w"), numpy_helper.from_array(np.array([1]), "axis")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
onnxtrain.prepare(model, sys.argv[1], optimizer="mezo", loss="mse")
onnxtrain.set_seed(3)
session = onnxtrain.TrainingSession(sys.argv[1])
session.set_learning_rate(1e-3)
x = np.arange(12, dtype=np.float32).reshape(2, 6) / 10
losses = [float(session.step(x, np.ones((2, 1), np.float32))[0]) for _ in range(5)]
pathlib.Path(sys.argv[1], "expected.json").write_text(json.dumps(losses))
`;

test("MeZO takes the same steps as in Python", { skip }, async () => {
  const folder = written(MEZO);
  const expected = JSON.parse(readFileSync(new URL("expected.json", folder), "utf-8"));
  setSeed(3);
  const session = await TrainingSession.fromFolder({ ort, folder });
  session.setLearningRate(1e-3);
  const x = { data: Float32Array.from({ length: 12 }, (_, i) => i / 10), dims: [2, 6] };
  const target = { data: Float32Array.from([1, 1]), dims: [2, 1] };
  for (const loss of expected) {
    const found = await session.step({ x, target });
    assert.ok(difference(found.loss, loss) <= 1e-5, `${found.loss} for ${loss}`);
  }
});

import assert from "node:assert/strict";
import { cp, mkdir, mkdtemp, readFile, rename, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { CheckpointError, CheckpointState, ModelError, TrainingSession } from "../dist/index.js";
import { bytes, python } from "./folders.js";
import { node } from "./runtimes.js";

const ort = await node();
const GRAPHS = {
  trainModel: "training_model.onnx",
  evalModel: "eval_model.onnx",
  optimizerModel: "optimizer_model.onnx",
  stepModel: "step_model.onnx",
};
const batch = [new Float32Array(32), [0, 1, 2, 0]];

/** The files of the folder `mlp`, and the same as if they were of another generation. */
async function twoGenerations() {
  const own = { checkpointState: await bytes(python("mlp"), "checkpoint") };
  for (const [key, file] of Object.entries(GRAPHS)) own[key] = await bytes(python("mlp"), file);
  const state = await CheckpointState.load(own.checkpointState);
  const id = state.generation;
  assert.match(id, /^[0-9a-f]{32}$/);
  const other = Object.fromEntries(
    Object.entries(own).map(([key, data]) => {
      const text = Buffer.from(data).toString("latin1").replace(id, "f".repeat(32));
      return [key, new Uint8Array(Buffer.from(text, "latin1"))];
    }),
  );
  other.checkpointState = await rebound(other, id);
  return [own, other];
}

/** A checkpoint with the digests of the graphs of the other generation. */
async function rebound(files, id) {
  const state = await CheckpointState.load(await bytes(python("mlp"), "checkpoint"));
  const record = JSON.parse(state._reserved.get("generation"));
  assert.equal(record.id, id);
  const { crc32 } = await import("../dist/checksum.js");
  record.id = "f".repeat(32);
  for (const [key, file] of Object.entries(GRAPHS)) {
    record.files[file] = [files[key].length, crc32(files[key])];
  }
  state._reserved.set("generation", JSON.stringify(record));
  return state.toBytes();
}

test("files of two generations are refused by name, in every mixture", async () => {
  const [own, other] = await twoGenerations();
  await TrainingSession.create({ ort, ...own });
  await TrainingSession.create({ ort, ...other });
  for (const key of Object.keys(own)) {
    await assert.rejects(
      TrainingSession.create({ ort, ...own, [key]: other[key] }),
      (error) =>
        error instanceof CheckpointError &&
        /is of generation [0-9a-f]{8}, and .* of [0-9a-f]{8}/.test(error.message),
      key,
    );
  }
  // Without one in the checkpoint, the graphs are compared with each other.
  for (const key of ["evalModel", "optimizerModel", "stepModel"]) {
    const state = await CheckpointState.load(own.checkpointState);
    state.generation = null;
    const files = { ...own, checkpointState: state, [key]: other[key] };
    await assert.rejects(TrainingSession.create({ ort, ...files }), /the other graphs are of/, key);
  }
});

test("a damaged graph is refused, unless the user has changed it on purpose", async () => {
  const [own] = await twoGenerations();
  for (const key of Object.keys(GRAPHS)) {
    const graphs = { ...own, [key]: new Uint8Array(Buffer.concat([own[key], field()])) };
    await assert.rejects(
      TrainingSession.create({ ort, ...graphs }),
      (error) => error instanceof ModelError && /is damaged/.test(error.message),
      key,
    );
    const state = await CheckpointState.load(own.checkpointState);
    state.generation = null;
    const session = await TrainingSession.create({ ort, ...graphs, checkpointState: state });
    await session.step(batch);
    assert.equal((await CheckpointState.load(await session.saveCheckpoint())).generation, null);
  }
});

/** What a model may end with: the field `model_version`. */
function field() {
  return Buffer.from([0x28, 7]);
}

test("the generation goes through training", async () => {
  const [own, other] = await twoGenerations();
  const session = await TrainingSession.create({ ort, ...own });
  await session.step(batch);
  const saved = await session.saveCheckpoint();
  await TrainingSession.create({ ort, ...own, checkpointState: saved });
  await assert.rejects(
    TrainingSession.create({ ort, ...other, checkpointState: saved }),
    /do not belong together/,
  );
});

test("a folder whose files were not all moved into place", async () => {
  const root = await mkdtemp(join(tmpdir(), "onnxtrain-"));
  try {
    const [, other] = await twoGenerations();
    const hidden = join(root, ".onnxtrain-generation");
    await cp(python("mlp"), root, { recursive: true });
    await mkdir(hidden);
    await writeFile(join(hidden, "files.json"), "{}");
    const files = { checkpointState: "checkpoint", ...GRAPHS };
    for (const [key, file] of Object.entries(files)) await writeFile(join(hidden, file), other[key]);
    for (const file of ["", ...Object.values(files)]) {
      if (file) await rename(join(hidden, file), join(root, file));
      const session = await TrainingSession.fromFolder({ ort, folder: root });
      assert.equal(session.state.generation, "f".repeat(32), file);
    }
    assert.deepEqual(new Uint8Array(await readFile(join(root, "checkpoint"))), other.checkpointState);
  } finally {
    await rm(root, { recursive: true });
  }
});

test("a damaged record", async () => {
  const [own] = await twoGenerations();
  for (const wrong of ["", "{}", "[]", "null", '{"id":"x","files":{}}', '{"id":3,"files":null}']) {
    const state = await CheckpointState.load(own.checkpointState);
    state._reserved.set("generation", wrong);
    await assert.rejects(
      CheckpointState.load(await state.toBytes()),
      (error) => error instanceof CheckpointError && /damaged record/.test(error.message),
      wrong,
    );
  }
});

/** The readers of the JavaScript package, for `run.py`; see `readers.py` for what is said. */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const dist = new URL("../../js/dist/", import.meta.url);
const golden = new URL("../golden/mlp/", import.meta.url);
const load = (file) => import(new URL(file, dist));

const { OnnxTrainError } = await load("errors.js");
const { CheckpointState } = await load("state.js");
const { readCheckpoint, writeCheckpoint } = await load("checkpoint-file.js");
const { readResumeState, checkOrder, savedScheduler, KEY } = await load("resume-state.js");
const { readModel } = await load("model-file.js");
const { TrainingSession } = await load("session.js");
const { Adapter } = await load("adapter.js");
const schedulers = await load("index.js");

const bytes = (path) => new Uint8Array(readFileSync(path));
const graph = (name) => bytes(new URL(`${name}_model.onnx`, golden));
const good = Object.fromEntries(
  ["training", "eval", "optimizer", "step"].map((name) => [name, graph(name)]),
);

/** A runtime that is never asked to run anything. */
const ort = {
  Tensor: class {
    constructor(type, data, dims) {
      Object.assign(this, { type, data, dims, location: "cpu" });
    }
    dispose() {}
  },
  InferenceSession: {
    create: () => {
      throw new OnnxTrainError("this runtime runs nothing");
    },
  },
};

const open = (checkpoint, graphs = good) =>
  TrainingSession.create(
    {
      ort,
      checkpointState: checkpoint,
      trainModel: graphs.training,
      evalModel: graphs.eval,
      optimizerModel: graphs.optimizer,
      stepModel: graphs.step,
    },
  );

async function use(bytes, externalData) {
  const state = await CheckpointState.load(bytes, { externalData });
  if (!state.nominal) for (const parameter of state.parameters) void parameter;
  for (const property of state.properties) void property;
  await allowed(() => resume(state)); // it is of another model, mostly
  if (!state.nominal) await state.toBytes(true);
}

/** What our own errors end is no failure here. */
async function allowed(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof OnnxTrainError)) throw error;
  }
}

/** Go on with the run that a state holds, as far as nothing is computed. */
async function resume(state) {
  const record = state.privateRecord.get(KEY);
  if (record !== undefined) {
    const { position, order } = readResumeState(record, 4);
    checkOrder(order, new Map([["batches", 2n]]), position);
    savedScheduler(position, state.savedScheduler);
  }
  const session = await open(await state.toBytes(true));
  for (const [kind, settings] of [
    ["LinearLRScheduler", { warmupStepCount: 1, totalStepCount: 9 }],
    ["PlateauLRScheduler", {}],
  ]) {
    new schedulers[kind](session.optimizer, settings);
  }
  await session.release();
}

const saved = process.env.ONNXTRAIN_FUZZ_RUN;

/** Read the checkpoint of a run with another text for one of its records. */
const record = (name) => async (data) => {
  const content = readCheckpoint(bytes(saved), undefined, "checkpoint");
  const properties = new Map([...content.properties, [name, new TextDecoder().decode(data)]]);
  await resume(await CheckpointState.load(writeCheckpoint({ ...content, properties })));
};

const READERS = {
  js_checkpoint: async (data) => use(data),
  js_external_data: async (blob) => {
    const size = blob.subarray(0, 4).reduceRight((sum, byte) => sum * 256 + byte, 0);
    await use(blob.slice(4, 4 + size), blob.slice(4 + size));
  },
  js_records: record("__onnxtrain__.training"),
  js_generation: record("__onnxtrain__.generation"),
  js_adapter: async (data) => {
    const adapter = await Adapter.read(data);
    adapter.toBytes();
    await allowed(() => adapter.check(good.eval));
    await allowed(() => Adapter.stack([adapter, adapter], [0.5, 0.5]));
  },
  js_graphs: async (data) => {
    readModel(data, "model");
    for (const place of Object.keys(good)) {
      await allowed(async () => {
        const state = await CheckpointState.load(bytes(new URL("checkpoint", golden)));
        state.generation = null; // that it is not the file which was written is known
        const session = await open(state, { ...good, [place]: data });
        await session.exportModelForInferencing(session.evalOutputNames.slice(1));
      });
    }
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const [name, path] = line.split("\t");
  let answer = { outcome: "read" };
  try {
    await READERS[name](bytes(path));
  } catch (error) {
    answer =
      error instanceof OnnxTrainError
        ? { outcome: "refused" }
        : { outcome: "foreign", error: String(error?.stack ?? error).slice(0, 4000) };
    if (process.env.ONNXTRAIN_FUZZ_SHOW) console.error(error);
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

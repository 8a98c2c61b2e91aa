/**
 * The position of a run, from which it resumes exactly. The record
 * is the one of the Python package, so a run can resume in the other language.
 */

import { ArgumentError, CheckpointError, messageOf } from "./errors.js";
import { type EpochRecord, type History, stepsOf, thinned } from "./history.js";
import { type Json, type JsonObject, toJson } from "./json.js";

/** The entry of `fit` in a checkpoint's private record. */
export const KEY = "fit";
const FORMAT = 1n;

/** The best epoch, its value, and the number of epochs since. */
export interface Best {
  readonly monitor: string;
  value: number | null;
  epoch: number | null;
  waited: number;
}

/** The position of a run: `epoch` epochs are done, and `batch` batches of the next one. */
export interface ResumeState {
  seed: bigint;
  epoch: number;
  batch: number;
  samples: number;
  lossSum: number;
  seconds: number;
  firstStep: number;
  /** The name of the scheduler, the rate that it was made with, and its state. */
  scheduler: JsonObject | null;
  /** The learning rate of the next step; null where the record has none. */
  rate: number | null;
  readonly history: History;
}

export function newResumeState(seed: bigint, firstStep: number): ResumeState {
  return {
    seed,
    epoch: 0,
    batch: 0,
    samples: 0,
    lossSum: 0,
    seconds: 0,
    firstStep,
    scheduler: null,
    rate: null,
    history: {
      losses: [],
      lossSteps: [],
      epochs: [],
      stopped: "",
      aborted: false,
      bestEpoch: null,
      skipped: 0,
    },
  };
}

/** The position as plain data for a checkpoint; `step` is the optimizer's. */
export function writeResumeState(
  position: ResumeState,
  step: number,
  order: ReadonlyMap<string, Json>,
  best: Best | null,
): JsonObject {
  const int = (value: number): bigint => BigInt(value);
  const { history } = position;
  const { losses, lossSteps, epochs } = thinned(history);
  const isWhole = losses.length === stepsOf(history);
  return new Map<string, Json>([
    ["format", FORMAT],
    ["step", int(step)],
    ["seed", position.seed],
    ["epoch", int(position.epoch)],
    ["batch", int(position.batch)],
    ["samples", int(position.samples)],
    ["loss_sum", position.lossSum],
    ["seconds", position.seconds],
    ["first_step", int(position.firstStep)],
    ["scheduler", position.scheduler],
    ["rate", position.rate],
    ["order", new Map(order)],
    [
      "best",
      best &&
        new Map<string, Json>([
          ["monitor", toPython(best.monitor)],
          ["value", best.value],
          ["epoch", best.epoch === null ? null : int(best.epoch)],
          ["waited", int(best.waited)],
        ]),
    ],
    [
      "history",
      new Map<string, Json>([
        ["format", FORMAT],
        ["losses", pack(losses)],
        ["epochs", epochs.map(recordJson)],
        ["stopped", ""],
        ["interrupted", false],
        ["best_epoch", history.bestEpoch === null ? null : int(history.bestEpoch)],
        ["skipped", int(history.skipped)],
        ...(isWhole ? [] : [["kept_steps", lossSteps.map(int)] as const]),
      ]),
    ],
  ]);
}

// The name of the evaluation loss follows the conventions of each language.
const toPython = (name: string): string => (name === "evalLoss" ? "eval_loss" : name);
const fromPython = (name: string): string => (name === "eval_loss" ? "evalLoss" : name);

function recordJson(record: EpochRecord): JsonObject {
  return new Map<string, Json>([
    ["epoch", BigInt(record.epoch)],
    ["steps", BigInt(record.steps)],
    ["samples", BigInt(record.samples)],
    ["loss", record.loss],
    ["learning_rate", record.learningRate],
    ["seconds", record.seconds],
    [
      "values",
      new Map(Object.entries(record.values).map(([name, value]) => [toPython(name), value])),
    ],
  ]);
}

/** The position and the best epoch in an untrusted checkpoint. */
export function readResumeState(
  saved: Json,
  step: number,
): { position: ResumeState; best: Best | null; order: JsonObject } {
  let found: { position: ResumeState; best: Best | null; order: JsonObject; step: number };
  try {
    found = parse(object(saved, "it"));
  } catch (error) {
    throw new CheckpointError(
      `the checkpoint's record of where the run stood cannot be read: ${messageOf(error)}. Load ` +
        "another checkpoint, or start a new run with resume: false",
    );
  }
  if (found.step !== step) {
    throw new CheckpointError(
      `the checkpoint says where a run stood at step ${found.step}, but its parameters are of step ` +
        `${step}: they were trained or saved outside of fit. Start a new run with resume: false`,
    );
  }
  return found;
}

function parse(record: JsonObject): ReturnType<typeof readResumeState> & { step: number } {
  if (record.get("format") !== FORMAT)
    throw new Error(`its format is ${String(record.get("format"))}`);
  const history = object(record.get("history"), "history");
  const best = record.get("best") ?? null;
  const losses = unpack(object(history.get("losses"), "losses"));
  const position: ResumeState = {
    seed: record.get("seed") as bigint,
    epoch: count(record, "epoch"),
    batch: count(record, "batch"),
    samples: count(record, "samples"),
    lossSum: finite(record, "loss_sum"),
    seconds: finite(record, "seconds"),
    firstStep: count(record, "first_step"),
    scheduler: readScheduler(record.get("scheduler") ?? null),
    rate: (record.get("rate") ?? null) === null ? null : finite(record, "rate"),
    history: {
      losses,
      lossSteps: readSteps(history.get("kept_steps") ?? [], losses.length),
      epochs: list(history.get("epochs"), "epochs").map((item) => readRecord(object(item, "epoch"))),
      stopped: "",
      aborted: false,
      bestEpoch: (history.get("best_epoch") ?? null) === null ? null : count(history, "best_epoch"),
      skipped: history.has("skipped") ? count(history, "skipped") : 0,
    },
  };
  if (typeof position.seed !== "bigint" || position.seed < 0n) {
    throw new Error(`seed is ${String(position.seed)}`);
  }
  if (position.samples && !position.batch) {
    throw new Error(`${position.batch} batches cannot have ${position.samples} samples`);
  }
  return {
    position,
    best: best === null ? null : readBest(object(best, "best")),
    order: object(record.get("order"), "order"),
    step: count(record, "step"),
  };
}

/** The name and the rate of a scheduler; its state is checked by the one that takes it over. */
function readScheduler(saved: Json): JsonObject | null {
  if (saved === null) return null;
  const scheduler = object(saved, "scheduler");
  if (typeof scheduler.get("name") !== "string") throw new Error("the scheduler has no name");
  for (const rate of ["initial_lr", "max_lr"]) {
    if (scheduler.has(rate) && finite(scheduler, rate) < 0) throw new Error(`${rate} is negative`);
  }
  if ((scheduler.get("state") ?? null) !== null) object(scheduler.get("state"), "state");
  return scheduler;
}

/** The steps of the losses: each step from 1, after those that were kept. */
function readSteps(saved: Json, count: number): number[] {
  const steps = Array.isArray(saved) ? saved.map(Number) : [NaN];
  const isRising = steps.every((step, i) => Number.isSafeInteger(step) && step > (steps[i - 1] ?? 0));
  if (!isRising || steps.length > count) throw new Error("kept_steps are not those of the losses");
  while (steps.length < count) steps.push((steps.at(-1) ?? 0) + 1);
  return steps;
}

function readBest(saved: JsonObject): Best {
  return {
    monitor: fromPython(String(saved.get("monitor"))),
    value: (saved.get("value") ?? null) === null ? null : number(saved, "value"),
    epoch: (saved.get("epoch") ?? null) === null ? null : count(saved, "epoch"),
    waited: count(saved, "waited"),
  };
}

function readRecord(saved: JsonObject): EpochRecord {
  const values = [...object(saved.get("values"), "values")]
    .filter(([, value]) => typeof value === "number")
    .map(([name, value]) => [fromPython(name), value]);
  return {
    epoch: count(saved, "epoch"),
    steps: count(saved, "steps"),
    samples: count(saved, "samples"),
    loss: number(saved, "loss"),
    learningRate: number(saved, "learning_rate"),
    seconds: number(saved, "seconds"),
    values: Object.fromEntries(values) as Record<string, number>,
  };
}

function object(value: Json | undefined, what: string): JsonObject {
  if (!(value instanceof Map)) throw new Error(`${what} is not an object`);
  return value;
}

function list(value: Json | undefined, what: string): Json[] {
  if (!Array.isArray(value)) throw new Error(`${what} is not a list`);
  return value;
}

function number(record: JsonObject, key: string): number {
  const value = record.get(key);
  if (typeof value !== "number" && typeof value !== "bigint") throw new Error(`${key} is missing`);
  return Number(value);
}

function finite(record: JsonObject, key: string): number {
  const value = number(record, key);
  if (!Number.isFinite(value)) throw new Error(`${key} is ${value}`);
  return value;
}

function count(record: JsonObject, key: string): number {
  const value = number(record, key);
  if (!Number.isSafeInteger(value) || value < 0) throw new Error(`${key} is ${value}`);
  return value;
}

/** Raise an error for other batches within an epoch. */
export function checkOrder(
  saved: JsonObject,
  order: ReadonlyMap<string, Json>,
  position: ResumeState,
): void {
  if (!position.batch) return;
  const shown = (value: Json | undefined): string => toJson(value ?? null);
  const changed = [...order].filter(
    // Python has the settings of replay elsewhere.
    ([key, value]) => shown(saved.get(key)) !== shown(value) && (key !== "replay" || saved.has(key)),
  );
  if (changed.length) {
    const details = changed.map(
      ([key, value]) => `${key} ${shown(value)} (before: ${shown(saved.get(key))})`,
    );
    throw new ArgumentError(
      `the run stopped within epoch ${position.epoch + 1}, after ${position.batch} batches, and cannot go ` +
        `on there with other batches: ${details.join(", ")}. Resume with what it was, or start a new ` +
        "run with resume: false",
    );
  }
}

/** Losses as base64, with 32 bits each if that is exact. */
function pack(losses: readonly number[]): JsonObject {
  const narrow = losses.every((loss) => Math.fround(loss) === loss);
  const array = narrow ? Float32Array.from(losses) : Float64Array.from(losses);
  const letters = Array.from(new Uint8Array(array.buffer), (byte) => String.fromCharCode(byte));
  return new Map([
    ["type", narrow ? "<f4" : "<f8"],
    ["data", btoa(letters.join(""))],
  ]);
}

function unpack(packed: JsonObject): number[] {
  const type = packed.get("type");
  const data = Uint8Array.from(atob(String(packed.get("data"))), (letter) => letter.charCodeAt(0));
  if (type === "<f4") return [...new Float32Array(data.buffer)];
  if (type === "<f8") return [...new Float64Array(data.buffer)];
  throw new Error(`losses of type ${String(type)}`);
}

/** The state of a run's scheduler, as a scheduler of its kind takes it over. */
export function savedScheduler(
  position: ResumeState,
  before: JsonObject | null,
): JsonObject | null {
  const state = position.scheduler?.get("state");
  if (!(state instanceof Map)) return before;
  return new Map<string, Json>([
    ["kind", position.scheduler!.get("name")!],
    ["state", state],
  ]);
}

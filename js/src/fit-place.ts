/**
 * Where a run stands, so that it can go on from a checkpoint as if it had never stopped. The record
 * is the one that the Python package writes, so that a run can go on in the other language.
 */

import { ArgumentError, CheckpointError, messageOf } from "./errors.js";
import type { Json, JsonObject } from "./json.js";

/** The entry of a checkpoint's private record that belongs to `fit`. */
export const KEY = "fit";
const FORMAT = 1n;

/** One epoch: `steps` counts from the beginning of the run, `values` are what evaluation found. */
export interface EpochRecord {
  readonly epoch: number;
  readonly steps: number;
  readonly samples: number;
  readonly loss: number;
  readonly learningRate: number;
  readonly seconds: number;
  readonly values: Readonly<Record<string, number>>;
}

/** The course of a run. */
export interface History {
  /** The loss of each step of the optimizer. */
  readonly losses: number[];
  readonly epochs: EpochRecord[];
  /** Why the run ended early, if it did. */
  stopped: string;
  /** Whether the signal ended it. */
  aborted: boolean;
  bestEpoch: number | null;
}

/** Which epoch was the best, by which value, and for how many epochs there was no better one. */
export interface Best {
  readonly monitor: string;
  value: number | null;
  epoch: number | null;
  waited: number;
}

/** Where a run stands: `epoch` epochs are over, and of the next one `batch` batches. */
export interface Place {
  seed: bigint;
  epoch: number;
  batch: number;
  samples: number;
  lossSum: number;
  seconds: number;
  firstStep: number;
  scheduler: JsonObject | null;
  readonly history: History;
}

export function newPlace(seed: bigint, firstStep: number): Place {
  return {
    seed,
    epoch: 0,
    batch: 0,
    samples: 0,
    lossSum: 0,
    seconds: 0,
    firstStep,
    scheduler: null,
    history: { losses: [], epochs: [], stopped: "", aborted: false, bestEpoch: null },
  };
}

/** The place as plain data for a checkpoint; `step` is the optimizer's. */
export function writePlace(
  place: Place,
  step: number,
  order: ReadonlyMap<string, Json>,
  best: Best | null,
): JsonObject {
  const int = (value: number): bigint => BigInt(value);
  const { history } = place;
  return new Map<string, Json>([
    ["format", FORMAT],
    ["step", int(step)],
    ["seed", place.seed],
    ["epoch", int(place.epoch)],
    ["batch", int(place.batch)],
    ["samples", int(place.samples)],
    ["loss_sum", place.lossSum],
    ["seconds", place.seconds],
    ["first_step", int(place.firstStep)],
    ["scheduler", place.scheduler],
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
        ["losses", pack(history.losses)],
        ["epochs", history.epochs.map(recordJson)],
        ["stopped", ""],
        ["interrupted", false],
        ["best_epoch", history.bestEpoch === null ? null : int(history.bestEpoch)],
      ]),
    ],
  ]);
}

// The loss of evaluation is called as each language writes names.
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

/** The place and the best epoch that a checkpoint holds, which may come from anywhere. */
export function readPlace(
  saved: Json,
  step: number,
): { place: Place; best: Best | null; order: JsonObject } {
  let found: { place: Place; best: Best | null; order: JsonObject; step: number };
  try {
    found = parse(object(saved));
  } catch (error) {
    throw new CheckpointError(
      `the checkpoint's record of where the run stood cannot be read: ${messageOf(error)}`,
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

function parse(record: JsonObject): ReturnType<typeof readPlace> & { step: number } {
  if (record.get("format") !== FORMAT)
    throw new Error(`its format is ${String(record.get("format"))}`);
  const history = object(record.get("history"));
  const best = record.get("best") ?? null;
  const place: Place = {
    seed: record.get("seed") as bigint,
    epoch: count(record, "epoch"),
    batch: count(record, "batch"),
    samples: count(record, "samples"),
    lossSum: number(record, "loss_sum"),
    seconds: number(record, "seconds"),
    firstStep: count(record, "first_step"),
    scheduler: (record.get("scheduler") ?? null) === null ? null : object(record.get("scheduler")),
    history: {
      losses: unpack(object(history.get("losses"))),
      epochs: (history.get("epochs") as Json[]).map((item) => readRecord(object(item))),
      stopped: "",
      aborted: false,
      bestEpoch: (history.get("best_epoch") ?? null) === null ? null : count(history, "best_epoch"),
    },
  };
  if (typeof place.seed !== "bigint" || Boolean(place.batch) !== Boolean(place.samples)) {
    throw new Error("its counts make no sense");
  }
  return {
    place,
    best: best === null ? null : readBest(object(best)),
    order: object(record.get("order")),
    step: count(record, "step"),
  };
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
  const values = [...object(saved.get("values"))]
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

function object(value: Json | undefined): JsonObject {
  if (!(value instanceof Map)) throw new Error("something is missing");
  return value;
}

function number(record: JsonObject, key: string): number {
  const value = record.get(key);
  if (typeof value !== "number" && typeof value !== "bigint") throw new Error(`${key} is missing`);
  return Number(value);
}

function count(record: JsonObject, key: string): number {
  const value = number(record, key);
  if (!Number.isSafeInteger(value) || value < 0) throw new Error(`${key} is ${value}`);
  return value;
}

/** Refuse other batches than before in the middle of an epoch. */
export function checkOrder(
  saved: JsonObject,
  order: ReadonlyMap<string, Json>,
  place: Place,
): void {
  if (!place.batch) return;
  const changed = [...order].filter(([key, value]) => saved.get(key) !== value);
  if (changed.length) {
    const details = changed.map(
      ([key, value]) => `${key} ${String(value)} (before: ${String(saved.get(key))})`,
    );
    throw new ArgumentError(
      `the run stopped within epoch ${place.epoch + 1}, after ${place.batch} batches, and cannot go ` +
        `on there with other batches: ${details.join(", ")}. Resume with what it was, or start a new ` +
        "run with resume: false",
    );
  }
}

/** Many numbers in little room: losses usually are floats of 32 bits. */
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

/** The samples that a memory keeps, which ones those are, and its record in a checkpoint. */

import { arrayOf, bytesOf, countOf, ELEMENT_TYPES, sameDims, zerosOf } from "./elements.js";
import { ArgumentError, CheckpointError, messageOf } from "./errors.js";
import type { Column } from "./fit-data.js";
import { converted } from "./inputs.js";
import type { Json, JsonObject } from "./json.js";
import type { ValueType } from "./model-file.js";
import type { TypedArray } from "./runtime.js";

/** The key of the checkpoint's private record. */
export const REPLAY = "replay";
const FORMAT = 1n;
/** numpy's names of element types, by ONNX's numbers. */
const NUMPY = new Map([
  [1, "<f4"], [2, "|u1"], [3, "|i1"], [4, "<u2"], [5, "<i2"], [6, "<i4"], [7, "<i8"],
  [9, "|b1"], [10, "<f2"], [11, "<f8"], [12, "<u4"], [13, "<u8"],
]); // prettier-ignore
const WHOLE = [2, 3, 4, 5, 6, 7, 12, 13];

export type Keep = "auto" | "balanced" | "reservoir";

/** The values of one input, a row for each sample; rows behind the last sample are free. */
interface Kept {
  readonly code: number;
  /** Of a sample. */
  readonly dims: readonly number[];
  readonly array: TypedArray;
}

/**
 * Samples of several runs, at most as many as fit.
 *
 * `_runs` says which run a sample is of, and `_seen` how many samples of each class, or in all
 * (-1), there have been.
 */
export class ReplayMemory {
  run = 0;
  /** Whether earlier runs left samples when this one began. */
  mixes = false;
  private _names: readonly string[] = [];
  private _columns: readonly Kept[] = [];
  private _count = 0;
  private _capacity = 0;
  private _runs: number[] = [];
  private _classes: number[] = [];
  private readonly _seen = new Map<number, number>();
  private _counts = new Map<number, number>();
  /** Classes that have been the largest. */
  private readonly _full = new Set<number>();

  /** Count what there is as old from now on. */
  beginRun(): void {
    this.run += 1;
    this.mixes = this._count > 0;
  }

  /** Refuse samples that are not like those in the memory; keep those as the inputs take them. */
  requireInputs(inputs: readonly ValueType[]): void {
    const names = inputs.map(({ name }) => name);
    if (this._names.length && this._names.join("\0") !== names.join("\0")) {
      throw new ArgumentError(
        `the memory for replay keeps ${this._names.join(", ")}, and this run takes ` +
          `${names.join(", ")}: forget the samples with clearReplay(session)`,
      );
    }
    this._names = names;
    this._columns = this._columns.map(({ code, dims, array }, index) => {
      const value = inputs[index]!;
      const given = code === value.code ? array : converted(value, array);
      return { code: value.code, dims, array: given };
    });
  }

  // ---- what is drawn -----------------------------------------------------------------------------

  /** The samples of earlier runs; should none be left, all. */
  old(): number[] {
    const all = Array.from({ length: this._count }, (_, place) => place);
    const found = all.filter((place) => this._runs[place]! < this.run);
    return found.length ? found : all;
  }

  /** The rows of old samples, all different where there are as many. */
  draw(count: number, words: BigUint64Array): Column[] {
    const old = this.old();
    const order = [...old.keys()].sort((a, b) =>
      words[a]! < words[b]! ? -1 : words[a]! > words[b]! ? 1 : a - b,
    );
    const places = Array.from({ length: count }, (_, i) => old[order[i % order.length]!]!);
    return this._columns.map(({ code, dims, array }) => {
      const stride = countOf(dims);
      const rows = zerosOf(code, [count, ...dims]);
      places.forEach((place, i) => copyRow(array, place, rows, i, stride));
      return { array: rows, dims: [count, ...dims], stride };
    });
  }

  // ---- what is kept ------------------------------------------------------------------------------

  /**
   * Keep some of the samples of a batch.
   *
   * @param words two random numbers for each sample.
   * @param labels which of the values are labels.
   */
  offer(
    values: readonly Column[],
    codes: readonly number[],
    labels: number,
    keep: Keep,
    words: BigUint64Array,
    capacity: (sampleBytes: number) => number,
  ): void {
    const classes = classesOf(values[labels]!, codes[labels]!, keep);
    this._makeRoom(values, codes, capacity);
    classes.forEach((label, row) => {
      // A sample that is not finite would spoil later runs.
      if (!values.every((value) => isFiniteRow(value, row))) return;
      const place = this._place(label, words[2 * row]!, words[2 * row + 1]!);
      if (place === null) return;
      this._runs[place] = this.run;
      this._classes[place] = label;
      this._counts.set(label, (this._counts.get(label) ?? 0) + 1);
      values.forEach(({ array, stride }, k) =>
        copyRow(array, row, this._columns[k]!.array, place, stride),
      );
    });
  }

  /** Bring the memory to its size, where it is not. */
  private _makeRoom(
    values: readonly Column[],
    codes: readonly number[],
    capacity: (sampleBytes: number) => number,
  ): void {
    const bytes = values.reduce((sum, v) => sum + v.stride * v.array.BYTES_PER_ELEMENT, 0);
    const size = capacity(bytes);
    const shapes = values.map(({ dims }) => dims.slice(1));
    const differs = this._columns.some(({ dims }, k) => !sameDims(dims, shapes[k]!));
    if (differs) {
      const shown = (all: readonly (readonly number[])[]): string =>
        all.map((dims) => `[${dims.join(", ")}]`).join(", ");
      throw new ArgumentError(
        `replay keeps samples of the shapes ${shown(this._columns.map(({ dims }) => dims))}, and ` +
          `these have ${shown(shapes)}: pad them to the same ones`,
      );
    }
    if (this._columns.length && this._capacity === size) return;
    const kept = this._keptIn(size);
    const held = this._columns;
    this._columns = values.map(({ stride }, k) => {
      const array = zerosOf(codes[k]!, [size, ...shapes[k]!]);
      const before = held[k];
      if (before) kept.forEach((place, i) => copyRow(before.array, place, array, i, stride));
      return { code: codes[k]!, dims: shapes[k]!, array };
    });
    this._runs = kept.map((place) => this._runs[place]!);
    this._classes = kept.map((place) => this._classes[place]!);
    this._count = kept.length;
    this._capacity = size;
    this._counts = counted(this._classes);
  }

  /** Which samples stay in a memory of some size: as many of each class. */
  private _keptIn(size: number): number[] {
    const places = new Map<number, number[]>();
    for (let place = 0; place < this._count; place++) {
      const label = this._classes[place]!;
      places.set(label, [...(places.get(label) ?? []), place]);
    }
    for (let excess = this._count - size; excess > 0; excess--) {
      let largest: number[] = [];
      for (const found of places.values()) if (found.length > largest.length) largest = found;
      largest.shift();
    }
    return [...places.values()].flat().sort((a, b) => a - b);
  }

  /**
   * Where to keep a sample, or null.
   *
   * Each class has a share of its own. Within it, every sample that there has been is kept with
   * the same probability (a reservoir); a class that needs room takes it from the largest one.
   */
  private _place(label: number, first: bigint, second: bigint): number | null {
    const seen = (this._seen.get(label) ?? 0) + 1;
    this._seen.set(label, seen);
    if (this._count < this._capacity) return this._count++;
    const most = Math.max(...this._counts.values());
    const largest = [...this._counts].filter(([, count]) => count === most).map(([c]) => c);
    for (const each of largest) this._full.add(each);
    if (!this._full.has(label)) return this._freed(Math.min(...largest), first);
    if (Number(first % BigInt(seen)) < (this._counts.get(label) ?? 0)) return this._freed(label, second);
    return null;
  }

  /** The place of some sample of a class, which is given up. */
  private _freed(label: number, word: bigint): number {
    const places: number[] = [];
    for (let at = 0; at < this._count; at++) if (this._classes[at] === label) places.push(at);
    this._counts.set(label, this._counts.get(label)! - 1);
    return places[Number(word % BigInt(places.length))]!;
  }

  // ---- in a checkpoint ---------------------------------------------------------------------------

  /** The memory as plain data, as Python writes it. */
  toRecord(): JsonObject {
    const ints = (values: Iterable<number>): bigint[] => Array.from(values, BigInt);
    const ascending = (a: number, b: number): number => a - b;
    return new Map<string, Json>([
      ["format", FORMAT],
      ["run", BigInt(this.run)],
      ["mixes", this.mixes],
      ["names", [...this._names]],
      ["columns", this._columns.map((column) => packed(column, this._count))],
      ["runs", ints(this._runs.slice(0, this._count))],
      ["classes", ints(this._classes.slice(0, this._count))],
      ["seen", [...this._seen].sort(([a], [b]) => a - b).map(ints)],
      ["full", ints([...this._full].sort(ascending))],
    ]);
  }

  /** Read the record of a checkpoint, which is not trusted. */
  static fromRecord(record: Json): ReplayMemory {
    try {
      return ReplayMemory._read(record instanceof Map ? record : new Map());
    } catch (error) {
      throw new CheckpointError(
        `the checkpoint's memory for replay cannot be read: ${messageOf(error)}. Forget it with ` +
          "clearReplay(session)",
      );
    }
  }

  private static _read(saved: JsonObject): ReplayMemory {
    if (saved.get("format") !== FORMAT) throw new Error("its format is another one");
    const made = new ReplayMemory();
    made.run = integer(saved.get("run"));
    made.mixes = saved.get("mixes") === true;
    made._names = list(saved, "names").map(String);
    made._runs = list(saved, "runs").map(integer);
    made._classes = list(saved, "classes").map(integer);
    made._count = made._capacity = made._runs.length;
    made._counts = counted(made._classes);
    for (const label of list(saved, "full")) made._full.add(integer(label));
    for (const pair of list(saved, "seen")) {
      const [label, count] = Array.isArray(pair) ? pair.map(integer) : [];
      if (label === undefined || count === undefined) throw new Error("'seen' has no pairs");
      made._seen.set(label, count);
    }
    made._columns = list(saved, "columns").map((column) => unpacked(column, made._count));
    const isWhole =
      made._classes.length === made._count &&
      (made._columns.length === made._names.length || (!made._count && !made._columns.length)) &&
      made._classes.every((label) => (made._seen.get(label) ?? 0) > 0);
    if (!isWhole) throw new Error("its parts do not fit each other");
    return made;
  }
}

/** The class of each sample; all are of the same where classes do not matter. */
function classesOf({ array, dims }: Column, code: number, keep: Keep): number[] {
  if (keep !== "reservoir") {
    if (dims.length === 1 && WHOLE.includes(code)) return Array.from(array as Int32Array, Number);
    if (keep === "balanced") {
      throw new ArgumentError(
        "keep: 'balanced' needs the number of a class for each sample: use keep: 'reservoir'",
      );
    }
  }
  return new Array<number>(dims[0]!).fill(-1);
}

function counted(labels: readonly number[]): Map<number, number> {
  const counts = new Map<number, number>();
  for (const label of labels) counts.set(label, (counts.get(label) ?? 0) + 1);
  return counts;
}

function copyRow(from: TypedArray, row: number, to: TypedArray, at: number, stride: number): void {
  (to as Float32Array).set((from as Float32Array).subarray(row * stride, (row + 1) * stride), at * stride);
}

function isFiniteRow({ array, stride }: Column, row: number): boolean {
  if (!(array instanceof Float32Array || array instanceof Float64Array)) return true;
  return array.subarray(row * stride, (row + 1) * stride).every((value) => Number.isFinite(value));
}

function packed({ code, dims, array }: Kept, count: number): JsonObject {
  let text = "";
  for (const byte of bytesOf(array.subarray(0, count * countOf(dims)))) text += String.fromCharCode(byte);
  return new Map<string, Json>([
    ["type", NUMPY.get(code) ?? ""],
    ["shape", dims.map(BigInt)],
    ["data", btoa(text)],
  ]);
}

function unpacked(column: Json, count: number): Kept {
  const saved = column instanceof Map ? column : new Map<string, Json>();
  const code = [...NUMPY].find(([, type]) => type === saved.get("type"))?.[0];
  const dims = list(saved, "shape").map(integer);
  const text = saved.get("data");
  if (code === undefined || typeof text !== "string") throw new Error("a column has no known type");
  const data = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const width = (ELEMENT_TYPES.get(code)?.bits ?? 8) / 8;
  if (!dims.every((dim) => dim >= 0) || data.length !== count * countOf(dims) * width) {
    throw new Error(`a column has ${data.length} bytes, and its shape is ${dims.join(", ")}`);
  }
  return { code, dims, array: arrayOf(code, data) };
}

function list(record: JsonObject, name: string): Json[] {
  const value = record.get(name);
  if (!Array.isArray(value)) throw new Error(`'${name}' is no list`);
  return value;
}

function integer(value: Json | undefined): number {
  const number = typeof value === "bigint" ? Number(value) : NaN;
  if (!Number.isSafeInteger(number)) throw new Error(`${String(value)} is no whole number`);
  return number;
}

/**
 * `fit({ replay })`: samples of earlier runs are mixed into the batches of this one.
 *
 * A model that learns new classes forgets old ones, unless it sees some of their samples again. The
 * memory keeps a few samples of every run. It is a part of the checkpoint, so that a run that is
 * resumed, here or in Python, draws the same samples.
 */

import { ArgumentError, quoted } from "./errors.js";
import { type Batch, type BatchSource, type Column, column } from "./fit-data.js";
import { arranged } from "./inputs.js";
import type { Json, JsonObject } from "./json.js";
import type { ValueType } from "./model-file.js";
import { randomWords } from "./random.js";
import { type Keep, REPLAY, ReplayMemory } from "./replay-memory.js";
import type { TypedArray } from "./runtime.js";
import type { TrainingSession } from "./session.js";

/** A memory of old samples. */
export interface ReplayOptions {
  /** How many samples it keeps; or how many bytes, such as "5MB". */
  readonly size?: number | string | undefined;
  /** The part of each batch that is drawn from it, once there are samples of earlier runs. */
  readonly share?: number | undefined;
  /**
   * "balanced" keeps as many samples of each class as it can; "reservoir" keeps each sample with
   * the same probability; "auto" balances classes where labels are such.
   */
  readonly keep?: Keep | undefined;
}

const [DRAW, KEEP] = [1n, 2n]; // streams of random numbers
const UNITS = new Map([["KB", 1e3], ["MB", 1e6], ["GB", 1e9]]); // prettier-ignore
const SAMPLE_WEIGHT = "sample_weight";

/** Forget all samples that a session, and its next checkpoint, keep. */
export function clearReplay(session: TrainingSession): void {
  session.state.privateRecord.delete(REPLAY);
}

/** The memory in a run: what is drawn from it, and what goes into it. */
export class RunReplay {
  private readonly _memory: ReplayMemory;
  private readonly _record: JsonObject;
  private readonly _size: number | string;
  private readonly _share: number;
  private readonly _keep: Keep;
  private _inputs: readonly ValueType[] = [];
  /** New and old samples of a whole batch of arrays. */
  private _parts = [0, 0];
  private _pending: { index: number; values: readonly Column[] } | null = null;

  constructor(
    given: number | string | ReplayOptions,
    session: TrainingSession,
    private readonly _seed: bigint,
    resumed: boolean,
  ) {
    const { size = 200, share = 0.5, keep = "auto" } =
      typeof given === "object" && given !== null ? given : { size: given };
    if (typeof size === "string") bytesIn(size);
    else if (!Number.isSafeInteger(size) || size < 1) {
      throw new ArgumentError(
        `replay is a number of samples, a size like '5MB' or { size, share, keep }, not ${String(size)}`,
      );
    }
    if (!(typeof share === "number" && share > 0 && share < 1)) {
      throw new ArgumentError(`the share of replay is between 0 and 1, not ${String(share)}`);
    }
    if (!["auto", "balanced", "reservoir"].includes(keep)) {
      throw new ArgumentError(`keep is 'auto', 'balanced' or 'reservoir', not ${quoted(keep)}`);
    }
    [this._size, this._share, this._keep] = [size, share, keep];
    this._record = session.state.privateRecord;
    const saved = this._record.get(REPLAY);
    this._memory = saved === undefined ? new ReplayMemory() : ReplayMemory.fromRecord(saved);
    if (!resumed) this._memory.beginRun();
  }

  /** How many samples of a batch are new. */
  newInBatch(batchSize: number): number {
    let old = 0;
    if (this._memory.mixes) {
      if (batchSize < 2) {
        throw new ArgumentError("replay mixes old samples into batches: pass batchSize: 2 or more");
      }
      old = Math.min(batchSize - 1, Math.max(1, rounded(batchSize * this._share)));
    }
    this._parts = [batchSize - old, old];
    return batchSize - old;
  }

  /** What a resumed run has to have in common, as Python writes it. */
  settings(): JsonObject {
    const size = typeof this._size === "number" ? BigInt(this._size) : this._size;
    return new Map<string, Json>([["size", size], ["share", this._share], ["keep", this._keep]]); // prettier-ignore
  }

  /** The batches of a source with old samples in them. */
  mixed(source: BatchSource, inputs: readonly ValueType[]): BatchSource {
    this._inputs = inputs;
    this._memory.requireInputs(inputs);
    const epoch = (number: number, skip: number): AsyncIterable<Batch> =>
      this._epoch(source, number, skip);
    return { batches: source.batches, order: source.order, epoch };
  }

  /** The batches of an epoch; those of the first one go into the memory. */
  private async *_epoch(source: BatchSource, number: number, skip: number): AsyncGenerator<Batch> {
    let index = skip;
    for await (const batch of source.epoch(number, skip)) {
      const given = arranged(this._inputs, batch.feeds);
      const values = this._inputs.map((value, k) => column(value, given[k]!));
      const mixed = this._withOld(values, batch.samples, number, index);
      if (number === 0) this._pending = { index, values };
      yield mixed;
      this._takeIn();
      index += 1;
    }
  }

  private _withOld(values: readonly Column[], samples: number, epoch: number, index: number): Batch {
    const feeds = (all: readonly Column[]): { data: TypedArray; dims: readonly number[] }[] =>
      all.map(({ array, dims }) => ({ data: array, dims }));
    if (!this._memory.mixes) return { feeds: feeds(values), samples };
    let [, count] = this._parts as [number, number];
    if (samples !== this._parts[0]) {
      // The last one, or one of an iterable.
      count = Math.max(1, rounded((samples * this._share) / (1 - this._share)));
    }
    const needed = Math.max(count, this._memory.old().length);
    const words = randomWords([this._seed, DRAW, BigInt(epoch), BigInt(index)], needed);
    const old = this._memory.draw(count, words);
    const both = values.map((value, k) => joined(value, old[k]!));
    return { feeds: feeds(both), samples: samples + count };
  }

  /** Put the batch that was trained with into the memory. */
  private _takeIn(): void {
    if (!this._pending) return;
    const { index, values } = this._pending;
    this._pending = null;
    const seed = [this._seed, KEEP, BigInt(this._memory.run), BigInt(index)];
    const names = this._inputs.map(({ name }) => name);
    const labels = names.length - (names[names.length - 1] === SAMPLE_WEIGHT ? 2 : 1);
    this._memory.offer(
      values,
      this._inputs.map(({ code }) => code),
      labels,
      this._keep,
      randomWords(seed, 2 * values[0]!.dims[0]!),
      (bytes) => this._capacity(bytes),
    );
  }

  private _capacity(sampleBytes: number): number {
    if (typeof this._size === "number") return this._size;
    const count = Math.floor(bytesIn(this._size) / Math.max(1, sampleBytes));
    if (count < 1) {
      throw new ArgumentError(`a sample has ${sampleBytes} bytes, and replay keeps ${this._size}`);
    }
    return count;
  }

  /** Put the memory into the checkpoint, as it is after some epochs and batches. */
  record(epoch: number, batch: number): void {
    if (this._pending && (epoch > 0 || batch > this._pending.index)) this._takeIn();
    this._record.set(REPLAY, this._memory.toRecord());
  }
}

function joined(first: Column, second: Column): Column {
  const make = first.array.constructor as new (length: number) => TypedArray;
  const array = new make(first.array.length + second.array.length);
  (array as Float32Array).set(first.array as Float32Array);
  (array as Float32Array).set(second.array as Float32Array, first.array.length);
  const { dims, stride } = first;
  return { array, dims: [dims[0]! + second.dims[0]!, ...dims.slice(1)], stride };
}

/** To the nearest whole number, and from the middle to the even one, as Python rounds. */
function rounded(value: number): number {
  const down = Math.floor(value);
  const isMiddle = value - down === 0.5;
  return isMiddle ? down + (down % 2) : Math.round(value);
}

function bytesIn(text: string): number {
  const [, number, unit] = /^([0-9]+(?:\.[0-9]+)?) ?(KB|MB|GB)$/i.exec(text.trim()) ?? [];
  if (!number || !unit) {
    throw new ArgumentError(
      `replay takes a number of samples, or a size like '5MB', not ${quoted(text)}`,
    );
  }
  return Math.floor(Number(number) * UNITS.get(unit.toUpperCase())!);
}

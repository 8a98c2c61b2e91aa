/** Batches from arrays, an iterable, or a function that returns an iterable for each epoch. */

import { countOf } from "./elements.js";
import { ArgumentError, quoted } from "./errors.js";
import { converted, type Feeds, type Input, isShaped, isTensor, type Numbers } from "./inputs.js";
import type { ValueType } from "./model-file.js";
import type { Json } from "./json.js";
import { shuffled } from "./random.js";
import type { TypedArray } from "./runtime.js";
import { elementsOfTensor } from "./variables.js";

/** Batches, one after the other. */
export type Batches = Iterable<Feeds> | AsyncIterable<Feeds>;

/**
 * Training data: arrays of all samples, by name or in the order of the inputs, with samples on
 * the first axis; batches that can be iterated in each epoch; or a function that returns
 * the batches of an epoch, counted from 0.
 */
export type FitData =
  | { readonly arrays: Feeds }
  | { readonly batches: Batches | ((epoch: number) => Batches) };

/** A batch and its number of samples. */
export interface Batch {
  readonly feeds: Feeds;
  readonly samples: number;
}

/** Gives the batches of an epoch, without the first `skip`. */
export interface BatchSource {
  /** Their number, if known in advance. */
  readonly batches: number | null;
  /** Everything that determines the order of batches. */
  readonly order: ReadonlyMap<string, Json>;
  epoch(number: number, skip: number): AsyncIterable<Batch>;
}

export interface ArrayOptions {
  readonly batchSize: number;
  readonly shuffle: boolean;
  readonly dropLast: boolean;
  readonly seed: bigint;
}

export function makeSource(
  data: FitData,
  inputs: readonly ValueType[],
  options: ArrayOptions,
): BatchSource {
  if (typeof data === "object" && data !== null) {
    if ("arrays" in data) return new ArraySource(data.arrays, inputs, options);
    if ("batches" in data) return new IterableSource(data.batches);
  }
  throw new ArgumentError("data are { arrays: … } with all samples, or { batches: … }");
}

/** The values of one input, a row for each sample. */
export interface Column {
  readonly array: TypedArray;
  readonly dims: readonly number[];
  readonly stride: number;
}

/** Batches of arrays, in an order derived from the seed and the epoch. */
class ArraySource implements BatchSource {
  readonly batches: number;
  private readonly _columns: readonly Column[];
  private readonly _samples: number;

  constructor(
    feeds: Feeds,
    inputs: readonly ValueType[],
    private readonly _options: ArrayOptions,
  ) {
    this._columns = inputs.map((value, index) => {
      const given = Array.isArray(feeds)
        ? (feeds as readonly Input[])[index]
        : (feeds as Readonly<Record<string, Input>>)[value.name];
      if (given === undefined) {
        throw new ArgumentError(
          `there are no samples for the input ${quoted(value.name)}; the inputs are ` +
            inputs.map(({ name }) => name).join(", "),
        );
      }
      return column(value, given);
    });
    this._samples = this._columns[0]?.dims[0] ?? 0;
    const other = this._columns.findIndex(({ dims }) => dims[0] !== this._samples);
    if (other >= 0) {
      throw new ArgumentError(
        `${quoted(inputs[0]!.name)} has ${this._samples} samples and ${quoted(inputs[other]!.name)} ` +
          `${this._columns[other]!.dims[0]}`,
      );
    }
    const count = this._samples / _options.batchSize;
    this.batches = _options.dropLast ? Math.floor(count) : Math.ceil(count);
    if (this.batches === 0) throw new ArgumentError("the data are too few for a batch");
  }

  get order(): ReadonlyMap<string, Json> {
    const { batchSize, shuffle, dropLast, seed } = this._options;
    return new Map<string, Json>([
      ["kind", "ArraySource"],
      ["batches", BigInt(this.batches)],
      ["samples", BigInt(this._samples)],
      ["batch_size", BigInt(batchSize)],
      ["shuffle", shuffle],
      ["drop_last", dropLast],
      ["seed", shuffle ? seed : null],
    ]);
  }

  async *epoch(number: number, skip: number): AsyncGenerator<Batch> {
    const { batchSize, shuffle, seed } = this._options;
    const order = shuffle ? shuffled(this._samples, seed, number) : null;
    for (let index = skip; index < this.batches; index++) {
      const start = index * batchSize;
      const end = Math.min(start + batchSize, this._samples);
      const feeds = this._columns.map(({ array, dims, stride }) => ({
        data: order
          ? gathered(array, stride, order.subarray(start, end))
          : array.subarray(start * stride, end * stride),
        dims: [end - start, ...dims.slice(1)],
      }));
      yield { feeds, samples: end - start };
    }
  }
}

/** The samples that are given for an input, as it takes them. */
export function column(value: ValueType, given: Input): Column {
  const source: Numbers = isTensor(given)
    ? elementsOfTensor(given)
    : isShaped(given)
      ? given.data
      : (given as Numbers);
  const array = converted(value, source);
  const declared = value.dims?.slice(1) ?? [];
  const dims =
    isTensor(given) || isShaped(given)
      ? given.dims
      : [array.length / countOf(declared.map(Number)), ...declared.map(Number)];
  if (!dims.every((dim) => Number.isInteger(dim) && dim >= 0) || countOf(dims) !== array.length) {
    throw new ArgumentError(
      `the shape of the samples for the input ${quoted(value.name)} is not clear: give {data, dims}`,
    );
  }
  return { array, dims, stride: countOf(dims.slice(1)) };
}

function gathered(array: TypedArray, stride: number, rows: Uint32Array): TypedArray {
  const result = new (array.constructor as new (length: number) => TypedArray)(
    rows.length * stride,
  );
  rows.forEach((row, index) => {
    const part = array.subarray(row * stride, (row + 1) * stride);
    (result as Float32Array).set(part as Float32Array, index * stride);
  });
  return result;
}

/** Batches from an iterable. */
class IterableSource implements BatchSource {
  readonly batches: number | null;
  readonly order: ReadonlyMap<string, Json>;

  constructor(private readonly _source: Batches | ((epoch: number) => Batches)) {
    this.batches = Array.isArray(_source) ? _source.length : null;
    this.order = new Map<string, Json>([
      ["kind", typeof _source === "function" ? "FunctionSource" : "IterableSource"],
      ["batches", this.batches === null ? null : BigInt(this.batches)],
    ]);
  }

  async *epoch(number: number, skip: number): AsyncGenerator<Batch> {
    const source = typeof this._source === "function" ? this._source(number) : this._source;
    let index = 0;
    for await (const feeds of source) {
      if (index++ >= skip) yield { feeds, samples: samplesOf(feeds) };
    }
    if (index < Math.max(skip, 1)) {
      throw new ArgumentError(
        skip
          ? `epoch ${number + 1} has ${index} batches, but ${skip} were done before the run stopped: ` +
            "to resume, the same data are needed"
          : `there was no batch in epoch ${number + 1}; an iterator can be gone through once: pass a ` +
            "function that returns a new one",
      );
    }
  }
}

/** The number of samples of a batch: the last input, usually labels, has one entry each. */
function samplesOf(feeds: Feeds): number {
  const values = Object.values(feeds) as Input[];
  for (const value of values) {
    if (isTensor(value) || isShaped(value)) return value.dims[0] ?? 1;
  }
  return (values[values.length - 1] as Numbers | undefined)?.length ?? 1;
}

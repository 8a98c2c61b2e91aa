/** Nearest class mean: a class is known by the mean of its features, which new samples refine. */

import { type Matrix, matrix, product, rowOf, dot } from "./eigen.js";
import { CheckpointError } from "./errors.js";
import type { Json, JsonObject } from "./json.js";
import type { LinearHead } from "./ridge.js";

export type MeanMetric = "cosine" | "euclidean";
/** How far the score of a class without samples is below the best one. */
const NEVER = 10;

/** Sums of the features of each class, and how many samples they are of. */
export class ClassMeans {
  constructor(
    readonly metric: MeanMetric,
    /** A row for each class. */
    readonly sums: Matrix,
    readonly counts: Float64Array,
  ) {}

  static empty(metric: MeanMetric, classes: number, features: number): ClassMeans {
    return new ClassMeans(metric, matrix(classes, features), new Float64Array(classes));
  }

  /** Take in samples, each with its class. */
  add(features: Matrix, labels: readonly number[]): void {
    labels.forEach((label, i) => {
      const sum = rowOf(this.sums, label);
      this._seen(rowOf(features, i)).forEach((value, j) => (sum[j]! += value));
      this.counts[label]! += 1;
    });
  }

  /** The head that finds the nearest mean, and its scores for samples among them. */
  head(features: Matrix, labels: readonly number[]): LinearHead {
    const classes = this.counts.length;
    const weight = matrix(features.columns, classes);
    const bias = new Float64Array(classes);
    this.counts.forEach((count, label) => {
      const [row, shift] = this._linear(rowOf(this.sums, label), count);
      row.forEach((value, j) => (weight.data[j * classes + label] = value));
      bias[label] = shift;
    });
    const scores = product(features, weight);
    for (let i = 0; i < scores.rows; i++) bias.forEach((value, j) => (rowOf(scores, i)[j]! += value));
    this._hideUnseen(scores, bias);
    labels.forEach((label, i) => {
      // Without a sample, the mean of its own class is another one.
      const others = this.counts[label]! - 1;
      if (others < 0.5) return;
      const x = rowOf(features, i);
      const seen = this._seen(x);
      const [row, shift] = this._linear(
        rowOf(this.sums, label).map((value, j) => value - seen[j]!),
        others,
      );
      rowOf(scores, i)[label] = dot(x, row) + shift;
    });
    return { weight, bias, leftOut: scores, regularization: 0 };
  }

  /** Let classes without samples never win. */
  private _hideUnseen(scores: Matrix, bias: Float64Array): void {
    const unseen = [...this.counts.keys()].filter((label) => this.counts[label]! < 0.5);
    if (!unseen.length) return;
    const best = Array.from({ length: scores.rows }, (_, i) =>
      Math.max(...rowOf(scores, i).filter((_, label) => this.counts[label]! > 0.5)),
    );
    const [least, most] = extremes(best);
    const low = least - NEVER * (most - least + Math.max(Math.abs(least), Math.abs(most)));
    for (const label of unseen) {
      bias[label] = low;
      for (let i = 0; i < scores.rows; i++) rowOf(scores, i)[label] = low;
    }
  }

  /** Features as distances are measured between them. */
  private _seen(x: Float64Array): Float64Array {
    return this.metric === "euclidean" ? x : normalised(x);
  }

  /**
   * The weights and the bias whose score is the largest for the nearest mean: |x - m|² is least
   * where x·m - |m|²/2 is largest; the cosine where x·m/|m| is.
   */
  private _linear(sum: Float64Array, count: number): [weights: Float64Array, bias: number] {
    const mean = sum.map((value) => value / Math.max(count, 1));
    return this.metric === "cosine" ? [normalised(mean), 0] : [mean, -0.5 * dot(mean, mean)];
  }

  // ---- in a checkpoint ---------------------------------------------------------------------------

  /** The sums as plain data, as Python writes them. */
  toRecord(): JsonObject {
    return new Map<string, Json>([
      ["metric", this.metric],
      ["shape", [BigInt(this.sums.rows), BigInt(this.sums.columns)]],
      ["sums", packed(this.sums.data)],
      ["counts", packed(this.counts)],
    ]);
  }

  /** Read the record of a checkpoint, which is not trusted. */
  static fromRecord(record: Json): ClassMeans {
    const fail = (what: string): never => {
      throw new CheckpointError(
        `the checkpoint's record of class means cannot be read: ${what}. Start with add: false`,
      );
    };
    const saved = record instanceof Map ? record : new Map<string, Json>();
    const metric = saved.get("metric");
    const shape = saved.get("shape");
    const isShape =
      Array.isArray(shape) &&
      shape.length === 2 &&
      shape.every((size) => typeof size === "bigint" && size > 0n && size < 2n ** 31n);
    if (!isShape || (metric !== "cosine" && metric !== "euclidean")) {
      return fail("its metric or shape is wrong");
    }
    const [rows, columns] = shape.map(Number) as [number, number];
    const [sums, counts] = [unpacked(saved.get("sums")), unpacked(saved.get("counts"))];
    if (sums?.length !== rows * columns || counts?.length !== rows) {
      return fail("its sums are not as many as it says");
    }
    if (!sums.every(Number.isFinite) || !counts.every((count) => count >= 0)) {
      return fail("its sums or counts are no finite numbers");
    }
    return new ClassMeans(metric, { rows, columns, data: sums }, counts);
  }
}

function extremes(values: readonly number[]): [least: number, most: number] {
  return values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [
    Infinity,
    -Infinity,
  ]);
}

function normalised(x: Float64Array): Float64Array {
  const norm = Math.sqrt(dot(x, x)) || 1;
  return x.map((value) => value / norm);
}

function packed(values: Float64Array): string {
  const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}

function unpacked(text: Json | undefined): Float64Array | null {
  if (typeof text !== "string" || !/^[A-Za-z0-9+/]*={0,2}$/.test(text) || text.length % 4) return null;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return bytes.length % 8 ? null : new Float64Array(bytes.buffer);
}

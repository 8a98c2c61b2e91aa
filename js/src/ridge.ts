/**
 * Ridge regression in closed form, with the regularisation that leave-one-out errors choose.
 *
 * With features x and targets y, both centred, the weight is (xᵀx + a)⁻¹ xᵀy. One decomposition of
 * xᵀx (or of xxᵀ, where there are fewer samples than features) gives it for every a, and with it the
 * prediction for each sample of a head that was computed without that sample.
 */

import { eigen, gram, type Matrix, matrix, product, rowOf, transposed } from "./eigen.js";

/** A solution, and what it would score for each sample had it not seen that sample. */
export interface LinearHead {
  /** A column for each score. */
  readonly weight: Matrix;
  readonly bias: Float64Array;
  readonly leftOut: Matrix;
  readonly regularization: number;
}

/** Relative to the mean variance of a direction of the features. */
const CANDIDATES = Array.from({ length: 21 }, (_, i) => 10 ** (-6 + i / 2));
/** Of the largest variance: what is less is rounding. */
const NOTHING = 1e-12;

/** The head whose scores are larger by a factor. */
export function scaledHead(head: LinearHead, factor: number): LinearHead {
  const times = (m: Matrix): Matrix => ({ ...m, data: m.data.map((value) => value * factor) });
  return {
    ...head,
    weight: times(head.weight),
    bias: head.bias.map((value) => value * factor),
    leftOut: times(head.leftOut),
  };
}

/** The head of the least squared error; null chooses the regularisation. */
export function solveRidge(
  features: Matrix,
  targets: Matrix,
  regularization: number | null,
  hasBias: boolean,
): LinearHead {
  const [x, xMean] = centred(features, hasBias);
  const [y, yMean] = centred(targets, hasBias);
  const count = x.rows;
  const { variances, directions } = decomposed(x);
  const turned = product(x, transposed(directions)); // a row for each sample
  const projected = product(transposed(turned), y);
  const own = hasBias ? 1 / count : 0; // what the mean owes to each sample

  const errors = (a: number): Matrix => {
    const shrunk = variances.map((value) => 1 / (value + a));
    const weights = scaledRows(projected, shrunk);
    const made = product(turned, weights);
    for (let i = 0; i < count; i++) {
      let leverage = own;
      rowOf(turned, i).forEach((value, k) => (leverage += value * value * shrunk[k]!));
      const rest = Math.max(1 - leverage, NOTHING);
      const [row, wanted] = [rowOf(made, i), rowOf(y, i)];
      row.forEach((value, j) => (row[j] = (wanted[j]! - value) / rest));
    }
    return made;
  };

  let chosen = regularization;
  if (chosen === null) {
    const total = variances.reduce((sum, value) => sum + value, 0);
    const scale = total / Math.max(1, variances.length) || 1;
    const squared = CANDIDATES.map((c) =>
      errors(c * scale).data.reduce((sum, value) => sum + value * value, 0),
    );
    chosen = CANDIDATES[squared.indexOf(Math.min(...squared))]! * scale;
  }
  const shrunk = variances.map((value) => 1 / (value + chosen));
  const weight = product(transposed(directions), scaledRows(projected, shrunk));
  const leftOut = errors(chosen);
  for (let i = 0; i < count; i++) {
    const [row, wanted] = [rowOf(leftOut, i), rowOf(y, i)];
    row.forEach((error, j) => (row[j] = wanted[j]! + yMean[j]! - error));
  }
  const shift = product(matrix(1, xMean.length, xMean), weight).data;
  const bias = yMean.map((value, j) => value - shift[j]!);
  return { weight, bias, leftOut, regularization: chosen };
}

/** Rows less their mean, and the mean; zeros where there is no bias. */
function centred(given: Matrix, hasBias: boolean): [Matrix, Float64Array] {
  const made = matrix(given.rows, given.columns, given.data);
  const mean = new Float64Array(given.columns);
  if (!hasBias) return [made, mean];
  for (let i = 0; i < made.rows; i++) {
    rowOf(made, i).forEach((value, j) => (mean[j]! += value / made.rows));
  }
  for (let i = 0; i < made.rows; i++) {
    const row = rowOf(made, i);
    mean.forEach((value, j) => (row[j]! -= value));
  }
  return [made, mean];
}

function scaledRows(a: Matrix, factors: Float64Array): Matrix {
  const made = matrix(a.rows, a.columns, a.data);
  factors.forEach((factor, i) => {
    const row = rowOf(made, i);
    row.forEach((value, j) => (row[j] = value * factor));
  });
  return made;
}

/** The directions in which features vary, as rows, and how much they do. */
function decomposed(x: Matrix): { variances: Float64Array; directions: Matrix } {
  const isWide = x.rows < x.columns;
  const { values, vectors } = eigen(gram(isWide ? x : transposed(x)));
  const least = NOTHING * Math.max(...values, Number.MIN_VALUE);
  const kept = [...values.keys()].filter((k) => values[k]! > least);
  const variances = Float64Array.from(kept, (k) => values[k]!);
  let directions = matrix(kept.length, vectors.columns);
  kept.forEach((k, i) => rowOf(directions, i).set(rowOf(vectors, k)));
  if (isWide) {
    directions = scaledRows(
      product(directions, x),
      variances.map((value) => 1 / Math.sqrt(value)),
    );
  }
  return { variances, directions };
}

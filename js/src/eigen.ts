/** Matrices of doubles, row by row, and the eigenvectors of symmetric ones. */

/** A matrix; its rows lie one after the other. */
export interface Matrix {
  readonly rows: number;
  readonly columns: number;
  readonly data: Float64Array;
}

export function matrix(rows: number, columns: number, data?: ArrayLike<number>): Matrix {
  return { rows, columns, data: data ? Float64Array.from(data) : new Float64Array(rows * columns) };
}

/** A row of a matrix, as a view. */
export const rowOf = ({ columns, data }: Matrix, row: number): Float64Array =>
  data.subarray(row * columns, (row + 1) * columns);

export function dot(a: Float64Array, b: Float64Array): number {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i]! * b[i]!;
  return sum;
}

/** y += factor · x */
function add(y: Float64Array, factor: number, x: Float64Array): void {
  for (let i = 0; i < y.length; i++) y[i]! += factor * x[i]!;
}

export function transposed(a: Matrix): Matrix {
  const made = matrix(a.columns, a.rows);
  for (let i = 0; i < a.rows; i++) {
    for (let j = 0; j < a.columns; j++) made.data[j * a.rows + i] = a.data[i * a.columns + j]!;
  }
  return made;
}

/** a · b */
export function product(a: Matrix, b: Matrix): Matrix {
  const made = matrix(a.rows, b.columns);
  for (let i = 0; i < a.rows; i++) {
    const row = rowOf(made, i);
    for (let k = 0; k < a.columns; k++) {
      const factor = a.data[i * a.columns + k]!;
      if (factor !== 0) add(row, factor, rowOf(b, k));
    }
  }
  return made;
}

/** a · aᵀ */
export function gram(a: Matrix): Matrix {
  const made = matrix(a.rows, a.rows);
  for (let i = 0; i < a.rows; i++) {
    for (let j = 0; j <= i; j++) {
      const value = dot(rowOf(a, i), rowOf(a, j));
      made.data[i * a.rows + j] = made.data[j * a.rows + i] = value;
    }
  }
  return made;
}

/**
 * Eigenvalues of a symmetric matrix, in no order, and the eigenvectors as rows.
 *
 * Householder reflections make it tridiagonal; QR steps with Wilkinson's shift make it diagonal.
 */
export function eigen(symmetric: Matrix): { values: Float64Array; vectors: Matrix } {
  const { diagonal, beside, turned } = tridiagonal(symmetric);
  diagonalise(diagonal, beside, turned);
  return { values: diagonal, vectors: turned };
}

/** A tridiagonal matrix T and the rows of Q, with A = Qᵀ T Q. */
function tridiagonal(symmetric: Matrix): {
  diagonal: Float64Array;
  beside: Float64Array;
  turned: Matrix;
} {
  const n = symmetric.rows;
  const a = matrix(n, n, symmetric.data);
  const beside = new Float64Array(Math.max(0, n - 1));
  const mirrors: (Float64Array | null)[] = [];
  for (let k = 0; k + 2 < n; k++) {
    // The mirror turns what is below the diagonal in column k to its first element.
    const v = rowOf(a, k).slice(k + 1);
    const length = Math.sqrt(dot(v, v));
    const side = v[0]! > 0 ? -length : length;
    beside[k] = side;
    v[0]! -= side;
    const norm = Math.sqrt(dot(v, v));
    if (norm === 0) {
      mirrors.push(null);
      continue;
    }
    for (let i = 0; i < v.length; i++) v[i]! /= norm;
    mirrors.push(v);
    const below = (i: number): Float64Array => rowOf(a, k + 1 + i).subarray(k + 1);
    const q = v.map((_, i) => 2 * dot(below(i), v));
    const along = dot(q, v);
    add(q, -along, v);
    for (let i = 0; i < v.length; i++) {
      const row = below(i);
      add(row, -v[i]!, q);
      add(row, -q[i]!, v);
    }
  }
  if (n > 1) beside[n - 2] = a.data[(n - 1) * n + n - 2]!;
  const diagonal = Float64Array.from({ length: n }, (_, i) => a.data[i * n + i]!);
  // Q is the product of all mirrors; the last ones change the fewest of its elements.
  const turned = matrix(n, n);
  for (let i = 0; i < n; i++) turned.data[i * n + i] = 1;
  for (let k = mirrors.length - 1; k >= 0; k--) {
    const v = mirrors[k];
    if (!v) continue;
    for (let i = k + 1; i < n; i++) {
      const row = rowOf(turned, i).subarray(k + 1);
      add(row, -2 * dot(row, v), v);
    }
  }
  return { diagonal, beside, turned };
}

const MOST_STEPS = 60; // for each eigenvalue; two are usual

function diagonalise(d: Float64Array, e: Float64Array, vectors: Matrix): void {
  let steps = 0;
  for (let last = d.length - 1; last > 0; ) {
    let first = last;
    while (first > 0 && !isSmall(d, e, first - 1)) first -= 1;
    if (first === last || ++steps > MOST_STEPS) {
      if (first < last) throw new RangeError("the eigenvalues of the features were not found");
      e[--last] = 0;
      steps = 0;
      continue;
    }
    step(d, e, vectors, first, last);
  }
}

function isSmall(d: Float64Array, e: Float64Array, at: number): boolean {
  return Math.abs(e[at]!) <= Number.EPSILON * (Math.abs(d[at]!) + Math.abs(d[at + 1]!));
}

/** One QR step on rows `first` to `last` of a tridiagonal matrix. */
function step(d: Float64Array, e: Float64Array, z: Matrix, first: number, last: number): void {
  const half = (d[last - 1]! - d[last]!) / 2;
  const edge = e[last - 1]!;
  const root = Math.hypot(half, edge);
  const shift = d[last]! - (edge * edge) / (half + (half < 0 ? -root : root));
  let x = d[first]! - shift;
  let bulge = e[first]!;
  for (let k = first; k < last; k++) {
    const r = Math.hypot(x, bulge);
    const c = r === 0 ? 1 : x / r;
    const s = r === 0 ? 0 : bulge / r;
    if (k > first) e[k - 1] = r;
    const [a, b, g] = [d[k]!, e[k]!, d[k + 1]!];
    d[k] = c * c * a + 2 * c * s * b + s * s * g;
    d[k + 1] = s * s * a - 2 * c * s * b + c * c * g;
    e[k] = c * s * (g - a) + (c * c - s * s) * b;
    x = e[k]!;
    if (k + 1 < last) {
      bulge = s * e[k + 1]!;
      e[k + 1]! *= c;
    }
    const [upper, lower] = [rowOf(z, k), rowOf(z, k + 1)];
    for (let i = 0; i < upper.length; i++) {
      const [u, l] = [upper[i]!, lower[i]!];
      upper[i] = c * u + s * l;
      lower[i] = c * l - s * u;
    }
  }
}

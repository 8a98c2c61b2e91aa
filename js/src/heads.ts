/** `fitHead`: computes the last layer from the features of samples, without steps. */

import { ClassMeans, type MeanMetric } from "./class-means.js";
import { type Matrix, matrix, rowOf, transposed } from "./eigen.js";
import { ArgumentError, InputError, NonFiniteError, quoted } from "./errors.js";
import { type FitData, makeSource } from "./fit-data.js";
import { whole } from "./fit-evaluation.js";
import { prepared } from "./inputs.js";
import { findLastLayer, type LastLayer } from "./last-layer.js";
import { KEY as RUN } from "./resume-state.js";
import { type LinearHead, scaledHead, solveRidge } from "./ridge.js";
import type { OrtTensor } from "./runtime.js";
import type { TrainingSession } from "./session.js";

export interface HeadOptions {
  /**
   * "ridge" is the linear layer of the least squared error, the better one from some ten samples a
   * class on; labels that are no classes are regression targets. With "class-means" the class
   * whose mean is the nearest wins, which a few samples suffice for.
   */
  readonly method?: "ridge" | "class-means" | undefined;
  /** Of ridge regression; chosen by leaving samples out, unless given. */
  readonly regularization?: number | undefined;
  /** How class means measure how near they are. */
  readonly metric?: MeanMetric | undefined;
  /** Let class means take in these samples beside those of earlier calls. */
  readonly add?: boolean | undefined;
  /** The name of the weight of the last layer, where several layers make outputs. */
  readonly layer?: string | undefined;
  readonly batchSize?: number | undefined;
}

/** What `fitHead` found. */
export interface HeadFit {
  readonly method: "ridge" | "class-means";
  readonly samples: number;
  /**
   * The part of the samples whose class a head finds that was computed without them: an estimate
   * for new samples. Null for a regression.
   */
  readonly accuracy: number | null;
  /** What was added to the variances of the features; null for class means. */
  readonly regularization: number | null;
  readonly seconds: number;
}

/** The key of the checkpoint's private record. */
const MEANS = "class_means";
const FACTORS = Array.from({ length: 81 }, (_, i) => 10 ** (-4 + i / 10));
const ENOUGH = 4000; // samples that tell the size of the scores

/** What each score should be, and of which kind; `labels` are the classes, if they are such. */
interface Targets {
  readonly kind: "classes" | "yes or no" | "values";
  readonly wanted: Matrix;
  readonly labels: readonly number[];
}

/**
 * Compute weight and bias of the last layer in closed form, from one pass over the data.
 *
 * Everything before the last layer stays as it is. The scores are scaled so that their softmax
 * gives probabilities that fit, and training can go on from them.
 */
export async function fitHead(
  session: TrainingSession,
  data: FitData,
  options: HeadOptions = {},
): Promise<HeadFit> {
  const began = performance.now();
  const { method = "ridge", metric = "cosine", add = false, regularization } = options;
  checkOptions(method, metric, add, regularization);
  const layer = findLastLayer(session, options.layer);
  const { features, labels } = await collect(session, layer, data, options.batchSize);
  const [rows, columns] = session.state.typeOf(layer.weight).dims as [number, number];
  const [width, outputs] = layer.isTransposed ? [columns, rows] : [rows, columns];
  if (features.columns !== width) {
    throw new ArgumentError(
      `there are ${features.columns} features of a sample before the last layer, not ${width}: ` +
        "fitHead does not know which of them a label is for",
    );
  }
  if (!features.data.every(Number.isFinite)) {
    throw new NonFiniteError("the features of these samples are not finite: nothing was changed");
  }
  const targets = targetsOf(session, labels, features.rows, outputs);
  const record = session.state.privateRecord;
  let head: LinearHead;
  if (method === "ridge") {
    const wanted = targets.wanted.data.map((t) => (targets.kind === "values" ? t : 2 * t - 1));
    const goal = { ...targets.wanted, data: wanted };
    head = solveRidge(features, goal, regularization ?? null, layer.bias !== null);
  } else {
    const means = meansOf(session, add, metric, [outputs, width], layer, targets);
    means.add(features, targets.labels);
    if (layer.bias === null && means.counts.includes(0)) {
      throw new ArgumentError("classes without samples need a last layer with a bias");
    }
    head = means.head(features, targets.labels);
    record.set(MEANS, means.toRecord());
  }
  head = calibrated(head, targets);
  await assign(session, layer, head);
  record.delete(RUN); // the position of a run with other parameters
  return {
    method,
    samples: features.rows,
    accuracy: accuracyOf(head.leftOut, targets),
    regularization: method === "ridge" ? head.regularization : null,
    seconds: (performance.now() - began) / 1000,
  };
}

function checkOptions(method: string, metric: string, add: boolean, a: unknown): void {
  if (method !== "ridge" && method !== "class-means") {
    throw new ArgumentError(`method is 'ridge' or 'class-means', not ${quoted(method)}`);
  }
  if (metric !== "cosine" && metric !== "euclidean") {
    throw new ArgumentError(`metric is 'cosine' or 'euclidean', not ${quoted(metric)}`);
  }
  if (method === "ridge" && add) {
    throw new ArgumentError(
      "add is for method: 'class-means': ridge regression needs all samples at once",
    );
  }
  if (a === undefined) return;
  if (method !== "ridge") throw new ArgumentError("regularization is for method: 'ridge'");
  if (typeof a !== "number" || !Number.isFinite(a) || a < 0) {
    throw new ArgumentError(`regularization is a finite number of at least 0, not ${String(a)}`);
  }
}

// ---- features ------------------------------------------------------------------------------------

/** What the last layer reads, and the labels, of all samples. */
async function collect(
  session: TrainingSession,
  layer: LastLayer,
  data: FitData,
  batchSize = 32,
): Promise<{ features: Matrix; labels: OrtTensor[] }> {
  const { ort } = session.module.settings;
  const all = session.module.evalPass!.signature.inputs;
  const inputs = all.filter(({ name }) => name !== "sample_weight");
  const fixed = inputs[0]?.dims?.[0];
  const source = makeSource(data, inputs, {
    batchSize: typeof fixed === "number" ? fixed : whole("batchSize", batchSize, 1),
    shuffle: false,
    dropLast: typeof fixed === "number",
    seed: 0n,
  });
  const isInput = inputs.some(({ name }) => name === layer.features);
  const model = isInput
    ? null
    : await session.exportModelForInferencing([layer.features], { allowNonfinite: true });
  const run = model && (await ort.InferenceSession.create(model));
  const [parts, labels] = [[] as OrtTensor[], [] as OrtTensor[]];
  try {
    for await (const { feeds } of source.epoch(0, 0)) {
      const tensors = prepared(ort, inputs, feeds);
      const byName = new Map(inputs.map(({ name }, i) => [name, tensors[i]!]));
      labels.push(tensors[tensors.length - 1]!);
      const made = run
        ? await run.run(Object.fromEntries(run.inputNames.map((n) => [n, byName.get(n)!])))
        : null;
      parts.push(made ? made[layer.features]! : byName.get(layer.features)!);
    }
  } finally {
    await run?.release?.();
  }
  return { features: joined(parts, layer.features), labels };
}

function joined(parts: readonly OrtTensor[], name: string): Matrix {
  const [, columns] = parts[0]!.dims;
  if (!parts.every(({ dims }) => dims.length === 2 && dims[1] === columns)) {
    throw new ArgumentError(
      `the features ${quoted(name)} before the last layer have the shape ` +
        `[${parts[0]!.dims.join(", ")}], not one row for each sample`,
    );
  }
  const rows = parts.reduce((sum, { dims }) => sum + dims[0]!, 0);
  const made = matrix(rows, columns!);
  let at = 0;
  for (const { data } of parts) {
    made.data.set(data as Float32Array, at);
    at += (data as Float32Array).length;
  }
  return made;
}

// ---- labels --------------------------------------------------------------------------------------

function targetsOf(
  session: TrainingSession,
  labels: readonly OrtTensor[],
  count: number,
  outputs: number,
): Targets {
  const numbers = labels.flatMap(({ data }) => Array.from(data as Float32Array, Number));
  const isWhole = labels.every(({ type }) => /^u?int/.test(type));
  const wanted = matrix(count, outputs);
  if (isWhole && labels[0]!.dims.length === 1 && outputs > 1) {
    const wrong = numbers.find((label) => label < 0 || label >= outputs);
    if (wrong !== undefined) {
      throw new InputError(
        `the label ${wrong} is no class: the head has ${outputs} classes, from 0 to ` +
          `${outputs - 1}. Prepare the model with classes=... for more`,
      );
    }
    numbers.forEach((label, i) => (wanted.data[i * outputs + label] = 1));
    return { kind: "classes", wanted, labels: numbers };
  }
  if (numbers.length !== count * outputs) {
    throw new ArgumentError(
      `there are ${numbers.length} labels of ${count} samples, and the last layer makes ${outputs} ` +
        "scores: fitHead takes the number of a class for each sample, or a number for each score",
    );
  }
  if (!numbers.every(Number.isFinite)) {
    throw new NonFiniteError("the labels are not finite: nothing was changed");
  }
  wanted.data.set(numbers);
  return { kind: isSigmoid(session) ? "yes or no" : "values", wanted, labels: [] };
}

function isSigmoid(session: TrainingSession): boolean {
  const key = "onnxtrain.activation";
  const own = session.state.properties.get(key);
  const text = own ?? session.module.evalPass!.graph.model.properties.get(key);
  return typeof text === "string" && /"sigmoid"/.test(text);
}

function meansOf(
  session: TrainingSession,
  add: boolean,
  metric: MeanMetric,
  [classes, width]: readonly [number, number],
  layer: LastLayer,
  { kind }: Targets,
): ClassMeans {
  if (kind !== "classes") {
    throw new ArgumentError("method: 'class-means' needs the number of a class for each sample");
  }
  if (metric === "euclidean" && layer.bias === null) {
    throw new ArgumentError("metric: 'euclidean' needs a last layer with a bias");
  }
  const record = add ? session.state.privateRecord.get(MEANS) : undefined;
  if (record === undefined) return ClassMeans.empty(metric, classes, width);
  const means = ClassMeans.fromRecord(record);
  const { rows, columns } = means.sums;
  if (rows !== classes || columns !== width || means.metric !== metric) {
    throw new ArgumentError(
      `the class means of the checkpoint are ${means.metric}, of ${rows} classes and ${columns} ` +
        `features, and not ${metric}, of ${classes} and ${width}: start with add: false`,
    );
  }
  return means;
}

// ---- the head ------------------------------------------------------------------------------------

/**
 * The head with scores of the size at which samples left out are the most probable; which class
 * has the largest score stays the same.
 */
function calibrated(head: LinearHead, { kind, wanted }: Targets): LinearHead {
  if (kind === "values") return head;
  const each = Math.max(1, Math.floor(wanted.rows / ENOUGH));
  const lossOf = (factor: number): number => {
    let sum = 0;
    for (let i = 0; i < wanted.rows; i += each) {
      sum += loss(rowOf(head.leftOut, i), rowOf(wanted, i), factor, kind);
    }
    return sum;
  };
  const losses = FACTORS.map(lossOf);
  return scaledHead(head, FACTORS[losses.indexOf(Math.min(...losses))]!);
}

/** The negative logarithm of the probability of what is wanted. */
function loss(
  scores: Float64Array,
  wanted: Float64Array,
  factor: number,
  kind: Targets["kind"],
): number {
  if (kind === "yes or no") {
    return scores.reduce((sum, score, j) => {
      const s = score * factor;
      return sum + Math.max(s, 0) + Math.log1p(Math.exp(-Math.abs(s))) - wanted[j]! * s;
    }, 0);
  }
  const most = Math.max(...scores) * factor;
  const total = scores.reduce((sum, score) => sum + Math.exp(score * factor - most), 0);
  return scores.reduce((sum, score, j) => sum - (score * factor - most) * wanted[j]!, Math.log(total));
}

function accuracyOf(scores: Matrix, { kind, wanted }: Targets): number | null {
  if (kind === "values") return null;
  if (kind === "yes or no") {
    const right = scores.data.filter((score, i) => score > 0 === wanted.data[i]! > 0.5);
    return right.length / scores.data.length;
  }
  const first = (row: Float64Array): number => row.indexOf(Math.max(...row));
  let right = 0;
  for (let i = 0; i < scores.rows; i++) {
    if (first(rowOf(scores, i)) === first(rowOf(wanted, i))) right += 1;
  }
  return right / scores.rows;
}

function assign(session: TrainingSession, layer: LastLayer, head: LinearHead): Promise<void> {
  const { state } = session;
  return state.lock.run(async () => {
    const weight = layer.isTransposed ? transposed(head.weight) : head.weight;
    state.setValue(layer.weight, Float32Array.from(weight.data));
    if (layer.bias !== null) state.setValue(layer.bias, Float32Array.from(head.bias));
  });
}

/** Evaluation of a session over data: loss and metrics. */

import { ArgumentError, NonFiniteError, quoted } from "./errors.js";
import { type BatchSource, type FitData, makeSource } from "./fit-data.js";
import { arranged, type Input, isShaped, isTensor, type Numbers } from "./inputs.js";
import type { OrtTensor } from "./runtime.js";
import type { TrainingSession } from "./session.js";

/** A metric of an output and the labels of a batch: its mean over the samples. */
export type Metric = (output: OrtTensor, labels: Numbers) => number;

export interface EvaluationOptions {
  /** The batch size for arrays. */
  readonly batchSize?: number | undefined;
  /** Metrics beside the loss, by name; "accuracy" is built in. */
  readonly metrics?:
    | readonly "accuracy"[]
    | Readonly<Record<string, Metric | "accuracy">>
    | undefined;
}

/** Repeated evaluation over the same data. */
export class Evaluation {
  readonly names: readonly string[];
  private readonly _source: BatchSource;
  private readonly _metrics: readonly [string, Metric][];

  constructor(
    private readonly _session: TrainingSession,
    data: FitData,
    options: EvaluationOptions,
  ) {
    const pass = _session.module.evalPass;
    if (!pass)
      throw new ArgumentError("the session has no evaluation model: make it with evalModel");
    this._source = makeSource(data, pass.signature.inputs, {
      batchSize: whole("batchSize", options.batchSize ?? 32, 1),
      shuffle: false,
      dropLast: false,
      seed: 0n,
    });
    const given = options.metrics ?? {};
    const pairs: [string, Metric | "accuracy"][] = Array.isArray(given)
      ? given.map((name: "accuracy") => [name, name])
      : Object.entries(given);
    this._metrics = pairs.map(([name, metric]) => {
      if (metric === "accuracy") return [name, accuracy];
      if (typeof metric !== "function") {
        throw new ArgumentError(`the metric ${quoted(name)} is a function, or 'accuracy'`);
      }
      return [name, metric];
    });
    this.names = this._metrics.map(([name]) => name);
    if (this._metrics.length && _session.outputNames(false).length < 2) {
      throw new ArgumentError(
        "metrics need an output of the model, and the evaluation model gives the loss alone: " +
          "generate the artifacts with additional_output_names=['...']",
      );
    }
  }

  async run(epoch: number): Promise<Record<string, number>> {
    const sums: Record<string, number> = { evalLoss: 0 };
    const inputs = this._session.module.evalPass!.signature.inputs;
    const output = this._session.outputNames(false)[1]!;
    let samples = 0;
    for await (const batch of this._source.epoch(epoch, 0)) {
      const { loss, outputs } = await this._session.evaluate(batch.feeds);
      if (!Number.isFinite(loss)) throw new NonFiniteError(`evaluation: the loss is ${loss}`);
      sums["evalLoss"]! += loss * batch.samples;
      const given = arranged(inputs, batch.feeds);
      for (const [name, metric] of this._metrics) {
        const labels = numbersOf(given[given.length - 1]!);
        sums[name] = (sums[name] ?? 0) + metric(outputs[output]!, labels) * batch.samples;
      }
      samples += batch.samples;
    }
    return Object.fromEntries(Object.entries(sums).map(([name, sum]) => [name, sum / samples]));
  }
}

function numbersOf(input: Input): Numbers {
  return isTensor(input)
    ? (input.data as Numbers)
    : isShaped(input)
      ? input.data
      : (input as Numbers);
}

/** The number of samples with the highest output at the label. */
export function accuracy(output: OrtTensor, labels: Numbers): number {
  const scores = output.data as Float32Array;
  const classes = output.dims[output.dims.length - 1]!;
  let right = 0;
  for (let row = 0; row < labels.length; row++) {
    let best = 0;
    for (let k = 1; k < classes; k++) {
      if (scores[row * classes + k]! > scores[row * classes + best]!) best = k;
    }
    if (best === Number(labels[row])) right += 1;
  }
  return labels.length ? right / labels.length : NaN;
}

export function whole(name: string, value: unknown, least: number): number {
  if (!Number.isSafeInteger(value) || (value as number) < least) {
    throw new ArgumentError(
      `${name} must be a whole number of at least ${least}, not ${String(value)}`,
    );
  }
  return value as number;
}

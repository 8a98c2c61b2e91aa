/** The messages between a page and its worker. */

import type { FitOptions, ProgressEvent } from "./fit.js";
import type { SessionOptions, TypedArray } from "./runtime.js";

/** The methods of `TrainingSession` that a worker calls directly. */
export const METHODS = [
  "step",
  "evaluate",
  "runTrainStep",
  "runEvalStep",
  "runOptimizerStep",
  "lazyResetGrad",
  "setLearningRate",
  "getLearningRate",
  "registerLinearLRScheduler",
  "schedulerStep",
  "getParametersSize",
  "getContiguousParameters",
  "loadParametersBuffer",
  "getParameter",
  "updateParameter",
  "freezeRanges",
  "addProperty",
  "getProperty",
  "saveCheckpoint",
  "exportModelForInferencing",
  "exportAdapter",
  "loadAdapter",
  "release",
] as const;

/** A tensor from a worker. */
export interface PlainTensor {
  readonly type: string;
  readonly dims: readonly number[];
  readonly data: TypedArray;
}

/** The source of a session in a worker. URLs are relative to the worker. */
export type WorkerOptions =
  | {
      readonly folder: string;
      readonly prefix?: string | undefined;
      readonly checkpoint?: Uint8Array | string | undefined;
      readonly batchSize?: number | "auto" | undefined;
      readonly sessionOptions?: SessionOptions | undefined;
    }
  | {
      readonly folder?: undefined;
      readonly checkpoint: Uint8Array | string;
      readonly trainModel: Uint8Array | string;
      readonly evalModel?: Uint8Array | string | undefined;
      readonly optimizerModel?: Uint8Array | string | undefined;
      readonly stepModel?: Uint8Array | string | undefined;
      readonly batchSize?: number | "auto" | undefined;
      readonly sessionOptions?: SessionOptions | undefined;
    };

/** The options of `fit` that can be sent to a worker. */
export interface WorkerFitOptions
  extends Omit<FitOptions, "save" | "onProgress" | "signal" | "scheduler" | "metrics"> {
  readonly scheduler?:
    | string
    | ({ readonly name: string } & Readonly<Record<string, unknown>>)
    | undefined;
  readonly metrics?: readonly "accuracy"[] | undefined;
  /** Store checkpoints in the store of this name (see `CheckpointStore`), under this key. */
  readonly store?: { readonly name?: string; readonly key: string } | undefined;
}

export type Call =
  | {
      readonly onnxtrain: "call";
      readonly id: number;
      readonly method: string;
      readonly args: readonly unknown[];
    }
  | { readonly onnxtrain: "abort"; readonly id: number }
  | { readonly onnxtrain: "hello" }
  | { readonly onnxtrain: "hold"; readonly lock: string };

export type Reply =
  | { readonly onnxtrain: "ready" }
  | { readonly onnxtrain: "holding"; readonly lock: string }
  | { readonly onnxtrain: "result"; readonly id: number; readonly value: unknown }
  | {
      readonly onnxtrain: "error";
      readonly id: number;
      readonly name: string;
      readonly message: string;
    }
  | { readonly onnxtrain: "progress"; readonly id: number; readonly event: ProgressEvent };

/** On-device training for ONNX models in the browser and in Node, on the stock onnxruntime. */

export * from "./errors.js";
export type {
  Ort,
  OrtSession,
  OrtTensor,
  RunOptions,
  SessionOptions,
  TypedArray,
} from "./runtime.js";
export type { Source } from "./load.js";
export type { Feeds, Input, Numbers } from "./inputs.js";
export { CheckpointState } from "./state.js";
export { Parameter, Parameters, Properties, type Property } from "./parameters.js";
export { Module, type ModuleOptions, type RunRequest } from "./module.js";
export { Optimizer } from "./optimizer.js";
export {
  type Fetches,
  type FolderOptions,
  type StepResult,
  TrainingSession,
  type TrainingSessionOptions,
} from "./session.js";
export * from "./schedulers.js";
export { setSeed } from "./random.js";
export {
  accuracy,
  type EarlyStopping,
  evaluate,
  fit,
  type FitOptions,
  type Metric,
  type ProgressEvent,
} from "./fit.js";
export type { Batches, FitData } from "./fit-data.js";
export type { EpochRecord, History } from "./fit-place.js";
export { CheckpointStore, type StoredCheckpoint } from "./store.js";
export {
  connect,
  type PlainTensor,
  type WorkerFitOptions,
  type WorkerLike,
  type WorkerOptions,
  WorkerSession,
  type WorkerStepResult,
} from "./worker-client.js";
export { serve } from "./worker.js";

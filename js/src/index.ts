/** On-device training for ONNX models in the browser and in Node, on the stock onnxruntime. */

export * from "./core.js";
export * from "./schedulers.js";
export { Adapter, applyAdapter, openSlots, type Pair } from "./adapter.js";
export {
  accuracy,
  type EarlyStopping,
  evaluate,
  fit,
  type FitOptions,
  type ProgressEvent,
} from "./fit.js";
export { fitHead, type HeadFit, type HeadOptions } from "./heads.js";
export { clearReplay, type ReplayOptions } from "./replay.js";
export type { EvaluationOptions, Metric } from "./fit-evaluation.js";
export type { Batches, FitData } from "./fit-data.js";
export type { EpochRecord, History } from "./history.js";
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

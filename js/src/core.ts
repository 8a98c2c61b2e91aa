/** Everything for training step by step: sessions, checkpoints, parameters, errors. */

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
export { setSeed } from "./random.js";

/** Every error that onnxtrain raises on purpose, on one page. */

/** The base of every error of this package. */
export class OnnxTrainError extends Error {
  override name = "OnnxTrainError";
}

/** The model cannot be read, is inconsistent, or lies outside what onnxtrain accepts. */
export class ModelError extends OnnxTrainError {
  override name = "ModelError";
}

/** An argument is not of a kind, or not one of the choices, that the function takes. */
export class ArgumentError extends OnnxTrainError {
  override name = "ArgumentError";
}

/** A name that was asked for is not in the model. */
export class UnknownNameError extends OnnxTrainError {
  override name = "UnknownNameError";
}

/** A checkpoint cannot be read or written, or its content is not consistent. */
export class CheckpointError extends OnnxTrainError {
  override name = "CheckpointError";
}

/** What was fed to a graph has the wrong number, shape or type, or does not fit the graph. */
export class InputError extends OnnxTrainError {
  override name = "InputError";
}

/** onnxruntime failed to run a graph. */
export class RunError extends OnnxTrainError {
  override name = "RunError";
}

/** Something was asked for before, or after, it could be given. */
export class StateError extends OnnxTrainError {
  override name = "StateError";
}

/** Training or evaluation came to a number that is infinite or not a number. */
export class NonFiniteError extends OnnxTrainError {
  override name = "NonFiniteError";
}

/** A file could not be fetched or read. */
export class LoadError extends OnnxTrainError {
  override name = "LoadError";
}

/** The browser's storage refused to read or write; what was stored before is as it was. */
export class StorageError extends OnnxTrainError {
  override name = "StorageError";
}

/** The worker that trains has ended, or was never reached. */
export class WorkerError extends OnnxTrainError {
  override name = "WorkerError";
}

const CLASSES: Record<string, new (message: string) => OnnxTrainError> = {
  OnnxTrainError,
  ModelError,
  ArgumentError,
  UnknownNameError,
  CheckpointError,
  InputError,
  RunError,
  StateError,
  NonFiniteError,
  LoadError,
  StorageError,
  WorkerError,
};

/** Make the error anew that another thread has told by name and message. */
export function revived(name: string, message: string): Error {
  if (name === "AbortError") return new DOMException(message, name);
  const known = CLASSES[name];
  return known ? new known(message) : new OnnxTrainError(`${name}: ${message}`);
}

/** The words of whatever was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** A text as messages show it. */
export function quoted(text: unknown): string {
  return typeof text === "string" ? `'${text}'` : String(text);
}

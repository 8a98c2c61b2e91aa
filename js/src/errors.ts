/** All errors of onnxtrain. */

// What moves a terminal's cursor or turns the direction of text; and halves of characters.
const UNSAFE = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|\p{Surrogate}/gu;

/** A text that is safe to show, as parts of it may be from a file. */
function printable(text: string): string {
  return text.replace(
    UNSAFE,
    (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** The base class of all errors of onnxtrain. */
export class OnnxTrainError extends Error {
  override name = "OnnxTrainError";

  constructor(message = "") {
    super(printable(message));
  }
}

/** The model cannot be read, is inconsistent, or is not supported. */
export class ModelError extends OnnxTrainError {
  override name = "ModelError";
}

/** An argument has a value that the function does not accept. */
export class ArgumentError extends OnnxTrainError {
  override name = "ArgumentError";
}

/** A name is not in the model. */
export class UnknownNameError extends OnnxTrainError {
  override name = "UnknownNameError";
}

/** A checkpoint cannot be read or written, or its content is inconsistent. */
export class CheckpointError extends OnnxTrainError {
  override name = "CheckpointError";
}

/** An adapter cannot be read or written, or does not fit the model. */
export class AdapterError extends OnnxTrainError {
  override name = "AdapterError";
}

/** The inputs of a graph have a wrong number, shape or type. */
export class InputError extends OnnxTrainError {
  override name = "InputError";
}

/** onnxruntime failed to run a graph. */
export class RunError extends OnnxTrainError {
  override name = "RunError";
}

/** A call came too early or too late, or the object lacks what it needs. */
export class StateError extends OnnxTrainError {
  override name = "StateError";
}

/** Training or evaluation produced a value that is infinite or NaN. */
export class NonFiniteError extends OnnxTrainError {
  override name = "NonFiniteError";
}

/** A file could not be fetched or read. */
export class LoadError extends OnnxTrainError {
  override name = "LoadError";
}

/** The browser's storage failed; what was stored before is unchanged. */
export class StorageError extends OnnxTrainError {
  override name = "StorageError";
}

/** The worker has ended, or could not be reached. */
export class WorkerError extends OnnxTrainError {
  override name = "WorkerError";
}

const CLASSES = {
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

/** Recreate an error of another thread from its name and message. */
export function revived(name: string, message: string): Error {
  if (name === "AbortError") return new DOMException(message, name);
  if (!Object.hasOwn(CLASSES, name)) return new OnnxTrainError(`${name}: ${message}`);
  return new CLASSES[name as keyof typeof CLASSES](message);
}

/** The message of anything that was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** A string as messages show it. */
export function quoted(text: unknown): string {
  return typeof text === "string" ? `'${text}'` : String(text);
}

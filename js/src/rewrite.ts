/** Read and change the values of initializers in a graph file; the rest stays byte for byte. */

import type { Stored } from "./checkpoint-file.js";
import { STRING } from "./elements.js";
import {
  GRAPH_INITIALIZER,
  GRAPH_INPUT,
  inlineData,
  MODEL_GRAPH,
  type ModelFile,
  readInitializer,
  TENSOR_DIMS,
  TENSOR_NAME,
  TENSOR_RAW,
  TENSOR_STRINGS,
  TENSOR_TYPE,
} from "./model-file.js";
import { encoded } from "./text.js";
import { Chunks, Message } from "./wire.js";

/** The elements of named initializers that are inside the file, except strings. */
export function storedData(model: ModelFile, names: ReadonlySet<string>): Map<string, Uint8Array> {
  const found = new Map<string, Uint8Array>();
  if (!names.size) return found;
  const graph = Message.of(model.data, model.source).only(MODEL_GRAPH)!;
  for (const tensor of graph.messages(GRAPH_INITIALIZER)) {
    const { name, external } = readInitializer(tensor);
    const data = names.has(name) && !external ? inlineData(tensor) : null;
    if (data) found.set(name, data);
  }
  return found;
}

/** The replacement of a message; null keeps it. */
type Change = (message: Message) => Chunks | null;

/**
 * The model with other values for some initializers, and with a symbolic dimension of the inputs
 * fixed: not every package of onnxruntime has an option for that.
 */
export function rewritten(
  model: ModelFile,
  values: ReadonlyMap<string, Stored>,
  symbol: string | null,
  size: number,
): Uint8Array {
  const dim: Change = (message) =>
    symbol !== null && message.text(2) === symbol ? new Chunks().number(1, size) : null;
  const initializer: Change = (message) => {
    const name = message.text(TENSOR_NAME);
    const value = values.get(name);
    return value ? tensorMessage(name, value) : null;
  };
  // Type, tensor, shape, dimensions.
  const input = into({ 2: into({ 1: into({ 2: into({ 1: dim }) }) }) });
  const graph = into({ [GRAPH_INPUT]: input, [GRAPH_INITIALIZER]: initializer });
  return into({ [MODEL_GRAPH]: graph })(Message.of(model.data, model.source))!.join();
}

/** A message with changes to what is in some of its fields. */
function into(changes: Readonly<Record<number, Change>>): Change {
  return (message) => {
    const result = new Chunks();
    for (const field of message.fields) {
      const other = changes[field.number]?.(message.inner(field, field.number));
      if (other) result.message(field.number, other);
      else result.add(field.raw);
    }
    return result;
  };
}

/** A TensorProto with its elements inside. */
export function tensorMessage(name: string, tensor: Stored): Chunks {
  const message = new Chunks();
  for (const dim of tensor.dims) message.number(TENSOR_DIMS, dim);
  message.number(TENSOR_TYPE, tensor.code).text(TENSOR_NAME, name);
  for (const text of tensor.strings ?? []) {
    message.bytes(TENSOR_STRINGS, encoded(text) ?? new Uint8Array(0));
  }
  return tensor.code === STRING ? message : message.bytes(TENSOR_RAW, tensor.data);
}

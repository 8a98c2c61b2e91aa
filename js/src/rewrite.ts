/** Read and change the values of initializers in a graph file; all else stays byte for byte. */

import type { Stored } from "./checkpoint-file.js";
import { STRING } from "./elements.js";
import {
  GraphField,
  inlineData,
  ModelField,
  type ModelFile,
  readInitializer,
  TensorField,
} from "./model-file.js";
import { encoded } from "./text.js";
import { Chunks, type Field, WireReader } from "./wire.js";

/** The elements of those of the named initializers that are in the file itself, without strings. */
export function storedData(model: ModelFile, names: ReadonlySet<string>): Map<string, Uint8Array> {
  const found = new Map<string, Uint8Array>();
  if (!names.size) return found;
  const reader = new WireReader(model.source);
  for (const part of graphParts(model, reader)) {
    if (part.number !== GraphField.INITIALIZER) continue;
    const { name, external } = readInitializer(reader, part.data);
    const data = names.has(name) && !external ? inlineData(reader, part.data) : null;
    if (data) found.set(name, data);
  }
  return found;
}

function graphParts(model: ModelFile, reader: WireReader): Field[] {
  const graph = reader.fields(model.data, "model").find((part) => part.number === ModelField.GRAPH);
  return reader.fields(graph!.data, "graph");
}

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
  const reader = new WireReader(model.source);
  return replaced(reader, model.data, (part) =>
    part.number === ModelField.GRAPH
      ? replaced(reader, part.data, (item) => {
          if (item.number === GraphField.INPUT && symbol !== null) {
            return fixed(reader, item.data, symbol, size);
          }
          if (item.number !== GraphField.INITIALIZER) return null;
          const { name } = readInitializer(reader, item.data);
          const value = values.get(name);
          return value ? tensorMessage(name, value) : null;
        })
      : null,
  ).join();
}

/** A message with other content for some fields; null leaves one as it is. */
function replaced(
  reader: WireReader,
  message: Uint8Array,
  change: (field: Field) => Chunks | null,
): Chunks {
  const result = new Chunks();
  for (const field of reader.fields(message, "model")) {
    const other = change(field);
    if (other) result.message(field.number, other);
    else result.add(message.subarray(field.start, field.end));
  }
  return result;
}

/** A ValueInfoProto with a size for a symbolic dimension: type, tensor, shape, dimensions. */
function fixed(reader: WireReader, value: Uint8Array, symbol: string, size: number): Chunks {
  const into =
    (
      number: number,
      change: (message: Uint8Array) => Chunks | null,
    ): ((message: Uint8Array) => Chunks) =>
    (message) =>
      replaced(reader, message, (field) => (field.number === number ? change(field.data) : null));
  const dim = (message: Uint8Array): Chunks | null => {
    const name = reader.fields(message, "dim").find((field) => field.number === 2);
    return name && reader.text(name, "dim") === symbol ? new Chunks().number(1, size) : null;
  };
  return into(2, into(1, into(2, into(1, dim))))(value);
}

/** A TensorProto with its elements inside. */
export function tensorMessage(name: string, tensor: Stored): Chunks {
  const message = new Chunks();
  for (const dim of tensor.dims) message.number(TensorField.DIMS, dim);
  message.number(TensorField.DATA_TYPE, tensor.code).text(TensorField.NAME, name);
  for (const text of tensor.strings ?? []) {
    message.bytes(TensorField.STRING_DATA, encoded(text) ?? new Uint8Array(0));
  }
  return tensor.code === STRING ? message : message.bytes(TensorField.RAW_DATA, tensor.data);
}

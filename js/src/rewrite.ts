/** Read and change the values of initializers in a graph file; all else stays byte for byte. */

import type { Stored } from "./checkpoint-file.js";
import { STRING } from "./elements.js";
import { GraphField, inlineData, ModelField, type ModelFile, readInitializer, TensorField } from "./model-file.js";
import { encoded } from "./text.js";
import { Chunks, type Field, WireReader } from "./wire.js";

/** The elements of those of the named initializers that are in the file itself, without strings. */
export function storedData(
  model: ModelFile,
  names: ReadonlySet<string>,
): Map<string, Uint8Array> {
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

/** The model with other values for some initializers; `values` has the name of each. */
export function withInitializers(
  model: ModelFile,
  values: ReadonlyMap<string, Stored>,
): Uint8Array {
  const reader = new WireReader(model.source);
  const result = new Chunks();
  for (const part of reader.fields(model.data, "model")) {
    if (part.number !== ModelField.GRAPH) {
      result.add(model.data.subarray(part.start, part.end));
      continue;
    }
    const graph = new Chunks();
    for (const item of reader.fields(part.data, "graph")) {
      const name =
        item.number === GraphField.INITIALIZER ? readInitializer(reader, item.data).name : "";
      const value = values.get(name);
      if (value) graph.message(item.number, tensorMessage(name, value));
      else graph.add(part.data.subarray(item.start, item.end));
    }
    result.message(part.number, graph);
  }
  return result.join();
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

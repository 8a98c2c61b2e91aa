/**
 * What training needs to know of a graph file: interface, metadata, external tensors.
 *
 * The file is read once at the level of the graph; nodes and weights are skipped.
 */

import { dataSize, ELEMENT_TYPES, STRING } from "./elements.js";
import { quoted } from "./errors.js";
import { Chunks, Message } from "./wire.js";

export const NOTES_KEY = "onnxtrain";
const EXTERNAL = 1;

// Numbers of the fields of ONNX's messages.
export const MODEL_GRAPH = 7;
export const MODEL_METADATA = 14;
export const GRAPH_INITIALIZER = 5;
export const GRAPH_INPUT = 11;
export const GRAPH_OUTPUT = 12;
export const TENSOR_DIMS = 1;
export const TENSOR_TYPE = 2;
export const TENSOR_STRINGS = 6;
export const TENSOR_NAME = 8;
export const TENSOR_RAW = 9;
const TENSOR_ENTRIES = 13;
const TENSOR_LOCATION = 14;

/** A dimension is a number, the name of a symbolic one, or null. */
export type Dim = number | string | null;

/** The type of an input or output; `code` is 0 if it is not a tensor. */
export interface ValueType {
  readonly name: string;
  readonly code: number;
  readonly dims: readonly Dim[] | null;
}

/** An initializer with its elements in another file of the folder. */
export interface ExternalTensor {
  readonly name: string;
  readonly code: number;
  readonly dims: readonly number[];
  readonly location: string;
  readonly offset: number;
  readonly length: number;
}

export interface Notes {
  readonly format?: number;
  readonly checkpoint?: string;
  readonly loss?: string;
  readonly outputs?: readonly string[];
  readonly trainable?: readonly string[];
  readonly frozen?: readonly string[];
  readonly statistics?: readonly string[];
  readonly target?: string;
  readonly on_cpu?: readonly string[];
  readonly generation?: string;
  /** The file of the base that low-rank factors were put beside. */
  readonly base?: string;
  /** Values that depend on parameters alone, and are constants in exported models. */
  readonly folded?: readonly string[];
}

/** A graph file. */
export interface ModelFile {
  readonly source: string;
  readonly data: Uint8Array;
  readonly notes: Notes;
  readonly inputs: readonly ValueType[];
  readonly outputs: readonly ValueType[];
  /** Initializers that are in the checkpoint. */
  readonly external: ReadonlyMap<string, ExternalTensor>;
  /** Initializers that are in the file of the base. */
  readonly inBase: ReadonlyMap<string, ExternalTensor>;
  /** The metadata of the model, beside the notes. */
  readonly properties: ReadonlyMap<string, string>;
  readonly initializers: readonly string[];
}

/** Read a graph file, which messages call `source`. */
export function readModel(data: Uint8Array, source: string): ModelFile {
  const model = Message.of(data, source);
  if (!data.length) model.fail("the file is empty");
  if (isOrtFormat(data)) model.fail("the file is in the ORT format: give the .onnx file instead");
  const [graph, ...others] = model.messages(MODEL_GRAPH, "graph");
  if (!graph || others.length) return model.fail("there is not one graph: it is no ONNX model");
  const noted = model.messages(MODEL_METADATA, "metadata_props").map(readEntry);
  const properties = new Map(noted);
  const text = properties.get(NOTES_KEY);
  properties.delete(NOTES_KEY);
  const notes = text === undefined ? {} : readNotes(model, text);
  const values = (number: number, what: string): ValueType[] =>
    named(graph.messages(number, what).map(readValueType), graph, what);
  const stored = named(
    graph.messages(GRAPH_INITIALIZER, "initializer").map(readInitializer),
    graph,
    "initializer",
  );
  return {
    source,
    data,
    notes,
    properties,
    inputs: values(GRAPH_INPUT, "input"),
    outputs: values(GRAPH_OUTPUT, "output"),
    initializers: stored.map(({ name }) => name),
    external: externals(stored, (location) => location !== notes.base),
    inBase: externals(stored, (location) => location === notes.base),
  };
}

function externals(
  stored: readonly { readonly name: string; readonly external: ExternalTensor | null }[],
  isThere: (location: string) => boolean,
): Map<string, ExternalTensor> {
  return new Map(
    stored.flatMap(({ name, external }) =>
      external && isThere(external.location) ? [[name, external] as const] : [],
    ),
  );
}

/** Whether the file is FlatBuffers with the identifier of the ORT format. */
function isOrtFormat(data: Uint8Array): boolean {
  if (String.fromCharCode(...data.subarray(4, 8)) !== "ORTM") return false;
  const offset = new DataView(data.buffer, data.byteOffset).getUint32(0, true);
  return offset >= 8 && offset <= data.length - 4;
}

/** Check that all have unique names. */
function named<T extends { readonly name: string }>(items: T[], graph: Message, what: string): T[] {
  const seen = new Set<string>();
  for (const { name } of items) {
    if (!name) graph.fail(`an ${what} has no name`);
    if (seen.has(name)) graph.fail(`the name ${quoted(name)} occurs twice (${what})`);
    // onnxruntime takes inputs and returns outputs as properties of objects.
    if (name === "__proto__") graph.fail(`an ${what} is called '__proto__': rename it`);
    seen.add(name);
  }
  return items;
}

// ---- metadata ------------------------------------------------------------------------------------

function readNotes(model: Message, text: string): Notes {
  let notes: Record<string, unknown> | null = null;
  try {
    notes = JSON.parse(text) as Record<string, unknown>;
  } catch {
    // It is none.
  }
  if (typeof notes !== "object" || !notes || Array.isArray(notes)) {
    return model.fail("the metadata of onnxtrain is not a JSON object");
  }
  for (const [key, isRight] of Object.entries(NOTES)) {
    if (notes[key] !== undefined && !isRight(notes[key])) {
      model.fail(`${quoted(key)} in the metadata of onnxtrain has a wrong type or value`);
    }
  }
  return notes;
}

const isText = (found: unknown): boolean => typeof found === "string";
const areTexts = (found: unknown): boolean => Array.isArray(found) && found.every(isText);

const NOTES: Record<string, (found: unknown) => boolean> = {
  format: Number.isInteger,
  checkpoint: (found) => isText(found) && staysInFolder(found as string),
  loss: isText,
  outputs: areTexts,
  trainable: areTexts,
  frozen: areTexts,
  statistics: areTexts,
  target: isText,
  on_cpu: areTexts,
  generation: isText,
  base: (found) => isText(found) && staysInFolder(found as string),
  folded: areTexts,
};

/** Whether a path leads to a file in the folder of the model, on any system. */
function staysInFolder(location: string): boolean {
  return !/^$|\0|^[\\/]|^[a-zA-Z]:|(^|[\\/])\.\.($|[\\/])/.test(location);
}

// ---- types ---------------------------------------------------------------------------------------

export function readEntry(entry: Message): [key: string, value: string] {
  return [entry.text(1), entry.text(2)];
}

/** Read a ValueInfoProto. */
export function readValueType(value: Message): ValueType {
  const name = value.text(1);
  const tensor = value.only(2)?.only(1);
  const dims = tensor?.only(2)?.messages(1).map(readDim) ?? null;
  return { name, code: tensor?.int(1) ?? 0, dims };
}

/** Exporters write a negative number for an unknown dimension. */
function readDim(dim: Message): Dim {
  const last = dim.fields[dim.fields.length - 1]?.number;
  if (last === 2) return dim.text(2) || null;
  const size = dim.int(1);
  return last === 1 && size >= 0 ? size : null;
}

/** Whether a ValueInfoProto has a type, and whether it has a shape. */
export function isTyped(value: Message): { readonly type: boolean; readonly shape: boolean } {
  const declared = value.only(2);
  if (!declared?.data.length) return { type: false, shape: false };
  if (!declared.only(1)) return { type: true, shape: true };
  const { code, dims } = readValueType(value);
  return { type: code !== 0, shape: dims !== null };
}

// ---- tensors -------------------------------------------------------------------------------------

export interface TensorType {
  readonly code: number;
  readonly dims: readonly number[];
}

/** Element type and shape of a TensorProto. */
export function readTensorType(tensor: Message): TensorType {
  return { code: tensor.int(TENSOR_TYPE), dims: tensor.ints(TENSOR_DIMS) };
}

/** The name of an initializer and, if its data are external, their location. */
export function readInitializer(tensor: Message): {
  readonly name: string;
  readonly external: ExternalTensor | null;
} {
  const name = tensor.text(TENSOR_NAME);
  const isExternal = tensor.int(TENSOR_LOCATION) === EXTERNAL;
  return { name, external: isExternal ? readExternal(name, tensor) : null };
}

function readExternal(name: string, tensor: Message): ExternalTensor {
  const where = `initializer ${quoted(name)}`;
  const [type, size] = checkedType(tensor, where);
  const entries = new Map(tensor.messages(TENSOR_ENTRIES).map(readEntry));
  const position = (key: string, absent: number): number => {
    const text = entries.get(key) ?? String(absent);
    if (!/^\d{1,15}$/.test(text)) {
      tensor.fail(`${quoted(text.slice(0, 40))} is not a position in a file`, where);
    }
    return Number(text);
  };
  const length = position("length", size);
  if (length !== size || type.code === STRING) {
    tensor.fail(`${length} bytes of external data, where its type asks for ${size}`, where);
  }
  const location = entries.get("location") ?? "";
  if (!staysInFolder(location)) {
    tensor.fail(`the external data are at ${quoted(location)}, outside the folder`, where);
  }
  return { name, ...type, location, offset: position("offset", 0), length };
}

/** The type of a tensor, and the size of its elements in bytes. */
function checkedType(tensor: Message, where: string): [type: TensorType, size: number] {
  const type = readTensorType(tensor);
  if (!ELEMENT_TYPES.has(type.code)) tensor.fail(`its element type ${type.code} is unknown`, where);
  let count = 1;
  for (const dim of type.dims) {
    count *= Math.max(dim, 1);
    if (dim < 0 || !Number.isSafeInteger(count)) {
      tensor.fail(`the shape [${type.dims.join(", ")}] is impossible`, where);
    }
  }
  return [type, dataSize(type.code, type.dims)];
}

/** The elements inside a tensor, in the form of checkpoints; null for strings. */
export function inlineData(tensor: Message): Uint8Array | null {
  if (tensor.int(TENSOR_TYPE) === STRING) return null;
  const where = `initializer ${quoted(tensor.text(TENSOR_NAME))}`;
  const [{ code }, size] = checkedType(tensor, where);
  const data = tensor.messages(TENSOR_RAW).pop()?.data ?? typedData(tensor, code, size);
  if (data.length !== size) {
    tensor.fail(`it has ${data.length} bytes, where its shape needs ${size}`, where);
  }
  return data;
}

// The field for the elements of a type without raw data; int32_data for most.
const FIELD_OF_TYPE: Record<number, number> = { 1: 4, 14: 4, 11: 10, 15: 10, 7: 7, 12: 11, 13: 11 };

/** Elements that are stored as one number each. */
function typedData(tensor: Message, code: number, size: number): Uint8Array {
  const number = FIELD_OF_TYPE[code] ?? 5;
  const fields = tensor.all(number);
  if (number === 4 || number === 10) return new Chunks(...fields.map(({ data }) => data)).join();
  const width = Math.max((ELEMENT_TYPES.get(code)?.bits ?? 8) / 8, 1);
  const most = Math.ceil(size / width);
  // Each number takes a byte at least: a shape that asks for more is not believed.
  if (fields.reduce((sum, { data }) => sum + Math.max(1, data.length), 0) < most) {
    return new Uint8Array();
  }
  const words = new Uint8Array(8);
  const view = new DataView(words.buffer);
  const result = new Uint8Array(most * width);
  let at = 0;
  for (const [low, high] of tensor.halves(number, most)) {
    view.setUint32(0, low, true);
    view.setUint32(4, high, true);
    result.set(words.subarray(0, width), at);
    at += width;
  }
  return result.subarray(0, at);
}


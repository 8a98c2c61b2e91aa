/**
 * What training needs to know of a graph file: its interface, its notes, its external tensors.
 *
 * The file is walked once at the level of the graph. Nodes and weights are stepped over.
 */

import { dataSize, ELEMENT_TYPES, FLOAT, INT64, STRING } from "./elements.js";
import { quoted } from "./errors.js";
import { type Field, FIXED32, FIXED64, MAX_RANK, WireReader } from "./wire.js";

export const NOTES_KEY = "onnxtrain";
const ORT_IDENTIFIER = "ORTM";
const EXTERNAL = 1;

/** Numbers of the fields of ONNX's messages. */
export const ModelField = {
  IR_VERSION: 1,
  GRAPH: 7,
  OPSET_IMPORT: 8,
  METADATA: 14,
  TRAINING_INFO: 20,
  FUNCTIONS: 25,
};
export const GraphField = {
  NODE: 1,
  INITIALIZER: 5,
  INPUT: 11,
  OUTPUT: 12,
  VALUE_INFO: 13,
  QUANTIZATION: 14,
  SPARSE: 15,
};
export const TensorField = {
  DIMS: 1,
  DATA_TYPE: 2,
  FLOAT_DATA: 4,
  INT32_DATA: 5,
  STRING_DATA: 6,
  INT64_DATA: 7,
  NAME: 8,
  RAW_DATA: 9,
  DOUBLE_DATA: 10,
  UINT64_DATA: 11,
  EXTERNAL_DATA: 13,
  DATA_LOCATION: 14,
};

/** A dimension is a number, the name of a symbolic one, or null. */
export type Dim = number | string | null;

/** The type of an input or output; `code` is 0 for what is not a tensor. */
export interface ValueType {
  readonly name: string;
  readonly code: number;
  readonly dims: readonly Dim[] | null;
}

/** An initializer whose elements are in another file of the same folder. */
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
}

/** A graph file. */
export interface ModelFile {
  readonly source: string;
  readonly data: Uint8Array;
  readonly notes: Notes;
  readonly inputs: readonly ValueType[];
  readonly outputs: readonly ValueType[];
  readonly external: ReadonlyMap<string, ExternalTensor>;
  readonly initializers: readonly string[];
}

/** Read a graph file; `source` is what messages call it. */
export function readModel(data: Uint8Array, source: string): ModelFile {
  const reader = new WireReader(source);
  if (data.length === 0) reader.fail("the file is empty", "model");
  if (isOrtFormat(data)) {
    reader.fail("the file is in the ORT format: give the .onnx file instead", "model");
  }
  const graphs: Uint8Array[] = [];
  let notes: Notes = {};
  for (const part of reader.fields(data, "model")) {
    if (part.number === ModelField.GRAPH) graphs.push(reader.message(part, "model"));
    else if (part.number === ModelField.METADATA) {
      const [key, value] = readEntry(reader, reader.message(part, "metadata_props"));
      if (key === NOTES_KEY) notes = readNotes(reader, value);
    }
  }
  if (graphs.length !== 1) {
    reader.fail(
      `there are ${graphs.length} graphs instead of one: this is not an ONNX model`,
      "model",
    );
  }
  return { source, data, notes, ...readGraph(reader, graphs[0]!) };
}

/** FlatBuffers with the mark of the ORT format: in ONNX, no offset stands before the letters. */
function isOrtFormat(data: Uint8Array): boolean {
  if (data.length < 8 || String.fromCharCode(...data.subarray(4, 8)) !== ORT_IDENTIFIER) {
    return false;
  }
  const offset = new DataView(data.buffer, data.byteOffset).getUint32(0, true);
  return offset >= 8 && offset <= data.length - 4;
}

function readGraph(
  reader: WireReader,
  graph: Uint8Array,
): Pick<ModelFile, "inputs" | "outputs" | "external" | "initializers"> {
  const inputs: ValueType[] = [];
  const outputs: ValueType[] = [];
  const initializers: string[] = [];
  const external = new Map<string, ExternalTensor>();
  for (const part of reader.fields(graph, "graph")) {
    if (part.number === GraphField.INITIALIZER) {
      const found = readInitializer(reader, reader.message(part, "graph.initializer"));
      initializers.push(found.name);
      if (found.external) external.set(found.name, found.external);
    } else if (part.number === GraphField.INPUT) {
      inputs.push(readValueType(reader, reader.message(part, "graph.input"), "input"));
    } else if (part.number === GraphField.OUTPUT) {
      outputs.push(readValueType(reader, reader.message(part, "graph.output"), "output"));
    }
  }
  requireUnique(
    reader,
    "input",
    inputs.map((value) => value.name),
  );
  requireUnique(
    reader,
    "output",
    outputs.map((value) => value.name),
  );
  requireUnique(reader, "initializer", initializers);
  return { inputs, outputs, external, initializers };
}

function requireUnique(reader: WireReader, what: string, names: readonly string[]): void {
  const seen = new Set<string>();
  for (const name of names) {
    if (!name) reader.fail("it has no name", `graph.${what}`);
    if (seen.has(name)) reader.fail(`there are two of the name ${quoted(name)}`, `graph.${what}`);
    seen.add(name);
  }
}

// ---- notes ---------------------------------------------------------------------------------------

function readNotes(reader: WireReader, text: string): Notes {
  let notes: unknown;
  try {
    notes = JSON.parse(text);
  } catch {
    reader.fail("the note of onnxtrain is not valid JSON", "metadata_props");
  }
  if (typeof notes !== "object" || notes === null || Array.isArray(notes)) {
    reader.fail("the note of onnxtrain is not a JSON object", "metadata_props");
  }
  for (const [key, isRight] of Object.entries(NOTES)) {
    const value = (notes as Record<string, unknown>)[key];
    if (value !== undefined && !isRight(value)) {
      reader.fail(`${quoted(key)} in the note of onnxtrain is not what it should be`, key);
    }
  }
  return notes as Notes;
}

const isText = (found: unknown): boolean => typeof found === "string";
const areTexts = (found: unknown): boolean => Array.isArray(found) && found.every(isText);

const NOTES: Record<string, (found: unknown) => boolean> = {
  format: (found) => Number.isInteger(found),
  checkpoint: (found) => isText(found) && staysInFolder(found as string),
  loss: isText,
  outputs: areTexts,
  trainable: areTexts,
  frozen: areTexts,
  statistics: areTexts,
  target: isText,
  on_cpu: areTexts,
};

/** Whether a path leads to a file in the folder of the model, on any system. */
function staysInFolder(location: string): boolean {
  if (!location || location.includes("\0")) return false;
  if (/^[\\/]/.test(location) || /^[a-zA-Z]:/.test(location)) return false;
  return !location.split(/[\\/]/).includes("..");
}

// ---- types ---------------------------------------------------------------------------------------

export function readEntry(reader: WireReader, message: Uint8Array): [key: string, value: string] {
  let key = "";
  let value = "";
  for (const part of reader.fields(message, "entry")) {
    if (part.number === 1) key = reader.text(part, "entry.key");
    else if (part.number === 2) value = reader.text(part, `entry ${quoted(key)}`);
  }
  return [key, value];
}

/** The field of a message that is its name; "" if there is none. */
export function readName(
  reader: WireReader,
  message: Uint8Array,
  number: number,
  where: string,
): string {
  const found = reader.fields(message, where).filter((part) => part.number === number);
  return found.length ? reader.text(found[found.length - 1]!, `${where}.name`) : "";
}

/** The one message in a field, or null. Protobuf would merge several. */
function only(
  reader: WireReader,
  message: Uint8Array,
  number: number,
  where: string,
): Uint8Array | null {
  const found = reader.fields(message, where).filter((part) => part.number === number);
  if (found.length > 1) reader.fail(`field ${number} is there twice`, where, found[1]!.start);
  return found.length ? reader.message(found[0]!, where) : null;
}

/** Read a ValueInfoProto. */
export function readValueType(reader: WireReader, message: Uint8Array, what: string): ValueType {
  const name = readName(reader, message, 1, what);
  const where = `${what} ${quoted(name)}`;
  const declared = only(reader, message, 2, where);
  const tensor = declared && only(reader, declared, 1, where);
  if (!tensor) return { name, code: 0, dims: null };
  let code = 0;
  for (const part of reader.fields(tensor, where)) {
    if (part.number === 1) code = reader.int(part, where);
  }
  const shape = only(reader, tensor, 2, where);
  return { name, code, dims: shape && readDims(reader, shape, where) };
}

/** Whether a ValueInfoProto says of which type the value is; and whether its shape too. */
export function isTyped(
  reader: WireReader,
  message: Uint8Array,
): { readonly type: boolean; readonly shape: boolean } {
  const declared = only(reader, message, 2, "value");
  if (declared === null || declared.length === 0) return { type: false, shape: false };
  if (only(reader, declared, 1, "value") === null) return { type: true, shape: true };
  const { code, dims } = readValueType(reader, message, "value");
  return { type: code !== 0, shape: dims !== null };
}

function readDims(reader: WireReader, shape: Uint8Array, where: string): Dim[] {
  const dims: Dim[] = [];
  for (const part of reader.fields(shape, where)) {
    if (part.number !== 1) continue;
    if (dims.length === MAX_RANK) reader.fail(`there are more than ${MAX_RANK} dimensions`, where);
    let dim: Dim = null;
    for (const item of reader.fields(reader.message(part, where), where)) {
      if (item.number === 1) {
        // Exporters write a negative number for what they do not know.
        const size = reader.int(item, where);
        dim = size < 0 ? null : size;
      } else if (item.number === 2) dim = reader.text(item, where) || null;
    }
    dims.push(dim);
  }
  return dims;
}

// ---- tensors -------------------------------------------------------------------------------------

export interface TensorType {
  readonly code: number;
  readonly dims: readonly number[];
}

/** Element type and shape of a TensorProto. */
export function readTensorType(
  reader: WireReader,
  parts: readonly Field[],
  where: string,
): TensorType {
  const types = parts.filter((part) => part.number === TensorField.DATA_TYPE);
  const dims = parts.filter((part) => part.number === TensorField.DIMS);
  const last = types[types.length - 1];
  return { code: last ? reader.int(last, where) : 0, dims: reader.ints(dims, where) };
}

/** The name of an initializer and, if its data are in another file, where they are. */
export function readInitializer(
  reader: WireReader,
  message: Uint8Array,
): { readonly name: string; readonly external: ExternalTensor | null } {
  const parts = reader.fields(message, "initializer");
  let name = "";
  let location = 0;
  for (const part of parts) {
    if (part.number === TensorField.NAME) name = reader.text(part, "initializer.name");
    else if (part.number === TensorField.DATA_LOCATION) location = reader.int(part, "initializer");
  }
  if (location !== EXTERNAL) return { name, external: null };
  return { name, external: readExternal(reader, name, parts) };
}

function readExternal(reader: WireReader, name: string, parts: readonly Field[]): ExternalTensor {
  const where = `initializer ${quoted(name)}`;
  const { code, dims } = readTensorType(reader, parts, where);
  if (!ELEMENT_TYPES.has(code) || code === STRING) {
    reader.fail(`the element type ${code} cannot be in an external file`, where);
  }
  const size = checkedSize(reader, { code, dims }, where);
  const entries = new Map(
    parts
      .filter((part) => part.number === TensorField.EXTERNAL_DATA)
      .map((part) => readEntry(reader, reader.message(part, where))),
  );
  const position = (key: string, absent: number): number => {
    const text = entries.get(key) ?? String(absent);
    if (!/^\d{1,15}$/.test(text))
      reader.fail(`${quoted(text.slice(0, 40))} is not a position in a file`, where);
    return Number(text);
  };
  const length = position("length", size);
  if (length !== size) {
    reader.fail(`${length} bytes of external data, where the shape asks for ${size}`, where);
  }
  const location = entries.get("location") ?? "";
  if (!staysInFolder(location)) {
    reader.fail(`the external data are at ${quoted(location)}, outside the folder`, where);
  }
  return { name, code, dims, location, offset: position("offset", 0), length };
}

function checkedSize(reader: WireReader, { code, dims }: TensorType, where: string): number {
  let count = 1;
  for (const dim of dims) {
    count *= Math.max(dim, 1);
    if (dim < 0 || !Number.isSafeInteger(count)) {
      reader.fail(`the shape [${dims.join(", ")}] is impossible`, where);
    }
  }
  return dataSize(code, dims);
}

/** The elements of a tensor that has them inside, as a checkpoint has them; null for strings. */
export function inlineData(reader: WireReader, message: Uint8Array): Uint8Array | null {
  const parts = reader.fields(message, "initializer");
  const stored = readTensorType(reader, parts, "initializer");
  if (stored.code === STRING) return null;
  const element = ELEMENT_TYPES.get(stored.code);
  const where = `initializer of ${stored.code} [${stored.dims.join(", ")}]`;
  if (!element) return reader.fail("its element type is unknown", where);
  const size = checkedSize(reader, stored, where);
  const raw = parts.filter((part) => part.number === TensorField.RAW_DATA);
  const data = raw.length
    ? reader.message(raw[raw.length - 1]!, where)
    : typedData(reader, parts, stored.code, size, where);
  if (data.length !== size) {
    reader.fail(`it has ${data.length} bytes, where its shape asks for ${size}`, where);
  }
  return data;
}

/** The elements where each is a number of its own in the file. */
function typedData(
  reader: WireReader,
  parts: readonly Field[],
  code: number,
  size: number,
  where: string,
): Uint8Array {
  const complex = code === 14 || code === 15;
  const floats = code === FLOAT || code === 14;
  const doubles = code === 11 || code === 15;
  const number = floats
    ? TensorField.FLOAT_DATA
    : doubles
      ? TensorField.DOUBLE_DATA
      : code === INT64
        ? TensorField.INT64_DATA
        : code === 12 || code === 13
          ? TensorField.UINT64_DATA
          : TensorField.INT32_DATA;
  const fields = parts.filter((part) => part.number === number);
  if (floats || doubles || complex) {
    const alone = floats ? FIXED32 : FIXED64;
    const pieces = fields.map((part) =>
      part.kind === alone ? part.data : reader.message(part, where),
    );
    return new Uint8Array(pieces.flatMap((piece) => [...piece]));
  }
  const width = Math.max((ELEMENT_TYPES.get(code)?.bits ?? 8) / 8, 1);
  const values = reader.halves(fields, where, Math.ceil(size / width));
  const data = new DataView(new ArrayBuffer(values.length * width));
  values.forEach(([low, high], index) => {
    if (width === 8) {
      data.setUint32(8 * index, low, true);
      data.setUint32(8 * index + 4, high, true);
    } else if (width === 4) data.setUint32(4 * index, low, true);
    else if (width === 2) data.setUint16(2 * index, low, true);
    else data.setUint8(index, low);
  });
  return new Uint8Array(data.buffer);
}

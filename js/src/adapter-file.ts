/**
 * Read and write `.onnx_adapter` files, ONNX Runtime's own: FlatBuffers, identifier `TORT`.
 *
 * `docs/format.md` of the project describes the fields. Behind the FlatBuffers part our files have
 * a record that ONNX Runtime does not look at: JSON about the adapter, and a checksum.
 */

import type { Stored } from "./checkpoint-file.js";
import { crc32 } from "./checksum.js";
import { BOOL, dataSize, ELEMENT_TYPES, STRING, typeName } from "./elements.js";
import { AdapterError, quoted } from "./errors.js";
import { FlatTable } from "./flat-reader.js";
import { bulk, i32, int64s, layOut, reference, table, text, vector } from "./flat-writer.js";
import { ascii, byCodePoints, decoded, encoded } from "./text.js";

export interface AdapterContent {
  readonly tensors: ReadonlyMap<string, Stored>;
  /** What JSON says about the adapter; empty in files of others. */
  readonly note: Readonly<Record<string, unknown>>;
}

const IDENTIFIER = "TORT";
const VERSION = 1;
const MAX_RANK = 32;
const ALIGNMENT = 64;
/** What ONNX Runtime refuses in an adapter: strings, bools, complex numbers. */
const REFUSED = [STRING, BOOL, 14, 15];
/** The last bytes: length of the JSON before, CRC-32 of all before, and this. */
const MARK = "TORTNOTE";
const END_SIZE = 16;

// ---- reading -------------------------------------------------------------------------------------

/** Read the bytes of a file; the tensors are views of them. */
export function readAdapterFile(data: Uint8Array, source: string): AdapterContent {
  const note = readNote(data, source);
  const root = FlatTable.root(data, source, IDENTIFIER, "adapter", AdapterError);
  const version = root.i32(0);
  if (version !== VERSION) root.fail(`the format version is ${version}; version 1 can be read`);
  const tensors = new Map<string, Stored>();
  for (const parameter of root.tables(3, "parameters")) {
    const name = parameter.text(0);
    if (!name) parameter.fail("its name is missing");
    if (tensors.has(name)) parameter.fail(`the name ${quoted(name)} occurs twice`);
    parameter.where += ` (${quoted(name.slice(0, 80))})`;
    tensors.set(name, readTensor(parameter));
  }
  return { tensors, note };
}

function readTensor(parameter: FlatTable): Stored {
  const code = parameter.i32(2);
  if (!ELEMENT_TYPES.has(code) || REFUSED.includes(code)) {
    parameter.fail(`the element type ${typeName(code)} is not one that an adapter may have`);
  }
  const given = parameter.i64s(1, MAX_RANK);
  let elements = 1;
  for (const dim of given) {
    elements *= Number(dim > 1n ? dim : 1n);
    if (dim < 0n || !Number.isSafeInteger(elements)) {
      parameter.fail(`the dimensions ${given.join(", ")} are impossible`);
    }
  }
  if (!given.length) parameter.fail("it has no dimensions");
  const dims = given.map(Number);
  const data = parameter.bytes(3);
  const size = dataSize(code, dims);
  if (data.length !== size) {
    parameter.fail(`the dimensions need ${size} bytes of data, but there are ${data.length}`);
  }
  return { code, dims, data };
}

/** What is behind the FlatBuffers part; files of others have nothing there. */
function readNote(data: Uint8Array, source: string): Record<string, unknown> {
  if (data.length < END_SIZE) return {};
  const end = data.length - END_SIZE;
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const mark = ascii(data.subarray(-MARK.length));
  const same = [...mark].filter((letter, index) => letter === MARK[index]).length;
  if (2 * same < MARK.length) return {};
  const length = view.getUint32(end, true);
  const isWhole = crc32(data.subarray(0, end + 4)) === view.getUint32(end + 4, true);
  if (mark !== MARK || length > end || !isWhole) {
    throw new AdapterError(`${source}: the checksum does not match: the file is damaged`);
  }
  try {
    const note: unknown = JSON.parse(decoded(data.subarray(end - length, end)) ?? "");
    if (typeof note !== "object" || !note || Array.isArray(note)) throw new SyntaxError();
    return note as Record<string, unknown>;
  } catch {
    throw new AdapterError(`${source}: the record at its end is no JSON object`);
  }
}

// ---- writing -------------------------------------------------------------------------------------

/** The bytes of a file, with the tensors in the order of their names. */
export function writeAdapterFile({ tensors, note }: AdapterContent): Uint8Array {
  const names = [...tensors.keys()].sort(byCodePoints);
  const parameters = names.map((name) => {
    const { code, dims, data } = tensors.get(name)!;
    const bytes = encoded(name);
    if (!bytes?.length) throw new AdapterError(`${quoted(name)} is not a name`);
    if (REFUSED.includes(code) || !dims.length || data.length !== dataSize(code, dims)) {
      throw new AdapterError(
        `${quoted(name)}: an adapter cannot hold ${typeName(code)} [${dims.join(", ")}] of ` +
          `${data.length} bytes`,
      );
    }
    return table(
      reference(0, text(bytes)),
      reference(1, int64s(dims)),
      i32(2, code),
      reference(3, bulk(data, ALIGNMENT)),
    );
  });
  const root = table(i32(0, VERSION), i32(1, 1), i32(2, 1), reference(3, vector(parameters)));
  const json = encoded(JSON.stringify(note))!;
  const [file] = layOut(root, IDENTIFIER, 0, json.length + END_SIZE);
  const end = file.length - END_SIZE;
  const view = new DataView(file.buffer);
  file.set(json, end - json.length);
  view.setUint32(end, json.length, true);
  view.setUint32(end + 4, crc32(file.subarray(0, end + 4)), true);
  file.set(encoded(MARK)!, end + 8);
  return file;
}

/**
 * Read and write checkpoint files in ONNX Runtime's format: FlatBuffers, identifier `ODTC`.
 *
 * `docs/format.md` of the project describes the fields. It reads versions 1 and 2, and writes
 * version 2.
 */

import { checkedBlocks, checkFile, END_SIZE, FRONT_SIZE, seal } from "./checksum.js";
import { arrayOf, BOOL, bytesOf, countOf, dataSize, ELEMENT_TYPES, STRING } from "./elements.js";
import { CheckpointError, quoted } from "./errors.js";
import { FlatTable } from "./flat-reader.js";
import {
  bool,
  bulk,
  f32,
  i32,
  i64,
  int64s,
  layOut,
  type Node,
  reference,
  table,
  text as textNode,
  vector,
} from "./flat-writer.js";
import type { TypedArray } from "./runtime.js";
import { ascii, byCodePoints, encoded } from "./text.js";

/** A stored tensor: little-endian bytes in row-major order, or strings. */
export interface Stored {
  readonly code: number;
  readonly dims: readonly number[];
  readonly data: Uint8Array;
  readonly strings?: readonly string[];
}

/** An integer is a bigint, a float is a number. */
export type StoredProperty = bigint | number | string;

export interface OptimizerGroup {
  step: bigint;
  initialLearningRate: number;
  /** The k-th tensor of a parameter is `momentum<k>` in the file. */
  states: Map<string, Stored[]>;
}

/** Everything in a checkpoint file, in the order of the file. */
export interface CheckpointContent {
  trainable: Map<string, Stored>;
  frozen: Map<string, Stored>;
  nominal: boolean;
  groups: Map<string, OptimizerGroup>;
  properties: Map<string, StoredProperty>;
}

export const RESERVED_PREFIX = "__onnxtrain__.";

const IDENTIFIER = "ODTC";
const VERSION = 2;
const MAX_RANK = 32;
const DATA_ID = `${RESERVED_PREFIX}external_data`;
const FOOTER = /^ODTCDATA[0-9a-f]{16}$/;
const FOOTER_SIZE = 24;
const ALIGNMENT = 64;
/** What ONNX Runtime aligns external data to. */
const UPSTREAM_ALIGNMENT = 4n;

export function stored(code: number, dims: readonly number[], array: TypedArray): Stored {
  return { code, dims: [...dims], data: bytesOf(array) };
}

/** The elements of a stored tensor; as bytes if JavaScript has no array for the type. */
export function elementsOf(tensor: Stored): TypedArray {
  return arrayOf(tensor.code, tensor.data);
}

// ---- reading -------------------------------------------------------------------------------------

/**
 * Read a checkpoint. Tensors are views of the bytes, which must not change afterwards.
 *
 * @param externalData the second file (`checkpoint.data`) of a checkpoint that has one.
 * @param verify whether to compute checksums.
 */
export function readCheckpoint(
  bytes: Uint8Array,
  externalData?: Uint8Array,
  source = "checkpoint",
  verify = true,
): CheckpointContent {
  return new CheckpointReader(bytes, externalData, source, verify).read();
}

class CheckpointReader {
  private readonly _root: FlatTable;
  private _external: Uint8Array | null = null;
  private _announced = false;
  /** The tensors with elements, in the file itself and in external data. */
  private readonly _inside: Uint8Array[] = [];
  private readonly _outside: Uint8Array[] = [];

  constructor(
    private readonly _data: Uint8Array,
    private readonly _given: Uint8Array | undefined,
    private readonly _source: string,
    private readonly _verify: boolean,
  ) {
    this._root = FlatTable.root(_data, _source, IDENTIFIER, "checkpoint");
    const version = this._root.i32(0);
    if (version !== 1 && version !== VERSION) {
      this._root.fail(`the format version is ${version}; versions 1 and 2 can be read`);
    }
  }

  read(): CheckpointContent {
    const { announced, wrong } = checkFile(this._data, this._verify);
    if (wrong) this._root.fail(wrong);
    this._announced = announced;
    const properties = this._properties();
    const bond = properties.get(DATA_ID);
    properties.delete(DATA_ID);
    const trainable = new Map<string, Stored>();
    const frozen = new Map<string, Stored>();
    const groups = new Map<string, OptimizerGroup>();
    const module = this._root.table(1, "module_state");
    const nominal = module?.flag(2) ?? false;
    if (module?.flag(3)) this._external = this._externalData(bond);
    for (const [slot, field, tensors, other] of [
      [0, "requires_grad_params", trainable, frozen],
      [1, "frozen_params", frozen, trainable],
    ] as const) {
      for (const table of module?.tables(slot, field) ?? []) {
        const name = named(table, tensors, other);
        tensors.set(name, this._tensor(table, nominal));
      }
    }
    for (const table of this._root.tables(2, "optimizer_groups")) {
      groups.set(named(table, groups), this._group(table));
    }
    requireApart(this._root, this._inside);
    const last = requireApart(this._root, this._outside);
    const end = last ? last.byteOffset + last.length - this._external!.byteOffset : 0;
    if (this._announced && this._external && end !== this._external.length) {
      throw new CheckpointError(
        `the external data of ${this._source} have ${this._external.length} bytes instead of ${end}`,
      );
    }
    return { trainable, frozen, nominal, groups, properties };
  }

  private _externalData(bond: StoredProperty | undefined): Uint8Array {
    const data = this._given;
    if (!data) {
      throw new CheckpointError(
        `${this._source} has external data, which are in a second file (its name and .data): pass ` +
          "its bytes as externalData",
      );
    }
    const whose = `the external data given with ${this._source} are`;
    const end = ascii(data.subarray(Math.max(0, data.length - FOOTER_SIZE)));
    if (!FOOTER.test(end)) {
      if (this._announced) throw new CheckpointError(`${whose} damaged: they have lost their end`);
      return data;
    }
    if (end.slice(8) !== bond) throw new CheckpointError(`${whose} of another checkpoint`);
    const rest = data.subarray(0, -FOOTER_SIZE);
    if (!this._announced) return rest;
    const checked = checkedBlocks(rest, this._verify);
    if (typeof checked === "string") throw new CheckpointError(`${whose} damaged: ${checked}`);
    return checked;
  }

  private _properties(): Map<string, StoredProperty> {
    const found = new Map<string, StoredProperty>();
    const bag = this._root.table(3, "property_bag");
    for (const [slot, field, value] of [
      [0, "ints", (table: FlatTable) => table.i64(1)],
      [1, "floats", (table: FlatTable) => table.f32(1)],
      [2, "strings", (table: FlatTable) => table.text(1)],
    ] as const) {
      for (const table of bag?.tables(slot, field) ?? []) {
        found.set(named(table, found), value(table));
      }
    }
    return found;
  }

  private _group(table: FlatTable): OptimizerGroup {
    const step = table.i64(1);
    if (step < 0n) table.fail(`the step is ${step}`);
    const states = new Map<string, Stored[]>();
    for (const state of table.tables(3, "optimizer_states")) {
      const parameter = named(state, states);
      const moments = new Map<string, Stored>();
      for (const moment of state.tables(1, "momentums")) {
        moments.set(named(moment, moments), this._tensor(moment, false));
      }
      const inOrder = Array.from(moments, (_, index) => moments.get(`momentum${index}`));
      if (inOrder.includes(undefined)) {
        state.fail(
          `the momentums are called ${[...moments.keys()].join(", ")} instead of momentum0 to ` +
            `momentum${moments.size - 1}`,
        );
      }
      states.set(parameter, inOrder as Stored[]);
    }
    return { step, initialLearningRate: table.f32(2), states };
  }

  private _tensor(table: FlatTable, nominal: boolean): Stored {
    const code = table.i32(3);
    if (!ELEMENT_TYPES.has(code)) table.fail(`the element type ${code} is unknown`);
    const dims = dimsOf(table);
    const none = new Uint8Array(0);
    if (nominal) {
      if (table.bytes(4).length) table.fail("a nominal checkpoint has data");
      return { code, dims, data: none };
    }
    if (code === STRING) {
      const strings = table.texts(5);
      if (strings.length !== countOf(dims)) {
        table.fail(`${strings.length} strings do not fill the dimensions ${dims.join(", ")}`);
      }
      return { code, dims, data: none, strings };
    }
    const data = this._bytes(table, dataSize(code, dims));
    if (code === BOOL && data.some((value) => value > 1)) {
      table.fail("a bool is neither 0 nor 1");
    }
    return { code, dims, data };
  }

  /** The elements, which must have `size` bytes. */
  private _bytes(table: FlatTable, size: number): Uint8Array {
    const offset = table.i64(6, -1n);
    if (offset === -1n) {
      const data = table.bytes(4);
      if (data.length !== size) {
        table.fail(`the dimensions need ${size} bytes of data, but there are ${data.length}`);
      }
      if (size) this._inside.push(data);
      return data;
    }
    const { _external: external } = this;
    const end = offset + BigInt(size);
    const alignment = this._announced ? BigInt(ALIGNMENT) : UPSTREAM_ALIGNMENT;
    if (offset % alignment) {
      table.fail(`the offset in the external data is ${offset}, not a multiple of ${alignment}`);
    }
    if (!external || offset < 0n || end > BigInt(external.length)) {
      return table.fail(
        `bytes ${offset} to ${end} of the external data are needed, which have ` +
          `${external?.length ?? 0} bytes`,
      );
    }
    const data = external.subarray(Number(offset), Number(end));
    if (size) this._outside.push(data);
    return data;
  }
}

/** Refuse tensors that share bytes, and return the last one. */
function requireApart(root: FlatTable, parts: Uint8Array[]): Uint8Array | undefined {
  let end = 0;
  for (const part of parts.sort((a, b) => a.byteOffset - b.byteOffset)) {
    if (part.byteOffset < end) root.fail("the elements of two tensors overlap");
    end = part.byteOffset + part.length;
  }
  return parts.at(-1);
}

/** The name of a table, which must be unique. */
function named(table: FlatTable, ...taken: readonly ReadonlyMap<string, unknown>[]): string {
  const name = table.text(0);
  if (!name) table.fail("its name is missing");
  if (taken.some((names) => names.has(name))) table.fail(`the name ${quoted(name)} occurs twice`);
  table.where += ` (${quoted(name.slice(0, 80))})`;
  return name;
}

function dimsOf(table: FlatTable): number[] {
  const dims = table.i64s(2, MAX_RANK);
  let elements = 1;
  for (const dim of dims) {
    elements *= Number(dim > 1n ? dim : 1n);
    if (dim < 0n || !Number.isSafeInteger(elements)) {
      table.fail(`the dimensions ${dims.join(", ")} are impossible`);
    }
  }
  return dims.map(Number);
}

// ---- writing -------------------------------------------------------------------------------------

/** Write a checkpoint, sorted by name. */
export function writeCheckpoint(content: CheckpointContent): Uint8Array {
  const { trainable, frozen, nominal, groups, properties } = content;
  for (const name of trainable.keys()) {
    if (frozen.has(name)) {
      throw new CheckpointError(`${quoted(name)} is trainable and frozen at once`);
    }
  }
  if (nominal && groups.size) {
    throw new CheckpointError("a nominal checkpoint holds no state of an optimizer");
  }
  const [trained, kept] = [trainable, frozen].map((tensors, slot) =>
    reference(slot, listed(tensors, (tensor, name) => tensorTable(name, tensor, nominal))),
  );
  const root = table(
    i32(0, VERSION),
    reference(1, table(trained!, kept!, bool(2, nominal))),
    reference(2, listed(groups, groupTable)),
    properties.size ? reference(3, propertyBag(properties)) : null,
  );
  return seal(...layOut(root, IDENTIFIER, FRONT_SIZE, END_SIZE));
}

function sorted<T>(entries: ReadonlyMap<string, T>): [string, T][] {
  return [...entries].sort(([a], [b]) => byCodePoints(a, b));
}

function listed<T>(
  entries: ReadonlyMap<string, T>,
  write: (value: T, name: string) => Node,
): Node {
  return vector(sorted(entries).map(([name, value]) => write(value, name)));
}

function tensorTable(name: string, { code, dims, data, strings }: Stored, nominal: boolean): Node {
  const content = (): ReturnType<typeof reference> => {
    if (nominal) return reference(4, bulk(new Uint8Array(0), 4));
    if (strings) return reference(5, vector(strings.map((value) => text(value, true))));
    const length = dataSize(code, dims);
    if (data.length !== length) {
      throw new CheckpointError(
        `tensor ${quoted(name)}: ${data.length} bytes of data do not fill [${dims.join(", ")}]`,
      );
    }
    return reference(4, bulk(data, length >= ALIGNMENT ? ALIGNMENT : 8));
  };
  return table(
    reference(0, text(name)),
    reference(2, int64s(nominal ? [] : dims)),
    i32(3, code),
    content(),
  );
}

function groupTable({ step, initialLearningRate, states }: OptimizerGroup, name: string): Node {
  const what = `of group ${quoted(name)}`;
  return table(
    reference(0, text(name)),
    i64(1, int64(step, `the step ${what}`)),
    f32(2, float32(initialLearningRate, `the learning rate ${what}`)),
    reference(
      3,
      listed(states, (moments, parameter) => {
        const tensors = moments.map((moment, k) => tensorTable(`momentum${k}`, moment, false));
        return table(
          reference(0, text(parameter)),
          reference(1, vector(tensors)),
        );
      }),
    ),
  );
}

function propertyBag(properties: ReadonlyMap<string, StoredProperty>): Node {
  const lists: [Node[], Node[], Node[]] = [[], [], []];
  for (const [name, value] of sorted(properties)) {
    const what = `the property ${quoted(name)}`;
    const [slot, field] =
      typeof value === "bigint"
        ? ([0, i64(1, int64(value, what))] as const)
        : typeof value === "number"
          ? ([1, f32(1, float32(value, what))] as const)
          : ([2, reference(1, text(value, true))] as const);
    lists[slot].push(table(reference(0, text(name)), field));
  }
  return table(...lists.map((items, slot) => reference(slot, vector(items))));
}

function text(value: string, mayBeEmpty = false): Node {
  const bytes = encoded(value);
  if (!bytes) throw new CheckpointError(`${quoted(value)} cannot be written as UTF-8`);
  if (!bytes.length && !mayBeEmpty) throw new CheckpointError("'' is not a name");
  return textNode(bytes);
}

function int64(value: bigint, what: string): bigint {
  if (BigInt.asIntN(64, value) !== value) {
    throw new CheckpointError(`${what} is ${value}, which does not fit 64 bits`);
  }
  return value;
}

function float32(value: number, what: string): number {
  const rounded = Math.fround(value);
  if (!Number.isFinite(rounded) && Number.isFinite(value)) {
    throw new CheckpointError(`${what} is ${value}, which does not fit 32 bits`);
  }
  return rounded;
}

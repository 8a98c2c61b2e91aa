/**
 * Read and write checkpoint files: FlatBuffers, identifier `ODTC`, as ONNX Runtime has them.
 *
 * `docs/format.md` of the project describes the file field by field. Versions 1 and 2 are read,
 * version 2 is written.
 */

import { CHECKSUM_SIZE, isChecksumRight, writeChecksum } from "./checksum.js";
import { arrayOf, BOOL, bytesOf, countOf, dataSize, ELEMENT_TYPES, STRING } from "./elements.js";
import { CheckpointError, quoted } from "./errors.js";
import { FlatReader, type FlatTable } from "./flat-reader.js";
import { Bulk, Int64s, layOut, Table, Text, Vector, type Node } from "./flat-writer.js";
import type { TypedArray } from "./runtime.js";
import { byCodePoints, decoded, encoded } from "./text.js";

/** A tensor as it is stored: bytes, little-endian, row by row; or strings. */
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
  /** The k-th tensor of a parameter is called `momentum<k>` in the file. */
  states: Map<string, Stored[]>;
}

/** All that a checkpoint file holds. The maps are in the order of the file. */
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

export function stored(code: number, dims: readonly number[], array: TypedArray): Stored {
  return { code, dims: [...dims], data: bytesOf(array) };
}

/** The elements of a stored tensor; those of types without an array of their own as bytes. */
export function elementsOf(tensor: Stored): TypedArray {
  return arrayOf(tensor.code, tensor.data);
}

// ---- reading -------------------------------------------------------------------------------------

/**
 * Read a checkpoint. Tensors are views of the bytes, which must not change afterwards.
 *
 * @param externalData the second file (`checkpoint.data`) of a checkpoint that has one.
 */
export function readCheckpoint(
  bytes: Uint8Array,
  externalData?: Uint8Array,
  source = "checkpoint",
): CheckpointContent {
  return new CheckpointReader(new FlatReader(bytes, source), externalData).read();
}

class CheckpointReader {
  private readonly root: FlatTable;
  private external: Uint8Array | null = null;

  constructor(
    private readonly reader: FlatReader,
    private readonly given: Uint8Array | undefined,
  ) {
    this.root = reader.root(IDENTIFIER, "checkpoint");
    const version = this.root.i32(0, "version");
    if (version !== 1 && version !== VERSION) {
      reader.fail(
        `the format version is ${version}; versions 1 and 2 can be read`,
        "checkpoint.version",
      );
    }
  }

  read(): CheckpointContent {
    if (!isChecksumRight(this.reader.data)) {
      this.reader.fail("the checksum is another: the file is damaged", "checkpoint");
    }
    const properties = this.properties();
    const bond = properties.get(DATA_ID);
    properties.delete(DATA_ID);
    const content: CheckpointContent = {
      trainable: new Map(),
      frozen: new Map(),
      nominal: false,
      groups: new Map(),
      properties,
    };
    const module = this.root.table(1, "module_state");
    if (module !== null) {
      content.nominal = module.flag(2, "is_nominal_state");
      if (module.flag(3, "has_external_data")) this.external = this.externalData(bond);
      const taken = new Map<string, unknown>();
      for (const [slot, field, tensors] of [
        [0, "requires_grad_params", content.trainable],
        [1, "frozen_params", content.frozen],
      ] as const) {
        for (const table of module.tables(slot, field)) {
          const name = this.name(table, "name", taken);
          taken.set(name, true);
          tensors.set(name, this.tensor(table, content.nominal));
        }
      }
    }
    for (const table of this.root.tables(2, "optimizer_groups")) {
      const name = this.name(table, "group_name", content.groups);
      content.groups.set(name, this.group(table));
    }
    return content;
  }

  private externalData(bond: StoredProperty | undefined): Uint8Array {
    const data = this.given;
    if (data === undefined) {
      throw new CheckpointError(
        `${this.reader.source} has external data, which are in a second file (its name and ` +
          ".data): pass its bytes as externalData",
      );
    }
    const end = decoded(data.subarray(Math.max(0, data.length - FOOTER_SIZE))) ?? "";
    const own = FOOTER.test(end) ? end.slice(8) : null;
    if (own !== null && own !== bond) {
      throw new CheckpointError(
        `the external data given with ${this.reader.source} are of another checkpoint`,
      );
    }
    return own === null ? data : data.subarray(0, data.length - FOOTER_SIZE);
  }

  private properties(): Map<string, StoredProperty> {
    const found = new Map<string, StoredProperty>();
    const bag = this.root.table(3, "property_bag");
    if (bag === null) return found;
    for (const table of bag.tables(0, "ints")) {
      found.set(this.name(table, "name", found), table.i64(1, "value"));
    }
    for (const table of bag.tables(1, "floats")) {
      found.set(this.name(table, "name", found), table.f32(1, "value"));
    }
    for (const table of bag.tables(2, "strings")) {
      found.set(this.name(table, "name", found), table.string(1, "value") ?? "");
    }
    return found;
  }

  private name(table: FlatTable, field: string, taken: ReadonlyMap<string, unknown>): string {
    const name = table.string(0, field);
    if (!name) this.reader.fail(`${field} is missing`, table.where, table.position);
    if (taken.has(name)) {
      this.reader.fail(`the name ${quoted(name)} occurs twice`, table.where, table.position);
    }
    table.where += ` (${quoted(name.slice(0, 80))})`;
    return name;
  }

  private group(table: FlatTable): OptimizerGroup {
    const group: OptimizerGroup = {
      step: table.i64(1, "step"),
      initialLearningRate: table.f32(2, "initial_learning_rate"),
      states: new Map(),
    };
    if (group.step < 0n) {
      this.reader.fail(`the step is ${group.step}`, table.where, table.position);
    }
    for (const state of table.tables(3, "optimizer_states")) {
      const parameter = this.name(state, "param_name", group.states);
      const moments = new Map<string, Stored>();
      for (const moment of state.tables(1, "momentums")) {
        const name = this.name(moment, "name", moments);
        moments.set(name, this.tensor(moment, false));
      }
      const inOrder = Array.from(moments, (_, index) => moments.get(`momentum${index}`));
      if (inOrder.some((moment) => moment === undefined)) {
        this.reader.fail(
          `the momentums are called ${[...moments.keys()].join(", ")} instead of momentum0 to ` +
            `momentum${moments.size - 1}`,
          state.where,
          state.position,
        );
      }
      group.states.set(parameter, inOrder as Stored[]);
    }
    return group;
  }

  private tensor(table: FlatTable, nominal: boolean): Stored {
    const code = table.i32(3, "data_type");
    if (!ELEMENT_TYPES.has(code)) {
      this.reader.fail(`the element type ${code} is unknown`, table.where, table.position);
    }
    const dims = this.dims(table);
    if (nominal) {
      const raw = table.target(4, "raw_data");
      if (raw !== null && this.reader.vector(raw, 1, table.where)[1]) {
        this.reader.fail("a nominal checkpoint has data", table.where, raw);
      }
      return { code, dims, data: new Uint8Array(0) };
    }
    if (code === STRING) return this.strings(table, dims);
    const data = this.bytes(table, dataSize(code, dims));
    if (code === BOOL && data.some((value) => value > 1)) {
      this.reader.fail("a truth value is neither 0 nor 1", table.where);
    }
    return { code, dims, data };
  }

  private dims(table: FlatTable): number[] {
    const at = table.target(2, "dims");
    if (at === null) return [];
    const dims = this.reader.i64s(at, `${table.where}.dims`, MAX_RANK);
    let elements = 1;
    for (const dim of dims) {
      elements *= Number(dim > 1n ? dim : 1n);
      if (dim < 0n || !Number.isSafeInteger(elements)) {
        this.reader.fail(`the dimensions ${dims.join(", ")} are not possible`, table.where, at);
      }
    }
    return dims.map(Number);
  }

  /** The elements, after checking that there are `size` bytes of them. */
  private bytes(table: FlatTable, size: number): Uint8Array {
    const offset = table.i64(6, "external_data_offset", -1n);
    const raw = table.target(4, "raw_data");
    if (offset === -1n) {
      const [start, length] = raw === null ? [0, 0] : this.reader.vector(raw, 1, table.where);
      if (length !== size) {
        this.reader.fail(
          `the dimensions ask for ${size} bytes of data, but there are ${length}`,
          table.where,
          raw ?? undefined,
        );
      }
      return this.reader.data.subarray(start, start + length);
    }
    if (this.external === null) {
      this.reader.fail(
        "the tensor is in external data, which the checkpoint does not have",
        table.where,
        table.position,
      );
    }
    const end = offset + BigInt(size);
    if (offset < 0n || end > BigInt(this.external.length)) {
      this.reader.fail(
        `bytes ${offset} to ${end} of the external data are needed, which have ` +
          `${this.external.length} bytes`,
        table.where,
        table.position,
      );
    }
    return this.external.subarray(Number(offset), Number(end));
  }

  private strings(table: FlatTable, dims: number[]): Stored {
    const at = table.target(5, "string_data");
    const strings = at === null ? [] : this.reader.strings(at, `${table.where}.string_data`);
    if (strings.length !== countOf(dims)) {
      this.reader.fail(
        `${strings.length} strings do not fill the dimensions ${dims.join(", ")}`,
        table.where,
        at ?? undefined,
      );
    }
    return { code: STRING, dims, data: new Uint8Array(0), strings };
  }
}

// ---- writing -------------------------------------------------------------------------------------

/** Write a checkpoint, sorted by name as a saved training state is. */
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
  const module = new Table();
  [trainable, frozen].forEach((tensors, slot) => {
    const items = sorted(tensors).map(([name, tensor]) => tensorTable(name, tensor, nominal));
    module.refer(slot, new Vector(items));
  });
  module.set(2, { kind: "bool", value: nominal });
  const root = new Table().set(0, { kind: "i32", value: VERSION }).refer(1, module);
  root.refer(2, new Vector(sorted(groups).map(([name, group]) => groupTable(name, group))));
  if (properties.size) root.refer(3, propertyBag(properties));
  return writeChecksum(layOut(root, IDENTIFIER, CHECKSUM_SIZE));
}

function sorted<T>(entries: ReadonlyMap<string, T>): [string, T][] {
  return [...entries].sort(([a], [b]) => byCodePoints(a, b));
}

function tensorTable(name: string, tensor: Stored, nominal: boolean): Table {
  const table = new Table()
    .refer(0, text(name))
    .refer(2, new Int64s(nominal ? [] : tensor.dims))
    .set(3, { kind: "i32", value: tensor.code });
  if (nominal) return table.refer(4, new Bulk(new Uint8Array(0), 4));
  if (tensor.strings) {
    return table.refer(5, new Vector(tensor.strings.map((value) => text(value, true))));
  }
  const length = dataSize(tensor.code, tensor.dims);
  if (tensor.data.length !== length) {
    throw new CheckpointError(
      `tensor ${quoted(name)}: ${tensor.data.length} bytes of data do not fill ` +
        `[${tensor.dims.join(", ")}]`,
    );
  }
  return table.refer(4, new Bulk(tensor.data, length >= ALIGNMENT ? ALIGNMENT : 8));
}

function groupTable(name: string, group: OptimizerGroup): Table {
  const states = sorted(group.states).map(([parameter, moments]) =>
    new Table()
      .refer(0, text(parameter))
      .refer(1, new Vector(moments.map((moment, k) => tensorTable(`momentum${k}`, moment, false)))),
  );
  return new Table()
    .refer(0, text(name))
    .set(1, { kind: "i64", value: int64(group.step, `the step of group ${quoted(name)}`) })
    .set(2, {
      kind: "f32",
      value: float32(group.initialLearningRate, `the learning rate of group ${quoted(name)}`),
    })
    .refer(3, new Vector(states));
}

function propertyBag(properties: ReadonlyMap<string, StoredProperty>): Table {
  const ints: Node[] = [];
  const floats: Node[] = [];
  const strings: Node[] = [];
  for (const [name, value] of sorted(properties)) {
    const table = new Table().refer(0, text(name));
    const what = `the property ${quoted(name)}`;
    if (typeof value === "bigint") {
      ints.push(table.set(1, { kind: "i64", value: int64(value, what) }));
    } else if (typeof value === "number") {
      floats.push(table.set(1, { kind: "f32", value: float32(value, what) }));
    } else {
      strings.push(table.refer(1, text(value, true)));
    }
  }
  const bag = new Table();
  [ints, floats, strings].forEach((items, slot) => bag.refer(slot, new Vector(items)));
  return bag;
}

function text(value: string, mayBeEmpty = false): Text {
  const bytes = encoded(value);
  if (bytes === null) throw new CheckpointError(`${quoted(value)} cannot be written as UTF-8`);
  if (!bytes.length && !mayBeEmpty) throw new CheckpointError(`'' is not a name`);
  return new Text(bytes);
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

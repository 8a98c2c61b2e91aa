/**
 * Read and write checkpoint files: FlatBuffers, identifier `ODTC`, as ONNX Runtime has them.
 *
 * `docs/format.md` of the project describes the file field by field. Versions 1 and 2 are read,
 * version 2 is written.
 */

import { CHECKSUM_SIZE, isChecksumRight, writeChecksum } from "./checksum.js";
import { arrayOf, BOOL, bytesOf, countOf, dataSize, ELEMENT_TYPES, STRING } from "./elements.js";
import { CheckpointError, quoted } from "./errors.js";
import { FlatTable } from "./flat-reader.js";
import * as flat from "./flat-writer.js";
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
  return new CheckpointReader(bytes, externalData, source).read();
}

class CheckpointReader {
  private readonly root: FlatTable;
  private external: Uint8Array | null = null;

  constructor(
    private readonly data: Uint8Array,
    private readonly given: Uint8Array | undefined,
    private readonly source: string,
  ) {
    this.root = FlatTable.root(data, source, IDENTIFIER, "checkpoint");
    const version = this.root.i32(0);
    if (version !== 1 && version !== VERSION) {
      this.root.fail(`the format version is ${version}; versions 1 and 2 can be read`);
    }
  }

  read(): CheckpointContent {
    if (!isChecksumRight(this.data)) {
      this.root.fail("the checksum is another: the file is damaged");
    }
    const properties = this.properties();
    const bond = properties.get(DATA_ID);
    properties.delete(DATA_ID);
    const trainable = new Map<string, Stored>();
    const frozen = new Map<string, Stored>();
    const groups = new Map<string, OptimizerGroup>();
    const module = this.root.table(1, "module_state");
    const nominal = module?.flag(2) ?? false;
    if (module?.flag(3)) this.external = this.externalData(bond);
    for (const [slot, field, tensors, other] of [
      [0, "requires_grad_params", trainable, frozen],
      [1, "frozen_params", frozen, trainable],
    ] as const) {
      for (const table of module?.tables(slot, field) ?? []) {
        const name = named(table, tensors, other);
        tensors.set(name, this.tensor(table, nominal));
      }
    }
    for (const table of this.root.tables(2, "optimizer_groups")) {
      groups.set(named(table, groups), this.group(table));
    }
    return { trainable, frozen, nominal, groups, properties };
  }

  private externalData(bond: StoredProperty | undefined): Uint8Array {
    const data = this.given;
    if (!data) {
      throw new CheckpointError(
        `${this.source} has external data, which are in a second file (its name and .data): pass ` +
          "its bytes as externalData",
      );
    }
    const end = decoded(data.subarray(Math.max(0, data.length - FOOTER_SIZE))) ?? "";
    if (!FOOTER.test(end)) return data;
    if (end.slice(8) !== bond) {
      throw new CheckpointError(
        `the external data given with ${this.source} are of another checkpoint`,
      );
    }
    return data.subarray(0, -FOOTER_SIZE);
  }

  private properties(): Map<string, StoredProperty> {
    const found = new Map<string, StoredProperty>();
    const bag = this.root.table(3, "property_bag");
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

  private group(table: FlatTable): OptimizerGroup {
    const step = table.i64(1);
    if (step < 0n) table.fail(`the step is ${step}`);
    const states = new Map<string, Stored[]>();
    for (const state of table.tables(3, "optimizer_states")) {
      const parameter = named(state, states);
      const moments = new Map<string, Stored>();
      for (const moment of state.tables(1, "momentums")) {
        moments.set(named(moment, moments), this.tensor(moment, false));
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

  private tensor(table: FlatTable, nominal: boolean): Stored {
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
    const data = this.bytes(table, dataSize(code, dims));
    if (code === BOOL && data.some((value) => value > 1)) {
      table.fail("a truth value is neither 0 nor 1");
    }
    return { code, dims, data };
  }

  /** The elements, after checking that there are `size` bytes of them. */
  private bytes(table: FlatTable, size: number): Uint8Array {
    const offset = table.i64(6, -1n);
    if (offset === -1n) {
      const data = table.bytes(4);
      if (data.length !== size) {
        table.fail(`the dimensions ask for ${size} bytes of data, but there are ${data.length}`);
      }
      return data;
    }
    const { external } = this;
    const end = offset + BigInt(size);
    if (!external || offset < 0n || end > BigInt(external.length)) {
      return table.fail(
        `bytes ${offset} to ${end} of the external data are needed, which have ` +
          `${external?.length ?? 0} bytes`,
      );
    }
    return external.subarray(Number(offset), Number(end));
  }
}

/** The name of a table, which no other one has. */
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
      table.fail(`the dimensions ${dims.join(", ")} are not possible`);
    }
  }
  return dims.map(Number);
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
  const [trained, kept] = [trainable, frozen].map((tensors, slot) =>
    flat.reference(slot, listed(tensors, (tensor, name) => tensorTable(name, tensor, nominal))),
  );
  const root = flat.table(
    flat.i32(0, VERSION),
    flat.reference(1, flat.table(trained!, kept!, flat.bool(2, nominal))),
    flat.reference(2, listed(groups, groupTable)),
    properties.size ? flat.reference(3, propertyBag(properties)) : null,
  );
  return writeChecksum(flat.layOut(root, IDENTIFIER, CHECKSUM_SIZE));
}

function sorted<T>(entries: ReadonlyMap<string, T>): [string, T][] {
  return [...entries].sort(([a], [b]) => byCodePoints(a, b));
}

function listed<T>(
  entries: ReadonlyMap<string, T>,
  write: (value: T, name: string) => flat.Node,
): flat.Node {
  return flat.vector(sorted(entries).map(([name, value]) => write(value, name)));
}

function tensorTable(name: string, { code, dims, data, strings }: Stored, nominal: boolean): flat.Node {
  const content = (): ReturnType<typeof flat.reference> => {
    if (nominal) return flat.reference(4, flat.bulk(new Uint8Array(0), 4));
    if (strings) return flat.reference(5, flat.vector(strings.map((value) => text(value, true))));
    const length = dataSize(code, dims);
    if (data.length !== length) {
      throw new CheckpointError(
        `tensor ${quoted(name)}: ${data.length} bytes of data do not fill [${dims.join(", ")}]`,
      );
    }
    return flat.reference(4, flat.bulk(data, length >= ALIGNMENT ? ALIGNMENT : 8));
  };
  return flat.table(
    flat.reference(0, text(name)),
    flat.reference(2, flat.int64s(nominal ? [] : dims)),
    flat.i32(3, code),
    content(),
  );
}

function groupTable({ step, initialLearningRate, states }: OptimizerGroup, name: string): flat.Node {
  const what = `of group ${quoted(name)}`;
  return flat.table(
    flat.reference(0, text(name)),
    flat.i64(1, int64(step, `the step ${what}`)),
    flat.f32(2, float32(initialLearningRate, `the learning rate ${what}`)),
    flat.reference(
      3,
      listed(states, (moments, parameter) => {
        const tensors = moments.map((moment, k) => tensorTable(`momentum${k}`, moment, false));
        return flat.table(
          flat.reference(0, text(parameter)),
          flat.reference(1, flat.vector(tensors)),
        );
      }),
    ),
  );
}

function propertyBag(properties: ReadonlyMap<string, StoredProperty>): flat.Node {
  const lists: [flat.Node[], flat.Node[], flat.Node[]] = [[], [], []];
  for (const [name, value] of sorted(properties)) {
    const what = `the property ${quoted(name)}`;
    const [slot, field] =
      typeof value === "bigint"
        ? ([0, flat.i64(1, int64(value, what))] as const)
        : typeof value === "number"
          ? ([1, flat.f32(1, float32(value, what))] as const)
          : ([2, flat.reference(1, text(value, true))] as const);
    lists[slot].push(flat.table(flat.reference(0, text(name)), field));
  }
  return flat.table(...lists.map((items, slot) => flat.reference(slot, flat.vector(items))));
}

function text(value: string, mayBeEmpty = false): flat.Node {
  const bytes = encoded(value);
  if (!bytes) throw new CheckpointError(`${quoted(value)} cannot be written as UTF-8`);
  if (!bytes.length && !mayBeEmpty) throw new CheckpointError("'' is not a name");
  return flat.text(bytes);
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

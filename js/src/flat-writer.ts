/**
 * Lay out FlatBuffers files from front to back: tables, strings and short vectors come first, bulk
 * data follows, aligned. It is the layout that the Python package writes, byte for byte.
 */

import { CheckpointError } from "./errors.js";

/** FlatBuffers' limit: ONNX Runtime does not read a file that is larger. */
const MAX_SIZE = 2 ** 31 - 2;

export class Text {
  constructor(readonly value: Uint8Array) {}
}

export class Int64s {
  constructor(readonly values: readonly number[]) {}
}

/** A vector of bytes; `offset` says where the first one comes to lie. */
export class Bulk {
  offset = -1;

  constructor(
    readonly data: Uint8Array,
    readonly alignment: number,
  ) {}
}

export class Vector {
  constructor(readonly items: readonly Node[]) {}
}

type Scalar =
  | { kind: "i64"; value: bigint }
  | { kind: "i32" | "f32"; value: number }
  | { kind: "bool"; value: boolean };

const WIDTHS = { i64: 8, i32: 4, f32: 4, bool: 1 } as const;

/** A table: the number of a field in the schema → its value. Absent fields are left out. */
export class Table {
  readonly references = new Map<number, Node>();
  readonly scalars = new Map<number, Scalar>();

  refer(slot: number, node: Node): this {
    this.references.set(slot, node);
    return this;
  }

  /** Set a scalar; as FlatBuffers has it, one with its default value is left out. */
  set(slot: number, scalar: Scalar): this {
    const isDefault = scalar.kind === "i64" ? scalar.value === 0n : Number(scalar.value) === 0;
    if (!isDefault) this.scalars.set(slot, scalar);
    return this;
  }
}

export type Node = Table | Vector | Int64s | Text | Bulk;

/** Bytes that grow at the end. */
class Growing {
  length = 0;
  private bytes = new Uint8Array(1024);
  view = new DataView(this.bytes.buffer);

  extend(count: number): number {
    const start = this.length;
    this.length += count;
    if (this.length > this.bytes.length) {
      const larger = new Uint8Array(Math.max(2 * this.bytes.length, this.length));
      larger.set(this.bytes);
      this.bytes = larger;
      this.view = new DataView(larger.buffer);
    }
    return start;
  }

  append(bytes: Uint8Array): void {
    // In this order: extending may replace the memory.
    const at = this.extend(bytes.length);
    this.bytes.set(bytes, at);
  }

  written(): Uint8Array {
    return this.bytes.subarray(0, this.length);
  }
}

class Front {
  readonly bytes = new Growing();
  /** Where an offset is to be filled in, and what it refers to. */
  readonly open: [reference: number, node: Node][] = [];
  private readonly vtables = new Map<string, number>();

  constructor(identifier: string) {
    this.bytes.extend(4);
    this.bytes.append(Uint8Array.from(identifier, (letter) => letter.charCodeAt(0)));
  }

  /** Add zeros until the position `ahead` bytes further on is aligned. */
  private pad(alignment: number, ahead = 0): void {
    const over = (this.bytes.length + ahead) % alignment;
    if (over) this.bytes.extend(alignment - over);
  }

  /** Append the object and return its position. */
  place(node: Table | Vector | Int64s | Text): number {
    if (node instanceof Table) return this.placeTable(node);
    this.pad(node instanceof Int64s ? 8 : 4, node instanceof Int64s ? 4 : 0);
    const position = this.bytes.extend(4);
    if (node instanceof Text) {
      this.bytes.view.setUint32(position, node.value.length, true);
      this.bytes.append(node.value);
      this.bytes.extend(1);
    } else if (node instanceof Int64s) {
      this.bytes.view.setUint32(position, node.values.length, true);
      for (const value of node.values) {
        const at = this.bytes.extend(8);
        this.bytes.view.setBigInt64(at, BigInt(value), true);
      }
    } else {
      this.bytes.view.setUint32(position, node.items.length, true);
      for (const item of node.items) this.open.push([this.bytes.extend(4), item]);
    }
    return position;
  }

  private placeTable(table: Table): number {
    // Widest fields first, right behind the four bytes of the offset to the vtable.
    const fields: [width: number, slot: number][] = [
      ...[...table.scalars].map(([slot, { kind }]): [number, number] => [WIDTHS[kind], slot]),
      ...[...table.references.keys()].map((slot): [number, number] => [4, slot]),
    ];
    fields.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    const offsets = new Map<number, number>();
    let size = 4;
    for (const [width, slot] of fields) {
      offsets.set(slot, size);
      size += width;
    }
    const count = Math.max(-1, ...offsets.keys()) + 1;
    const vtable = this.placeVtable([
      4 + 2 * count,
      size,
      ...Array.from({ length: count }, (_, slot) => offsets.get(slot) ?? 0),
    ]);
    if (fields[0]?.[0] === 8) this.pad(8, 4);
    else this.pad(4);
    const position = this.bytes.extend(size);
    const { view } = this.bytes;
    view.setInt32(position, position - vtable, true);
    for (const [slot, scalar] of table.scalars) {
      const at = position + offsets.get(slot)!;
      if (scalar.kind === "i64") view.setBigInt64(at, scalar.value, true);
      else if (scalar.kind === "i32") view.setInt32(at, scalar.value, true);
      else if (scalar.kind === "f32") view.setFloat32(at, scalar.value, true);
      else view.setUint8(at, scalar.value ? 1 : 0);
    }
    for (const [slot, node] of table.references) {
      this.open.push([position + offsets.get(slot)!, node]);
    }
    return position;
  }

  /** Tables of one shape share a vtable. */
  private placeVtable(words: number[]): number {
    const key = words.join();
    let at = this.vtables.get(key);
    if (at === undefined) {
      this.pad(2);
      at = this.bytes.extend(2 * words.length);
      words.forEach((word, i) => this.bytes.view.setUint16(at! + 2 * i, word, true));
      this.vtables.set(key, at);
    }
    return at;
  }
}

/**
 * Give each object of the tree its place; an object is always behind its owner.
 *
 * @param tail how many zeros to leave behind all of them.
 */
export function layOut(root: Table, identifier: string, tail: number): Uint8Array {
  const front = new Front(identifier);
  const waiting: [reference: number, bulk: Bulk][] = [];
  front.open.push([0, root]);
  for (let next = 0; next < front.open.length; next++) {
    const [reference, node] = front.open[next]!;
    if (node instanceof Bulk) waiting.push([reference, node]);
    else {
      const position = front.place(node);
      front.bytes.view.setUint32(reference, position - reference, true);
    }
  }
  let end = front.bytes.length;
  for (const [reference, bulk] of waiting) {
    // The length, four bytes, stands in front of the data.
    bulk.offset = Math.ceil((end + 4) / bulk.alignment) * bulk.alignment;
    if (bulk.offset > MAX_SIZE) break;
    front.bytes.view.setUint32(reference, bulk.offset - 4 - reference, true);
    end = bulk.offset + bulk.data.length;
  }
  if (end > MAX_SIZE || waiting.some(([, bulk]) => bulk.offset > MAX_SIZE)) {
    throw new CheckpointError(
      `the checkpoint would need more than ${MAX_SIZE} bytes, which is the limit of its format`,
    );
  }
  const file = new Uint8Array(end + tail);
  const view = new DataView(file.buffer);
  file.set(front.bytes.written());
  for (const [, bulk] of waiting) {
    view.setUint32(bulk.offset - 4, bulk.data.length, true);
    file.set(bulk.data, bulk.offset);
  }
  return file;
}

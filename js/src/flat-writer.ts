/**
 * Lay out FlatBuffers files from front to back: tables, strings and short vectors come first, bulk
 * data follows, aligned, as in the Python package.
 */

import { CheckpointError } from "./errors.js";

/** FlatBuffers' limit; ONNX Runtime does not read larger files. */
const MAX_SIZE = 2 ** 31 - 2;

/** A vector of bytes, which follows everything else. */
interface Bulk {
  readonly data: Uint8Array;
  readonly alignment: number;
}

/** An object of the file: bulk data, or a function that appends it and returns its position. */
export type Node = Bulk | ((front: Front) => number);

/** A field of a table: a number, omitted if it is the default, or a reference. */
type Field = readonly [slot: number, width: number, content: Node | Write] | null;
type Write = (view: DataView, at: number) => void;

export const bulk = (data: Uint8Array, alignment: number): Node => ({ data, alignment });

export const text = (bytes: Uint8Array): Node => (front) => {
  const position = front.head(bytes.length);
  front.append(bytes);
  front.extend(1);
  return position;
};

export const int64s = (values: readonly number[]): Node => (front) => {
  const position = front.head(values.length, 8, 4);
  front.append(new Uint8Array(BigInt64Array.from(values, BigInt).buffer));
  return position;
};

export const vector = (items: readonly Node[]): Node => (front) => {
  const position = front.head(items.length);
  for (const item of items) front.open.push([front.extend(4), item]);
  return position;
};

export const reference = (slot: number, node: Node): Field => [slot, 4, node];

const scalar =
  (width: number, set: (view: DataView, at: number, value: any) => void) =>
  (slot: number, value: number | bigint | boolean): Field =>
    Number(value) === 0 ? null : [slot, width, (view: DataView, at: number) => set(view, at, value)];
export const i64 = scalar(8, (view, at, value) => view.setBigInt64(at, value, true));
export const i32 = scalar(4, (view, at, value) => view.setInt32(at, value, true));
export const f32 = scalar(4, (view, at, value) => view.setFloat32(at, value, true));
export const bool = scalar(1, (view, at) => view.setUint8(at, 1));

/** Widest fields first, right behind the four bytes of the offset to the vtable. */
export const table = (...given: readonly Field[]): Node => (front) => {
  const fields = given.filter((field) => field !== null);
  fields.sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const vtable = [4, 4];
  for (const [slot, width] of fields) {
    while (vtable.length < slot + 3) vtable.push(0);
    vtable[slot + 2] = vtable[1]!;
    vtable[1]! += width;
  }
  vtable[0] = 2 * vtable.length;
  const at = front.vtable(vtable);
  if (fields[0]?.[1] === 8) front.pad(8, 4);
  else front.pad(4);
  const position = front.extend(vtable[1]!);
  front.view.setInt32(position, position - at, true);
  for (const [slot, , content] of fields) {
    const place = position + vtable[slot + 2]!;
    // A function with two parameters writes a number.
    if (typeof content === "function" && content.length === 2) (content as Write)(front.view, place);
    else front.open.push([place, content as Node]);
  }
  return position;
};

/** The part of the file before bulk data; bytes that grow at the end. */
class Front {
  length = 0;
  /** Positions of offsets that are not known yet, and what they refer to. */
  readonly open: [reference: number, node: Node][] = [];
  bytes = new Uint8Array(1024);
  view = new DataView(this.bytes.buffer);
  private readonly _vtables = new Map<string, number>();

  extend(count: number): number {
    const start = this.length;
    this.length += count;
    if (this.length > this.bytes.length) {
      const larger = new Uint8Array(2 * this.length);
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

  /** Add zeros until the position `ahead` bytes further on is aligned. */
  pad(alignment: number, ahead = 0): void {
    const over = (this.length + ahead) % alignment;
    if (over) this.extend(alignment - over);
  }

  /** Begin a vector with its length. */
  head(count: number, alignment = 4, ahead = 0): number {
    this.pad(alignment, ahead);
    const position = this.extend(4);
    this.view.setUint32(position, count, true);
    return position;
  }

  /** Tables of one shape share a vtable. */
  vtable(words: readonly number[]): number {
    const key = words.join();
    let at = this._vtables.get(key);
    if (at === undefined) {
      this.pad(2);
      at = this.length;
      this.append(new Uint8Array(Uint16Array.from(words).buffer));
      this._vtables.set(key, at);
    }
    return at;
  }
}

/**
 * Assign offsets to all objects of the tree; an object always follows its owner.
 *
 * @param gap the number of zero bytes behind the identifier.
 * @param tail the number of zero bytes at the end.
 * @returns the file, and the length of the part before bulk data.
 */
export function layOut(
  root: Node,
  identifier: string,
  gap: number,
  tail: number,
): [file: Uint8Array, structure: number] {
  const front = new Front();
  front.extend(4);
  front.append(Uint8Array.from(identifier, (letter) => letter.charCodeAt(0)));
  front.extend(gap);
  const waiting: [reference: number, bulk: Bulk][] = [];
  front.open.push([0, root]);
  for (const [at, node] of front.open) {
    if (typeof node !== "function") waiting.push([at, node]);
    else {
      const position = node(front);
      front.view.setUint32(at, position - at, true);
    }
  }
  let end = front.length;
  const placed = waiting.map(([at, { data, alignment }]) => {
    // The length, four bytes, stands in front of the data.
    const offset = Math.ceil((end + 4) / alignment) * alignment;
    front.view.setUint32(at, offset - 4 - at, true);
    end = offset + data.length;
    return [offset, data] as const;
  });
  if (end > MAX_SIZE) {
    throw new CheckpointError(
      `the checkpoint would need more than ${MAX_SIZE} bytes, which is the limit of its format`,
    );
  }
  const file = new Uint8Array(end + tail);
  const view = new DataView(file.buffer);
  file.set(front.bytes.subarray(0, front.length));
  for (const [offset, data] of placed) {
    view.setUint32(offset - 4, data.length, true);
    file.set(data, offset);
  }
  return [file, front.length];
}

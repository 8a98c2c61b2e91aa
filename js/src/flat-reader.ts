/**
 * Read FlatBuffers that may be broken or hostile.
 *
 * Each offset, length and string is checked before it is followed, and the whole walk is bounded by
 * the size of the file, so that a file can neither crash the reader nor keep it busy or fill the
 * memory. Whatever is wrong is a `CheckpointError` that names the object and the byte.
 */

import { CheckpointError } from "./errors.js";
import { decoded } from "./text.js";

/** The same bound as FlatBuffers' verifier, which ONNX Runtime runs over checkpoints. */
const MAX_TABLES = 1_000_000;

/** The bytes of one file and the account of what was read of them. */
export class FlatReader {
  private readonly view: DataView;
  private read = 0;
  private tables = 0;
  private readonly texts = new Map<number, string>();

  constructor(
    readonly data: Uint8Array,
    readonly source: string,
  ) {
    this.view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  fail(what: string, where: string, position?: number): never {
    const at = position === undefined ? "" : ` at byte ${position}`;
    throw new CheckpointError(`${this.source}: ${where}${at}: ${what}`);
  }

  /** The root table of a file that carries `identifier`. */
  root(identifier: string, where: string): FlatTable {
    if (this.data.length < 8) {
      this.fail(`the file ends after ${this.data.length} bytes, before its header does`, where);
    }
    const found = String.fromCharCode(...this.data.subarray(4, 8));
    if (found !== identifier) {
      this.fail(
        `the file identifier is ${JSON.stringify(found)} instead of '${identifier}': ` +
          "this is not a checkpoint",
        where,
        4,
      );
    }
    return new FlatTable(this, this.follow(0, where), where);
  }

  /** Check that `size` bytes from `position` on lie within the file. */
  need(position: number, size: number, where: string): void {
    if (position < 0 || size < 0 || position + size > this.data.length) {
      this.fail(
        `${size} bytes are needed, but the file has ${this.data.length}: it is truncated or damaged`,
        where,
        position,
      );
    }
  }

  /**
   * Take note that an object of `size` bytes is read. Objects of a proper file do not overlap, so
   * the sum of their sizes cannot exceed that of the file.
   */
  claim(position: number, size: number, where: string): void {
    this.need(position, size, where);
    this.read += size;
    if (this.read > this.data.length) this.fail("objects in the file overlap", where, position);
  }

  countTable(where: string): void {
    this.tables += 1;
    if (this.tables > MAX_TABLES) this.fail(`the file has more than ${MAX_TABLES} tables`, where);
  }

  u16(position: number, where: string): number {
    this.need(position, 2, where);
    return this.view.getUint16(position, true);
  }

  u32(position: number, where: string): number {
    this.need(position, 4, where);
    return this.view.getUint32(position, true);
  }

  i32(position: number, where: string): number {
    this.need(position, 4, where);
    return this.view.getInt32(position, true);
  }

  i64(position: number, where: string): bigint {
    this.need(position, 8, where);
    return this.view.getBigInt64(position, true);
  }

  f32(position: number, where: string): number {
    this.need(position, 4, where);
    return this.view.getFloat32(position, true);
  }

  /** The position that the offset stored at `position` points to. */
  follow(position: number, where: string): number {
    const offset = this.u32(position, where);
    if (offset === 0) this.fail("an offset is zero", where, position);
    this.need(position + offset, 4, where);
    return position + offset;
  }

  /** Where the items of the vector at `position` begin, and how many there are. */
  vector(position: number, itemSize: number, where: string): [start: number, count: number] {
    const count = this.u32(position, where);
    this.claim(position, 4 + count * itemSize, where);
    return [position + 4, count];
  }

  /** The string at `position`. Several objects may share one string. */
  string(position: number, where: string): string {
    const known = this.texts.get(position);
    if (known !== undefined) return known;
    const length = this.u32(position, where);
    // The terminating zero is part of the format, not of the length.
    this.claim(position, 4 + length + 1, where);
    const start = position + 4;
    if (this.data[start + length] !== 0) {
      this.fail("a string does not end with a zero byte", where, start + length);
    }
    const text = decoded(this.data.subarray(start, start + length));
    if (text === null) this.fail("a string is not valid UTF-8", where, start);
    this.texts.set(position, text);
    return text;
  }

  strings(position: number, where: string): string[] {
    const [start, count] = this.vector(position, 4, where);
    return Array.from({ length: count }, (_, i) =>
      this.string(this.follow(start + 4 * i, where), where),
    );
  }

  i64s(position: number, where: string, atMost: number): bigint[] {
    const [start, count] = this.vector(position, 8, where);
    if (count > atMost) {
      this.fail(`${count} entries, where at most ${atMost} are allowed`, where, position);
    }
    return Array.from({ length: count }, (_, i) => this.i64(start + 8 * i, where));
  }
}

/** One table of the file. Fields are asked for by their number in the schema. */
export class FlatTable {
  private readonly vtable: number;
  private readonly size: number;
  private readonly slots: number;

  constructor(
    readonly reader: FlatReader,
    readonly position: number,
    public where: string,
  ) {
    reader.countTable(where);
    const vtable = position - reader.i32(position, where);
    if (vtable < 0 || vtable + 4 > reader.data.length) {
      reader.fail("the table points to a layout outside the file", where, position);
    }
    const vtableSize = reader.u16(vtable, where);
    this.size = reader.u16(vtable + 2, where);
    if (vtableSize < 4 || vtableSize % 2 || this.size < 4) {
      reader.fail("the layout of the table is damaged", where, vtable);
    }
    reader.need(vtable, vtableSize, where);
    reader.claim(position, this.size, where);
    this.vtable = vtable;
    this.slots = (vtableSize - 4) / 2;
  }

  private field(slot: number, size: number, name: string): number | null {
    if (slot >= this.slots) return null;
    const offset = this.reader.u16(this.vtable + 4 + 2 * slot, this.where);
    if (offset === 0) return null;
    if (offset < 4 || offset + size > this.size) {
      this.reader.fail(`the field '${name}' lies outside its table`, this.where, this.vtable);
    }
    return this.position + offset;
  }

  i32(slot: number, name: string): number {
    const at = this.field(slot, 4, name);
    return at === null ? 0 : this.reader.i32(at, this.where);
  }

  i64(slot: number, name: string, absent = 0n): bigint {
    const at = this.field(slot, 8, name);
    return at === null ? absent : this.reader.i64(at, this.where);
  }

  f32(slot: number, name: string): number {
    const at = this.field(slot, 4, name);
    return at === null ? 0 : this.reader.f32(at, this.where);
  }

  flag(slot: number, name: string): boolean {
    const at = this.field(slot, 1, name);
    if (at === null) return false;
    const value = this.reader.data[at]!;
    if (value > 1) {
      this.reader.fail(`the flag '${name}' is ${value} instead of 0 or 1`, this.where, at);
    }
    return value === 1;
  }

  /** Where the table, vector or string that a field refers to is, or null. */
  target(slot: number, name: string): number | null {
    const at = this.field(slot, 4, name);
    return at === null ? null : this.reader.follow(at, `${this.where}.${name}`);
  }

  string(slot: number, name: string): string | null {
    const at = this.target(slot, name);
    return at === null ? null : this.reader.string(at, `${this.where}.${name}`);
  }

  table(slot: number, name: string): FlatTable | null {
    const at = this.target(slot, name);
    return at === null ? null : new FlatTable(this.reader, at, `${this.where}.${name}`);
  }

  /** The tables of a field that is a vector of tables; none if the field is absent. */
  *tables(slot: number, name: string): Generator<FlatTable> {
    const at = this.target(slot, name);
    if (at === null) return;
    const where = `${this.where}.${name}`;
    const [start, count] = this.reader.vector(at, 4, where);
    for (let index = 0; index < count; index++) {
      const item = `${where}[${index}]`;
      yield new FlatTable(this.reader, this.reader.follow(start + 4 * index, item), item);
    }
  }
}

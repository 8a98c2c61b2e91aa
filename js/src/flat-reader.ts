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
interface File {
  readonly data: Uint8Array;
  readonly view: DataView;
  readonly source: string;
  readonly texts: Map<number, string>;
  read: number;
  tables: number;
}

/** One table of the file. Fields are asked for by their number in the schema; absent ones are 0. */
export class FlatTable {
  private readonly vtable: number;
  private readonly size: number;
  private readonly end: number;

  private constructor(
    private readonly file: File,
    private readonly position: number,
    public where: string,
  ) {
    if (++file.tables > MAX_TABLES) this.fail(`the file has more than ${MAX_TABLES} tables`);
    this.need(position, 4);
    this.vtable = position - file.view.getInt32(position, true);
    const length = this.u16(this.vtable);
    this.size = this.u16(this.vtable + 2);
    this.end = this.vtable + length;
    if (length < 4 || length % 2 || this.size < 4) this.fail("the layout of the table is damaged");
    this.need(this.vtable, length);
    this.claim(position, this.size);
  }

  /** The root table of a file that carries `identifier`. */
  static root(data: Uint8Array, source: string, identifier: string, where: string): FlatTable {
    const found = String.fromCharCode(...data.subarray(4, 8));
    if (found !== identifier) {
      throw new CheckpointError(
        `${source}: the file identifier is ${JSON.stringify(found)} instead of '${identifier}': ` +
          "this is not a checkpoint",
      );
    }
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    const file = { data, view, source, texts: new Map(), read: 0, tables: 0 };
    return new FlatTable(file, view.getUint32(0, true), where);
  }

  fail(what: string, position = this.position): never {
    throw new CheckpointError(`${this.file.source}: ${this.where} at byte ${position}: ${what}`);
  }

  /** Check that `size` bytes from `position` on lie within the file. */
  private need(position: number, size: number): void {
    const { length } = this.file.data;
    if (position < 0 || position + size > length) {
      this.fail(
        `${size} bytes are needed, but the file has ${length}: it is truncated or damaged`,
        position,
      );
    }
  }

  /**
   * Take note that an object of `size` bytes is read. Objects of a proper file do not overlap, so
   * the sum of their sizes cannot exceed that of the file.
   */
  private claim(position: number, size: number): void {
    this.need(position, size);
    this.file.read += size;
    if (this.file.read > this.file.data.length) this.fail("objects in the file overlap", position);
  }

  private u16(position: number): number {
    this.need(position, 2);
    return this.file.view.getUint16(position, true);
  }

  /** Where a field is, or 0. */
  private field(slot: number, size: number): number {
    const place = this.vtable + 4 + 2 * slot;
    const offset = place < this.end ? this.u16(place) : 0;
    if (!offset) return 0;
    if (offset < 4 || offset + size > this.size) this.fail(`field ${slot} lies outside its table`);
    return this.position + offset;
  }

  i32(slot: number): number {
    const at = this.field(slot, 4);
    return at && this.file.view.getInt32(at, true);
  }

  i64(slot: number, absent = 0n): bigint {
    const at = this.field(slot, 8);
    return at ? this.file.view.getBigInt64(at, true) : absent;
  }

  f32(slot: number): number {
    const at = this.field(slot, 4);
    return at && this.file.view.getFloat32(at, true);
  }

  flag(slot: number): boolean {
    const at = this.field(slot, 1);
    const value = at && this.file.data[at]!;
    if (value > 1) this.fail(`the flag ${slot} is ${value} instead of 0 or 1`, at);
    return value === 1;
  }

  /** The position that the offset stored at `position` points to. */
  private follow(position: number): number {
    this.need(position, 4);
    const offset = this.file.view.getUint32(position, true);
    if (!offset) this.fail("an offset is zero", position);
    this.need(position + offset, 4);
    return position + offset;
  }

  /** Where the items of a vector begin, and how many there are; several objects may share a text. */
  vector(slot: number, width: number): [start: number, count: number] {
    const at = this.field(slot, 4);
    return at ? this.items(this.follow(at), width) : [0, 0];
  }

  private items(at: number, width: number, more = 0): [start: number, count: number] {
    const count = this.file.view.getUint32(at, true);
    this.claim(at, 4 + count * width + more);
    return [at + 4, count];
  }

  private textAt(reference: number): string {
    const at = this.follow(reference);
    const known = this.file.texts.get(at);
    if (known !== undefined) return known;
    // The terminating zero is part of the format, not of the length.
    const [start, length] = this.items(at, 1, 1);
    if (this.file.data[start + length]) this.fail("a string does not end with a zero byte", start);
    const text = decoded(this.file.data.subarray(start, start + length));
    if (text === null) return this.fail("a string is not valid UTF-8", start);
    this.file.texts.set(at, text);
    return text;
  }

  text(slot: number): string {
    const at = this.field(slot, 4);
    return at ? this.textAt(at) : "";
  }

  texts(slot: number): string[] {
    const [start, count] = this.vector(slot, 4);
    return Array.from({ length: count }, (_, i) => this.textAt(start + 4 * i));
  }

  bytes(slot: number): Uint8Array {
    const [start, length] = this.vector(slot, 1);
    return this.file.data.subarray(start, start + length);
  }

  i64s(slot: number, atMost: number): bigint[] {
    const [start, count] = this.vector(slot, 8);
    if (count > atMost) this.fail(`${count} entries, where at most ${atMost} are allowed`);
    return Array.from({ length: count }, (_, i) => this.file.view.getBigInt64(start + 8 * i, true));
  }

  private inner(reference: number, name: string): FlatTable {
    return new FlatTable(this.file, this.follow(reference), `${this.where}.${name}`);
  }

  table(slot: number, name: string): FlatTable | null {
    const at = this.field(slot, 4);
    return at ? this.inner(at, name) : null;
  }

  /** The tables of a field that is a vector of tables. */
  *tables(slot: number, name: string): Generator<FlatTable> {
    const [start, count] = this.vector(slot, 4);
    for (let i = 0; i < count; i++) yield this.inner(start + 4 * i, `${name}[${i}]`);
  }
}

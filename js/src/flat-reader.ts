/**
 * Read FlatBuffers files that may be broken or hostile.
 *
 * Each offset, length and string is checked before it is followed, and the whole walk is bounded by
 * the size of the file, so that a file can neither crash the reader nor keep it busy or fill the
 * memory. Every error names the object and the byte: a `CheckpointError`, or what the caller asks for.
 */

import { CheckpointError, type OnnxTrainError } from "./errors.js";
import { decoded } from "./text.js";

/** The same bound as FlatBuffers' verifier, which ONNX Runtime runs; of strings, too. */
const MAX_TABLES = 1_000_000;

/** The bytes of a file, and how many of them were read. */
interface File {
  readonly data: Uint8Array;
  readonly view: DataView;
  readonly source: string;
  readonly texts: Map<number, string>;
  readonly error: new (message: string) => OnnxTrainError;
  read: number;
  tables: number;
}

/** A table of the file, with fields by their number in the schema; absent ones are 0. */
export class FlatTable {
  private readonly _vtable: number;
  private readonly _size: number;
  private readonly _end: number;

  private constructor(
    private readonly _file: File,
    private readonly _position: number,
    public where: string,
  ) {
    if (++_file.tables > MAX_TABLES) this.fail(`the file has more than ${MAX_TABLES} tables`);
    this._need(_position, 4);
    this._vtable = _position - _file.view.getInt32(_position, true);
    const length = this._u16(this._vtable);
    this._size = this._u16(this._vtable + 2);
    this._end = this._vtable + length;
    if (length < 4 || length % 2 || this._size < 4) this.fail("the layout of the table is damaged");
    this._need(this._vtable, length);
    this._claim(_position, this._size);
  }

  /** The root table of a file that carries `identifier`. */
  static root(
    data: Uint8Array,
    source: string,
    identifier: string,
    where: string,
    error: new (message: string) => OnnxTrainError = CheckpointError,
  ): FlatTable {
    const found = String.fromCharCode(...data.subarray(4, 8));
    if (found !== identifier) {
      const article = /^[aeiou]/.test(where) ? "an" : "a";
      throw new error(
        `${source}: the file identifier is ${JSON.stringify(found)} instead of '${identifier}': ` +
          `this is not ${article} ${where}`,
      );
    }
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    const file = { data, view, source, texts: new Map(), error, read: 0, tables: 0 };
    return new FlatTable(file, view.getUint32(0, true), where);
  }

  fail(what: string, position = this._position): never {
    throw new this._file.error(`${this._file.source}: ${this.where} at byte ${position}: ${what}`);
  }

  /** Check that `size` bytes at `position` lie within the file. */
  private _need(position: number, size: number): void {
    const { length } = this._file.data;
    if (position < 0 || position + size > length) {
      this.fail(
        `${size} bytes are needed, but the file has ${length}: it is truncated or damaged`,
        position,
      );
    }
  }

  /**
   * Count the bytes of an object. Objects of a valid file do not overlap, so
   * the sum of their sizes cannot exceed that of the file.
   */
  private _claim(position: number, size: number): void {
    this._need(position, size);
    this._file.read += size;
    if (this._file.read > this._file.data.length) this.fail("objects in the file overlap", position);
  }

  private _u16(position: number): number {
    this._need(position, 2);
    return this._file.view.getUint16(position, true);
  }

  /** The position of a field, or 0. */
  private _field(slot: number, size: number): number {
    const place = this._vtable + 4 + 2 * slot;
    const offset = place < this._end ? this._u16(place) : 0;
    if (!offset) return 0;
    if (offset < 4 || offset + size > this._size) this.fail(`field ${slot} lies outside its table`);
    return this._position + offset;
  }

  i32(slot: number): number {
    const at = this._field(slot, 4);
    return at && this._file.view.getInt32(at, true);
  }

  i64(slot: number, absent = 0n): bigint {
    const at = this._field(slot, 8);
    return at ? this._file.view.getBigInt64(at, true) : absent;
  }

  f32(slot: number): number {
    const at = this._field(slot, 4);
    return at && this._file.view.getFloat32(at, true);
  }

  flag(slot: number): boolean {
    const at = this._field(slot, 1);
    const value = at && this._file.data[at]!;
    if (value > 1) this.fail(`the flag ${slot} is ${value} instead of 0 or 1`, at);
    return value === 1;
  }

  /** The position that the offset stored at `position` points to. */
  private _follow(position: number): number {
    this._need(position, 4);
    const offset = this._file.view.getUint32(position, true);
    if (!offset) this.fail("an offset is zero", position);
    this._need(position + offset, 4);
    return position + offset;
  }

  /** The start and number of a vector's items; objects may share a string. */
  vector(slot: number, width: number): [start: number, count: number] {
    const at = this._field(slot, 4);
    return at ? this._items(this._follow(at), width) : [0, 0];
  }

  private _items(at: number, width: number, more = 0): [start: number, count: number] {
    const count = this._file.view.getUint32(at, true);
    this._claim(at, 4 + count * width + more);
    return [at + 4, count];
  }

  private _textAt(reference: number): string {
    const at = this._follow(reference);
    const known = this._file.texts.get(at);
    if (known !== undefined) return known;
    if (this._file.texts.size >= MAX_TABLES) this.fail(`the file has more than ${MAX_TABLES} strings`);
    // The terminating zero is part of the format, not of the length.
    const [start, length] = this._items(at, 1, 1);
    if (this._file.data[start + length]) this.fail("a string does not end with a zero byte", start);
    const text = decoded(this._file.data.subarray(start, start + length));
    if (text === null) return this.fail("a string is not valid UTF-8", start);
    this._file.texts.set(at, text);
    return text;
  }

  text(slot: number): string {
    const at = this._field(slot, 4);
    return at ? this._textAt(at) : "";
  }

  texts(slot: number): string[] {
    const [start, count] = this.vector(slot, 4);
    return Array.from({ length: count }, (_, i) => this._textAt(start + 4 * i));
  }

  bytes(slot: number): Uint8Array {
    const [start, length] = this.vector(slot, 1);
    return this._file.data.subarray(start, start + length);
  }

  i64s(slot: number, atMost: number): bigint[] {
    const [start, count] = this.vector(slot, 8);
    if (count > atMost) this.fail(`${count} entries, where at most ${atMost} are allowed`);
    return Array.from({ length: count }, (_, i) => this._file.view.getBigInt64(start + 8 * i, true));
  }

  private _inner(reference: number, name: string): FlatTable {
    return new FlatTable(this._file, this._follow(reference), `${this.where}.${name}`);
  }

  table(slot: number, name: string): FlatTable | null {
    const at = this._field(slot, 4);
    return at ? this._inner(at, name) : null;
  }

  /** The tables of a field that is a vector of tables. */
  *tables(slot: number, name: string): Generator<FlatTable> {
    const [start, count] = this.vector(slot, 4);
    for (let i = 0; i < count; i++) yield this._inner(start + 4 * i, `${name}[${i}]`);
  }
}

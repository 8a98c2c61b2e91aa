/**
 * Protobuf's wire format, as far as ONNX files need it.
 *
 * Reading yields the fields of a message as views, so that what nobody looks into is neither parsed
 * nor copied and can be written out again byte for byte. The bytes may be broken or hostile: each
 * number and length is checked before it is used, and the number of fields is bounded.
 */

import { ModelError } from "./errors.js";
import { decoded, encoded } from "./text.js";

export const VARINT = 0;
export const FIXED64 = 1;
export const BYTES = 2;
export const FIXED32 = 5;
/** Far more than the largest models have. */
const MAX_FIELDS = 4_000_000;
export const MAX_RANK = 64;

/** One field of a message. A number is in two halves, `data` is of texts, bytes and messages. */
export interface Field {
  readonly number: number;
  readonly kind: number;
  readonly low: number;
  readonly high: number;
  readonly data: Uint8Array;
  readonly start: number;
  readonly end: number;
}

const EMPTY: Uint8Array = new Uint8Array(0);

/** Reads messages of one file; `source` is what errors call the file. */
export class WireReader {
  private left = MAX_FIELDS;
  private low = 0;
  private high = 0;

  constructor(readonly source: string) {}

  fail(what: string, where: string, position?: number): never {
    const at = position === undefined ? "" : ` at byte ${position} of it`;
    throw new ModelError(`${this.source}: ${where}${at}: ${what}`);
  }

  /** Read a number of variable length into `low` and `high`; return the position behind it. */
  private varint(data: Uint8Array, position: number, where: string): number {
    let low = 0;
    let high = 0;
    for (let index = 0; index < 10; index++) {
      const byte = data[position + index];
      if (byte === undefined) {
        this.fail("a number is cut off: the file is truncated or damaged", where, position);
      }
      const bits = byte & 0x7f;
      if (index < 4) low |= bits << (7 * index);
      else if (index === 4) {
        low |= bits << 28;
        high |= bits >>> 4;
      } else high |= bits << (7 * index - 32);
      if (byte < 0x80) {
        this.low = low >>> 0;
        this.high = high >>> 0;
        return position + index + 1;
      }
    }
    return this.fail("a number has more than ten bytes", where, position);
  }

  /** The fields of a message, in the order of the file. */
  fields(message: Uint8Array, where: string): Field[] {
    const found: Field[] = [];
    const size = message.length;
    let position = 0;
    while (position < size) {
      this.left -= 1;
      if (this.left < 0) this.fail("there are more fields than any real model has", where);
      const start = position;
      position = this.varint(message, position, where);
      const number = this.low >>> 3;
      const kind = this.low & 7;
      if (number === 0 || this.high !== 0) {
        this.fail("a field has an impossible number", where, start);
      }
      let [low, high, data] = [0, 0, EMPTY];
      if (kind === BYTES) {
        position = this.varint(message, position, where);
        const length = this.high * 2 ** 32 + this.low;
        if (position + length > size) this.tooLong(length, size - position, where, start);
        data = message.subarray(position, position + length);
        position += length;
      } else if (kind === VARINT) {
        position = this.varint(message, position, where);
        [low, high] = [this.low, this.high];
      } else if (kind === FIXED32 || kind === FIXED64) {
        const width = kind === FIXED32 ? 4 : 8;
        if (position + width > size) this.tooLong(width, size - position, where, start);
        data = message.subarray(position, position + width);
        position += width;
      } else {
        this.fail(`a field is of the kind ${kind}, which ONNX does not have`, where, start);
      }
      found.push({ number, kind, low, high, data, start, end: position });
    }
    return found;
  }

  private tooLong(length: number, left: number, where: string, at: number): never {
    this.fail(
      `a field of ${length} bytes, but ${left} are left: the file is truncated or damaged`,
      where,
      at,
    );
  }

  /** The bytes of a field that is a message, a text or bytes. */
  message(field: Field, where: string): Uint8Array {
    if (field.kind !== BYTES) this.fail("a number where a message should be", where, field.start);
    return field.data;
  }

  text(field: Field, where: string): string {
    const text = decoded(this.message(field, where));
    return text ?? this.fail("a text is not valid UTF-8", where, field.start);
  }

  /** A signed number. Beyond 2⁵³ it is not exact, which is as good as impossible here. */
  int(field: Field, where: string): number {
    if (field.kind !== VARINT) {
      this.fail("a message where a number should be", where, field.start);
    }
    return signed(field.low, field.high);
  }

  /** The numbers of a repeated field, packed or not, in halves; more than `most` is an error. */
  halves(fields: readonly Field[], where: string, most: number): [low: number, high: number][] {
    const result: [number, number][] = [];
    const add = (low: number, high: number): void => {
      result.push([low, high]);
      if (result.length > most) this.fail(`there are more than ${most} numbers`, where);
    };
    for (const field of fields) {
      if (field.kind === VARINT) add(field.low, field.high);
      else {
        const data = this.message(field, where);
        for (let position = 0; position < data.length; ) {
          position = this.varint(data, position, where);
          add(this.low, this.high);
        }
      }
    }
    return result;
  }

  ints(fields: readonly Field[], where: string): number[] {
    return this.halves(fields, where, MAX_RANK).map(([low, high]) => signed(low, high));
  }
}

function signed(low: number, high: number): number {
  return (high | 0) * 2 ** 32 + low;
}

// ---- writing -------------------------------------------------------------------------------------

/** Bytes in pieces, none of which is copied before they are joined. */
export class Chunks {
  readonly pieces: Uint8Array[] = [];
  size = 0;

  constructor(...pieces: Uint8Array[]) {
    for (const piece of pieces) this.add(piece);
  }

  add(piece: Uint8Array): this {
    this.pieces.push(piece);
    this.size += piece.length;
    return this;
  }

  addAll(other: Chunks): this {
    for (const piece of other.pieces) this.add(piece);
    return this;
  }

  number(field: number, value: number): this {
    return this.add(varint(field * 8 + VARINT)).add(varint(value));
  }

  bytes(field: number, data: Uint8Array): this {
    return this.add(varint(field * 8 + BYTES))
      .add(varint(data.length))
      .add(data);
  }

  text(field: number, text: string): this {
    const bytes = encoded(text);
    if (bytes === null) throw new ModelError(`'${text}' cannot be written as UTF-8`);
    return this.bytes(field, bytes);
  }

  message(field: number, content: Chunks): this {
    this.add(varint(field * 8 + BYTES)).add(varint(content.size));
    return this.addAll(content);
  }

  join(): Uint8Array {
    const joined = new Uint8Array(this.size);
    let at = 0;
    for (const piece of this.pieces) {
      joined.set(piece, at);
      at += piece.length;
    }
    return joined;
  }
}

function varint(value: number): Uint8Array {
  if (value < 0) {
    // As ONNX does, in ten bytes.
    let rest = BigInt.asUintN(64, BigInt(value));
    return Uint8Array.from({ length: 10 }, (_, i) => {
      const bits = Number(rest & 0x7fn);
      rest >>= 7n;
      return i < 9 ? bits | 0x80 : bits;
    });
  }
  const bytes: number[] = [];
  while (value >= 0x80) {
    bytes.push(value % 0x80 | 0x80);
    value = Math.floor(value / 0x80);
  }
  bytes.push(value);
  return Uint8Array.from(bytes);
}

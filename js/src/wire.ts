/**
 * Protobuf's wire format, as far as ONNX files need it.
 *
 * Fields are views of the message, so unread parts are neither parsed
 * nor copied, and can be written again byte for byte. The bytes may be broken or hostile: each
 * number and length is checked before it is used, and the number of fields is bounded.
 */

import { ModelError, quoted } from "./errors.js";
import { decoded, encoded } from "./text.js";

const VARINT = 0;
const FIXED64 = 1;
const BYTES = 2;
const FIXED32 = 5;
/** Far more than the largest models have. */
const MAX_FIELDS = 4_000_000;
const MAX_RANK = 64;
const CUT_OFF = "the file is truncated or damaged";

/**
 * A field of a message. A number has two halves; `data` is for strings, bytes and messages.
 *
 * There may be millions of them: they are positions, and views are made when they are asked for.
 */
export class Field {
  constructor(
    private readonly _message: Uint8Array,
    readonly number: number,
    readonly kind: number,
    readonly low: number,
    readonly high: number,
    private readonly _start: number,
    private readonly _content: number,
    private readonly _end: number,
  ) {}

  get data(): Uint8Array {
    return this._message.subarray(this._content, this._end);
  }

  /** The field as it is in the file, with its number. */
  get raw(): Uint8Array {
    return this._message.subarray(this._start, this._end);
  }
}

/** A file that is being read, which errors call `source`. */
interface File {
  readonly source: string;
  left: number;
}

/** A message in a file. `where` says which, for errors. */
export class Message {
  private _found: Field[] | null = null;

  private constructor(
    private readonly _file: File,
    readonly data: Uint8Array,
    readonly where: string,
  ) {}

  static of(data: Uint8Array, source: string): Message {
    return new Message({ source, left: MAX_FIELDS }, data, "model");
  }

  fail(what: string, where = this.where): never {
    throw new ModelError(`${this._file.source}: ${where}: ${what}`);
  }

  /** All fields, in the order of the file. */
  get fields(): readonly Field[] {
    return (this._found ??= this._read());
  }

  private _read(): Field[] {
    const { data, _file: file } = this;
    const found: Field[] = [];
    for (let at = 0; at < data.length; ) {
      if (--file.left < 0) this.fail("there are more fields than any real model has");
      const start = at;
      const next = (): [low: number, high: number] => {
        const [low, high, end] = this._varint(data, at);
        at = end;
        return [low, high];
      };
      let [low, high] = next();
      const number = low >>> 3;
      const kind = low & 7;
      if (!number || high) this.fail(`a field at byte ${start} has an impossible number`);
      let size = 0;
      low = high = 0;
      if (kind === VARINT) [low, high] = next();
      else if (kind === BYTES) {
        const [length, more] = next();
        size = more * 2 ** 32 + length;
      } else if (kind === FIXED32 || kind === FIXED64) size = kind === FIXED32 ? 4 : 8;
      else this.fail(`a field at byte ${start} is of the kind ${kind}, which ONNX does not have`);
      if (at + size > data.length) {
        this.fail(
          `a field at byte ${start} has ${size} bytes, but ${data.length - at} are left: ${CUT_OFF}`,
        );
      }
      found.push(new Field(data, number, kind, low, high, start, at, at + size));
      at += size;
    }
    return found;
  }

  /** A varint in two halves, and the position after it. */
  private _varint(data: Uint8Array, at: number): [low: number, high: number, end: number] {
    let low = 0;
    let high = 0;
    for (let index = 0; index < 10; index++) {
      const byte = data[at + index];
      if (byte === undefined) return this.fail(`a number at byte ${at} is cut off: ${CUT_OFF}`);
      const bits = byte & 0x7f;
      if (index < 5) low |= bits << (7 * index);
      if (index > 3) high |= index > 4 ? bits << (7 * index - 32) : bits >>> 4;
      if (byte < 0x80) return [low >>> 0, high >>> 0, at + index + 1];
    }
    return this.fail(`a number at byte ${at} has more than ten bytes`);
  }

  all(number: number): Field[] {
    return this.fields.filter((field) => field.number === number);
  }

  private _last(number: number): Field | undefined {
    return this.all(number).pop();
  }

  /** A field as a message of its own. */
  inner(field: Field, name: string | number): Message {
    const where = `${this.where}.${name}`;
    if (field.kind !== BYTES) this.fail("a number where a message should be", where);
    return new Message(this._file, field.data, where);
  }

  /** The messages in a field. */
  messages(number: number, name: string | number = number): Message[] {
    return this.all(number).map((field) => this.inner(field, name));
  }

  /** The only message in a field, or null. Two are an error; protobuf would merge them. */
  only(number: number): Message | null {
    const found = this.messages(number);
    if (found.length > 1) this.fail(`field ${number} is there twice`);
    return found[0] ?? null;
  }

  texts(number: number): string[] {
    return this.messages(number).map(
      ({ data, where }) => decoded(data) ?? this.fail("a text is not valid UTF-8", where),
    );
  }

  /** The string in a field, "" if there is none. */
  text(number: number): string {
    return this.texts(number).pop() ?? "";
  }

  /** A signed number, exact up to 2⁵³. */
  int(number: number): number {
    const field = this._last(number);
    if (!field) return 0;
    if (field.kind !== VARINT) this.fail("a message where a number should be");
    return signed([field.low, field.high]);
  }

  /** The numbers of a repeated field, packed or not, in halves; more than `most` is an error. */
  *halves(number: number, most: number): Generator<[low: number, high: number]> {
    let left = most;
    for (const field of this.all(number)) {
      const { data } = field;
      for (let at = 0, isFirst = field.kind === VARINT; isFirst || at < data.length; isFirst = false) {
        if (--left < 0) this.fail(`there are more than ${most} numbers`);
        if (isFirst) yield [field.low, field.high];
        else {
          const [low, high, end] = this._varint(data, at);
          yield [low, high];
          at = end;
        }
      }
    }
  }

  ints(number: number): number[] {
    return [...this.halves(number, MAX_RANK)].map(signed);
  }
}

function signed([low, high]: readonly [number, number]): number {
  return (high | 0) * 2 ** 32 + low;
}

// ---- writing -------------------------------------------------------------------------------------

/** Chunks of bytes, copied once when they are joined. */
export class Chunks {
  size = 0;
  private readonly _pieces: Uint8Array[] = [];

  constructor(...pieces: Uint8Array[]) {
    this.add(...pieces);
  }

  add(...pieces: Uint8Array[]): this {
    for (const piece of pieces) {
      this._pieces.push(piece);
      this.size += piece.length;
    }
    return this;
  }

  number(field: number, value: number): this {
    return this.add(varint(field * 8 + VARINT), varint(value));
  }

  bytes(field: number, data: Uint8Array): this {
    return this.message(field, new Chunks(data));
  }

  text(field: number, text: string): this {
    const bytes = encoded(text);
    if (!bytes) throw new ModelError(`${quoted(text)} cannot be written as UTF-8`);
    return this.bytes(field, bytes);
  }

  message(field: number, content: Chunks): this {
    return this.add(varint(field * 8 + BYTES), varint(content.size), ...content._pieces);
  }

  join(): Uint8Array {
    const joined = new Uint8Array(this.size);
    let at = 0;
    for (const piece of this._pieces) {
      joined.set(piece, at);
      at += piece.length;
    }
    return joined;
  }
}

/** A number as a varint; a negative one takes ten bytes. */
function varint(value: number): Uint8Array {
  const bytes: number[] = [];
  let rest = BigInt.asUintN(64, BigInt(value));
  for (; rest > 0x7fn; rest >>= 7n) bytes.push(Number(rest & 0x7fn) | 0x80);
  return Uint8Array.of(...bytes, Number(rest));
}

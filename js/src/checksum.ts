/**
 * Checksums of the two files of a checkpoint; `docs/format.md` specifies them. The file itself says
 * in its front how long it is and that it ends with a checksum; the data file has one per block.
 */

import { ascii } from "./text.js";

/** Bytes 8 to 32: this, the length of the file, and that of the part before tensors. */
const FRONT_MARK = "ODTCSIZE";
const FRONT_AT = 8;
export const FRONT_SIZE = 24;
/** The last bytes: this, and eight hexadecimal digits, the CRC-32 of the rest. */
const END_MARK = "ODTCCRC=";
export const END_SIZE = END_MARK.length + 8;
/** Behind the checksums of blocks: this, length of the data, size of a block, CRC-32 of all that. */
const TABLE_MARK = "ODTCBLKS";
const TABLE_SIZE = 24;
const SMALLEST_BLOCK = 1 << 16;

// Eight tables, so that eight bytes are taken at a time.
const TABLES = Array.from({ length: 8 }, () => new Uint32Array(256));
for (let byte = 0; byte < 256; byte++) {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  TABLES[0]![byte] = value;
}
for (let k = 1; k < 8; k++) {
  for (let byte = 0; byte < 256; byte++) {
    const before = TABLES[k - 1]![byte]!;
    TABLES[k]![byte] = (before >>> 8) ^ TABLES[0]![before & 255]!;
  }
}

export function crc32(bytes: Uint8Array): number {
  const [t0, t1, t2, t3, t4, t5, t6, t7] = TABLES as [
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
    Uint32Array,
  ];
  const whole = bytes.length - (bytes.length % 8);
  let sum = 0xffffffff;
  let i = 0;
  for (; i < whole; i += 8) {
    sum ^= bytes[i]! | (bytes[i + 1]! << 8) | (bytes[i + 2]! << 16) | (bytes[i + 3]! << 24);
    sum =
      t7[sum & 255]! ^
      t6[(sum >>> 8) & 255]! ^
      t5[(sum >>> 16) & 255]! ^
      t4[sum >>> 24]! ^
      t3[bytes[i + 4]!]! ^
      t2[bytes[i + 5]!]! ^
      t1[bytes[i + 6]!]! ^
      t0[bytes[i + 7]!]!;
  }
  for (; i < bytes.length; i++) sum = (sum >>> 8) ^ t0[(sum ^ bytes[i]!) & 255]!;
  return ~sum >>> 0;
}

/** Say in the front of a file how long it is, and write its checksum at the end. */
export function seal(file: Uint8Array, structure: number): Uint8Array {
  write(file, FRONT_AT, FRONT_MARK);
  const view = viewOf(file);
  view.setBigUint64(FRONT_AT + 8, BigInt(file.length), true);
  view.setBigUint64(FRONT_AT + 16, BigInt(structure), true);
  return writeChecksum(file);
}

/** Write the checksum into the last bytes of a file. */
export function writeChecksum(file: Uint8Array): Uint8Array {
  write(file, file.length - END_SIZE, endOf(file));
  return file;
}

function write(file: Uint8Array, at: number, text: string): void {
  for (let i = 0; i < text.length; i++) file[at + i] = text.charCodeAt(i);
}

function endOf(file: Uint8Array): string {
  const rest = file.subarray(0, file.length - END_SIZE);
  return END_MARK + crc32(rest).toString(16).padStart(8, "0");
}

/**
 * Check length and checksum; return whether the front announces them, and what is wrong.
 *
 * Files of ONNX Runtime have neither, those of older versions of onnxtrain only the checksum.
 */
export function checkFile(
  file: Uint8Array,
  verify: boolean,
): { readonly announced: boolean; readonly wrong?: string } {
  const announced = isMark(ascii(file.subarray(FRONT_AT, FRONT_AT + 8)), FRONT_MARK);
  const end = ascii(file.subarray(Math.max(0, file.length - END_SIZE)));
  if (!announced && !isMark(end, END_MARK)) return { announced };
  if (announced) {
    const length = file.length < FRONT_AT + 16 ? 0n : viewOf(file).getBigUint64(FRONT_AT + 8, true);
    if (length !== BigInt(file.length)) {
      const wrong = `the file has ${file.length} bytes instead of ${length}: it is cut off or damaged`;
      return { announced, wrong };
    }
  }
  if (verify ? end === endOf(file) : end.startsWith(END_MARK)) return { announced };
  return { announced, wrong: "the checksum does not match: the file is damaged" };
}

/** Whether it is a mark, even if half of its bytes are damaged. */
function isMark(found: string, mark: string): boolean {
  let same = 0;
  for (let i = 0; i < mark.length; i++) if (found[i] === mark[i]) same++;
  return 2 * same >= mark.length;
}

/**
 * The data of a data file without its footer, which ends with the checksums of its blocks.
 *
 * @returns the data, or what is wrong.
 */
export function checkedBlocks(file: Uint8Array, verify: boolean): Uint8Array | string {
  const at = file.length - TABLE_SIZE;
  if (at < 0 || ascii(file.subarray(at, at + 8)) !== TABLE_MARK) {
    return "the list of its checksums is missing";
  }
  const view = viewOf(file);
  const length = Number(view.getBigUint64(at + 8, true));
  const block = view.getUint32(at + 16, true);
  const count = Math.ceil(length / block);
  // Many small blocks would keep a reader busy.
  if (block < SMALLEST_BLOCK || length + 4 * count !== at) {
    return "it has more or fewer bytes than its checksums are for";
  }
  if (crc32(file.subarray(length, at + 20)) !== view.getUint32(at + 20, true)) {
    return "the list of its checksums is damaged";
  }
  for (let i = 0; verify && i < count; i++) {
    const [start, stop] = [i * block, Math.min((i + 1) * block, length)];
    if (crc32(file.subarray(start, stop)) !== view.getUint32(length + 4 * i, true)) {
      return `the checksum of bytes ${start} to ${stop} does not match`;
    }
  }
  return file.subarray(0, length);
}

function viewOf(file: Uint8Array): DataView {
  return new DataView(file.buffer, file.byteOffset, file.byteLength);
}

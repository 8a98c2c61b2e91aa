/** The CRC-32 at the end of a checkpoint file. */

const MARK = "ODTCCRC=";
export const CHECKSUM_SIZE = MARK.length + 8;

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

/** Write the checksum into the last bytes of a file. */
export function writeChecksum(file: Uint8Array): Uint8Array {
  const start = file.length - CHECKSUM_SIZE;
  const text = MARK + crc32(file.subarray(0, start)).toString(16).padStart(8, "0");
  for (let i = 0; i < text.length; i++) file[start + i] = text.charCodeAt(i);
  return file;
}

/** Whether the checksum of a file matches or is absent: ONNX Runtime writes none. */
export function isChecksumRight(file: Uint8Array): boolean {
  const start = Math.max(0, file.length - CHECKSUM_SIZE);
  const found = String.fromCharCode(...file.subarray(start));
  if (!found.startsWith(MARK)) return true;
  return found === MARK + crc32(file.subarray(0, start)).toString(16).padStart(8, "0");
}

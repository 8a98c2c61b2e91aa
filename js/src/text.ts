/** Strings as in files: UTF-8, ordered by code points. */

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();
const LONE_SURROGATE = /[\uD800-\uDFFF]/u;

/** The string of UTF-8 bytes; null if they are invalid. */
export function decoded(bytes: Uint8Array): string | null {
  try {
    // A view of memory that threads share has to be copied first.
    return decoder.decode(isShared(bytes) ? bytes.slice() : bytes);
  } catch {
    return null;
  }
}

/** A few bytes as characters, one each. */
export function ascii(bytes: Uint8Array): string {
  return String.fromCharCode(...bytes);
}

function isShared(bytes: Uint8Array): boolean {
  return typeof SharedArrayBuffer !== "undefined" && bytes.buffer instanceof SharedArrayBuffer;
}

/** The UTF-8 bytes of a string; null if it has a lone surrogate. */
export function encoded(text: string): Uint8Array | null {
  return LONE_SURROGATE.test(text) ? null : encoder.encode(text);
}

/** Compare by code points, which is also the order of UTF-8 bytes. */
export function byCodePoints(a: string, b: string): number {
  const length = Math.min(a.length, b.length);
  for (let i = 0; i < length; i++) {
    const x = a.charCodeAt(i);
    const y = b.charCodeAt(i);
    // Surrogates stand for code points above all others.
    if (x !== y) return rank(x) - rank(y);
  }
  return a.length - b.length;
}

function rank(unit: number): number {
  return unit >= 0xd800 && unit <= 0xdfff ? unit + 0x10000 : unit;
}

/** Texts as files hold them: UTF-8, ordered by their code points. */

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();
const LONE_SURROGATE = /[\uD800-\uDFFF]/u;

/** The text of UTF-8 bytes; null if they are none. */
export function decoded(bytes: Uint8Array): string | null {
  try {
    // A view of memory that threads share has to be copied first.
    return decoder.decode(isShared(bytes) ? bytes.slice() : bytes);
  } catch {
    return null;
  }
}

function isShared(bytes: Uint8Array): boolean {
  return typeof SharedArrayBuffer !== "undefined" && bytes.buffer instanceof SharedArrayBuffer;
}

/** The UTF-8 bytes of a text; null if it has half of a pair. */
export function encoded(text: string): Uint8Array | null {
  return LONE_SURROGATE.test(text) ? null : encoder.encode(text);
}

/** Compare by code points, which is the order of the UTF-8 bytes too. */
export function byCodePoints(a: string, b: string): number {
  const length = Math.min(a.length, b.length);
  for (let i = 0; i < length; i++) {
    const x = a.charCodeAt(i);
    const y = b.charCodeAt(i);
    // Halves of pairs stand for code points above all others.
    if (x !== y) return rank(x) - rank(y);
  }
  return a.length - b.length;
}

function rank(unit: number): number {
  return unit >= 0xd800 && unit <= 0xdfff ? unit + 0x10000 : unit;
}

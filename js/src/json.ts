/**
 * The JSON in checkpoints (docs/format.md): integers of any size and floats are different types.
 *
 * A bigint is an integer, a number is a float, and a float that is not finite is the string "NaN",
 * "Infinity" or "-Infinity". Objects are maps, which keep the order of all keys.
 */

export type Json = null | boolean | bigint | number | string | Json[] | JsonObject;
export type JsonObject = Map<string, Json>;

export function toJson(value: Json): string {
  if (Array.isArray(value)) return `[${value.map(toJson).join(", ")}]`;
  if (value instanceof Map) {
    return `{${[...value].map(([key, item]) => `${JSON.stringify(key)}: ${toJson(item)}`).join(", ")}}`;
  }
  if (typeof value === "bigint") return String(value);
  if (typeof value !== "number") return JSON.stringify(value);
  if (!Number.isFinite(value)) return `"${value}"`;
  const text = Object.is(value, -0) ? "-0" : String(value);
  return /[.e]/.test(text) ? text : `${text}.0`;
}

const STRINGS = /"(?:[^"\\]|\\.)*"/g;
const TOKENS = /("(?:[^"\\]|\\.)*")|-?(?:Infinity|(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?)|NaN/g;

const MOST_DIGITS = 300; // a float has at most 309
const MOST_LEVELS = 100; // of lists and objects; ours have ten

/**
 * Read JSON; throws a SyntaxError where it is none, or has a key twice, or is made to do harm.
 *
 * JavaScript's own parser reads it, with a letter before each string, and numbers as strings with
 * another letter: so integers and floats stay apart, and keys in their order. The bare words NaN
 * and Infinity are those of earlier versions.
 */
export function fromJson(text: string): Json {
  let keys = 0;
  const marked = text.replace(TOKENS, (token, isText, point, exponent) => {
    if (isText) return `"t${token.slice(1)}`;
    if (token.length > MOST_DIGITS) throw new SyntaxError("a number is too large");
    return `"${point || exponent || /[NI]/.test(token) ? "f" : "i"}${token}"`;
  });
  const rest = marked.replace(STRINGS, "");
  let level = 0;
  for (const sign of rest) {
    if (sign === ":") keys += 1;
    if (sign === "[" || sign === "{") level += 1;
    if (sign === "]" || sign === "}") level -= 1;
    if (level > MOST_LEVELS) throw new SyntaxError(`there are more than ${MOST_LEVELS} levels`);
  }
  const found = JSON.parse(marked, (_, value: unknown) => {
    if (typeof value === "string") {
      const rest = value.slice(1);
      if (value[0] === "i") return BigInt(rest);
      return value[0] === "f" || /^(NaN|-?Infinity)$/.test(rest) ? Number(rest) : rest;
    }
    if (typeof value !== "object" || value === null || Array.isArray(value)) return value;
    const entries = Object.entries(value);
    keys -= entries.length;
    return new Map(entries.map(([key, item]) => [key.slice(1), item]));
  }) as Json;
  if (keys) throw new SyntaxError("a key is there twice");
  return found;
}

/**
 * JSON as Python's `json` writes it, so that a record saved here is the record saved there.
 *
 * Python tells integers from floats, and integers have any size: here a bigint is an integer and a
 * number is a float. Objects are maps, which keep the order of all keys.
 */

export type Json = null | boolean | bigint | number | string | Json[] | JsonObject;
export type JsonObject = Map<string, Json>;

export function toJson(value: Json): string {
  if (value === null || typeof value === "boolean" || typeof value === "bigint") {
    return String(value);
  }
  if (typeof value === "number") return floatText(value);
  if (typeof value === "string") return stringText(value);
  if (Array.isArray(value)) return `[${value.map(toJson).join(", ")}]`;
  const entries = [...value].map(([key, item]) => `${stringText(key)}: ${toJson(item)}`);
  return `{${entries.join(", ")}}`;
}

/** A float as Python shows it: always with a point or an exponent. */
export function floatText(value: number): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Infinity" : "-Infinity";
  const sign = value < 0 || Object.is(value, -0) ? "-" : "";
  const [mantissa, power] = Math.abs(value).toExponential().split("e") as [string, string];
  const digits = mantissa.replace(".", "");
  const exponent = Number(power);
  if (exponent < -4 || exponent >= 16) {
    const size = String(Math.abs(exponent)).padStart(2, "0");
    return `${sign}${mantissa}e${exponent < 0 ? "-" : "+"}${size}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
  const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
  return `${sign}${whole}.${digits.slice(exponent + 1) || "0"}`;
}

/** A text with everything outside ASCII escaped, as Python does. */
function stringText(text: string): string {
  return JSON.stringify(text).replace(
    /[\u007f-\uffff]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

const TOKENS = /("(?:[^"\\]|\\.)*")|-?(?:Infinity|(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?)|NaN/g;

/**
 * Read JSON; throws a SyntaxError where it is none.
 *
 * JavaScript's own parser reads it, with a letter before each text, and numbers as texts with
 * another letter: so integers and floats stay apart, and keys in their order.
 */
export function fromJson(text: string): Json {
  const marked = text.replace(TOKENS, (token, isText, point, exponent) =>
    isText ? `"t${token.slice(1)}` : `"${point || exponent || /[NI]/.test(token) ? "f" : "i"}${token}"`,
  );
  return JSON.parse(marked, (_, value: unknown) => {
    if (typeof value === "string") {
      const rest = value.slice(1);
      return value[0] === "t" ? rest : value[0] === "i" ? BigInt(rest) : Number(rest);
    }
    if (typeof value !== "object" || value === null || Array.isArray(value)) return value;
    return new Map(Object.entries(value).map(([key, item]) => [key.slice(1), item]));
  }) as Json;
}

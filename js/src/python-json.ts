/**
 * JSON as Python's `json` writes it, so that a record saved here is the record saved there.
 *
 * Python tells integers from floats, and integers have any size: here a bigint is an integer and a
 * number is a float. Objects are maps, which keep the order of all keys.
 */

export type Json = null | boolean | bigint | number | string | Json[] | JsonObject;
export type JsonObject = Map<string, Json>;

// Deeper nesting than any record has would overflow the stack.
const MAX_DEPTH = 200;

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

/** Read JSON; throws a SyntaxError where it is none. */
export function fromJson(text: string): Json {
  const parser = new Parser(text);
  const value = parser.value(0);
  parser.end();
  return value;
}

const NUMBER = /-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const SPACE = /[ \t\n\r]*/y;
const WORDS = new Map<string, Json>([
  ["null", null],
  ["true", true],
  ["false", false],
  ["NaN", NaN],
  ["Infinity", Infinity],
  ["-Infinity", -Infinity],
]);

class Parser {
  private at = 0;

  constructor(private readonly text: string) {}

  value(depth: number): Json {
    if (depth > MAX_DEPTH) throw new SyntaxError("JSON is nested too deep");
    this.match(SPACE);
    const next = this.text[this.at];
    if (next === "{") return this.object(depth);
    if (next === "[") return this.array(depth);
    if (next === '"') return this.string();
    for (const [word, value] of WORDS) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length;
        return value;
      }
    }
    const found = this.match(NUMBER);
    if (!found?.[0]) return this.fail();
    return found[1] || found[2] ? Number(found[0]) : BigInt(found[0]);
  }

  end(): void {
    this.match(SPACE);
    if (this.at !== this.text.length) this.fail();
  }

  private object(depth: number): JsonObject {
    const result: JsonObject = new Map();
    this.list("}", () => {
      this.match(SPACE);
      const key = this.string();
      this.take(":");
      result.set(key, this.value(depth + 1));
    });
    return result;
  }

  private array(depth: number): Json[] {
    const result: Json[] = [];
    this.list("]", () => result.push(this.value(depth + 1)));
    return result;
  }

  private list(close: string, item: () => void): void {
    this.at += 1;
    this.match(SPACE);
    if (this.text[this.at] !== close) {
      do item();
      while (this.comma());
    }
    this.take(close);
  }

  private comma(): boolean {
    this.match(SPACE);
    if (this.text[this.at] !== ",") return false;
    this.at += 1;
    return true;
  }

  private string(): string {
    const found = this.match(STRING);
    return found ? (JSON.parse(found[0]) as string) : this.fail();
  }

  private take(letter: string): void {
    this.match(SPACE);
    if (this.text[this.at] !== letter) this.fail();
    this.at += 1;
  }

  private match(pattern: RegExp): RegExpExecArray | null {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found;
  }

  private fail(): never {
    throw new SyntaxError(`not JSON at character ${this.at}`);
  }
}

/** Parameters and properties of a checkpoint, as users see them. */

import { RESERVED_PREFIX, type StoredProperty } from "./checkpoint-file.js";
import { typeName } from "./elements.js";
import { ArgumentError, quoted, UnknownNameError } from "./errors.js";
import type { TypedArray } from "./runtime.js";
import type { CheckpointState } from "./state.js";
import { byCodePoints } from "./text.js";

/** A tensor of the model. */
export class Parameter {
  /** @internal */
  constructor(
    private readonly _state: CheckpointState,
    /** The name of the parameter in the model. */
    readonly name: string,
  ) {}

  /** Whether the parameter is trainable. */
  get requiresGrad(): boolean {
    return this._state.isTrainable(this.name);
  }

  /** The type of its elements, such as "float32". */
  get type(): string {
    return typeName(this._state.typeOf(this.name).code);
  }

  /** Its shape. */
  get dims(): readonly number[] {
    return this._state.typeOf(this.name).dims;
  }

  /** The present values; a training step creates new arrays. To change them, assign. */
  get data(): TypedArray {
    return this._state.valueOf(this.name);
  }

  set data(values: TypedArray) {
    this._state.setValue(this.name, values);
  }

  /** The accumulated gradient; null if frozen, and before the first training step. */
  get grad(): TypedArray | null {
    return this._state.gradientOf(this.name);
  }

  set grad(values: TypedArray) {
    this._state.setGradient(this.name, values);
  }
}

/** The parameters of a state, by name; iteration yields pairs of name and parameter. */
export class Parameters {
  /** @internal */
  constructor(private readonly _state: CheckpointState) {}

  get(name: string): Parameter {
    if (!this._state.has(name)) throw new UnknownNameError(`Parameter ${name} not found.`);
    this._state.requireValues();
    return new Parameter(this._state, name);
  }

  set(name: string, values: TypedArray): this {
    this.get(name).data = values;
    return this;
  }

  has(name: string): boolean {
    return this._state.has(name);
  }

  get size(): number {
    return this._state.names().length;
  }

  /** The names, sorted. */
  names(): string[] {
    return this._state.names();
  }

  *[Symbol.iterator](): Generator<[string, Parameter]> {
    this._state.requireValues();
    for (const name of this._state.names()) yield [name, new Parameter(this._state, name)];
  }
}

/** The value of a property. */
export type Property = number | bigint | string;

/**
 * The user's own values in a checkpoint: integers, floats and strings.
 *
 * The file rounds floats to 32 bits. An integer beyond 2⁵³ is a bigint.
 */
export class Properties {
  /** @internal */
  constructor(private readonly _values: Map<string, StoredProperty>) {}

  get(name: string): Property | undefined {
    const value = this._values.get(name);
    return value === undefined ? undefined : shown(value);
  }

  /**
   * Set a property. A whole number becomes an integer, unless the property is a float already or
   * `kind` says that it is one.
   */
  set(name: string, value: Property | boolean, kind?: "int" | "float"): this {
    if (typeof name !== "string" || !name) {
      throw new ArgumentError(`the name of a property is a text, not ${quoted(name)}`);
    }
    if (name.startsWith(RESERVED_PREFIX)) {
      throw new ArgumentError(`names that begin with ${quoted(RESERVED_PREFIX)} are reserved`);
    }
    this._values.set(name, this._kept(name, value, kind));
    return this;
  }

  private _kept(name: string, value: Property | boolean, kind?: "int" | "float"): StoredProperty {
    if (typeof value === "boolean") return value ? 1n : 0n;
    if (typeof value === "string") return value;
    if (typeof value === "bigint") {
      return BigInt.asIntN(64, value) === value ? value : Math.fround(Number(value));
    }
    if (typeof value !== "number") {
      throw new ArgumentError(
        `the property ${quoted(name)} is a ${typeof value}; properties are numbers and strings`,
      );
    }
    const isFloat = kind === "float" || (!kind && typeof this._values.get(name) === "number");
    if (isFloat || !Number.isInteger(value) || Math.abs(value) >= 2 ** 63) {
      if (kind === "int") throw new ArgumentError(`${value} is not an integer of 64 bits`);
      return Math.fround(value);
    }
    return BigInt(value);
  }

  has(name: string): boolean {
    return this._values.has(name);
  }

  delete(name: string): boolean {
    return this._values.delete(name);
  }

  get size(): number {
    return this._values.size;
  }

  *[Symbol.iterator](): Generator<[string, Property]> {
    for (const [name, value] of [...this._values].sort(([a], [b]) => byCodePoints(a, b))) {
      yield [name, shown(value)];
    }
  }
}

function shown(value: StoredProperty): Property {
  if (typeof value !== "bigint") return value;
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}

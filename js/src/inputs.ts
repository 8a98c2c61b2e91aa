/** Inputs from the user: matched with those of a graph, and converted if that is exact. */

import { codeOf, countOf, ELEMENT_TYPES, typeName, zerosOf } from "./elements.js";
import { InputError, quoted } from "./errors.js";
import type { Dim, ValueType } from "./model-file.js";
import type { Ort, OrtTensor, TypedArray } from "./runtime.js";
import { isOnCpu, ortType } from "./variables.js";

/** Numbers, in an array of any kind. */
export type Numbers = TypedArray | readonly number[] | readonly bigint[] | readonly boolean[];

/**
 * An input: an onnxruntime tensor; numbers with their shape; or numbers
 * alone, whose shape follows from the graph and their count.
 */
export type Input =
  | OrtTensor
  | { readonly data: Numbers; readonly dims: readonly number[] }
  | Numbers;

/** Inputs by name, or in the order of the graph. */
export type Feeds = Readonly<Record<string, Input>> | readonly Input[];

/** Inputs in the order of the graph. */
export function arranged(inputs: readonly ValueType[], given: Feeds): Input[] {
  if (Array.isArray(given)) {
    if (given.length !== inputs.length) {
      throw new InputError(
        `${given.length} inputs were given, and there are ${inputs.length}. ${expected(inputs)}`,
      );
    }
    return [...(given as readonly Input[])];
  }
  if (typeof given !== "object" || given === null) {
    throw new InputError(`inputs are given by name, or as a list. ${expected(inputs)}`);
  }
  const named = given as Readonly<Record<string, Input>>;
  const names = inputs.map(({ name }) => name);
  const unknown = Object.keys(named).filter((name) => !names.includes(name));
  // Not `named[name]` alone: every object has a "constructor".
  const missing = names.filter((name) => !Object.hasOwn(named, name) || (named[name] ?? null) === null);
  if (unknown.length || missing.length) {
    const parts = [
      ...(unknown.length ? [`unknown: ${unknown.map(quoted).join(", ")}`] : []),
      ...(missing.length ? [`missing: ${missing.map(quoted).join(", ")}`] : []),
    ];
    throw new InputError(`the inputs do not fit: ${parts.join("; ")}. ${expected(inputs)}`);
  }
  return names.map((name) => named[name]!);
}

/** Tensors for the given inputs, checked and converted. */
export function prepared(ort: Ort, inputs: readonly ValueType[], given: Feeds): OrtTensor[] {
  const symbols = new Map<string, number>();
  const values = arranged(inputs, given);
  return inputs.map((value, index) => {
    const tensor = toTensor(ort, value, values[index]!, symbols, inputs);
    checkShape(value, tensor.dims, symbols, inputs);
    return tensor;
  });
}

export function isTensor(value: unknown): value is OrtTensor {
  return typeof value === "object" && value !== null && "type" in value && "dims" in value;
}

function toTensor(
  ort: Ort,
  value: ValueType,
  given: Input,
  symbols: ReadonlyMap<string, number>,
  inputs: readonly ValueType[],
): OrtTensor {
  if (isTensor(given)) {
    if (value.code === 0 || codeOf(given.type) === value.code || !isOnCpu(given)) return given;
    return make(ort, value, given.data as Numbers, given.dims, inputs);
  }
  if (isShaped(given)) return make(ort, value, given.data, given.dims, inputs);
  if (!isNumbers(given)) {
    refuse(value, inputs, `is neither a tensor nor numbers`);
  }
  return make(ort, value, given, shapeOf(value, given.length, symbols, inputs), inputs);
}

export function isShaped(
  given: unknown,
): given is { readonly data: Numbers; readonly dims: readonly number[] } {
  return (
    typeof given === "object" &&
    given !== null &&
    Array.isArray((given as { dims?: unknown }).dims) &&
    isNumbers((given as { data?: unknown }).data)
  );
}

function isNumbers(given: unknown): given is Numbers {
  return Array.isArray(given) || (ArrayBuffer.isView(given) && !(given instanceof DataView));
}

/** The shape of a number of elements, if the graph leaves at most one dimension open. */
function shapeOf(
  value: ValueType,
  count: number,
  symbols: ReadonlyMap<string, number>,
  inputs: readonly ValueType[],
): number[] {
  const dims = (value.dims ?? [null, null]).map((dim) =>
    typeof dim === "string" ? (symbols.get(dim) ?? dim) : dim,
  );
  const open = dims.filter((dim) => typeof dim !== "number");
  const known = countOf(dims.filter((dim) => typeof dim === "number"));
  const rest = count / known;
  if (open.length > 1 || (open.length === 1 && !Number.isInteger(rest))) {
    throw new InputError(
      `the shape of ${count} numbers for the input ${quoted(value.name)} is not clear: give ` +
        `{data, dims}. ${expected(inputs)}`,
    );
  }
  if (open.length === 0 && count !== known) {
    refuse(value, inputs, `takes ${known} numbers, not ${count}`);
  }
  return dims.map((dim) => (typeof dim === "number" ? dim : rest));
}

function make(
  ort: Ort,
  value: ValueType,
  data: Numbers,
  dims: readonly number[],
  inputs: readonly ValueType[],
): OrtTensor {
  if (data.length !== countOf(dims)) {
    refuse(value, inputs, `was given ${data.length} numbers for the shape [${dims.join(", ")}]`);
  }
  return new ort.Tensor(ortType(value.code), converted(value, data, inputs), [...dims]);
}

/** Numbers in the array type of an input, if the conversion is exact. */
export function converted(
  value: ValueType,
  data: Numbers,
  inputs: readonly ValueType[] = [value],
): TypedArray {
  const wanted = ELEMENT_TYPES.get(value.code)?.array;
  if (!wanted) {
    throw new InputError(
      `the input ${quoted(value.name)} takes ${typeName(value.code)}, which is not supported here`,
    );
  }
  const isArray = data instanceof (wanted as unknown as new () => object);
  if (isArray || (data instanceof Uint8ClampedArray && value.code === 2)) return data as TypedArray;
  const result = zerosOf(value.code, [data.length]);
  const isBig = result instanceof BigInt64Array || result instanceof BigUint64Array;
  const isFloat = result instanceof Float32Array || result instanceof Float64Array;
  if (value.code === 10) {
    refuse(value, inputs, `is float16: give a tensor of onnxruntime`);
  }
  for (let i = 0; i < data.length; i++) {
    const item = data[i]!;
    if (isBig) {
      if (typeof item === "number" && !Number.isSafeInteger(item)) lost(value, item, i, inputs);
      result[i] = BigInt(item);
      if (result[i] !== BigInt(item)) lost(value, item, i, inputs);
    } else {
      const number = Number(item);
      result[i] = number;
      // Plain numbers are always doubles, so only integers need to be exact.
      const isSame = isFloat
        ? !Number.isNaN(number) || typeof item === "number"
        : result[i] === number;
      if (!isSame || (value.code === 9 && result[i]! > 1)) lost(value, item, i, inputs);
    }
  }
  return result;
}

function refuse(value: ValueType, inputs: readonly ValueType[], why: string): never {
  throw new InputError(`the input ${quoted(value.name)} ${why}. ${expected(inputs)}`);
}

function lost(value: ValueType, item: unknown, at: number, inputs: readonly ValueType[]): never {
  refuse(value, inputs, `is ${typeName(value.code)}, and ${String(item)} at ${at} is not`);
}

function checkShape(
  value: ValueType,
  dims: readonly number[],
  symbols: Map<string, number>,
  inputs: readonly ValueType[],
): void {
  if (value.dims === null) return;
  const fits =
    dims.length === value.dims.length &&
    value.dims.every((dim, index) => typeof dim !== "number" || dim === dims[index]);
  if (!fits) {
    refuse(value, inputs, `has the shape ${shown(value.dims)}, and was given [${dims.join(", ")}]`);
  }
  value.dims.forEach((dim, index) => {
    if (typeof dim !== "string") return;
    const known = symbols.get(dim);
    if (known === undefined) symbols.set(dim, dims[index]!);
    else if (known !== dims[index]) {
      throw new InputError(
        `the dimension ${quoted(dim)} is ${known} in one input and ${dims[index]} in ` +
          `${quoted(value.name)}: it is the same in all inputs`,
      );
    }
  });
}

function shown(dims: readonly Dim[]): string {
  return `[${dims.map((dim) => dim ?? "?").join(", ")}]`;
}

function expected(inputs: readonly ValueType[]): string {
  const described = inputs.map(
    ({ name, code, dims }) => `${name}: ${typeName(code)} ${dims ? shown(dims) : "of any shape"}`,
  );
  return `The inputs are, in this order: ${described.join("; ")}`;
}

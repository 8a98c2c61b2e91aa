/** Types of tensor elements: ONNX's numbers, widths, and what JavaScript holds them in. */

import type { TypedArray } from "./runtime.js";

interface ArrayType {
  new (buffer: ArrayBufferLike, byteOffset: number, length: number): TypedArray;
  new (length: number): TypedArray;
  readonly BYTES_PER_ELEMENT: number;
}

/** A type of elements. `array` is null where elements have no array of their own. */
export interface ElementType {
  readonly name: string;
  readonly bits: number;
  /** What onnxruntime calls it in JavaScript; null where it has no such tensors. */
  readonly ort: string | null;
  readonly array: ArrayType | null;
}

export const FLOAT = 1;
export const INT64 = 7;
export const STRING = 8;
export const BOOL = 9;
export const UINT32 = 12;

function type(name: string, bits: number, ort: string | null, array: unknown): ElementType {
  return { name, bits, ort, array: array as ArrayType | null };
}

/** ONNX's numbers for element types. Of strings, the width is of no meaning. */
export const ELEMENT_TYPES: ReadonlyMap<number, ElementType> = new Map([
  [FLOAT, type("float32", 32, "float32", Float32Array)],
  [2, type("uint8", 8, "uint8", Uint8Array)],
  [3, type("int8", 8, "int8", Int8Array)],
  [4, type("uint16", 16, "uint16", Uint16Array)],
  [5, type("int16", 16, "int16", Int16Array)],
  [6, type("int32", 32, "int32", Int32Array)],
  [INT64, type("int64", 64, "int64", BigInt64Array)],
  [STRING, type("string", 0, "string", null)],
  [BOOL, type("bool", 8, "bool", Uint8Array)],
  // Bits of 16 are shown as such: not every JavaScript has an array of half floats.
  [10, type("float16", 16, "float16", Uint16Array)],
  [11, type("float64", 64, "float64", Float64Array)],
  [UINT32, type("uint32", 32, "uint32", Uint32Array)],
  [13, type("uint64", 64, "uint64", BigUint64Array)],
  [14, type("complex64", 64, null, null)],
  [15, type("complex128", 128, null, null)],
  [16, type("bfloat16", 16, null, Uint16Array)],
  [17, type("float8e4m3fn", 8, null, Uint8Array)],
  [18, type("float8e4m3fnuz", 8, null, Uint8Array)],
  [19, type("float8e5m2", 8, null, Uint8Array)],
  [20, type("float8e5m2fnuz", 8, null, Uint8Array)],
  [21, type("uint4", 4, null, null)],
  [22, type("int4", 4, null, null)],
  [23, type("float4e2m1", 4, null, null)],
  [24, type("float8e8m0", 8, null, Uint8Array)],
  [25, type("uint2", 2, null, null)],
  [26, type("int2", 2, null, null)],
]);

const CODES = new Map(
  [...ELEMENT_TYPES].flatMap(([code, { ort }]) => (ort === null ? [] : [[ort, code] as const])),
);

/** ONNX's number of what onnxruntime calls a type; 0 if there is none. */
export function codeOf(ortType: string): number {
  return CODES.get(ortType) ?? 0;
}

/** What messages call a type. */
export function typeName(code: number): string {
  return ELEMENT_TYPES.get(code)?.name ?? `type ${code}`;
}

/** How many elements a shape has. */
export function countOf(dims: readonly number[]): number {
  return dims.reduce((product, dim) => product * dim, 1);
}

/** How many bytes the elements take; narrow types are packed without gaps. */
export function dataSize(code: number, dims: readonly number[]): number {
  return Math.ceil((countOf(dims) * (ELEMENT_TYPES.get(code)?.bits ?? 0)) / 8);
}

/** The bytes of an array, which are not copied. */
export function bytesOf(array: ArrayBufferView): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

/** Bytes as an array of their type: a view where they are aligned, else a copy. */
export function arrayOf(code: number, bytes: Uint8Array): TypedArray {
  const make = ELEMENT_TYPES.get(code)?.array ?? (Uint8Array as unknown as ArrayType);
  const width = make.BYTES_PER_ELEMENT;
  const source = bytes.byteOffset % width === 0 ? bytes : bytes.slice();
  return new make(source.buffer, source.byteOffset, source.byteLength / width);
}

/** Zeros of a type. */
export function zerosOf(code: number, dims: readonly number[]): TypedArray {
  const make = ELEMENT_TYPES.get(code)?.array;
  if (!make) throw new Error(`there is no array of ${typeName(code)}`);
  return new make(countOf(dims));
}

/** Whether two shapes are the same. */
export function sameDims(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((dim, index) => dim === b[index]);
}

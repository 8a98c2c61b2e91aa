/** Element types of tensors: ONNX's numbers, widths, and JavaScript arrays. */

import { StateError } from "./errors.js";
import type { TypedArray } from "./runtime.js";

interface ArrayType {
  new (buffer: ArrayBufferLike, byteOffset: number, length: number): TypedArray;
  new (length: number): TypedArray;
  readonly BYTES_PER_ELEMENT: number;
}

/** An element type. `array` is null if JavaScript has no array for it. */
export interface ElementType {
  readonly name: string;
  readonly bits: number;
  /** Its name in onnxruntime; null if that has no such tensors. */
  readonly ort: string | null;
  readonly array: ArrayType | null;
}

export const FLOAT = 1;
export const INT8 = 3;
export const INT64 = 7;
export const STRING = 8;
export const BOOL = 9;
export const UINT32 = 12;

// Name, bits and array of each type; a star marks what onnxruntime has tensors of. Bits of half
// floats are shown as such: not every JavaScript has an array of them.
const TABLE = `float32 32 Float32*,uint8 8 Uint8*,int8 8 Int8*,uint16 16 Uint16*,int16 16 Int16*,int32 32 Int32*,
int64 64 BigInt64*,string 0 *,bool 8 Uint8*,float16 16 Uint16*,float64 64 Float64*,uint32 32 Uint32*,
uint64 64 BigUint64*,complex64 64 ,complex128 128 ,bfloat16 16 Uint16,float8e4m3fn 8 Uint8,
float8e4m3fnuz 8 Uint8,float8e5m2 8 Uint8,float8e5m2fnuz 8 Uint8,uint4 4 ,int4 4 ,float4e2m1 4 ,
float8e8m0 8 Uint8,uint2 2 ,int2 2 `;

/** Element types by ONNX's number, from 1. A string has no width. */
export const ELEMENT_TYPES: ReadonlyMap<number, ElementType> = new Map(
  TABLE.split(",").map((row, index) => {
    const [name, bits, kind] = row.trimStart().split(" ") as [string, string, string];
    const array = (globalThis as Record<string, any>)[`${kind.replace("*", "")}Array`];
    const hasArray = /\w/.test(kind);
    return [
      index + 1,
      {
        name,
        bits: Number(bits),
        ort: kind.endsWith("*") ? name : null,
        array: hasArray ? (array as ArrayType) : null,
      },
    ];
  }),
);

const CODES = new Map(
  [...ELEMENT_TYPES].flatMap(([code, { ort }]) => (ort === null ? [] : [[ort, code] as const])),
);

/** ONNX's number of onnxruntime's name of a type; 0 if there is none. */
export function codeOf(ortType: string): number {
  return CODES.get(ortType) ?? 0;
}

/** The name of a type in messages. */
export function typeName(code: number): string {
  return ELEMENT_TYPES.get(code)?.name ?? `type ${code}`;
}

/** The number of elements of a shape. */
export function countOf(dims: readonly number[]): number {
  return dims.reduce((product, dim) => product * dim, 1);
}

/** The size of the elements in bytes; types narrower than a byte are packed. */
export function dataSize(code: number, dims: readonly number[]): number {
  return Math.ceil((countOf(dims) * (ELEMENT_TYPES.get(code)?.bits ?? 0)) / 8);
}

/** The bytes of an array, which are not copied. */
export function bytesOf(array: ArrayBufferView): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

/** Bytes as an array of their type: a view if they are aligned, else a copy. */
export function arrayOf(code: number, bytes: Uint8Array): TypedArray {
  const make = ELEMENT_TYPES.get(code)?.array ?? (Uint8Array as unknown as ArrayType);
  const width = make.BYTES_PER_ELEMENT;
  const source = bytes.byteOffset % width === 0 ? bytes : bytes.slice();
  return new make(source.buffer, source.byteOffset, source.byteLength / width);
}

/** Zeros of a type. */
export function zerosOf(code: number, dims: readonly number[]): TypedArray {
  const make = ELEMENT_TYPES.get(code)?.array;
  if (!make) throw new StateError(`JavaScript has no array of ${typeName(code)}`);
  try {
    return new make(countOf(dims));
  } catch {
    throw new StateError(`there is no memory for ${typeName(code)} [${dims.join(", ")}]`);
  }
}

/** Whether two shapes are the same. */
export function sameDims(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((dim, index) => dim === b[index]);
}

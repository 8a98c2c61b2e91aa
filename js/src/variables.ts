/** Tensors that training changes, and the lock that serializes calls. */

import { bytesOf, ELEMENT_TYPES, sameDims, typeName } from "./elements.js";
import { StateError } from "./errors.js";
import type { Ort, OrtTensor, TypedArray } from "./runtime.js";
import { elementsOf, type Stored } from "./checkpoint-file.js";

/** A tensor whose value is replaced from run to run. */
export class Variable {
  private _tensor: OrtTensor | null = null;

  constructor(
    readonly code: number,
    readonly dims: readonly number[],
    private _elements: TypedArray | null,
  ) {}

  static of(tensor: Stored): Variable {
    return new Variable(tensor.code, tensor.dims, elementsOf(tensor));
  }

  /** The present elements. */
  get array(): TypedArray {
    if (this._elements === null) {
      throw new StateError("the values are on the GPU: await state.download() before reading them");
    }
    return this._elements;
  }

  /** The tensor to feed to a session. */
  feed(ort: Ort): OrtTensor {
    this._tensor ??= new ort.Tensor(ortType(this.code), this._elements, this.dims);
    return this._tensor;
  }

  /** Take the output of a run as the new value. */
  replace(tensor: OrtTensor): void {
    if (tensor === this._tensor) return;
    const old = this._tensor;
    this._elements = isOnCpu(tensor) ? elementsOfTensor(tensor) : null;
    // A large tensor is updated in chunks: the same elements in another shape.
    const isSame = sameDims(tensor.dims, this.dims);
    this._tensor = isSame ? tensor : this._elements ? null : onGpuInShape(tensor, this.dims);
    if (old !== null && !isOnCpu(old)) old.dispose?.();
  }

  /** Set the elements; they are copied. */
  assign(array: TypedArray): void {
    const old = this._tensor;
    this._tensor = null;
    this._elements = array.slice();
    if (old !== null && !isOnCpu(old)) old.dispose?.();
  }

  /** Fetch the elements from the GPU, if they are there. */
  async download(): Promise<void> {
    if (this._elements !== null || this._tensor === null) return;
    const data = (await this._tensor.getData?.()) as TypedArray;
    this._elements = data;
  }

  stored(): Stored {
    return { code: this.code, dims: this.dims, data: bytesOf(this.array) };
  }

  /** Free GPU memory. */
  release(): void {
    if (this._tensor !== null && !isOnCpu(this._tensor)) this._tensor.dispose?.();
    this._tensor = null;
  }

  fits(code: number, dims: readonly number[]): boolean {
    return code === this.code && sameDims(dims, this.dims);
  }
}

/** The same memory of the GPU in another shape. */
function onGpuInShape(tensor: OrtTensor, dims: readonly number[]): OrtTensor {
  const { gpuBuffer } = tensor as { gpuBuffer?: unknown };
  const make = tensor.constructor as unknown as {
    fromGpuBuffer(buffer: unknown, options: object): OrtTensor;
  };
  return make.fromGpuBuffer(gpuBuffer, {
    dataType: tensor.type,
    dims,
    download: () => tensor.getData?.(),
    dispose: () => tensor.dispose?.(),
  });
}

export function isOnCpu(tensor: OrtTensor): boolean {
  return tensor.location === undefined || tensor.location.startsWith("cpu");
}

/** The elements of a tensor in memory; half floats as their bits. */
export function elementsOfTensor(tensor: OrtTensor): TypedArray {
  const data = tensor.data as TypedArray;
  if (tensor.type !== "float16" || data instanceof Uint16Array) return data;
  return new Uint16Array(data.buffer, data.byteOffset, data.length);
}

/** onnxruntime's name of a type, for tensors to feed. */
export function ortType(code: number): string {
  const type = ELEMENT_TYPES.get(code);
  if (!type?.ort || !type.array) {
    throw new StateError(
      `onnxruntime has no tensors of type ${typeName(code)} in JavaScript: such a parameter cannot ` +
        "change in training here",
    );
  }
  return type.ort;
}

/** Serializes concurrent calls. */
export class Lock {
  private _last: Promise<unknown> = Promise.resolve();

  run<T>(work: () => Promise<T>): Promise<T> {
    const result = this._last.then(work);
    this._last = result.catch(() => undefined);
    return result;
  }
}

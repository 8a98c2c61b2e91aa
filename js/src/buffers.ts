/**
 * All parameters in one buffer, one after the other, as federated learning sends them.
 *
 * The order is: trainable parameters as the training graph's inputs, running statistics in the
 * same order, then frozen parameters as the graph's metadata lists them.
 */

import { elementsOf, stored, type Stored } from "./checkpoint-file.js";
import { countOf, FLOAT, typeName } from "./elements.js";
import { ArgumentError, quoted, StateError } from "./errors.js";
import { isTensor } from "./inputs.js";
import type { ModelFile } from "./model-file.js";
import type { GraphSignature } from "./graph-signature.js";
import type { OrtTensor } from "./runtime.js";
import type { CheckpointState } from "./state.js";
import { byCodePoints } from "./text.js";

/** Reads and writes the parameters of a module as one vector. */
export class Buffers {
  private readonly _trainable: string[];
  private readonly _all: string[];
  private readonly _shapes = new Map<string, readonly number[]>();

  constructor(
    private readonly _state: CheckpointState,
    model: ModelFile,
    signature: GraphSignature,
  ) {
    const inputs = new Map(signature.parameters.map(({ name, dims }) => [name, dims]));
    this._trainable = [...inputs.keys()].filter((name) => _state.isTrainable(name));
    const rest = [...inputs.keys()].filter((name) => !_state.isTrainable(name));
    const noted = (model.notes.frozen ?? []).filter((n) => _state.has(n) && !inputs.has(n));
    const listed = new Set([...inputs.keys(), ...noted]);
    const others = _state
      .names()
      .filter((name) => !listed.has(name))
      .sort(byCodePoints);
    this._all = [...this._trainable, ...rest, ...noted, ...others];
    for (const name of this._all) {
      const dims = inputs.get(name) ?? model.external.get(name)?.dims ?? null;
      if (dims?.every((dim) => typeof dim === "number")) {
        this._shapes.set(name, dims as readonly number[]);
      } else if (!_state.nominal) this._shapes.set(name, _state.typeOf(name).dims);
    }
  }

  private _names(trainableOnly: boolean): string[] {
    return trainableOnly ? this._trainable : this._all;
  }

  private _shape(name: string): readonly number[] {
    const shape = this._shapes.get(name);
    if (!shape) {
      throw new StateError(
        `the shape of ${quoted(name)} is neither in the training graph nor in the nominal ` +
          "checkpoint: use a complete checkpoint",
      );
    }
    return shape;
  }

  /** The number of elements. */
  size(trainableOnly: boolean): number {
    return this._names(trainableOnly).reduce((sum, name) => sum + countOf(this._shape(name)), 0);
  }

  /** A copy of the parameters. */
  read(trainableOnly: boolean): Float32Array {
    const buffer = new Float32Array(this.size(trainableOnly));
    let start = 0;
    for (const name of this._names(trainableOnly)) {
      this._requireFloat(name);
      const values = this._state.valueOf(name) as Float32Array;
      buffer.set(values, start);
      start += values.length;
    }
    return buffer;
  }

  /** Set the parameters from a buffer; if it does not fit, none is changed. */
  write(buffer: Uint8Array | Float32Array | OrtTensor, trainableOnly: boolean): void {
    if (trainableOnly) this._state.requireValues();
    const values = floatsOf(buffer);
    const wanted = this.size(trainableOnly);
    if (values.length !== wanted) {
      throw new ArgumentError(`the buffer has ${values.length} numbers, and ${wanted} are needed`);
    }
    const names = this._names(trainableOnly);
    for (const name of names) this._requireFloat(name);
    const parts = new Map<string, Stored>();
    let start = 0;
    for (const name of names) {
      const shape = this._shape(name);
      const end = start + countOf(shape);
      parts.set(name, stored(FLOAT, shape, values.slice(start, end)));
      start = end;
    }
    if (this._state.nominal) this._state.complete(parts);
    else for (const [name, part] of parts) this._state.setValue(name, elementsOf(part));
  }

  private _requireFloat(name: string): void {
    const { code } = this._state.typeOf(name);
    if (code !== FLOAT) {
      throw new StateError(
        `the parameter ${quoted(name)} is ${typeName(code)}; only float32 goes into a buffer`,
      );
    }
  }
}

function floatsOf(buffer: Uint8Array | Float32Array | OrtTensor): Float32Array {
  if (buffer instanceof Float32Array) return buffer;
  if (buffer instanceof Uint8Array) {
    if (buffer.length % 4) {
      throw new ArgumentError(`${buffer.length} bytes are not numbers of 32 bits`);
    }
    const aligned = buffer.byteOffset % 4 ? buffer.slice() : buffer;
    return new Float32Array(aligned.buffer, aligned.byteOffset, aligned.length / 4);
  }
  if (isTensor(buffer) && buffer.type === "float32") return buffer.data as Float32Array;
  throw new ArgumentError("a buffer is a Uint8Array, a Float32Array or a float32 tensor");
}

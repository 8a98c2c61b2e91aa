/**
 * All parameters in one buffer, one behind the other: how federated learning passes them on.
 *
 * The order is that of the training graph's inputs for what trains, then running statistics in the
 * same order, then frozen parameters as the graph's notes list them.
 */

import { elementsOf, stored, type Stored } from "./checkpoint-file.js";
import { countOf, FLOAT, typeName } from "./elements.js";
import { ArgumentError, quoted, StateError } from "./errors.js";
import { isTensor } from "./inputs.js";
import type { ModelFile } from "./model-file.js";
import type { Roles } from "./roles.js";
import type { OrtTensor } from "./runtime.js";
import type { CheckpointState } from "./state.js";
import { byCodePoints } from "./text.js";

/** Reads and writes the parameters of a module as one vector. */
export class Buffers {
  private readonly trainable: string[];
  private readonly all: string[];
  private readonly shapes = new Map<string, readonly number[]>();

  constructor(
    private readonly state: CheckpointState,
    model: ModelFile,
    roles: Roles,
  ) {
    const inputs = new Map(roles.parameters.map(({ name, dims }) => [name, dims]));
    this.trainable = [...inputs.keys()].filter((name) => state.isTrainable(name));
    const rest = [...inputs.keys()].filter((name) => !state.isTrainable(name));
    const noted = (model.notes.frozen ?? []).filter((n) => state.has(n) && !inputs.has(n));
    const listed = new Set([...inputs.keys(), ...noted]);
    const others = state
      .names()
      .filter((name) => !listed.has(name))
      .sort(byCodePoints);
    this.all = [...this.trainable, ...rest, ...noted, ...others];
    for (const name of this.all) {
      const dims = inputs.get(name) ?? model.external.get(name)?.dims ?? null;
      if (dims?.every((dim) => typeof dim === "number")) {
        this.shapes.set(name, dims as readonly number[]);
      } else if (!state.nominal) this.shapes.set(name, state.typeOf(name).dims);
    }
  }

  private names(trainableOnly: boolean): string[] {
    return trainableOnly ? this.trainable : this.all;
  }

  private shape(name: string): readonly number[] {
    const shape = this.shapes.get(name);
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
    return this.names(trainableOnly).reduce((sum, name) => sum + countOf(this.shape(name)), 0);
  }

  /** A copy of the parameters. */
  read(trainableOnly: boolean): Float32Array {
    const buffer = new Float32Array(this.size(trainableOnly));
    let start = 0;
    for (const name of this.names(trainableOnly)) {
      this.requireFloat(name);
      const values = this.state.valueOf(name) as Float32Array;
      buffer.set(values, start);
      start += values.length;
    }
    return buffer;
  }

  /** Set the parameters from a buffer; nothing is changed if it does not fit. */
  write(buffer: Uint8Array | Float32Array | OrtTensor, trainableOnly: boolean): void {
    if (this.state.nominal && trainableOnly) {
      throw new StateError(
        "Please load the model parameters first. A nominal state needs all of them: pass false " +
          "for trainableOnly",
      );
    }
    const values = floatsOf(buffer);
    const wanted = this.size(trainableOnly);
    if (values.length !== wanted) {
      throw new ArgumentError(`the buffer has ${values.length} numbers, and ${wanted} are needed`);
    }
    const names = this.names(trainableOnly);
    for (const name of names) this.requireFloat(name);
    const parts = new Map<string, Stored>();
    let start = 0;
    for (const name of names) {
      const shape = this.shape(name);
      const end = start + countOf(shape);
      parts.set(name, stored(FLOAT, shape, values.slice(start, end)));
      start = end;
    }
    if (this.state.nominal) this.state.complete(parts);
    else for (const [name, part] of parts) this.state.setValue(name, elementsOf(part));
  }

  private requireFloat(name: string): void {
    const { code } = this.state.typeOf(name);
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

/**
 * Export a trained model for inference.
 *
 * The evaluation graph is reduced to what the outputs need, and the parameters, which are
 * inputs of that graph, become initializers with their current values. Nodes are copied byte for
 * byte, so the exported model computes the same as evaluation.
 */

import type { Stored } from "./checkpoint-file.js";
import { codeOf, typeName } from "./elements.js";
import {
  ArgumentError,
  CheckpointError,
  messageOf,
  ModelError,
  quoted,
  UnknownNameError,
} from "./errors.js";
import { fold } from "./fold.js";
import {
  type Dim,
  GRAPH_INITIALIZER,
  GRAPH_INPUT,
  GRAPH_OUTPUT,
  isTyped,
  MODEL_GRAPH,
  MODEL_METADATA,
  type ModelFile,
  readTensorType,
  readValueType,
} from "./model-file.js";
import {
  findNeeded,
  GRAPH_NODE,
  GRAPH_QUANTIZATION,
  GRAPH_SPARSE,
  GRAPH_VALUE_INFO,
  MODEL_FUNCTION,
  MODEL_OPSET,
  type ModelParts,
  type Needed,
  type Pieces,
  takeApart,
  valueNames,
} from "./model-parts.js";
import { tensorMessage } from "./rewrite.js";
import type { Ort } from "./runtime.js";
import { Chunks, type Message } from "./wire.js";

type Values = ReadonlyMap<string, Stored>;
const MAX_FILE_SIZE = 2 ** 31 - 1;

/**
 * The bytes of an inference model, from an evaluation model and its parameters.
 *
 * @param names the values of the graph to output, in this order.
 * @param properties what is added to the metadata of the model.
 */
export async function exportModel(
  model: ModelFile,
  names: readonly string[],
  values: Values,
  ort: Ort,
  properties: ReadonlyMap<string, string> = new Map(),
  base?: Uint8Array,
): Promise<Uint8Array> {
  const whole = takeApart(model);
  checkNames(names, whole, model.source);
  for (const [key, value] of properties) whole.properties.set(key, value);
  const all = withBase(model, values, base);
  const isParameter = (name: string): boolean => isKnown(model, all, name);
  const parts = await fold(model, whole, names, ort, isParameter, (some, nodes, outputs = some) =>
    new Cut(model, whole, some, all, ort).filled(outputs.map(untyped), nodes),
  );
  return new Cut(model, parts, names, all, ort).file();
}

/** The values of parameters, and of what is in the file of the base. */
function withBase(model: ModelFile, values: Values, base?: Uint8Array): Values {
  const all = new Map(values);
  for (const [name, { code, dims, offset, length }] of model.inBase) {
    const data = base?.subarray(offset, offset + length);
    if (data?.length === length) all.set(name, { code, dims, data });
  }
  return all;
}

class Cut {
  private readonly _needed: Needed;

  constructor(
    private readonly _model: ModelFile,
    private readonly _parts: ModelParts,
    private readonly _names: readonly string[],
    private readonly _values: Values,
    private readonly _ort: Ort,
  ) {
    this._needed = findNeeded(_parts, _names, _model.source);
    const known = valueNames(_parts);
    const lost = [...this._needed.values].filter((name) => !known.has(name)).sort();
    if (lost.length) {
      throw new ModelError(
        `${_model.source}: nothing in the graph makes ${lost.slice(0, 8).map(quoted).join(", ")}, ` +
          "which it reads",
      );
    }
  }

  async file(): Promise<Uint8Array> {
    const file = this.filled(await this._outputTypes());
    if (file.size > MAX_FILE_SIZE) {
      throw new ModelError(
        `the model has ${file.size} bytes and an ONNX file cannot have more than ${MAX_FILE_SIZE}`,
      );
    }
    return file.join();
  }

  /** The model with the values of parameters, with outputs of these types, and with more nodes. */
  filled(outputs: readonly Uint8Array[], nodes: readonly Uint8Array[] = []): Chunks {
    const parameters = [...this._parts.inputs.keys()].filter((name) => this._isParameter(name));
    const replaced = new Set(parameters);
    const inputs = this._kept(this._parts.inputs).filter(([name]) => !replaced.has(name));
    const tensors = parameters.map((name) => this._parameter(name));
    const copied: Uint8Array[] = [];
    for (const [name, data] of this._kept(this._parts.initializers)) {
      if (replaced.has(name)) continue;
      const value = this._values.get(name);
      if (value) {
        const { code, dims } = readTensorType(data);
        tensors.push(checkedTensor(name, value, code, dims));
      } else if (this._isElsewhere(name)) {
        throw new CheckpointError(
          `there is no value for ${quoted(name)}, which ${this._model.source} takes from another file`,
        );
      } else copied.push(data.data);
    }
    for (const [name, value] of this._computed()) tensors.push(tensorMessage(name, value));
    return this._assemble(
      inputs.map(([, { data }]) => data),
      outputs,
      copied,
      tensors,
      nodes,
    );
  }

  private _computed(): [string, Stored][] {
    return [...this._parts.computed].filter(([name]) => this._needed.values.has(name));
  }

  private _assemble(
    inputs: readonly Uint8Array[],
    outputs: readonly Uint8Array[],
    copied: readonly Uint8Array[],
    tensors: readonly Chunks[],
    more: readonly Uint8Array[] = [],
  ): Chunks {
    const { _parts: parts, _needed: needed } = this;
    const givenOut = new Set(this._names);
    const made = new Set(
      needed.nodes.flatMap((node) => node.outputs).filter((name) => !givenOut.has(name)),
    );
    const graph = new Chunks(...parts.graphHead);
    const pieces = (entries: readonly (readonly [string, Message])[]): Uint8Array[] =>
      entries.map(([, { data }]) => data);
    for (const [field, messages] of [
      [GRAPH_NODE, [...needed.nodes.map((node) => node.data), ...more]],
      [GRAPH_INITIALIZER, copied],
      [GRAPH_SPARSE, pieces(this._kept(parts.sparse))],
      [GRAPH_INPUT, inputs],
      [GRAPH_OUTPUT, outputs],
      [GRAPH_VALUE_INFO, pieces([...parts.valueInfos].filter(([name]) => made.has(name)))],
      [GRAPH_QUANTIZATION, pieces(this._kept(parts.quantization))],
    ] as const) {
      for (const message of messages) graph.bytes(field, message);
    }
    for (const tensor of tensors) graph.message(GRAPH_INITIALIZER, tensor);
    const file = new Chunks(...parts.head);
    for (const [key, value] of parts.properties) {
      file.message(MODEL_METADATA, new Chunks().text(1, key).text(2, value));
    }
    for (const [domain, data] of parts.opsets) {
      if (needed.domains.has(domain)) file.bytes(MODEL_OPSET, data);
    }
    file.message(MODEL_GRAPH, graph);
    for (const data of needed.functions) file.bytes(MODEL_FUNCTION, data);
    return file;
  }

  private _kept(pieces: Pieces): [string, Message][] {
    return [...pieces].filter(([name]) => this._needed.values.has(name));
  }

  /** Whether the elements of an initializer are in another file. */
  private _isElsewhere(name: string): boolean {
    return this._model.external.has(name) || this._model.inBase.has(name);
  }

  private _isParameter(name: string): boolean {
    return this._needed.values.has(name) && isKnown(this._model, this._values, name);
  }

  private _parameter(name: string): Chunks {
    const value = this._values.get(name);
    if (!value) {
      throw new CheckpointError(
        `there is no value for the parameter ${quoted(name)} of ${this._model.source}: load the ` +
          "checkpoint that belongs to the model",
      );
    }
    const wanted = readValueType(this._parts.inputs.get(name)!);
    return checkedTensor(name, value, wanted.code, wanted.dims);
  }

  // ---- types of outputs --------------------------------------------------------------------------

  /** The types of the outputs: as the model declares them, else as onnxruntime infers them. */
  private async _outputTypes(): Promise<Uint8Array[]> {
    const unsure = this._names.filter((name) => !this._statedType(name)?.[1]);
    const inferred = await this._infer(unsure);
    return this._names.map((name) => {
      const data = inferred.get(name) ?? this._statedType(name)?.[0];
      if (!data) {
        throw new ModelError(
          `${this._model.source} does not say of which type ${quoted(name)} is, and onnxruntime ` +
            "cannot tell here: export an output of the model instead",
        );
      }
      return data;
    });
  }

  /** The declared type of a value, and whether it includes the shape. */
  private _statedType(name: string): [data: Uint8Array, hasShape: boolean] | null {
    const { outputs, valueInfos, inputs, initializers } = this._parts;
    for (const pieces of [outputs, valueInfos, inputs]) {
      const value = pieces.get(name);
      const { type, shape } = value ? isTyped(value) : { type: false, shape: false };
      if (type) return [value!.data, shape];
    }
    const computed = this._parts.computed.get(name);
    if (computed) return [valueInfo(name, computed.code, computed.dims).join(), true];
    const tensor = initializers.get(name);
    return tensor ? [this._initializerType(name, tensor), true] : null;
  }

  private _initializerType(name: string, tensor: Message): Uint8Array {
    const { code, dims } = readTensorType(tensor);
    return valueInfo(name, code, dims).join();
  }

  /** Let onnxruntime infer types; parameters stay inputs, so no data is needed. */
  private async _infer(names: readonly string[]): Promise<Map<string, Uint8Array>> {
    const found = new Map<string, Uint8Array>();
    if (!names.length) return found;
    const inputs = this._kept(this._parts.inputs).map(([, { data }]) => data);
    const copied: Uint8Array[] = [];
    for (const [name, data] of this._kept(this._parts.initializers)) {
      if (!this._isElsewhere(name)) copied.push(data.data);
      else if (!this._parts.inputs.has(name)) inputs.push(this._initializerType(name, data));
    }
    for (const [name, { code, dims }] of this._computed()) {
      inputs.push(valueInfo(name, code, dims).join());
    }
    const model = this._assemble(inputs, names.map(untyped), copied, []).join();
    let metadata: readonly OutputMetadata[] = [];
    try {
      const session = await this._ort.InferenceSession.create(model, {
        graphOptimizationLevel: "disabled",
        executionProviders: ["cpu"],
        logSeverityLevel: 4,
      });
      metadata = (session as { outputMetadata?: readonly OutputMetadata[] }).outputMetadata ?? [];
      await session.release?.();
    } catch (error) {
      if (names.some((name) => !this._statedType(name))) {
        throw new ModelError(
          `${this._model.source} does not say of which type ${names.map(quoted).join(", ")} is, and ` +
            `onnxruntime cannot tell: ${messageOf(error)}`,
        );
      }
    }
    for (const { name, isTensor, type, shape } of metadata) {
      // An empty shape may be a scalar or unknown, so it is omitted.
      if (isTensor && codeOf(type ?? "")) {
        const dims = shape?.length ? shape.map((dim) => (dim === "" ? null : dim)) : null;
        found.set(name, valueInfo(name, codeOf(type ?? ""), dims).join());
      }
    }
    return found;
  }
}

/** Whether an input is a parameter. */
function isKnown({ notes }: ModelFile, values: Values, name: string): boolean {
  const { trainable = [], statistics = [] } = notes;
  return values.has(name) || trainable.includes(name) || statistics.includes(name);
}

/** An output whose type onnxruntime finds. */
function untyped(name: string): Uint8Array {
  return new Chunks().text(1, name).join();
}

interface OutputMetadata {
  readonly name: string;
  readonly isTensor: boolean;
  readonly type?: string;
  readonly shape?: readonly (number | string)[];
}

function valueInfo(name: string, code: number, dims: readonly Dim[] | null): Chunks {
  const tensor = new Chunks().number(1, code);
  if (dims) {
    const shape = new Chunks();
    for (const dim of dims) {
      const item = new Chunks();
      if (typeof dim === "number") item.number(1, dim);
      else if (dim) item.text(2, dim);
      shape.message(1, item);
    }
    tensor.message(2, shape);
  }
  return new Chunks().text(1, name).message(2, new Chunks().message(1, tensor));
}

/** The value of a parameter, which must have the type of the model. */
function checkedTensor(
  name: string,
  value: Stored,
  code: number,
  dims: readonly Dim[] | null,
): Chunks {
  const fits =
    dims === null ||
    (dims.length === value.dims.length &&
      dims.every((dim, index) => typeof dim !== "number" || dim === value.dims[index]));
  if (value.code !== code || !fits) {
    throw new CheckpointError(
      `the parameter ${quoted(name)} is ${typeName(value.code)} [${value.dims.join(", ")}] and the ` +
        `model wants ${typeName(code)} [${dims?.join(", ") ?? ""}]: the values are of another model`,
    );
  }
  return tensorMessage(name, value);
}

function checkNames(names: readonly string[], parts: ModelParts, source: string): void {
  if (!Array.isArray(names) || !names.every((name) => typeof name === "string")) {
    throw new ArgumentError("the outputs of an exported model are given as a list of names");
  }
  if (!names.length) throw new ArgumentError("name at least one value to give out");
  if (new Set(names).size !== names.length) {
    throw new ArgumentError(`a name is there twice: ${names.map(quoted).join(", ")}`);
  }
  const known = valueNames(parts);
  const unknown = names.filter((name) => !known.has(name));
  if (unknown.length) {
    throw new UnknownNameError(
      `${source} has no value ${unknown.map(quoted).join(", ")} to give out; its outputs are ` +
        [...parts.outputs.keys()].map(quoted).join(", "),
    );
  }
}

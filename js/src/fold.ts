/**
 * What depends on parameters alone, computed once before a model is exported.
 *
 * Evaluation graphs of models that train for integers quantize their weights in each run; the
 * exported model has the integers instead, and no floats. onnxruntime computes them, so that they
 * are those of evaluation.
 */

import type { Stored } from "./checkpoint-file.js";
import { bytesOf, codeOf, ELEMENT_TYPES, INT8 } from "./elements.js";
import { messageOf, ModelError, quoted, RunError } from "./errors.js";
import { type ModelFile, readTensorType } from "./model-file.js";
import { findNeeded, type ModelParts, type Node, valueNames } from "./model-parts.js";
import type { Ort, OrtTensor } from "./runtime.js";
import { Chunks, Message } from "./wire.js";

/** onnxruntime holds what it computes from twice, so large models are not computed all at once. */
const PART = 2 ** 26;
const WIDE = " as bytes";

/** A model of some values of the graph, with more nodes, whose outputs have these names. */
export type Computing = (
  names: readonly string[],
  nodes?: readonly Uint8Array[],
  outputs?: readonly string[],
) => Chunks;

/**
 * The parts of a model, with what the notes of an evaluation graph list in place of the nodes
 * that make it, as far as the outputs need it.
 *
 * @param isParameter whether an input is a parameter.
 */
export async function fold(
  model: ModelFile,
  parts: ModelParts,
  outputs: readonly string[],
  ort: Ort,
  isParameter: (name: string) => boolean,
  computing: Computing,
): Promise<ModelParts> {
  const nodes = listed(model, parts, outputs);
  const names = nodes.flatMap((node) => node.outputs);
  if (!names.length) return parts;
  requireParametersAlone(model, parts, names, isParameter);
  const narrow = narrowTypes(nodes, parts, model.source);
  const computed = new Map<string, Stored>();
  for (const some of inParts(names, computing)) {
    for (const [name, tensor] of await compute(some, narrow, ort, computing)) {
      computed.set(name, tensor);
    }
  }
  const made = new Set(nodes);
  return { ...parts, computed, nodes: parts.nodes.filter((node) => !made.has(node)) };
}

/** The nodes that make what is listed, in the order of the graph. */
function listed({ notes, source }: ModelFile, parts: ModelParts, outputs: readonly string[]): Node[] {
  const names = new Set(notes.folded ?? []);
  if (!names.size) return [];
  const known = valueNames(parts);
  const lost = [...names].filter((name) => !known.has(name)).sort();
  if (lost.length) {
    throw new ModelError(
      `${source} lists ${quoted(lost[0]!)} among what to compute before export ('folded' in its ` +
        "metadata), and has no such value: prepare the model anew",
    );
  }
  const needed = findNeeded(parts, outputs, source).nodes;
  return needed.filter((node) => node.outputs.some((name) => names.has(name)));
}

/** Throws if a value differs from input to input. */
function requireParametersAlone(
  { source }: ModelFile,
  parts: ModelParts,
  names: readonly string[],
  isParameter: (name: string) => boolean,
): void {
  const free = [...parts.inputs.keys()].filter((name) => !isParameter(name)).sort();
  const read = (some: readonly string[]): string | undefined => {
    const { values } = findNeeded(parts, some, source);
    return free.find((name) => values.has(name));
  };
  if (read(names) === undefined) return;
  const name = names.find((one) => read([one]) !== undefined)!;
  throw new ModelError(
    `${source} lists ${quoted(name)} among what depends on parameters alone ('folded' in its ` +
      `metadata), and it depends on the input ${quoted(read([name])!)}: prepare the model anew`,
  );
}

/** What is quantized to less than a byte, of which JavaScript has no tensors everywhere. */
function narrowTypes(nodes: readonly Node[], parts: ModelParts, source: string): Map<string, number> {
  const found = new Map<string, number>();
  for (const { data, outputs } of nodes) {
    const node = Message.of(data, source);
    const zeroPoint = parts.initializers.get(node.texts(1)[2] ?? "");
    if (node.text(4) !== "QuantizeLinear" || !zeroPoint) continue;
    const { code } = readTensorType(zeroPoint);
    if (ELEMENT_TYPES.get(code)?.bits === 4) found.set(outputs[0]!, code);
  }
  return found;
}

/** Values, divided so that each part is computed from a limited number of bytes. */
function* inParts(names: readonly string[], computing: Computing): Generator<readonly string[]> {
  if (computing(names).size <= PART) {
    yield names;
    return;
  }
  let part: string[] = [];
  let size = 0;
  for (const name of names) {
    const own = computing([name]).size;
    if (part.length && size + own > PART) {
      yield part;
      part = [];
      size = 0;
    }
    part.push(name);
    size += own;
  }
  yield part;
}

async function compute(
  names: readonly string[],
  narrow: ReadonlyMap<string, number>,
  ort: Ort,
  computing: Computing,
): Promise<[string, Stored][]> {
  const casts = names.filter((name) => narrow.has(name)).map(castToBytes);
  const fetched = names.map((name) => (narrow.has(name) ? name + WIDE : name));
  const made = await run(ort, computing(names, casts, fetched).join(), fetched);
  return names.map((name, index) => {
    const tensor = made[fetched[index]!]!;
    const code = narrow.get(name);
    return [name, code === undefined ? stored(name, tensor) : packed(code, tensor)];
  });
}

async function run(
  ort: Ort,
  model: Uint8Array,
  names: readonly string[],
): Promise<Record<string, OrtTensor>> {
  try {
    const session = await ort.InferenceSession.create(model, {
      graphOptimizationLevel: "disabled",
      executionProviders: ["cpu"],
      logSeverityLevel: 4,
    });
    const made = (await session.run({}, names)) as Record<string, OrtTensor>;
    await session.release?.();
    return made;
  } catch (error) {
    throw new RunError(`onnxruntime could not quantize the parameters: ${messageOf(error)}`);
  }
}

/** A node that makes bytes of what is narrower. */
function castToBytes(name: string): Uint8Array {
  const to = new Chunks().text(1, "to").number(3, INT8).number(20, 2);
  return new Chunks().text(1, name).text(2, name + WIDE).text(4, "Cast").message(5, to).join();
}

function stored(name: string, tensor: OrtTensor): Stored {
  const code = codeOf(tensor.type);
  if (!code) throw new RunError(`${quoted(name)} is of the type ${tensor.type}, which cannot be exported`);
  return { code, dims: tensor.dims, data: bytesOf(tensor.data as ArrayBufferView).slice() };
}

/** Two elements to a byte, the first in the lower half. */
function packed(code: number, { dims, data }: OrtTensor): Stored {
  const elements = data as Int8Array;
  const bytes = new Uint8Array(Math.ceil(elements.length / 2));
  elements.forEach((element, index) => {
    bytes[index >> 1]! |= (element & 15) << (index % 2 ? 4 : 0);
  });
  return { code, dims, data: bytes };
}

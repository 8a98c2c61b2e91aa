/**
 * The parts of a model, unparsed, and those that a set of outputs needs.
 *
 * Nodes, types and weights remain the bytes of the file. Of a node only the names are read; the
 * bodies of If, Loop and Scan are looked through for values of the graph around them.
 */

import type { Stored } from "./checkpoint-file.js";
import { ModelError, quoted } from "./errors.js";
import {
  GRAPH_INITIALIZER,
  GRAPH_INPUT,
  GRAPH_OUTPUT,
  MODEL_GRAPH,
  MODEL_METADATA,
  type ModelFile,
  NOTES_KEY,
  readEntry,
  readInitializer,
  TENSOR_NAME,
} from "./model-file.js";
import { Message } from "./wire.js";

/** Protobuf itself reads no deeper nesting: a body within a node is three messages down. */
const MAX_DEPTH = 32;
export const MODEL_OPSET = 8;
const MODEL_TRAINING = 20;
export const MODEL_FUNCTION = 25;
/** The fields of a model that are not copied as they are. */
const OTHERS = [MODEL_GRAPH, MODEL_METADATA, MODEL_OPSET, MODEL_FUNCTION, MODEL_TRAINING];
export const GRAPH_NODE = 1;
export const GRAPH_VALUE_INFO = 13;
export const GRAPH_QUANTIZATION = 14;
export const GRAPH_SPARSE = 15;

/** A node. `reads` has what its bodies take from outside too, `calls` what they call. */
export interface Node {
  readonly data: Uint8Array;
  readonly reads: ReadonlySet<string>;
  readonly outputs: readonly string[];
  readonly calls: ReadonlySet<string>;
}

export type Pieces = Map<string, Message>;

/** A model in pieces. Pieces in maps go by the name of the value that they are about. */
export interface ModelParts {
  readonly head: Uint8Array[];
  readonly properties: Map<string, string>;
  readonly opsets: [domain: string, data: Uint8Array][];
  readonly functions: Map<string, Node>;
  readonly graphHead: Uint8Array[];
  readonly nodes: Node[];
  readonly inputs: Pieces;
  readonly outputs: Pieces;
  readonly valueInfos: Pieces;
  readonly initializers: Pieces;
  readonly sparse: Pieces;
  readonly quantization: Pieces;
  /** What was computed before export, in place of nodes. */
  readonly computed: ReadonlyMap<string, Stored>;
}

/** What some outputs depend on. */
export interface Needed {
  readonly nodes: readonly Node[];
  readonly values: ReadonlySet<string>;
  readonly domains: ReadonlySet<string>;
  readonly functions: readonly Uint8Array[];
}

const domainOf = (domain: string): string => (domain === "ai.onnx" ? "" : domain);

/** A callee as one string: domain, name and overload. */
const operator = (message: Message, ...[domain, name, overload]: [number, number, number]): string =>
  [domainOf(message.text(domain)), message.text(name), message.text(overload)].join("\0");

/** Read the pieces of a model. */
export function takeApart({ data, source }: ModelFile): ModelParts {
  const model = Message.of(data, source);
  const [graph] = model.messages(MODEL_GRAPH, "graph") as [Message];
  const named = (number: number, name: (message: Message) => string): Pieces =>
    new Map(graph.messages(number).map((message) => [name(message), message]));
  const byFirst = (message: Message): string => message.text(1);
  const listed = new Set([GRAPH_INITIALIZER, GRAPH_NODE, GRAPH_INPUT, GRAPH_OUTPUT,
    GRAPH_VALUE_INFO, GRAPH_QUANTIZATION, GRAPH_SPARSE]); // prettier-ignore
  return {
    head: model.fields.filter(({ number }) => !OTHERS.includes(number)).map(({ raw }) => raw),
    properties: new Map(
      // What the notes say is for training files only.
      model.messages(MODEL_METADATA, "entry").map(readEntry).filter(([key]) => key !== NOTES_KEY),
    ),
    opsets: model.messages(MODEL_OPSET).map((m) => [domainOf(m.text(1)), m.data]),
    functions: new Map(
      model.messages(MODEL_FUNCTION, "function").map((f) => [operator(f, 10, 1, 13), functionOf(f)]),
    ),
    graphHead: graph.fields.filter(({ number }) => !listed.has(number)).map(({ raw }) => raw),
    nodes: graph.messages(GRAPH_NODE, "node").map((node) => readNode(node)),
    inputs: named(GRAPH_INPUT, byFirst),
    outputs: named(GRAPH_OUTPUT, byFirst),
    valueInfos: named(GRAPH_VALUE_INFO, byFirst),
    initializers: named(GRAPH_INITIALIZER, (tensor) => tensor.text(TENSOR_NAME)),
    sparse: named(GRAPH_SPARSE, sparseName),
    quantization: named(GRAPH_QUANTIZATION, byFirst),
    computed: new Map(),
  };
}

/** The names of all values of the main graph. */
export function valueNames({ nodes, inputs, initializers, sparse, computed }: ModelParts): Set<string> {
  return new Set([
    ...nodes.flatMap(({ outputs }) => outputs),
    ...inputs.keys(),
    ...initializers.keys(),
    ...sparse.keys(),
    ...computed.keys(),
  ]);
}

/** Find what the outputs depend on, in topological order. */
export function findNeeded(parts: ModelParts, outputs: readonly string[], source: string): Needed {
  const producers = new Map<string, Node>();
  for (const node of parts.nodes) {
    for (const name of node.outputs) {
      if (producers.has(name) || parts.inputs.has(name) || parts.initializers.has(name)) {
        throw new ModelError(`${source}: ${quoted(name)} is made in two places`);
      }
      producers.set(name, node);
    }
  }
  const before = (node: Node): Node[] =>
    [...node.reads].flatMap((name) => producers.get(name) ?? []);
  const kept = reached(outputs.flatMap((name) => producers.get(name) ?? []), before);
  const nodes = inOrder(parts.nodes.filter((node) => kept.has(node)), before, source);
  const calls = reached(
    nodes.flatMap((node) => [...node.calls]),
    (call) => [...(parts.functions.get(call)?.calls ?? [])],
  );
  return {
    nodes,
    values: new Set([...outputs, ...nodes.flatMap((node) => [...node.reads, ...node.outputs])]),
    domains: new Set(["", ...[...calls].map((call) => call.split("\0")[0]!)]),
    functions: [...parts.functions].flatMap(([name, { data }]) => (calls.has(name) ? [data] : [])),
  };
}

/** Everything that is reachable. */
function reached<T>(from: readonly T[], next: (item: T) => readonly T[]): Set<T> {
  const found = new Set<T>();
  for (const waiting = [...from]; waiting.length; ) {
    const item = waiting.pop()!;
    if (!found.has(item)) {
      found.add(item);
      waiting.push(...next(item));
    }
  }
  return found;
}

/** Sort nodes topologically, which onnxruntime does not require of models. */
function inOrder(nodes: readonly Node[], before: (node: Node) => Node[], source: string): Node[] {
  const done = new Set<Node>();
  const open = new Set<Node>();
  for (const stack = [...nodes].reverse(); stack.length; ) {
    const node = stack[stack.length - 1]!;
    const missing = done.has(node) ? [] : before(node).filter((other) => !done.has(other));
    if (missing.some((other) => open.has(other) || other === node)) {
      throw new ModelError(`${source}: the graph has a cycle`);
    }
    if (missing.length) {
      open.add(node);
      stack.push(...missing);
    } else {
      open.delete(node);
      done.add(node);
      stack.pop();
    }
  }
  return [...done];
}

function sparseName(sparse: Message): string {
  return sparse.only(1)?.text(TENSOR_NAME) ?? sparse.fail("it has no values");
}

function readNode(node: Message, depth = 0): Node {
  const reads = new Set(node.texts(1));
  const calls = new Set([operator(node, 7, 4, 8)]);
  for (const attribute of node.messages(5, "attribute")) {
    for (const number of [5, 10]) attribute.messages(number).forEach(requireInside);
    for (const number of [6, 11]) {
      for (const body of attribute.messages(number)) readBody(body, depth + 1, reads, calls);
    }
  }
  // An empty name is an absent optional input or output.
  reads.delete("");
  return { data: node.data, reads, outputs: node.texts(2).filter((name) => name), calls };
}

/** Add what a subgraph takes from outer graphs, and what it calls. */
function readBody(body: Message, depth: number, outer: Set<string>, calls: Set<string>): void {
  if (depth > MAX_DEPTH) body.fail(`bodies of nodes are nested more than ${MAX_DEPTH} deep`);
  const nodes = body.messages(GRAPH_NODE).map((node) => readNode(node, depth));
  const tensors = body.messages(GRAPH_INITIALIZER);
  tensors.forEach(requireInside);
  const defined = new Set([
    ...nodes.flatMap(({ outputs }) => outputs),
    ...body.messages(GRAPH_INPUT).map((value) => value.text(1)),
    ...tensors.map((tensor) => tensor.text(TENSOR_NAME)),
    ...body.messages(GRAPH_SPARSE).map(sparseName),
  ]);
  const given = body.messages(GRAPH_OUTPUT).map((value) => value.text(1));
  for (const name of [...nodes.flatMap(({ reads }) => [...reads]), ...given]) {
    if (!defined.has(name)) outer.add(name);
  }
  for (const node of nodes) for (const call of node.calls) calls.add(call);
}

/** Raise an error for external data in parts that are copied: the reference would dangle. */
function requireInside(tensor: Message): void {
  if (readInitializer(tensor).external) {
    tensor.fail("the tensor is in another file; only initializers may be");
  }
}

function functionOf(message: Message): Node {
  const nodes = message.messages(7, "node").map((node) => readNode(node));
  const calls = new Set(nodes.flatMap((node) => [...node.calls]));
  return { data: message.data, reads: new Set(), outputs: [], calls };
}

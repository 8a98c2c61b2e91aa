/**
 * A model taken apart into pieces that stay as they are, and what of it a set of outputs needs.
 *
 * Nodes, types and weights remain the bytes of the file. Of a node only the names are read; the
 * bodies of If, Loop and Scan are looked through for values of the graph around them.
 */

import { ModelError, quoted } from "./errors.js";
import {
  GraphField,
  ModelField,
  type ModelFile,
  NOTES_KEY,
  readEntry,
  readInitializer,
  readName,
  TensorField,
} from "./model-file.js";
import { WireReader } from "./wire.js";

/** Protobuf itself reads no deeper nesting: a body within a node is three messages down. */
const MAX_DEPTH = 32;
const NodeField = { INPUT: 1, OUTPUT: 2, OP_TYPE: 4, ATTRIBUTE: 5, DOMAIN: 7, OVERLOAD: 8 };
const AttributeField = { TENSOR: 5, GRAPH: 6, TENSORS: 10, GRAPHS: 11 };
const FunctionField = { NAME: 1, NODE: 7, DOMAIN: 10, OVERLOAD: 13 };

/** A node. `reads` has what its bodies take from outside too, `calls` what they call. */
export interface Node {
  readonly data: Uint8Array;
  readonly reads: ReadonlySet<string>;
  readonly outputs: readonly string[];
  readonly calls: ReadonlySet<string>;
}

type Pieces = Map<string, Uint8Array>;

/** A model in pieces. Pieces in maps go by the name of the value that they are about. */
export interface ModelParts {
  readonly head: Uint8Array[];
  readonly opsets: [domain: string, data: Uint8Array][];
  readonly functions: Map<
    string,
    { readonly data: Uint8Array; readonly calls: ReadonlySet<string> }
  >;
  readonly graphHead: Uint8Array[];
  readonly nodes: Node[];
  readonly inputs: Pieces;
  readonly outputs: Pieces;
  readonly valueInfos: Pieces;
  readonly initializers: Pieces;
  readonly sparse: Pieces;
  readonly quantization: Pieces;
}

/** What some outputs are computed from. */
export interface Needed {
  readonly nodes: readonly Node[];
  readonly values: ReadonlySet<string>;
  readonly domains: ReadonlySet<string>;
  readonly functions: readonly Uint8Array[];
}

// What a node calls, in one text: domain, name and overload.
const operator = (domain: string, name: string, overload: string): string =>
  [domain === "ai.onnx" ? "" : domain, name, overload].join("\0");

/** Read the pieces of a model. */
export function takeApart(model: ModelFile): ModelParts {
  const reader = new WireReader(model.source);
  const parts: ModelParts = {
    head: [],
    opsets: [],
    functions: new Map(),
    graphHead: [],
    nodes: [],
    inputs: new Map(),
    outputs: new Map(),
    valueInfos: new Map(),
    initializers: new Map(),
    sparse: new Map(),
    quantization: new Map(),
  };
  for (const part of reader.fields(model.data, "model")) {
    if (part.number === ModelField.OPSET_IMPORT) {
      const domain = readName(reader, reader.message(part, "opset_import"), 1, "opset_import");
      parts.opsets.push([domain === "ai.onnx" ? "" : domain, part.data]);
    } else if (part.number === ModelField.FUNCTIONS) {
      readFunction(reader, reader.message(part, "function"), parts);
    } else if (part.number === ModelField.METADATA) {
      // The note is about the files that are trained from, which this will not be.
      if (readEntry(reader, reader.message(part, "metadata_props"))[0] !== NOTES_KEY) {
        parts.head.push(model.data.subarray(part.start, part.end));
      }
    } else if (part.number === ModelField.GRAPH) {
      readGraph(reader, reader.message(part, "graph"), parts);
    } else if (part.number !== ModelField.TRAINING_INFO) {
      parts.head.push(model.data.subarray(part.start, part.end));
    }
  }
  return parts;
}

/** The names of all values of the main graph. */
export function valueNames(parts: ModelParts): Set<string> {
  return new Set([
    ...parts.nodes.flatMap((node) => node.outputs),
    ...parts.inputs.keys(),
    ...parts.initializers.keys(),
    ...parts.sparse.keys(),
  ]);
}

/** Find what the outputs are computed from; nodes keep their order. */
export function findNeeded(parts: ModelParts, outputs: readonly string[], source: string): Needed {
  const producers = new Map<string, number>();
  parts.nodes.forEach((node, index) => {
    for (const name of node.outputs) {
      if (producers.has(name) || parts.inputs.has(name) || parts.initializers.has(name)) {
        throw new ModelError(`${source}: ${quoted(name)} is made in two places`);
      }
      producers.set(name, index);
    }
  });
  const values = new Set(outputs);
  const waiting = [...outputs];
  const kept = new Set<number>();
  while (waiting.length) {
    const index = producers.get(waiting.pop()!);
    if (index === undefined || kept.has(index)) continue;
    kept.add(index);
    for (const name of parts.nodes[index]!.reads) {
      if (!values.has(name)) {
        values.add(name);
        waiting.push(name);
      }
    }
  }
  const nodes = inOrder(parts, kept, producers, source).map((index) => parts.nodes[index]!);
  for (const node of nodes) for (const name of node.outputs) values.add(name);
  const calls = allCalls(parts, nodes);
  return {
    nodes,
    values,
    domains: new Set(["", ...[...calls].map((call) => call.split("\0")[0]!)]),
    functions: [...parts.functions].filter(([name]) => calls.has(name)).map(([, { data }]) => data),
  };
}

/** Put each node behind those that it reads from, which onnxruntime does not insist on. */
function inOrder(
  parts: ModelParts,
  kept: ReadonlySet<number>,
  producers: ReadonlyMap<string, number>,
  source: string,
): number[] {
  const result: number[] = [];
  const marks = new Map<number, "open" | "done">();
  for (const first of [...kept].sort((a, b) => a - b)) {
    const stack = [first];
    while (stack.length) {
      const index = stack[stack.length - 1]!;
      if (marks.get(index) === "done") {
        stack.pop();
        continue;
      }
      marks.set(index, "open");
      const before = [...parts.nodes[index]!.reads]
        .map((name) => producers.get(name))
        .filter((other): other is number => other !== undefined && marks.get(other) !== "done");
      if (before.some((other) => marks.get(other) === "open")) {
        throw new ModelError(`${source}: the graph has a cycle`);
      }
      if (before.length) stack.push(...before.sort((a, b) => b - a));
      else {
        marks.set(index, "done");
        result.push(index);
        stack.pop();
      }
    }
  }
  return result;
}

/** What nodes call, and what the functions among that call in turn. */
function allCalls(parts: ModelParts, nodes: readonly Node[]): Set<string> {
  const calls = new Set<string>();
  const waiting = nodes.flatMap((node) => [...node.calls]);
  while (waiting.length) {
    const call = waiting.pop()!;
    if (calls.has(call)) continue;
    calls.add(call);
    waiting.push(...(parts.functions.get(call)?.calls ?? []));
  }
  return calls;
}

function readGraph(reader: WireReader, graph: Uint8Array, parts: ModelParts): void {
  const lists = new Map<number, [where: string, nameField: number, pieces: Pieces]>([
    [GraphField.INITIALIZER, ["initializer", TensorField.NAME, parts.initializers]],
    [GraphField.INPUT, ["input", 1, parts.inputs]],
    [GraphField.OUTPUT, ["output", 1, parts.outputs]],
    [GraphField.VALUE_INFO, ["value_info", 1, parts.valueInfos]],
    [GraphField.QUANTIZATION, ["quantization_annotation", 1, parts.quantization]],
  ]);
  for (const part of reader.fields(graph, "graph")) {
    const list = lists.get(part.number);
    if (part.number === GraphField.NODE) {
      parts.nodes.push(readNode(reader, reader.message(part, "graph.node"), 0));
    } else if (part.number === GraphField.SPARSE) {
      const message = reader.message(part, "sparse_initializer");
      parts.sparse.set(sparseName(reader, message), message);
    } else if (list) {
      const [where, nameField, pieces] = list;
      const message = reader.message(part, where);
      pieces.set(readName(reader, message, nameField, where), message);
    } else parts.graphHead.push(graph.subarray(part.start, part.end));
  }
}

function sparseName(reader: WireReader, message: Uint8Array): string {
  const values = reader.fields(message, "sparse_initializer").find((part) => part.number === 1);
  if (!values) return reader.fail("it has no values", "sparse_initializer");
  return readName(reader, values.data, TensorField.NAME, "sparse_initializer");
}

function readNode(reader: WireReader, message: Uint8Array, depth: number): Node {
  const reads = new Set<string>();
  const outputs: string[] = [];
  const calls = new Set<string>();
  let [domain, type, overload] = ["", "", ""];
  for (const part of reader.fields(message, "node")) {
    if (part.number === NodeField.INPUT) reads.add(reader.text(part, "node.input"));
    else if (part.number === NodeField.OUTPUT) outputs.push(reader.text(part, "node.output"));
    else if (part.number === NodeField.DOMAIN) domain = reader.text(part, "node");
    else if (part.number === NodeField.OP_TYPE) type = reader.text(part, "node");
    else if (part.number === NodeField.OVERLOAD) overload = reader.text(part, "node");
    else if (part.number === NodeField.ATTRIBUTE) {
      readAttribute(reader, reader.message(part, "node.attribute"), depth, reads, calls);
    }
  }
  calls.add(operator(domain, type, overload));
  // An empty name stands for an optional input or output that is not there.
  reads.delete("");
  return { data: message, reads, outputs: outputs.filter((name) => name), calls };
}

function readAttribute(
  reader: WireReader,
  message: Uint8Array,
  depth: number,
  reads: Set<string>,
  calls: Set<string>,
): void {
  for (const part of reader.fields(message, "attribute")) {
    if (part.number === AttributeField.GRAPH || part.number === AttributeField.GRAPHS) {
      readBody(reader, reader.message(part, "attribute.graph"), depth + 1, reads, calls);
    } else if (part.number === AttributeField.TENSOR || part.number === AttributeField.TENSORS) {
      requireInside(reader, reader.message(part, "attribute.tensor"), "attribute.tensor");
    }
  }
}

/** Add what a body takes from the graphs around it, and what it calls. */
function readBody(
  reader: WireReader,
  graph: Uint8Array,
  depth: number,
  outerReads: Set<string>,
  calls: Set<string>,
): void {
  if (depth > MAX_DEPTH) {
    reader.fail(`bodies of nodes are nested more than ${MAX_DEPTH} deep`, "node");
  }
  const reads = new Set<string>();
  const defined = new Set<string>();
  for (const part of reader.fields(graph, "body")) {
    if (part.number === GraphField.NODE) {
      const node = readNode(reader, reader.message(part, "body.node"), depth);
      for (const name of node.reads) reads.add(name);
      for (const name of node.outputs) defined.add(name);
      for (const call of node.calls) calls.add(call);
    } else if (part.number === GraphField.OUTPUT) {
      reads.add(readName(reader, reader.message(part, "body.output"), 1, "body.output"));
    } else if (part.number === GraphField.INPUT) {
      defined.add(readName(reader, reader.message(part, "body.input"), 1, "body.input"));
    } else if (part.number === GraphField.INITIALIZER) {
      const tensor = reader.message(part, "body.initializer");
      requireInside(reader, tensor, "body.initializer");
      defined.add(readName(reader, tensor, TensorField.NAME, "body.initializer"));
    } else if (part.number === GraphField.SPARSE) {
      defined.add(sparseName(reader, reader.message(part, "body.sparse_initializer")));
    }
  }
  for (const name of reads) if (!defined.has(name)) outerReads.add(name);
}

/** Refuse external data where pieces are copied as they are: the reference would dangle. */
function requireInside(reader: WireReader, tensor: Uint8Array, where: string): void {
  if (readInitializer(reader, tensor).external) {
    reader.fail("the tensor is in another file; only initializers may be", where);
  }
}

function readFunction(reader: WireReader, message: Uint8Array, parts: ModelParts): void {
  const calls = new Set<string>();
  let [domain, name, overload] = ["", "", ""];
  for (const part of reader.fields(message, "function")) {
    if (part.number === FunctionField.DOMAIN) domain = reader.text(part, "function");
    else if (part.number === FunctionField.NAME) name = reader.text(part, "function");
    else if (part.number === FunctionField.OVERLOAD) overload = reader.text(part, "function");
    else if (part.number === FunctionField.NODE) {
      const node = readNode(reader, reader.message(part, "function.node"), 0);
      for (const call of node.calls) calls.add(call);
    }
  }
  parts.functions.set(operator(domain, name, overload), { data: message, calls });
}

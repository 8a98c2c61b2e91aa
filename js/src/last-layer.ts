/** The last layer of a model: a matrix product with what trains, whose result is the scores. */

import { ArgumentError, quoted, StateError } from "./errors.js";
import { type ModelParts, type Node, takeApart } from "./model-parts.js";
import type { TrainingSession } from "./session.js";
import { Message } from "./wire.js";

/** A linear layer: scores = features · weight + bias, or with the weight transposed. */
export interface LastLayer {
  readonly features: string;
  readonly scores: string;
  readonly weight: string;
  readonly bias: string | null;
  /** Whether the weight has a row for each score. */
  readonly isTransposed: boolean;
}

/** What may stand between the scores and an output: none of it changes which class is the first. */
const AFTER = new Set(
  "Cast Flatten Identity LogSoftmax Reshape Sigmoid Softmax Squeeze".split(" "),
);

/** The layer that makes the scores; `weight` names its matrix where there are several. */
export function findLastLayer(session: TrainingSession, weight?: string): LastLayer {
  const pass = session.module.evalPass;
  if (!pass) {
    throw new StateError("there is no evaluation graph to compute features with: give evalModel");
  }
  const all = new Search(session, takeApart(pass.graph.model)).layers();
  const found = weight === undefined ? all : all.filter((layer) => layer.weight === weight);
  if (!found.length) {
    const wanted = weight === undefined ? "" : ` with the weight ${quoted(weight)}`;
    throw new ArgumentError(
      `no linear layer${wanted} that trains makes the scores: the last layer has to be a Gemm or ` +
        "MatMul whose weight and bias train. Either train it, or prepare the model with " +
        "classes=..., which gives it such a layer",
    );
  }
  if (found.length > 1) {
    const names = found.map((layer) => quoted(layer.weight)).join(", ");
    throw new ArgumentError(`several layers make outputs: say which one is meant, layer: ${names}`);
  }
  return found[0]!;
}

/** Looks through an evaluation graph for layers whose result is an output. */
class Search {
  private readonly _outputs: ReadonlySet<string>;
  private readonly _trained: ReadonlyMap<string, readonly number[]>;
  private readonly _madeBy: ReadonlyMap<string, Node>;

  constructor(
    session: TrainingSession,
    private readonly _parts: ModelParts,
  ) {
    const { state } = session;
    this._outputs = new Set(session.outputNames(false).slice(1));
    this._trained = new Map(
      state.trainableNames().map((name) => [name, state.typeOf(name).dims] as const),
    );
    this._madeBy = new Map(
      _parts.nodes.flatMap((node) => node.outputs.map((name) => [name, node] as const)),
    );
  }

  layers(): LastLayer[] {
    return this._parts.nodes
      .map((node) => this._layer(node))
      .filter((layer): layer is LastLayer => layer !== null && this._isOutput(layer.scores));
  }

  private _layer(node: Node): LastLayer | null {
    const kind = kindOf(node);
    if (kind !== "Gemm" && kind !== "MatMul") return null;
    const [features, matrix, third] = inputsOf(node);
    const found = matrix === undefined ? null : this._matrix(matrix);
    if (!features || !found) return null;
    const [weight, isTransposed] = found;
    if (kind === "MatMul") {
      const [scores, bias] = this._added(node.outputs[0]!);
      return { features, scores, weight, bias, isTransposed };
    }
    const given = attributesOf(node);
    const isPlain = !given.get("transA") && ["alpha", "beta"].every((n) => (given.get(n) ?? 1) === 1);
    const bias = third || null;
    if (!isPlain || (bias && !this._trained.has(bias))) return null;
    const isTurned = isTransposed !== Boolean(given.get("transB"));
    return { features, scores: node.outputs[0]!, weight, bias, isTransposed: isTurned };
  }

  /** The parameter that a value is, and whether it is transposed. */
  private _matrix(name: string): [weight: string, isTransposed: boolean] | null {
    if (this._trained.get(name)?.length === 2) return [name, false];
    const node = this._madeBy.get(name);
    const source = node && kindOf(node) === "Transpose" ? inputsOf(node)[0] : undefined;
    return source && this._trained.get(source)?.length === 2 ? [source, true] : null;
  }

  /** The value behind the addition of a bias, and the bias, if one is added. */
  private _added(product: string): [scores: string, bias: string | null] {
    const readers = this._readers(product);
    const [next] = readers;
    if (readers.length === 1 && next && kindOf(next) === "Add") {
      const other = inputsOf(next).find((name) => name !== product) ?? "";
      const dims = this._trained.get(other);
      // A vector, with whatever axes of 1.
      if (dims?.length && Math.max(...dims) === dims.reduce((a, b) => a * b, 1)) {
        return [next.outputs[0]!, other];
      }
    }
    return [product, null];
  }

  /** Whether a value is an output, but for what keeps the order of scores. */
  private _isOutput(value: string): boolean {
    if (this._outputs.has(value)) return true;
    return this._readers(value).some(
      (node) =>
        AFTER.has(kindOf(node)) && inputsOf(node)[0] === value && this._isOutput(node.outputs[0]!),
    );
  }

  private _readers(value: string): Node[] {
    return this._parts.nodes.filter((node) => node.reads.has(value));
  }
}

/** The standard operator of a node; "" for others and those with bodies. */
function kindOf({ calls }: Node): string {
  const [domain, name] = [...calls][0]!.split("\0");
  return calls.size === 1 && domain === "" ? name! : "";
}

const inputsOf = ({ data }: Node): string[] => Message.of(data, "the evaluation graph").texts(1);

/** The attributes of a node that are single numbers. */
function attributesOf({ data }: Node): Map<string, number> {
  const found = new Map<string, number>();
  for (const attribute of Message.of(data, "the evaluation graph").messages(5, "attribute")) {
    const number = attribute.all(2).pop();
    const { buffer, byteOffset, byteLength } = number?.data ?? new Uint8Array(0);
    const isFloat = byteLength === 4;
    found.set(
      attribute.text(1),
      isFloat ? new DataView(buffer, byteOffset).getFloat32(0, true) : attribute.int(3),
    );
  }
  return found;
}

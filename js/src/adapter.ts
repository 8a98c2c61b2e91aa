/**
 * An adapter: what fine-tuning with LoRA changed, two small factors for each layer, by the names of
 * their slots in the model for inference. B holds the scale (alpha / rank) already.
 */

import { readAdapterFile, writeAdapterFile } from "./adapter-file.js";
import type { Stored } from "./checkpoint-file.js";
import { arrayOf, bytesOf, ELEMENT_TYPES, FLOAT, typeName } from "./elements.js";
import { AdapterError, ArgumentError, quoted } from "./errors.js";
import { loadBytes, type Source } from "./load.js";
import {
  GRAPH_INITIALIZER,
  GRAPH_INPUT,
  MODEL_GRAPH,
  type ModelFile,
  readModel,
  TENSOR_NAME,
  type ValueType,
} from "./model-file.js";
import { tensorMessage } from "./rewrite.js";
import type { Ort, OrtTensor, TypedArray } from "./runtime.js";
import { Chunks, Message } from "./wire.js";

/** The two factors of a layer; `scale` is what B was multiplied by, 1 where a file does not tell. */
export interface Pair {
  readonly layer: string;
  readonly a: string;
  readonly b: string;
  readonly rank: number;
  readonly scale: number;
  readonly kind: "linear" | "conv";
}

const FACTOR = /^(.+)\.lora_([AB])(?:\.\w+)?\.weight$/;
const FLOATS = [1, 10, 11, 16];

/**
 * ```js
 * const adapter = await Adapter.read("style.onnx_adapter");
 * const model = openSlots(bytes); // of inference_model.onnx
 * const session = await ort.InferenceSession.create(model);
 * const { logits } = await session.run({ input, ...adapter.feeds(ort, model) });
 * ```
 */
export class Adapter {
  constructor(
    /** The factors, and tensors that were trained whole, by the names of their slots. */
    readonly tensors: ReadonlyMap<string, Stored>,
    readonly pairs: readonly Pair[],
    /** The fingerprint of the model that they were trained on, "" if it is not told. */
    readonly base = "",
    source = "the adapter",
  ) {
    for (const [name, { code }] of tensors) {
      if (!FLOATS.includes(code)) {
        throw new AdapterError(
          `${source}: ${quoted(name)} is ${typeName(code)}: factors are floats. Adapters with ` +
            "quantized factors are not supported",
        );
      }
    }
    for (const pair of pairs) requirePair(pair, tensors, source);
  }

  /** Read an `.onnx_adapter` file: its bytes, a URL or, in Node, a path. */
  static async read(source: Source): Promise<Adapter> {
    const name = typeof source === "string" || source instanceof URL ? String(source) : "the adapter";
    const { tensors, note } = readAdapterFile(await loadBytes(source, name), name);
    const base = note["base"] ?? "";
    if (typeof base !== "string") throw new AdapterError(`${name}: its base is not a text`);
    const pairs = note["lora"] === undefined ? pairsByName(tensors, name) : pairsOf(note["lora"], name);
    return new Adapter(tensors, pairs, base, name);
  }

  /** The bytes of an `.onnx_adapter` file. */
  toBytes(): Uint8Array {
    const lora = this.pairs.map(({ layer, a, b, rank, scale, kind }) => ({
      layer,
      a,
      b,
      rank,
      scale,
      kind,
    }));
    const { tensors, base } = this;
    return writeAdapterFile({ tensors, note: base ? { lora, base } : { lora } });
  }

  /** The largest rank of its layers. */
  get rank(): number {
    return Math.max(0, ...this.pairs.map(({ rank }) => rank));
  }

  /** The elements of a tensor. */
  get(name: string): TypedArray {
    const tensor = this.tensors.get(name);
    if (!tensor) throw new ArgumentError(`the adapter has no tensor ${quoted(name)}`);
    return arrayOf(tensor.code, tensor.data);
  }

  /**
   * The inputs that a session of `openSlots` takes besides those of the model.
   *
   * @param model the model that the session was made of; slots that the adapter has no factors for
   *   get factors of rank 0. Without it only those of the adapter are returned.
   */
  feeds(ort: Ort, model?: Uint8Array): Record<string, OrtTensor> {
    const made: Record<string, OrtTensor> = {};
    const whole = [...this.tensors.keys()].find((name) => !FACTOR.test(name));
    if (whole !== undefined) {
      throw new AdapterError(
        `${quoted(whole)} was trained whole, which no slot takes: put the adapter into the model ` +
          "with applyAdapter",
      );
    }
    const tensor = ({ code, dims, data }: Stored): OrtTensor => {
      const type = ELEMENT_TYPES.get(code)?.ort;
      if (!type) throw new AdapterError(`onnxruntime has no tensors of ${typeName(code)} here`);
      return new ort.Tensor(type, arrayOf(code, data), dims);
    };
    if (model) {
      const { inputs, source } = readModel(model, "the model");
      this._require(inputs, source);
      for (const { name, code, dims } of inputs) {
        if (!FACTOR.test(name) || this.tensors.has(name)) continue;
        const none = (dims ?? []).map((dim) => (typeof dim === "number" ? dim : 0));
        made[name] = tensor({ code, dims: none, data: new Uint8Array(0) });
      }
    }
    for (const [name, value] of this.tensors) made[name] = tensor(value);
    return made;
  }

  /** Raise an error that says what differs, if the adapter does not fit a model with slots. */
  check(model: Uint8Array, source = "the model"): void {
    const file = readModel(model, source);
    const told = file.properties.get("onnxtrain.base");
    if (this.base && told !== undefined && told !== JSON.stringify(this.base)) {
      throw new AdapterError(`the adapter was trained on another base than ${source}`);
    }
    const stored = new Set(file.initializers);
    this._require(
      file.inputs.filter(({ name }) => stored.has(name) || FACTOR.test(name)),
      source,
    );
  }

  /** @internal Raise an error unless the adapter has just the tensors that a session trains. */
  requireAll(slots: readonly ValueType[], base: string, source: string): void {
    if (this.base && base && this.base !== base) {
      throw new AdapterError(`the adapter was trained on another base than ${source}`);
    }
    this._require(slots, source);
    const missing = slots.filter(({ name }) => !this.tensors.has(name));
    if (missing.length) {
      throw new AdapterError(
        `the adapter lacks ${missing.length} of the ${slots.length} tensors that ${source} trains, ` +
          `such as ${quoted(missing[0]!.name)}: prepare the layers that it was trained on`,
      );
    }
  }

  private _require(slots: readonly ValueType[], source: string): void {
    const byName = new Map(slots.map((slot) => [slot.name, slot]));
    for (const [name, { code, dims }] of this.tensors) {
      const slot = byName.get(name);
      if (!slot) {
        const some = [...byName.keys()].filter((key) => FACTOR.test(key)).slice(0, 3);
        throw new AdapterError(
          `${source} has no slot ${quoted(name)}` +
            (some.length ? `; its slots are ${some.map(quoted).join(", ")}` : ", and none at all"),
        );
      }
      const fits =
        !slot.dims ||
        (slot.dims.length === dims.length &&
          slot.dims.every((dim, index) => typeof dim !== "number" || dim === dims[index]));
      if (slot.code !== code || !fits) {
        throw new AdapterError(
          `${quoted(name)} is ${typeName(code)} [${dims.join(", ")}] in the adapter and ` +
            `${typeName(slot.code)} [${slot.dims?.join(", ") ?? ""}] in ${source}`,
        );
      }
    }
  }

  /**
   * One adapter that does what several do together, each times its weight: the ranks of a layer
   * add up. All are float32.
   */
  static stack(adapters: readonly Adapter[], weights?: readonly number[]): Adapter {
    const factors = weights ?? adapters.map(() => 1);
    if (!adapters.length || factors.length !== adapters.length || !factors.every(Number.isFinite)) {
      throw new ArgumentError("stack takes adapters, and a finite weight for each");
    }
    const bases = new Set(adapters.map(({ base }) => base).filter(Boolean));
    if (bases.size > 1) throw new AdapterError("the adapters were trained on different bases");
    const tensors = new Map<string, Stored>();
    const pairs = new Map<string, Pair>();
    adapters.forEach((adapter, index) => {
      if (adapter.tensors.size > 2 * adapter.pairs.length) {
        throw new AdapterError("adapters that replace whole tensors do not stack");
      }
      for (const pair of adapter.pairs) {
        const [first, second] = rankAxes(pair.kind);
        const a = joined(tensors.get(pair.a), adapter.tensors.get(pair.a)!, first, 1, pair.a);
        const b = joined(
          tensors.get(pair.b),
          adapter.tensors.get(pair.b)!,
          second,
          factors[index]!,
          pair.b,
        );
        tensors.set(pair.a, a).set(pair.b, b);
        pairs.set(pair.layer, { ...pair, rank: a.dims[first]!, scale: 1 });
      }
    });
    return new Adapter(tensors, [...pairs.values()], [...bases][0] ?? "");
  }
}

// ---- models --------------------------------------------------------------------------------------

/**
 * The model with an adapter in its slots: what it computes needs no further inputs.
 *
 * onnxruntime in JavaScript has no way to feed an input that has a default, so the defaults of rank
 * 0 are replaced.
 */
export function applyAdapter(model: Uint8Array, adapter: Adapter): Uint8Array {
  adapter.check(model);
  const file = readModel(model, "the model");
  const isFilled = isSlotOf(file, (name) => adapter.tensors.has(name));
  return changed(file, (number, name) => {
    if (number === GRAPH_INPUT) return isFilled(name) ? "gone" : null;
    const value = adapter.tensors.get(name);
    return value ? tensorMessage(name, value) : null;
  });
}

/**
 * The model with slots that are ordinary inputs: each run gives them, with `Adapter.feeds`, so that
 * one session serves any adapters.
 */
export function openSlots(model: Uint8Array): Uint8Array {
  const file = readModel(model, "the model");
  const isSlot = isSlotOf(file, () => false);
  return changed(file, (number, name) =>
    number === GRAPH_INITIALIZER && isSlot(name) ? "gone" : null,
  );
}

/** Whether a name is that of an input with a default that is a factor, or among others. */
function isSlotOf(file: ModelFile, others: (name: string) => boolean): (name: string) => boolean {
  const inputs = new Set(file.inputs.map(({ name }) => name));
  const stored = new Set(file.initializers);
  return (name) => inputs.has(name) && stored.has(name) && (FACTOR.test(name) || others(name));
}

/** The model with inputs and initializers left out or replaced; the rest stays byte for byte. */
function changed(
  file: ModelFile,
  change: (number: number, name: string) => Chunks | "gone" | null,
): Uint8Array {
  const places: Record<number, number> = { [GRAPH_INPUT]: 1, [GRAPH_INITIALIZER]: TENSOR_NAME };
  const whole = Message.of(file.data, file.source);
  const result = new Chunks();
  for (const field of whole.fields) {
    if (field.number !== MODEL_GRAPH) {
      result.add(field.raw);
      continue;
    }
    const inner = whole.inner(field, "graph");
    const graph = new Chunks();
    for (const part of inner.fields) {
      const place = places[part.number];
      const other = place ? change(part.number, inner.inner(part, "item").text(place)) : null;
      if (other === null) graph.add(part.raw);
      else if (other !== "gone") graph.message(part.number, other);
    }
    result.message(MODEL_GRAPH, graph);
  }
  return result.join();
}

// ---- pairs ---------------------------------------------------------------------------------------

const rankAxes = (kind: string): [a: number, b: number] => (kind === "conv" ? [0, 1] : [1, 0]);

/** @internal The pairs that a record of anyone names. */
export function pairsOf(found: unknown, source: string): Pair[] {
  const isText = (value: unknown): boolean => typeof value === "string" && value !== "";
  const isRight = (item: unknown): item is Pair => {
    const { layer, a, b, rank, scale, kind } = (item ?? {}) as Record<string, unknown>;
    return (
      [layer, a, b].every(isText) &&
      Number.isInteger(rank) &&
      (rank as number) > 0 &&
      Number.isFinite(scale) &&
      (scale as number) > 0 &&
      (kind === "linear" || kind === "conv")
    );
  };
  if (!Array.isArray(found) || !found.every(isRight)) {
    throw new AdapterError(`${source}: what it says about its factors is not valid`);
  }
  return found.map(({ layer, a, b, rank, scale, kind }) => ({ layer, a, b, rank, scale, kind }));
}

/** The pairs by the names that PEFT and Olive give them; other tensors are whole ones. */
function pairsByName(tensors: ReadonlyMap<string, Stored>, source: string): Pair[] {
  const factors = new Map<string, Map<string, string>>();
  for (const name of tensors.keys()) {
    const [, layer, factor] = FACTOR.exec(name) ?? [];
    if (name.includes(".quant.") || name.includes("magnitude") || (!layer && name.includes("lora_"))) {
      throw new AdapterError(
        `${source}: ${quoted(name)} is not a factor of plain LoRA, which ends in .lora_A.weight or ` +
          ".lora_B.weight; DoRA and quantized factors are not supported",
      );
    }
    if (layer) factors.set(layer, (factors.get(layer) ?? new Map()).set(factor!, name));
  }
  return [...factors].map(([layer, names]) => {
    const [a, b] = [names.get("A"), names.get("B")];
    if (!a || !b) throw new AdapterError(`${source}: ${quoted(layer)} has one factor only`);
    const { dims } = tensors.get(a)!;
    const kind = dims.length === 2 ? "linear" : "conv";
    return { layer, a, b, rank: dims[rankAxes(kind)[0]] ?? 0, scale: 1, kind };
  });
}

function requirePair(pair: Pair, tensors: ReadonlyMap<string, Stored>, source: string): void {
  const [first, second] = rankAxes(pair.kind);
  const [a, b] = [tensors.get(pair.a)?.dims, tensors.get(pair.b)?.dims];
  const isRight =
    a?.length === b?.length &&
    (pair.kind === "linear" ? a?.length === 2 : (a?.length ?? 0) > 2) &&
    a?.[first] === pair.rank &&
    b?.[second] === pair.rank;
  if (!isRight) {
    throw new AdapterError(
      `${source}: the factors of ${quoted(pair.layer)}, of shapes [${a?.join(", ") ?? ""}] and ` +
        `[${b?.join(", ") ?? ""}], do not multiply at rank ${pair.rank}`,
    );
  }
}

/** Two factors side by side along an axis, the second times a number. */
function joined(
  before: Stored | undefined,
  next: Stored,
  axis: number,
  factor: number,
  name: string,
): Stored {
  const none = next.dims.map((dim, index) => (index === axis ? 0 : dim));
  const old = before ?? { code: next.code, dims: none, data: new Uint8Array(0) };
  const fits =
    old.dims.length === next.dims.length &&
    old.dims.every((dim, index) => index === axis || dim === next.dims[index]);
  if (old.code !== FLOAT || next.code !== FLOAT || !fits) {
    throw new AdapterError(`${quoted(name)} is not float32 of one shape in all adapters`);
  }
  const dims = next.dims.map((dim, index) => (index === axis ? dim + old.dims[index]! : dim));
  const rows = dims.slice(0, axis).reduce((a, b) => a * b, 1);
  const made = new Float32Array(dims.reduce((a, b) => a * b, 1));
  const [left, right] = [arrayOf(FLOAT, old.data), arrayOf(FLOAT, next.data)] as Float32Array[];
  const [width, more] = [left!.length / rows || 0, right!.length / rows || 0];
  for (let row = 0; row < rows; row++) {
    made.set(left!.subarray(row * width, (row + 1) * width), row * (width + more));
    const start = row * (width + more) + width;
    for (let i = 0; i < more; i++) made[start + i] = right![row * more + i]! * factor;
  }
  return { code: FLOAT, dims, data: bytesOf(made) };
}

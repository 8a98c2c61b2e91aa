/** The adapter that a session trains: taken out of it, or put into it. */

import { Adapter, type Pair, pairsOf } from "./adapter.js";
import type { Stored } from "./checkpoint-file.js";
import { arrayOf, bytesOf, FLOAT, typeName } from "./elements.js";
import { AdapterError, quoted, StateError } from "./errors.js";
import type { TrainingSession } from "./session.js";

/** The factors as they are now, with the scale in B, and what else trains. */
export function adapterOf(session: TrainingSession, allowNonfinite: boolean): Promise<Adapter> {
  const { state } = session;
  return state.lock.run(async () => {
    const [pairs, base] = trained(session);
    const names = state.trainableNames();
    for (const name of names) await state.variableIfThere(name)?.download();
    if (!allowNonfinite) state.requireFinite("there is no adapter");
    const scales = new Map(pairs.map(({ b, scale }) => [b, scale]));
    const tensors = new Map<string, Stored>();
    for (const name of names) tensors.set(name, scaled(name, state.held(name), scales.get(name) ?? 1));
    return new Adapter(tensors, pairs, base);
  });
}

/** Go on from an adapter of the same base, layers and rank; moments start from zero. */
export function loadAdapter(session: TrainingSession, adapter: Adapter): Promise<void> {
  const { state } = session;
  return state.lock.run(async () => {
    const [pairs, base] = trained(session);
    const slots = state.trainableNames().map((name) => ({ name, ...state.typeOf(name) }));
    adapter.requireAll(slots, base, "the session");
    const scales = new Map(pairs.map(({ b, scale }) => [b, scale]));
    const values = [...adapter.tensors].map(([name, tensor]) => {
      const { code, data } = scaled(name, tensor, scales.get(name) ?? 1, true);
      return [name, arrayOf(code, data)] as const;
    });
    for (const [name, value] of values) state.setValue(name, value);
    session.module.lazyResetGrad();
    session.optimizer?.resetNow();
  });
}

/** The pairs of factors that train, and the fingerprint of the base. */
function trained(session: TrainingSession): [pairs: Pair[], base: string] {
  const [pairs, base] = described(session);
  session.state.requireValues();
  const names = session.state.trainableNames();
  if (!pairs.length || !pairs.every(({ a, b }) => names.includes(a) && names.includes(b))) {
    throw new StateError(
      "the session trains no low-rank factors, so there is no adapter: prepare the model with " +
        "train='lora'",
    );
  }
  return [pairs, base];
}

/** The pairs of factors, and the fingerprint of the base, as graph or checkpoint tell them. */
function described(session: TrainingSession): [pairs: Pair[], base: string] {
  const properties = session.module.evalPass?.graph.model.properties;
  const told = (key: string): unknown => {
    const own = session.state.properties.get(key);
    const text = typeof own === "string" ? own : properties?.get(key);
    try {
      return text === undefined ? undefined : JSON.parse(text);
    } catch {
      throw new AdapterError(`the property ${quoted(key)} is not valid JSON`);
    }
  };
  const [lora, base] = [told("onnxtrain.lora"), told("onnxtrain.base")];
  return [
    lora === undefined ? [] : pairsOf(lora, "the evaluation graph"),
    typeof base === "string" ? base : "",
  ];
}

/** A tensor times a scale, or divided by it, in float32 as Python does it. */
function scaled(name: string, tensor: Stored, scale: number, divide = false): Stored {
  const { code, dims, data } = tensor;
  if (scale === 1) return { code, dims, data: data.slice() };
  if (code !== FLOAT) throw new AdapterError(`${quoted(name)} is ${typeName(code)}, not float32`);
  const by = Math.fround(scale);
  const values = Float32Array.from(arrayOf(code, data) as Float32Array, (value) =>
    divide ? value / by : value * by,
  );
  return { code, dims, data: bytesOf(values) };
}

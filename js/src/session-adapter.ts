/** The adapter that a session trains. */

import { Adapter, type Pair, pairsOf } from "./adapter.js";
import type { Stored } from "./checkpoint-file.js";
import { arrayOf, bytesOf, FLOAT, typeName } from "./elements.js";
import { AdapterError, quoted, StateError } from "./errors.js";
import type { TrainingSession } from "./session.js";

/** The factors as they are now, with the scale in B, and what else trains. */
export function adapterOf(session: TrainingSession, allowNonfinite: boolean): Promise<Adapter> {
  const { state } = session;
  return state.lock.run(async () => {
    const [pairs, base] = described(session);
    state.requireValues();
    const names = state.trainableNames();
    if (!pairs.length || !pairs.every(({ a, b }) => names.includes(a) && names.includes(b))) {
      throw new StateError(
        "the session trains no low-rank factors, so there is no adapter: prepare the model with " +
          "train='lora'",
      );
    }
    for (const name of names) await state.variableIfThere(name)?.download();
    if (!allowNonfinite) state.requireFinite("there is no adapter");
    const scales = new Map(pairs.map(({ b, scale }) => [b, scale]));
    const tensors = new Map<string, Stored>();
    for (const name of names) tensors.set(name, scaled(name, state.held(name), scales.get(name) ?? 1));
    return new Adapter(tensors, pairs, base);
  });
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

function scaled(name: string, { code, dims, data }: Stored, scale: number): Stored {
  if (scale === 1) return { code, dims, data: data.slice() };
  if (code !== FLOAT) throw new AdapterError(`${quoted(name)} is ${typeName(code)}, not float32`);
  const values = Float32Array.from(arrayOf(code, data) as Float32Array, (value) => value * scale);
  return { code, dims, data: bytesOf(values) };
}

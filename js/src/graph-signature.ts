/** The signature of a graph: its inputs and outputs by purpose. */

import { sameDims, typeName } from "./elements.js";
import { CheckpointError, ModelError, quoted } from "./errors.js";
import type { Dim, ModelFile, ValueType } from "./model-file.js";
import type { CheckpointState } from "./state.js";

export const LAZY_RESET = "lazy_reset_grad";
export const RANDOM_SEED = "random_seed";
export const LEARNING_RATE = "learning_rate";
export const STEP = "step";
export const BUFFER = "_grad.accumulation.buffer";
export const ACCUMULATED = "_grad.accumulation.out";
export const UPDATED = ".updated";
export const UPDATED_FLAG = "updated_flag";
export const FINITE_CHECK = "finite_check";
export const RANGE_MOMENTUM = "quantization.momentum";
const MOMENTUM = /^(.*)\.momentum(\d+)$/s;

/**
 * The inputs and outputs of a graph by purpose.
 *
 * `parameters` are inputs that are in the checkpoint; `trained` are names whose gradient the graph
 * accumulates; `updated` are names that it returns a new value for. `check` are the outputs that
 * tell whether a step was finite; graphs of earlier versions have none.
 */
export interface GraphSignature {
  readonly inputs: readonly ValueType[];
  readonly outputs: readonly ValueType[];
  readonly parameters: readonly ValueType[];
  readonly trained: readonly string[];
  readonly updated: readonly string[];
  readonly hasSeed: boolean;
  readonly check: readonly string[];
}

/** The signature of a training or evaluation graph, or of a `fused` step. */
export function signatureOf(model: ModelFile, state: CheckpointState, fused = false): GraphSignature {
  const names = new Set(model.inputs.map((value) => value.name));
  const trained = model.inputs
    .filter(({ name }) => name.endsWith(BUFFER))
    .map(({ name }) => name.slice(0, -BUFFER.length))
    .filter((name) => names.has(name));
  const parameters = model.inputs.filter(({ name }) => state.has(name));
  const known = new Set([LAZY_RESET, RANDOM_SEED, ...trained.map((name) => name + BUFFER)]);
  const held = new Set(parameters.map(({ name }) => name));
  if (fused) {
    known.add(STEP).add(LEARNING_RATE);
    for (const { name } of model.inputs) {
      const parameter = MOMENTUM.exec(name)?.[1];
      if (parameter !== undefined && held.has(parameter)) known.add(name);
    }
  }
  for (const name of held) known.add(name);
  const updated = model.outputs
    .filter(({ name }) => name.endsWith(UPDATED))
    .map(({ name }) => name.slice(0, -UPDATED.length))
    .filter((name) => known.has(name));
  const outputs = new Set(model.outputs.map(({ name }) => name));
  const check = [UPDATED_FLAG, FINITE_CHECK].filter(
    (_, __, both) => both.every((name) => outputs.has(name)),
  );
  const results = new Set([
    ...check,
    ...updated.map((name) => name + UPDATED),
    ...trained.map((name) => name + ACCUMULATED),
  ]);
  return {
    inputs: model.inputs.filter(({ name }) => !known.has(name)),
    outputs: model.outputs.filter(({ name }) => !results.has(name)),
    parameters,
    trained,
    updated,
    hasSeed: names.has(RANDOM_SEED),
    check,
  };
}

/** The optimizer states of a parameter, in order. */
export function momentumsOf(model: ModelFile, parameter: string): ValueType[] {
  return model.inputs
    .map((value) => ({ value, found: MOMENTUM.exec(value.name) }))
    .filter(({ found }) => found?.[1] === parameter)
    .sort((a, b) => Number(a.found![2]) - Number(b.found![2]))
    .map(({ value }) => value);
}

const APART = "they do not belong together";

/** Raise an error if graph and checkpoint do not belong together. */
export function checkBelongs(model: ModelFile, state: CheckpointState, signature: GraphSignature): void {
  const { trainable = [], frozen = [], statistics = [] } = model.notes;
  for (const name of [...trainable, ...frozen, ...statistics, ...model.external.keys()]) {
    if (!state.has(name)) {
      throw new CheckpointError(
        `${model.source} has the parameter ${quoted(name)}, and the checkpoint does not: ${APART}`,
      );
    }
  }
  for (const name of [...model.initializers, ...frozen]) {
    if (state.isTrainable(name)) {
      throw new CheckpointError(
        `${quoted(name)} is a constant in ${model.source}, and the checkpoint has it as a parameter ` +
          `that trains: ${APART}`,
      );
    }
  }
  const userInputs = new Set(signature.inputs.map(({ name }) => name));
  checkTrainable(
    model,
    state,
    signature.trained.filter((name) => !userInputs.has(name)),
  );
  for (const value of signature.parameters) checkType(model, state, value);
  for (const value of model.external.values()) checkType(model, state, value);
}

/** Raise an error if the training graph does not train what the checkpoint trains. */
export function checkTrains(model: ModelFile, state: CheckpointState, signature: GraphSignature): void {
  const trained = new Set(signature.trained);
  for (const name of state.trainableNames()) {
    if (!trained.has(name)) {
      throw new CheckpointError(
        `the checkpoint has ${quoted(name)} as a parameter that trains, and ${model.source} has no ` +
          `gradient of it: ${APART}`,
      );
    }
  }
}

/** Raise an error if the graph does not update exactly the trainable parameters. */
export function checkUpdates(model: ModelFile, state: CheckpointState): void {
  const inputs = new Map(model.inputs.map((value) => [value.name, value]));
  const outputs = new Set(model.outputs.map(({ name }) => name));
  for (const number of [LEARNING_RATE, STEP]) {
    if (!inputs.has(number)) {
      throw new ModelError(
        `${model.source} is not an optimizer graph: it has no input ${quoted(number)}`,
      );
    }
  }
  for (const name of state.trainableNames()) {
    const input = inputs.get(name);
    if (!input || !outputs.has(name + UPDATED)) {
      throw new CheckpointError(
        `${model.source} does not update ${quoted(name)}, which the checkpoint has as a parameter ` +
          `that trains: ${APART}`,
      );
    }
    checkType(model, state, input);
  }
  const moments = [...inputs.keys()].map((name) => MOMENTUM.exec(name)?.[1] ?? "");
  checkTrainable(
    model,
    state,
    moments.filter((name) => state.has(name)),
  );
}

/** Raise an error if the graph trains what the checkpoint does not. */
function checkTrainable(model: ModelFile, state: CheckpointState, names: readonly string[]): void {
  for (const name of [...names, ...(model.notes.trainable ?? [])]) {
    if (!state.isTrainable(name)) {
      const held = state.has(name) ? "has as frozen" : "does not have";
      throw new CheckpointError(
        `${model.source} trains ${quoted(name)}, which the checkpoint ${held}: ${APART}`,
      );
    }
  }
}

function checkType(
  model: ModelFile,
  state: CheckpointState,
  value: { readonly name: string; readonly code: number; readonly dims: readonly Dim[] | null },
): void {
  const { code, dims } = state.typeOf(value.name);
  const wanted = value.dims;
  const fits =
    state.nominal ||
    wanted === null ||
    sameDims(
      wanted.map((dim) => Number(dim ?? NaN)),
      dims,
    );
  if (code !== value.code || !fits) {
    throw new CheckpointError(
      `the parameter ${quoted(value.name)} is ${typeName(value.code)} ` +
        `[${(wanted ?? []).join(", ")}] in ${model.source} and ${typeName(code)} ` +
        `[${dims.join(", ")}] in the checkpoint: ${APART}`,
    );
  }
}

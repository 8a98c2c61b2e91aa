/** CheckpointState: everything that training changes and needs to resume. */

import {
  type CheckpointContent,
  elementsOf,
  type OptimizerGroup,
  readCheckpoint,
  RESERVED_PREFIX,
  type Stored,
  type StoredProperty,
  writeCheckpoint,
} from "./checkpoint-file.js";
import { bytesOf, ELEMENT_TYPES, typeName, zerosOf } from "./elements.js";
import { ArgumentError, CheckpointError, NonFiniteError, quoted, StateError } from "./errors.js";
import { GENERATION, type Generation, readGeneration } from "./generation.js";
import { loadBytes, type Source } from "./load.js";
import { fromJson, type Json, type JsonObject, toJson } from "./json.js";
import { Parameters, Properties } from "./parameters.js";
import { RandomState } from "./random.js";
import type { TypedArray } from "./runtime.js";
import { byCodePoints } from "./text.js";
import { Lock, Variable } from "./variables.js";

export const GROUP = "group0";
const TRAINING = "training"; // the reserved property for what the format has no field for

/** The part of an optimizer that a state needs. */
export interface SavedOptimizer {
  readonly lastingRate: number;
  group(): OptimizerGroup;
  schedulerState(): JsonObject | null;
  download(): Promise<void>;
}

/** The values of constants in graphs; `version` counts changes. */
export interface Frozen {
  readonly values: Map<string, Stored>;
  version: number;
  /** The file that the values are views of, if any. */
  readonly file: Uint8Array | null;
}

/**
 * The state of training: parameters, properties, optimizer state.
 *
 * One state serves one module and one optimizer, which change it.
 */
export class CheckpointState {
  /** @internal */ readonly lock = new Lock();
  /** @internal */ readonly frozen: Frozen;
  /** @internal */ readonly groups: Map<string, OptimizerGroup>;
  /** @internal */ optimizer: SavedOptimizer | null = null;
  /** @internal */ readonly random: RandomState;
  /** @internal Batches whose loss or gradients were not finite. */ skippedBatches = 0;
  /** @internal The gradients because of which the last one was skipped. */
  notFinite: readonly string[] = [];
  /** @internal Whether all batches since the last reset were skipped. */ hasStaleGradients = false;
  /** @internal */ readonly privateRecord: JsonObject;
  /** @internal */ savedLearningRate: number | null;
  /** @internal */ savedScheduler: JsonObject | null;
  private _isNominal: boolean;
  private readonly _userProperties = new Map<string, StoredProperty>();
  private readonly _reserved = new Map<string, StoredProperty>();
  private readonly _trainable: Map<string, Stored>;
  /** @internal */ boundTo: Generation | null;
  private readonly _variables = new Map<string, Variable>();
  private readonly _gradients = new Map<string, Variable>();

  /** @internal Use `CheckpointState.load`. */
  constructor(content: CheckpointContent, file: Uint8Array | null = null) {
    for (const [name, value] of content.properties) {
      if (name.startsWith(RESERVED_PREFIX)) {
        this._reserved.set(name.slice(RESERVED_PREFIX.length), value);
      } else this._userProperties.set(name, value);
    }
    const saved = trainingOf(this._reserved.get(TRAINING));
    this._reserved.delete(TRAINING);
    this.boundTo = readGeneration(this._reserved.get(GENERATION));
    this._isNominal = content.nominal;
    this._trainable = new Map(content.trainable);
    this.frozen = { values: new Map(content.frozen), version: 0, file };
    this.groups = new Map(content.groups);
    this.random = new RandomState(saved.get("random") as JsonObject | undefined);
    this.privateRecord = (saved.get("private") as JsonObject | undefined) ?? new Map();
    const rate = saved.get("learning_rate");
    this.savedLearningRate = rate === undefined ? null : Number(rate);
    this.savedScheduler = (saved.get("scheduler") as JsonObject | undefined) ?? null;
  }

  // ---- loading and saving ------------------------------------------------------------------------

  /**
   * Load a checkpoint, complete or nominal, from bytes, a URL or, in Node, a path.
   *
   * @param options.externalData the second file of a checkpoint that has one (`checkpoint.data`).
   * @param options.verify whether to compute checksums; without them damage goes unnoticed.
   */
  static async load(
    source: Source,
    options: { externalData?: Source; verify?: boolean } = {},
  ): Promise<CheckpointState> {
    const what =
      typeof source === "string" || source instanceof URL ? String(source) : "checkpoint";
    const bytes = await loadBytes(source, what);
    const external =
      options.externalData === undefined
        ? undefined
        : await loadBytes(options.externalData, "the external data of the checkpoint");
    const content = readCheckpoint(bytes, external, what, options.verify ?? true);
    return new CheckpointState(content, bytes);
  }

  /** The same as `load`, by the name that Python has. */
  static loadCheckpoint(
    source: Source,
    options: { externalData?: Source; verify?: boolean } = {},
  ): Promise<CheckpointState> {
    return CheckpointState.load(source, options);
  }

  /** The same as `state.toBytes`, by the name that Python has. */
  static saveCheckpoint(
    state: CheckpointState,
    includeOptimizerState = false,
    options: { readonly allowNonfinite?: boolean } = {},
  ): Promise<Uint8Array> {
    return state.toBytes(includeOptimizerState, options);
  }

  /**
   * The bytes of a checkpoint file with the present state.
   *
   * With the optimizer state, training resumes from them exactly. A state in which training has
   * made something infinite or NaN is refused, unless `allowNonfinite` is set.
   */
  toBytes(
    includeOptimizerState = false,
    options: { readonly allowNonfinite?: boolean } = {},
  ): Promise<Uint8Array> {
    return this.lock.run(async () => {
      await this._downloadAll();
      if (!options.allowNonfinite) this.requireFinite("nothing was saved", includeOptimizerState);
      return writeCheckpoint(this._content(includeOptimizerState));
    });
  }

  /** @internal Refuse to go on where training has made something infinite or NaN. */
  requireFinite(what: string, includeOptimizerState = false): void {
    const held = new Map(
      [...this._trainable.keys(), ...this._variables.keys()].map((name) => [name, this.held(name)]),
    );
    if (includeOptimizerState) {
      for (const [name, states] of this.optimizer?.group().states ?? []) {
        states.forEach((state, k) => held.set(`${name}.momentum${k}`, state));
      }
    }
    for (const [name, tensor] of held) {
      if (!isAllFinite(tensor)) {
        throw new NonFiniteError(
          `${quoted(name)} has elements that are infinite or not a number: ${what}. Go on from an ` +
            "earlier checkpoint, or pass { allowNonfinite: true }",
        );
      }
    }
  }

  /** Fetch values from the GPU, so that `parameters` can be read. */
  download(): Promise<void> {
    return this.lock.run(() => this._downloadAll());
  }

  private async _downloadAll(): Promise<void> {
    for (const variable of [...this._variables.values(), ...this._gradients.values()]) {
      await variable.download();
    }
    await this.optimizer?.download();
  }

  private _content(includeOptimizerState: boolean): CheckpointContent {
    const properties = new Map(this._userProperties);
    const reserved = new Map(this._reserved);
    let groups = new Map<string, OptimizerGroup>();
    if (includeOptimizerState && !this._isNominal) {
      groups = this.optimizer ? new Map([[GROUP, this.optimizer.group()]]) : this.groups;
      reserved.set(TRAINING, toJson(this._training()));
    }
    for (const [name, value] of reserved) properties.set(RESERVED_PREFIX + name, value);
    const held = (names: Iterable<string>): Map<string, Stored> =>
      new Map([...names].map((name) => [name, this.held(name)]));
    return {
      trainable: held(this._trainable.keys()),
      frozen: held(this.frozen.values.keys()),
      nominal: this._isNominal,
      groups,
      properties,
    };
  }

  private _training(): JsonObject {
    const { optimizer } = this;
    const saved: [string, Json][] = [
      ["random", this.random.saved()],
      ["private", this.privateRecord],
      ["learning_rate", optimizer ? optimizer.lastingRate : this.savedLearningRate],
      ["scheduler", optimizer ? optimizer.schedulerState() : this.savedScheduler],
    ];
    return new Map(
      saved.filter(([, value]) => value !== null && !(value instanceof Map && value.size === 0)),
    );
  }

  // ---- as users see it ---------------------------------------------------------------------------

  /** The parameters by name. */
  get parameters(): Parameters {
    return new Parameters(this);
  }

  /** The user's properties. */
  get properties(): Properties {
    return new Properties(this._userProperties);
  }

  /**
   * The identifier of the artifacts that the state belongs to, or null.
   *
   * Graphs of other artifacts are refused, and graphs that were changed. Set it to null to use the
   * state with such graphs, on your own responsibility.
   */
  get generation(): string | null {
    return this.boundTo?.id ?? null;
  }

  set generation(_: null) {
    this.boundTo = null;
    this._reserved.delete(GENERATION);
  }

  /** Whether the state has names but no values yet. */
  get nominal(): boolean {
    return this._isNominal;
  }

  // ---- internal ------------------------------------------------------------------------------------

  /** @internal The names of all parameters, sorted. */
  names(): string[] {
    return [...this._trainable.keys(), ...this.frozen.values.keys()].sort(byCodePoints);
  }

  /** @internal The names of what trains, in the order of the checkpoint. */
  trainableNames(): string[] {
    return [...this._trainable.keys()];
  }

  /** @internal */
  has(name: string): boolean {
    return this._trainable.has(name) || this.frozen.values.has(name);
  }

  /** @internal */
  isTrainable(name: string): boolean {
    return this._trainable.has(name);
  }

  /** @internal Element type and shape of a parameter. */
  typeOf(name: string): { readonly code: number; readonly dims: readonly number[] } {
    return this._stored(name);
  }

  private _stored(name: string): Stored {
    const tensor = this._trainable.get(name) ?? this.frozen.values.get(name);
    if (!tensor) throw new CheckpointError(`there is no parameter ${quoted(name)}`);
    return tensor;
  }

  /** @internal The present value of a parameter, as it is stored. */
  held(name: string): Stored {
    return this._variables.get(name)?.stored() ?? this._stored(name);
  }

  /** @internal */
  valueOf(name: string): TypedArray {
    return this._variables.get(name)?.array ?? elementsOf(this._stored(name));
  }

  /** @internal Set a parameter; the graphs see it with their next run. */
  setValue(name: string, value: unknown): void {
    const { code, dims } = this._stored(name);
    const array = checked(name, value, code, dims);
    const variable = this._variables.get(name);
    if (variable) variable.assign(array);
    else {
      const copy: Stored = { code, dims, data: bytesOf(array).slice() };
      if (this._trainable.has(name)) this._trainable.set(name, copy);
      else {
        this.frozen.values.set(name, copy);
        this.frozen.version += 1;
      }
    }
  }

  /** @internal The gradient of a parameter; null if it has none. */
  gradientOf(name: string): TypedArray | null {
    return this._gradients.get(name)?.array ?? null;
  }

  /** @internal */
  setGradient(name: string, value: unknown): void {
    const gradient = this._gradients.get(name);
    if (!gradient) {
      throw new StateError(
        `the parameter ${quoted(name)} has no gradient, or there was no training step yet`,
      );
    }
    gradient.assign(checked(`${name}_grad`, value, gradient.code, gradient.dims));
    this.hasStaleGradients = false;
  }

  /** @internal What a parameter is kept in; from then on graphs read and write it. */
  variable(name: string): Variable {
    let variable = this._variables.get(name);
    if (!variable) {
      variable = Variable.of(this._stored(name));
      this._variables.set(name, variable);
    }
    return variable;
  }

  /** @internal */
  variableIfThere(name: string): Variable | null {
    return this._variables.get(name) ?? null;
  }

  /** @internal The gradient of a parameter, all zero where there was none yet. */
  gradient(name: string): Variable {
    let gradient = this._gradients.get(name);
    if (!gradient) {
      const { code, dims } = this._stored(name);
      gradient = new Variable(code, dims, zerosOf(code, dims));
      this._gradients.set(name, gradient);
    }
    return gradient;
  }

  /** @internal Give a nominal state its values. */
  complete(values: ReadonlyMap<string, Stored>): void {
    for (const [name, value] of values) {
      (this._trainable.has(name) ? this._trainable : this.frozen.values).set(name, value);
    }
    this._isNominal = false;
    this.frozen.version += 1;
  }

  /** @internal Refuse to go on with a nominal state. */
  requireValues(): void {
    if (this._isNominal) {
      throw new StateError(
        "Please load the model parameters first. The checkpoint is nominal, it has names and no " +
          "values: loadParametersBuffer(buffer, false) gives it all of them",
      );
    }
  }

  /** @internal Free GPU memory. */
  release(): void {
    for (const variable of this._variables.values()) variable.release();
    for (const gradient of this._gradients.values()) gradient.release();
  }
}

/** The new value of a parameter, which must be an array of its type and size. */
function checked(name: string, value: unknown, code: number, dims: readonly number[]): TypedArray {
  const wanted = ELEMENT_TYPES.get(code)?.array;
  if (!wanted || !(value instanceof (wanted as unknown as new () => object))) {
    throw new ArgumentError(
      `the parameter ${quoted(name)} is set to a ${wanted?.name ?? "value"} of ${typeName(code)}, ` +
        `not to ${(value as object | null)?.constructor?.name ?? typeof value}`,
    );
  }
  const size = dims.reduce((product, dim) => product * dim, 1);
  const array = value as TypedArray;
  if (array.length !== size) {
    throw new ArgumentError(
      `the parameter ${quoted(name)} has the shape [${dims.join(", ")}], ${size} numbers, not ` +
        `${array.length}`,
    );
  }
  return array;
}

/** The training record of an untrusted checkpoint. */
function trainingOf(text: StoredProperty | undefined): JsonObject {
  if (text === undefined) return new Map();
  let saved: Json = null;
  try {
    saved = typeof text === "string" ? fromJson(text) : null;
  } catch {
    // Reported below.
  }
  const record = saved instanceof Map ? saved : null;
  const isRight = ([key, value]: [string, Json]): boolean =>
    TRAINING_RECORD.get(key)?.(value) ?? true;
  if (!record || ![...record].every(isRight)) {
    throw new CheckpointError(
      "the checkpoint holds a damaged record of the learning rate, the scheduler or the random " +
        "numbers",
    );
  }
  return record;
}

const isObject = (value: Json): boolean => value instanceof Map;

// By names out of a file: a map, as any object has a "constructor".
const TRAINING_RECORD = new Map<string, (value: Json) => boolean>([
  [
    "random",
    (value) =>
      value instanceof Map &&
      ["seed", "draws"].every((key) => {
        const count = value.get(key);
        return typeof count === "bigint" && count >= 0n;
      }),
  ],
  ["private", isObject],
  [
    "learning_rate",
    (value) =>
      (typeof value === "number" || typeof value === "bigint") &&
      Number.isFinite(Math.fround(Number(value))),
  ],
  ["scheduler", isObject],
]);

const FLOAT16 = 10;

/** Whether no element of a tensor of floats is infinite or NaN. */
function isAllFinite(tensor: Stored): boolean {
  const elements = ELEMENT_TYPES.get(tensor.code)?.array && elementsOf(tensor);
  if (elements instanceof Float32Array || elements instanceof Float64Array) {
    return elements.every((value) => Number.isFinite(value));
  }
  // In half floats, all bits of the exponent are set.
  return (
    tensor.code !== FLOAT16 ||
    (elements as Uint16Array).every((bits) => (bits & 0x7c00) !== 0x7c00)
  );
}

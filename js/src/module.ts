/** Module: forward and backward passes on the parameters of a state. */

import { Buffers } from "./buffers.js";
import { BOOL, FLOAT, UINT32, zerosOf } from "./elements.js";
import { ArgumentError, InputError, StateError } from "./errors.js";
import { checkGeneration } from "./generation.js";
import { batchSymbol, Graph, type Settings, type Tensors } from "./graph.js";
import { type Feeds, prepared } from "./inputs.js";
import { loadBytes, type Source } from "./load.js";
import { readModel, type ValueType } from "./model-file.js";
import {
  ACCUMULATED,
  BUFFER,
  checkBelongs,
  checkTrains,
  LAZY_RESET,
  RANDOM_SEED,
  type GraphSignature,
  signatureOf,
  UPDATED,
} from "./graph-signature.js";
import type { Ort, OrtTensor, RunOptions, SessionOptions, TypedArray } from "./runtime.js";
import type { CheckpointState } from "./state.js";
import { elementsOfTensor, isOnCpu, ortType } from "./variables.js";

/** The arguments of a module. */
export interface ModuleOptions {
  /** The onnxruntime package. */
  readonly ort: Ort;
  /** The parameters, which training changes. */
  readonly state: CheckpointState;
  /** The training graph: bytes, URL or, in Node, path. */
  readonly trainModel: Source;
  /** The evaluation graph, for evaluation and for export. */
  readonly evalModel?: Source | undefined;
  /** The file of the base (`base.data`), where low-rank factors train. */
  readonly baseData?: Source | undefined;
  /** onnxruntime's options for all sessions. */
  readonly sessionOptions?: SessionOptions | undefined;
  /**
   * Fix the first dimension of all inputs, so that onnxruntime knows all shapes in advance. A
   * batch of another size is an error or, with "auto", recreates the sessions.
   */
  readonly batchSize?: number | "auto" | undefined;
}

/** Options of a run. */
export interface RunRequest {
  /** The outputs to return; all by default. */
  readonly fetches?: readonly string[] | undefined;
  readonly options?: RunOptions | undefined;
}

/**
 * A model that can be trained and evaluated.
 *
 * `run` runs the graph of the present mode. In training mode it returns the loss (and the outputs
 * beside it) and adds the gradients to `Parameter.grad`, until `lazyResetGrad`.
 */
export class Module {
  /** Whether `run` trains. */
  training = true;
  /** @internal */ readonly settings: Settings;
  private readonly _buffers: Buffers;

  private constructor(
    readonly state: CheckpointState,
    settings: Settings,
    /** @internal */ readonly trainPass: TrainPass,
    /** @internal */ readonly evalPass: EvalPass | null,
    private readonly _automatic: boolean,
  ) {
    this.settings = settings;
    this._buffers = new Buffers(state, trainPass.graph.model, trainPass.signature);
  }

  static async create(options: ModuleOptions): Promise<Module> {
    const { ort, state, batchSize } = options;
    if (typeof ort?.InferenceSession?.create !== "function") {
      throw new ArgumentError(
        "ort is the package of onnxruntime: import * as ort from 'onnxruntime-web', and pass it",
      );
    }
    const base =
      options.baseData === undefined ? undefined : await loadBytes(options.baseData, "the base");
    const settings: Settings = {
      ort,
      base,
      options: options.sessionOptions ?? {},
      batch: typeof batchSize === "number" ? batchSize : null,
      generation: "",
    };
    const [train, evaluation] = await Promise.all([
      loadBytes(options.trainModel, "the training model"),
      options.evalModel === undefined ? null : loadBytes(options.evalModel, "the evaluation model"),
    ]);
    const trainPass = new TrainPass(
      train,
      nameOf(options.trainModel, "training model"),
      settings,
      state,
    );
    const evalPass =
      evaluation &&
      new EvalPass(evaluation, nameOf(options.evalModel!, "evaluation model"), settings, state);
    checkBatch(batchSize, trainPass.signature.inputs);
    return new Module(state, settings, trainPass, evalPass, batchSize === "auto");
  }

  /** Enter training mode, or (false) evaluation mode. */
  train(mode = true): this {
    this.training = mode;
    return this;
  }

  /** Enter evaluation mode. */
  eval(): this {
    return this.train(false);
  }

  /** Run the graph of the present mode; inputs by name, or as a list in order. */
  run(feeds: Feeds, request: RunRequest = {}): Promise<Tensors> {
    return this.state.lock.run(() => this.runPass(this._present(), feeds, request));
  }

  private _present(): Pass {
    if (this.training) return this.trainPass;
    if (this.evalPass) return this.evalPass;
    throw new StateError("there is no evaluation graph: give evalModel, or call train()");
  }

  /** @internal Run a pass; the lock of the state is held. */
  runPass(pass: Pass, feeds: Feeds, request: RunRequest = {}): Promise<Tensors> {
    this.state.requireValues();
    const { inputs, outputs } = pass.signature;
    const values = prepared(this.settings.ort, inputs, feeds);
    this._adaptBatch(inputs, values);
    const names = outputs.map(({ name }) => name);
    const wanted = request.fetches ?? names;
    const unknown = wanted.filter((name) => !names.includes(name));
    if (unknown.length) {
      throw new ArgumentError(
        `there is no output '${unknown[0]}'; the outputs are ${names.join(", ")}`,
      );
    }
    return pass.run(values, wanted, request.options);
  }

  private _adaptBatch(inputs: readonly ValueType[], values: readonly OrtTensor[]): void {
    if (this.settings.batch === null && !this._automatic) return;
    const symbol = batchSymbol(inputs);
    const index = inputs.findIndex(({ dims }) => dims?.[0] === symbol);
    const size = values[index]!.dims[0]!;
    if (this._automatic) this.settings.batch = size;
    else if (size !== this.settings.batch) {
      throw new InputError(
        `the batch has ${size} samples, and batchSize ${this.settings.batch} fixed it. With ` +
          "batchSize 'auto' the sessions are made anew for another size",
      );
    }
  }

  /** The number of batches that were left out, as their loss or gradients were not finite. */
  get skippedBatches(): number {
    return this.state.skippedBatches;
  }

  /** Let the next training run start the gradients from zero. */
  lazyResetGrad(): void {
    this.trainPass.reset = true;
  }

  /** The names of the inputs of `run`, in the present mode. */
  inputNames(): string[] {
    return namesOf(this.training ? this.trainPass : this.evalPass, "inputs");
  }

  /** The names of the outputs of `run`, in the present mode. */
  outputNames(): string[] {
    return namesOf(this.training ? this.trainPass : this.evalPass, "outputs");
  }

  /** The gradients of inputs in the last training run, where the graph has them. */
  get inputGradients(): ReadonlyMap<string, OrtTensor> {
    return this.trainPass.inputGradients;
  }

  /** The number of elements of the parameters. */
  getParametersSize(trainableOnly = true): number {
    return this._buffers.size(trainableOnly);
  }

  /** A copy of all parameters, one after the other. */
  getContiguousParameters(trainableOnly = false): Promise<OrtTensor> {
    return this.state.lock.run(async () => {
      this.state.requireValues();
      for (const { name } of this.trainPass.signature.parameters) {
        await this.state.variable(name).download();
      }
      const buffer = this._buffers.read(trainableOnly);
      return new this.settings.ort.Tensor(ortType(FLOAT), buffer, [buffer.length]);
    });
  }

  /** Set all parameters from a buffer of `getContiguousParameters`, or from its bytes. */
  copyBufferToParameters(
    buffer: Uint8Array | Float32Array | OrtTensor,
    trainableOnly = true,
  ): Promise<void> {
    return this.state.lock.run(async () => this._buffers.write(buffer, trainableOnly));
  }

  /**
   * The bytes of an ONNX model for inference, with the present parameters.
   *
   * The model keeps the metadata of the one it was prepared from; string properties of the state
   * whose names begin with "onnxtrain." are added to it.
   *
   * @param outputNames any values of the evaluation graph.
   * @param options.allowNonfinite export parameters that training has made infinite or NaN, too.
   */
  exportModelForInferencing(
    outputNames: readonly string[],
    options: { readonly allowNonfinite?: boolean } = {},
  ): Promise<Uint8Array> {
    return this.state.lock.run(async () => {
      if (!this.evalPass) {
        throw new StateError("there is no evaluation graph to export: give evalModel");
      }
      this.state.requireValues();
      const values = new Map();
      for (const name of this.state.names()) {
        await this.state.variableIfThere(name)?.download();
        values.set(name, this.state.held(name));
      }
      if (!options.allowNonfinite) this.state.requireFinite("nothing was exported");
      const properties = new Map<string, string>();
      for (const [name, value] of this.state.properties) {
        if (name.startsWith("onnxtrain.") && typeof value === "string") properties.set(name, value);
      }
      const { exportModel } = await import("./export.js"); // only those who export load it
      return exportModel(
        this.evalPass.graph.model,
        outputNames,
        values,
        this.settings.ort,
        properties,
        this.settings.base,
      );
    });
  }

  /** Free the sessions. */
  async release(): Promise<void> {
    await this.state.lock.run(async () => {
      await this.trainPass.graph.release();
      await this.evalPass?.graph.release();
      this.state.release();
    });
  }
}

/** A graph, and its inputs other than the user's. */
export abstract class Pass {
  readonly graph: Graph;
  readonly signature: GraphSignature;

  constructor(
    bytes: Uint8Array,
    source: string,
    protected readonly settings: Settings,
    protected readonly state: CheckpointState,
    fused = false,
  ) {
    const model = readModel(bytes, source);
    settings.generation = checkGeneration(model, state.boundTo, settings.generation);
    this.signature = signatureOf(model, state, fused);
    checkBelongs(model, state, this.signature);
    const own = new Set(this.signature.outputs.map(({ name }) => name).concat(this.signature.check));
    const kept = model.outputs.map(({ name }) => name).filter((name) => !own.has(name));
    this.graph = new Graph(model, settings, state.frozen, new Set(kept));
  }

  abstract run(
    values: readonly OrtTensor[],
    fetches: readonly string[],
    options?: RunOptions,
  ): Promise<Tensors>;

  /** The user's inputs, the parameters and the seed. */
  protected feeds(values: readonly OrtTensor[]): Tensors {
    const feeds: Tensors = {};
    this.signature.inputs.forEach(({ name }, index) => (feeds[name] = values[index]!));
    for (const { name } of this.signature.parameters) {
      feeds[name] = this.state.variable(name).feed(this.settings.ort);
    }
    if (this.signature.hasSeed) {
      feeds[RANDOM_SEED] = this.tensor(UINT32, this.state.random.next(), [2]);
    }
    return feeds;
  }

  protected tensor(code: number, data: TypedArray, dims: readonly number[]): OrtTensor {
    return new this.settings.ort.Tensor(ortType(code), data, dims);
  }

  protected takeUpdates(made: Tensors): void {
    for (const name of this.signature.updated) {
      this.state.variableIfThere(name)?.replace(made[name + UPDATED]!);
    }
  }

  /** Whether a run was finite. One that was not is undone: nothing of it is taken over. */
  protected passed(made: Tensors, results: readonly string[]): boolean {
    const { check, trained, updated, hasSeed } = this.signature;
    if (!check.length || isTrue(made[check[0]!]!)) return true;
    discard(made, results);
    const { state } = this;
    const sums = elementsOfTensor(made[check[1]!]!) as ArrayLike<number>;
    const names = trained.length ? trained : updated.filter((name) => state.isTrainable(name));
    state.notFinite = names.filter((_, index) => !Number.isFinite(sums[index]));
    state.skippedBatches += 1;
    if (hasSeed) state.random.undo();
    return false;
  }
}

/** Whether a flag is set. */
export function isTrue(flag: OrtTensor): boolean {
  return Boolean((flag.data as Uint8Array)[0]);
}

/** Free outputs on the GPU that nobody takes over. */
export function discard(made: Tensors, names: readonly string[]): void {
  for (const name of names) if (!isOnCpu(made[name]!)) made[name]!.dispose?.();
}

/** The requested outputs. */
export function picked(made: Tensors, names: readonly string[]): Tensors {
  return Object.fromEntries(names.map((name) => [name, made[name]!]));
}

/** The evaluation graph. */
export class EvalPass extends Pass {
  override run(
    values: readonly OrtTensor[],
    fetches: readonly string[],
    options?: RunOptions,
  ): Promise<Tensors> {
    return this.graph.run(this.feeds(values), fetches, options);
  }
}

/** The training graph, which adds gradients to buffers. */
export class TrainPass extends Pass {
  reset = true;
  readonly inputGradients = new Map<string, OrtTensor>();
  private readonly _trained: readonly string[];
  private readonly _differentiatedInputs: readonly string[];

  constructor(bytes: Uint8Array, source: string, settings: Settings, state: CheckpointState) {
    super(bytes, source, settings, state);
    checkTrains(this.graph.model, state, this.signature);
    const inputs = new Set(this.signature.inputs.map(({ name }) => name));
    this._trained = this.signature.trained.filter((name) => !inputs.has(name));
    this._differentiatedInputs = this.signature.trained.filter((name) => inputs.has(name));
  }

  override async run(
    values: readonly OrtTensor[],
    fetches: readonly string[],
    options?: RunOptions,
  ): Promise<Tensors> {
    const { ort } = this.settings;
    const feeds = this.feeds(values);
    for (const name of this._trained) feeds[name + BUFFER] = this.state.gradient(name).feed(ort);
    for (const name of this._differentiatedInputs) {
      feeds[name + BUFFER] = this._inputBuffer(name, feeds[name]!);
    }
    feeds[LAZY_RESET] = this.tensor(BOOL, Uint8Array.of(this.reset ? 1 : 0), [1]);
    const results = [
      ...this.signature.trained.map((name) => name + ACCUMULATED),
      ...this.signature.updated.map((name) => name + UPDATED),
    ];
    const { check } = this.signature;
    const made = await this.graph.run(feeds, [...fetches, ...results, ...check], options);
    if (!this.passed(made, results)) {
      // Gradients of before the reset are still there, and no step may use them.
      this.state.hasStaleGradients ||= this.reset;
      return picked(made, fetches);
    }
    this.reset = this.state.hasStaleGradients = false;
    for (const name of this._trained) this.state.gradient(name).replace(made[name + ACCUMULATED]!);
    for (const name of this._differentiatedInputs) {
      this.inputGradients.set(name, made[name + ACCUMULATED]!);
    }
    this.takeUpdates(made);
    return picked(made, fetches);
  }

  /** The accumulator of an input's gradient, in the shape of the input. */
  private _inputBuffer(name: string, value: OrtTensor): OrtTensor {
    const earlier = this.inputGradients.get(name);
    const isSame = earlier && earlier.dims.join() === value.dims.join();
    if (isSame) return earlier;
    const { code } = this.signature.inputs.find((input) => input.name === name)!;
    return this.tensor(code, zerosOf(code, value.dims), value.dims);
  }
}

function namesOf(pass: Pass | null, what: "inputs" | "outputs"): string[] {
  return pass ? pass.signature[what].map(({ name }) => name) : [];
}

function checkBatch(batchSize: unknown, inputs: readonly ValueType[]): void {
  if (batchSize === undefined) return;
  if (batchSize !== "auto" && !(Number.isInteger(batchSize) && (batchSize as number) > 0)) {
    throw new ArgumentError(`batchSize is a positive number or 'auto', not ${String(batchSize)}`);
  }
  if (batchSymbol(inputs) === null) {
    throw new ArgumentError(
      "batchSize needs inputs that begin with one symbolic dimension, which has a name",
    );
  }
}

/** The name of a file in messages. */
export function nameOf(source: Source, otherwise: string): string {
  return typeof source === "string" || source instanceof URL ? String(source) : `the ${otherwise}`;
}

/** The value of a tensor of one element. */
export function numberOf(tensor: OrtTensor): number {
  return Number((elementsOfTensor(tensor) as ArrayLike<number | bigint>)[0]);
}

/** TrainingSession: module, optimizer and scheduler in one. */

import type { Adapter } from "./adapter.js";
import { LoadError, StateError } from "./errors.js";
import type { Feeds } from "./inputs.js";
import type { Settings, Tensors } from "./graph.js";
import { loadBytes, loadIfThere, type Source } from "./load.js";
import { Module, nameOf, numberOf, Pass, picked } from "./module.js";
import { readModel } from "./model-file.js";
import { Optimizer } from "./optimizer.js";
import type { Property } from "./parameters.js";
import { RANGE_MOMENTUM, UPDATED } from "./graph-signature.js";
import type { Ort, OrtTensor, RunOptions, SessionOptions, TypedArray } from "./runtime.js";
import { LinearLRScheduler } from "./scheduler-base.js";
import { CheckpointState } from "./state.js";

/** The arguments of a session. Sources are bytes, a URL or, in Node, a path. */
export interface TrainingSessionOptions {
  /** The package of onnxruntime: `onnxruntime-web`, `onnxruntime-node` or another. */
  readonly ort: Ort;
  /** A `CheckpointState`, or the source of one. */
  readonly checkpointState: CheckpointState | Source;
  /** The training graph. */
  readonly trainModel: Source;
  /** The evaluation graph, for evaluation and export. */
  readonly evalModel?: Source | undefined;
  /** The optimizer graph, for updates. */
  readonly optimizerModel?: Source | undefined;
  /** The graph of a whole step, which makes `step` faster. */
  readonly stepModel?: Source | undefined;
  /** As for `Module`. */
  readonly baseData?: Source | undefined;
  /** As for `Module`. */
  readonly batchSize?: number | "auto" | undefined;
}

/** An artifact folder. */
export interface FolderOptions {
  readonly ort: Ort;
  /** The URL of the folder or, in Node, its path. */
  readonly folder: string | URL;
  /** The prefix of the file names. */
  readonly prefix?: string | undefined;
  /** Another checkpoint than that of the folder, such as one to resume from. */
  readonly checkpoint?: CheckpointState | Source | undefined;
  readonly batchSize?: number | "auto" | undefined;
}

/** The result of a step: the loss, and all outputs by name. */
export interface StepResult {
  readonly loss: number;
  readonly outputs: Tensors;
}

/** Which outputs a run returns, as upstream has it: their names, alone or as keys. */
export type Fetches = readonly string[] | Readonly<Record<string, unknown>>;

/**
 * All of training: steps, evaluation, learning rate, checkpoints, export.
 *
 * ```js
 * const session = await TrainingSession.fromFolder({ ort, folder: "artifacts" });
 * const { loss } = await session.step({ input, labels });
 * const checkpoint = await session.saveCheckpoint();
 * ```
 */
export class TrainingSession {
  private _canUpdateAlone = false;
  private _fused: FusedPass | null = null;

  private constructor(
    /** The parameters and properties. */
    readonly state: CheckpointState,
    readonly module: Module,
    /** The optimizer, for schedulers; null if there is none. */
    readonly optimizer: Optimizer | null,
  ) {}

  /** Make a session. Files are checked now; graphs are loaded when they first run. */
  static async create(
    options: TrainingSessionOptions,
    sessionOptions?: SessionOptions,
  ): Promise<TrainingSession> {
    const { checkpointState, optimizerModel, stepModel } = options;
    const state =
      checkpointState instanceof CheckpointState
        ? checkpointState
        : await CheckpointState.load(checkpointState);
    const module = await Module.create({ ...options, state, sessionOptions });
    const step = stepModel === undefined ? undefined : await loadBytes(stepModel, "the step model");
    const updates = optimizerModel ?? step;
    const optimizer = updates === undefined ? null : await Optimizer.create(updates, module);
    const session = new TrainingSession(state, module, optimizer);
    session._canUpdateAlone = optimizerModel !== undefined;
    if (step && optimizer) {
      const name = nameOf(stepModel!, "step model");
      session._fused = new FusedPass(step, name, module.settings, state, optimizer);
    }
    return session;
  }

  /** Make a session from an artifact folder, with the graphs in it. */
  static async fromFolder(
    options: FolderOptions,
    sessionOptions?: SessionOptions,
  ): Promise<TrainingSession> {
    const { ort, folder, prefix = "", batchSize } = options;
    const file = (name: string): string => `${String(folder).replace(/\/+$/, "")}/${prefix}${name}`;
    const graph = async (stem: string): Promise<Uint8Array | undefined> =>
      (await loadIfThere(file(`${stem}.onnx`), `${prefix}${stem}.onnx`)) ?? undefined;
    const [trainModel, evalModel, optimizerModel, stepModel, own] = await Promise.all([
      graph("training_model"),
      graph("eval_model"),
      graph("optimizer_model"),
      graph("step_model"),
      options.checkpoint === undefined ? checkpointOf(file) : options.checkpoint,
    ]);
    if (!trainModel) {
      throw new LoadError(
        `there is no '${prefix}training_model.onnx' in ${folder}: it is not a folder of training ` +
          "artifacts",
      );
    }
    if (!own) throw new LoadError(`there is no '${prefix}checkpoint' in ${folder}`);
    const { base } = readModel(trainModel, `${prefix}training_model.onnx`).notes;
    const baseData = base && `${String(folder).replace(/\/+$/, "")}/${base}`;
    const graphs = { trainModel, evalModel, optimizerModel, stepModel };
    return TrainingSession.create(
      { ort, checkpointState: own, ...graphs, batchSize, ...(baseData && { baseData }) },
      sessionOptions,
    );
  }

  // ---- steps -------------------------------------------------------------------------------------

  /**
   * The loss and additional outputs by name; gradients accumulate until
   * `lazyResetGrad`.
   */
  runTrainStep(feeds: Feeds, options?: RunOptions): Promise<Tensors>;
  runTrainStep(feeds: Feeds, fetches: Fetches, options?: RunOptions): Promise<Tensors>;
  runTrainStep(feeds: Feeds, second?: unknown, third?: RunOptions): Promise<Tensors> {
    return this.state.lock.run(() =>
      this.module.runPass(this.module.trainPass, feeds, this._request(true, second, third)),
    );
  }

  /** The loss and additional outputs of the model in inference mode, by name. */
  runEvalStep(feeds: Feeds, options?: RunOptions): Promise<Tensors>;
  runEvalStep(feeds: Feeds, fetches: Fetches, options?: RunOptions): Promise<Tensors>;
  runEvalStep(feeds: Feeds, second?: unknown, third?: RunOptions): Promise<Tensors> {
    return this.state.lock.run(() => {
      const pass = this.module.evalPass;
      if (!pass) throw new StateError("there is no evaluation graph: give evalModel");
      return this.module.runPass(pass, feeds, this._request(false, second, third));
    });
  }

  private _request(
    training: boolean,
    second: unknown,
    third?: RunOptions,
  ): { fetches?: readonly string[]; options?: RunOptions } {
    if (second === undefined) return {};
    if (Array.isArray(second))
      return { fetches: second as string[], ...(third && { options: third }) };
    const keys = Object.keys(second as object);
    const outputs = this.outputNames(training);
    // As upstream decides it: options have no key that is the name of an output.
    if (third !== undefined || (keys.length && keys.every((key) => outputs.includes(key)))) {
      return { fetches: keys, ...(third && { options: third }) };
    }
    return { options: second as RunOptions };
  }

  /** Update the parameters from the accumulated gradients. */
  runOptimizerStep(options?: RunOptions): Promise<void> {
    return this.state.lock.run(() => this._updateNow(options));
  }

  private _updateNow(options?: RunOptions): Promise<void> {
    if (!this._canUpdateAlone || !this.optimizer) {
      throw new StateError("there is no optimizer graph: give optimizerModel, or call step");
    }
    return this.optimizer.stepNow(options);
  }

  /** Let the next training step start the gradients from zero. */
  async lazyResetGrad(): Promise<void> {
    this.module.lazyResetGrad();
  }

  /**
   * Update the parameters with a batch, in one run; the result has the loss and the outputs.
   *
   * Does what `runTrainStep`, `runOptimizerStep` and `lazyResetGrad` do, without accumulating:
   * gradients of earlier training steps are not used. If the loss or a gradient is not finite,
   * nothing changes, and `skippedSteps` counts the step.
   */
  step(feeds: Feeds): Promise<StepResult> {
    return this.state.lock.run(async () => {
      if (this._fused) return this._result(await this.module.runPass(this._fused, feeds));
      this.module.lazyResetGrad();
      const made = await this.module.runPass(this.module.trainPass, feeds);
      await this._updateNow();
      this.module.lazyResetGrad();
      return this._result(made);
    });
  }

  /** Evaluate a batch; the result has the loss and the outputs. */
  async evaluate(feeds: Feeds): Promise<StepResult> {
    return this._result(await this.runEvalStep(feeds));
  }

  private _result(outputs: Tensors): StepResult {
    return { loss: numberOf(outputs[this.lossName]!), outputs };
  }

  /** The number of steps that changed nothing, as their loss or gradients were not finite. */
  get skippedSteps(): number {
    return this.requireOptimizer().skippedSteps;
  }

  /** The number of batches that were left out, as their loss or gradients were not finite. */
  get skippedBatches(): number {
    return this.module.skippedBatches;
  }

  /** Whether steps that are not finite change nothing; not in graphs of earlier versions. */
  get checksFinite(): boolean {
    return [this.module.trainPass, this._fused].every((pass) => !pass || pass.signature.check.length);
  }

  /** The name of the output that is the loss. */
  get lossName(): string {
    return this.module.trainPass.signature.outputs[0]!.name;
  }

  // ---- learning rate -----------------------------------------------------------------------------

  /** @internal */
  requireOptimizer(): Optimizer {
    if (!this.optimizer) {
      throw new StateError("there is no optimizer: give optimizerModel or stepModel");
    }
    return this.optimizer;
  }

  setLearningRate(learningRate: number): void {
    this.requireOptimizer().setLearningRate(learningRate);
  }

  getLearningRate(): number {
    return this.requireOptimizer().getLearningRate();
  }

  /** Schedule a linear warm-up and a linear decay to zero. */
  registerLinearLRScheduler(
    warmupStepCount: number,
    totalStepCount: number,
    initialLr: number,
  ): void {
    new LinearLRScheduler(this.requireOptimizer(), { warmupStepCount, totalStepCount, initialLr });
  }

  /** Let the scheduler set the learning rate of the next step; `metric` is for a plateau. */
  schedulerStep(metric?: number): void {
    const { scheduler } = this.requireOptimizer();
    if (!scheduler) {
      throw new StateError(
        "there is no scheduler: call registerLinearLRScheduler, or make one with session.optimizer",
      );
    }
    scheduler.step(metric);
  }

  // ---- parameters --------------------------------------------------------------------------------

  /** The number of elements of the parameters. */
  async getParametersSize(trainableOnly = true): Promise<number> {
    return this.module.getParametersSize(trainableOnly);
  }

  /** A copy of all parameters, one after the other. */
  getContiguousParameters(trainableOnly = true): Promise<OrtTensor> {
    return this.module.getContiguousParameters(trainableOnly);
  }

  /** Set all parameters from one buffer, or its bytes. */
  loadParametersBuffer(
    buffer: Uint8Array | Float32Array | OrtTensor,
    trainableOnly = true,
  ): Promise<void> {
    return this.module.copyBufferToParameters(buffer, trainableOnly);
  }

  /** A copy of a parameter. */
  getParameter(name: string): TypedArray {
    return this.state.parameters.get(name).data.slice();
  }

  /** Set a parameter. */
  updateParameter(name: string, values: TypedArray): void {
    this.state.parameters.set(name, values);
  }

  /**
   * Let the ranges of a model that trains for integers stay as they are from now on. `fit` does
   * the same by itself for the last quarter of its steps, and for these alone.
   */
  freezeRanges(): void {
    if (!this.state.has(RANGE_MOMENTUM)) {
      throw new StateError(
        "there are no ranges that follow training: prepare with quantize='int8' and scales='average'",
      );
    }
    this.updateParameter(RANGE_MOMENTUM, new Float32Array(1));
  }

  /** Set a property of the checkpoint. */
  addProperty(name: string, value: Property): void {
    this.state.properties.set(name, value);
  }

  /** A property of the checkpoint. */
  getProperty(name: string): Property | undefined {
    return this.state.properties.get(name);
  }

  // ---- interface, files --------------------------------------------------------------------------

  /** The names of the inputs of a step: those of the model, then labels. */
  inputNames(training = true): string[] {
    return this._pass(training)?.signature.inputs.map(({ name }) => name) ?? [];
  }

  /** The names of the outputs of a step; the first is the loss. */
  outputNames(training = true): string[] {
    return this._pass(training)?.signature.outputs.map(({ name }) => name) ?? [];
  }

  private _pass(training: boolean): Pass | null {
    return training ? this.module.trainPass : this.module.evalPass;
  }

  get trainingInputNames(): string[] {
    return this.inputNames(true);
  }

  get trainingOutputNames(): string[] {
    return this.outputNames(true);
  }

  get evalInputNames(): string[] {
    return this.inputNames(false);
  }

  get evalOutputNames(): string[] {
    return this.outputNames(false);
  }

  /**
   * The bytes of a checkpoint, from which training resumes exactly.
   *
   * Infinite numbers and NaN are refused, unless `allowNonfinite` is set.
   */
  saveCheckpoint(
    includeOptimizerState = true,
    options: { readonly allowNonfinite?: boolean } = {},
  ): Promise<Uint8Array> {
    return this.state.toBytes(includeOptimizerState, options);
  }

  /** The bytes of an ONNX model for inference, with the present parameters; see `Module`. */
  exportModelForInferencing(
    outputNames: readonly string[],
    options: { readonly allowNonfinite?: boolean } = {},
  ): Promise<Uint8Array> {
    return this.module.exportModelForInferencing(outputNames, options);
  }

  /**
   * The low-rank factors as they are now, with the scale in B, and what else trains.
   *
   * @param options.allowNonfinite take what training has made infinite or NaN, too.
   */
  async adapter(options: { readonly allowNonfinite?: boolean } = {}): Promise<Adapter> {
    const { adapterOf } = await import("./session-adapter.js");
    return adapterOf(this, options.allowNonfinite ?? false);
  }

  /** The bytes of an `.onnx_adapter` file with the low-rank factors as they are now. */
  async exportAdapter(options: { readonly allowNonfinite?: boolean } = {}): Promise<Uint8Array> {
    return (await this.adapter(options)).toBytes();
  }

  /**
   * Go on from an adapter of the same base, layers and rank: an `Adapter`, or its file. Moments
   * start from zero.
   */
  async loadAdapter(adapter: Adapter | Source): Promise<void> {
    const [{ Adapter: Read }, { loadAdapter }] = await Promise.all([
      import("./adapter.js"),
      import("./session-adapter.js"),
    ]);
    await loadAdapter(this, adapter instanceof Read ? adapter : await Read.read(adapter));
  }

  /** Free the sessions; nothing can run afterwards. */
  async release(): Promise<void> {
    await this.module.release();
    await this.optimizer?.release();
    await this.state.lock.run(async () => this._fused?.graph.release());
  }
}

async function checkpointOf(file: (name: string) => string): Promise<CheckpointState | null> {
  for (const name of ["checkpoint", "nominal_checkpoint"]) {
    const bytes = await loadIfThere(file(name), name);
    if (!bytes) continue;
    try {
      return await CheckpointState.load(bytes);
    } catch (error) {
      const data = /has external data/.test(String(error))
        ? await loadIfThere(file(`${name}.data`), `${name}.data`)
        : null;
      if (!data) throw error;
      return CheckpointState.load(bytes, { externalData: data });
    }
  }
  return null;
}

/** The graph that computes the loss and the updated parameters. */
class FusedPass extends Pass {
  constructor(
    bytes: Uint8Array,
    source: string,
    settings: Settings,
    state: CheckpointState,
    private readonly _optimizer: Optimizer,
  ) {
    super(bytes, source, settings, state, true);
  }

  override async run(
    values: readonly OrtTensor[],
    fetches: readonly string[],
    options?: RunOptions,
  ): Promise<Tensors> {
    const feeds = { ...this.feeds(values), ...this._optimizer.feeds() };
    const results = this.signature.updated.map((name) => name + UPDATED);
    const { check } = this.signature;
    const made = await this.graph.run(feeds, [...fetches, ...results, ...check], options);
    if (this.passed(made, results)) {
      this.takeUpdates(made);
      this._optimizer.finish(made);
    } else this._optimizer.skip();
    return picked(made, fetches);
  }
}

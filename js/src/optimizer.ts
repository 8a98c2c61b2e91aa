/** Optimizer: updates the parameters of a module from their gradients. */

import type { OptimizerGroup, Stored } from "./checkpoint-file.js";
import { FLOAT, INT64, typeName, zerosOf } from "./elements.js";
import { ArgumentError, CheckpointError, ModelError, quoted } from "./errors.js";
import { checkGeneration } from "./generation.js";
import { Graph, type Tensors } from "./graph.js";
import { loadBytes, type Source } from "./load.js";
import { readModel } from "./model-file.js";
import { discard, isTrue, type Module, nameOf } from "./module.js";
import type { JsonObject } from "./json.js";
import {
  checkUpdates,
  LEARNING_RATE,
  momentumsOf,
  STEP,
  UPDATED,
  UPDATED_FLAG,
} from "./graph-signature.js";
import type { RunOptions } from "./runtime.js";
import type { LRScheduler } from "./scheduler-base.js";
import { type CheckpointState, GROUP } from "./state.js";
import { ortType, Variable } from "./variables.js";

export const DEFAULT_LEARNING_RATE = 0.001;

/**
 * Takes steps with the accumulated gradients of a module.
 *
 * It continues from the optimizer state of the checkpoint, if there is one: moments, number of
 * steps, the learning rate.
 */
export class Optimizer {
  /** The initial rate of schedulers. */
  initialLr = DEFAULT_LEARNING_RATE;
  private readonly _state: CheckpointState;
  private readonly _names: readonly string[];
  private _moments: Map<string, Variable[]> | null = null;
  private _rate = Math.fround(DEFAULT_LEARNING_RATE);
  private _count = 0;
  private _skipped = 0;
  private _attached: LRScheduler | null = null;
  /** While a run's own schedule sets the rate: rate and scheduler of before, which last. */
  private _lasting: [number, JsonObject | null] | null = null;

  private constructor(
    private readonly _module: Module,
    private readonly _graph: Graph,
  ) {
    const { state } = _module;
    this._state = state;
    checkUpdates(_graph.model, state);
    this._names = state.trainableNames();
    if (state.savedLearningRate !== null) this._rate = Math.fround(state.savedLearningRate);
    const group = state.groups.get(GROUP);
    if (group) {
      this._count = Number(group.step);
      this.initialLr = group.initialLearningRate;
    }
    if (!state.nominal) this._allocate();
    state.optimizer = this;
  }

  /**
   * @param optimizerModel the optimizer graph: bytes, URL or, in Node, path.
   * @param module whose parameters are updated.
   */
  static async create(optimizerModel: Source, module: Module): Promise<Optimizer> {
    const bytes = await loadBytes(optimizerModel, "the optimizer model");
    const model = readModel(bytes, nameOf(optimizerModel, "optimizer model"));
    const { settings, state } = module;
    settings.generation = checkGeneration(model, state.boundTo, settings.generation);
    const kept = model.outputs.map(({ name }) => name).filter((name) => name.endsWith(UPDATED));
    return new Optimizer(
      module,
      new Graph(model, settings, state.frozen, new Set(kept)),
    );
  }

  // ---- steps -------------------------------------------------------------------------------------

  /**
   * Update all trainable parameters once.
   *
   * Nothing changes if a gradient is infinite or NaN, or if all batches since the last reset were
   * skipped; `skippedSteps` counts such steps.
   */
  step(options?: RunOptions): Promise<void> {
    return this._state.lock.run(() => this.stepNow(options));
  }

  /** @internal The same, while the lock of the state is held. */
  async stepNow(options?: RunOptions): Promise<void> {
    this._state.requireValues();
    if (this._state.hasStaleGradients) {
      this.skip();
      return;
    }
    const { ort } = this._module.settings;
    const feeds = this.feeds();
    for (const name of this._names) {
      const variable = this._state.variable(name);
      feeds[name] = variable.feed(ort);
      feeds[`${name}_grad`] = this._state.gradient(name).feed(ort);
    }
    const results = this.results();
    const flags = this._graph.model.outputs
      .map(({ name }) => name)
      .filter((name) => name.includes(UPDATED_FLAG));
    const made = await this._graph.run(feeds, [...results, ...flags], options);
    if (!flags.every((name) => isTrue(made[name]!))) {
      discard(made, results);
      this.skip();
      return;
    }
    for (const name of this._names) this._state.variable(name).replace(made[name + UPDATED]!);
    this.finish(made);
  }

  /** @internal What an update reads beside parameters and gradients. */
  feeds(): Tensors {
    const { ort } = this._module.settings;
    const feeds: Tensors = {
      [LEARNING_RATE]: new ort.Tensor(ortType(FLOAT), Float32Array.of(this._rate), [1]),
      [STEP]: new ort.Tensor(ortType(INT64), BigInt64Array.of(BigInt(this._count + 1)), [1]),
    };
    for (const [name, moments] of this._allocate()) {
      moments.forEach((moment, k) => (feeds[`${name}.momentum${k}`] = moment.feed(ort)));
    }
    return feeds;
  }

  /** @internal The names of what an update makes. */
  results(): string[] {
    return [...this._allocate()].flatMap(([name, moments]) => [
      name + UPDATED,
      ...moments.map((_, k) => `${name}.momentum${k}${UPDATED}`),
    ]);
  }

  /** @internal Take over the moments that a step has made, and count it. */
  finish(made: Tensors): void {
    for (const [name, moments] of this._allocate()) {
      moments.forEach((moment, k) => moment.replace(made[`${name}.momentum${k}${UPDATED}`]!));
    }
    this._count += 1;
  }

  /** @internal Count a step that has changed nothing. */
  skip(): void {
    this._skipped += 1;
  }

  /** The number of steps that changed nothing, as their loss or gradients were not finite. */
  get skippedSteps(): number {
    return this._skipped;
  }

  /** The number of completed steps. */
  get stepCount(): number {
    return this._count;
  }

  // ---- learning rate -----------------------------------------------------------------------------

  /** The learning rate of the next step, as float32. */
  get learningRate(): number {
    return this._rate;
  }

  set learningRate(rate: number) {
    this.setLearningRate(rate);
  }

  setLearningRate(learningRate: number): void {
    const rate = Math.fround(learningRate);
    if (typeof learningRate !== "number" || !Number.isFinite(rate)) {
      throw new ArgumentError(`a learning rate is a finite number, not ${String(learningRate)}`);
    }
    this._rate = rate;
  }

  getLearningRate(): number {
    return this._rate;
  }

  /** @internal The rate that a checkpoint holds: that of before a run's own schedule. */
  get lastingRate(): number {
    return this._lasting?.[0] ?? this._rate;
  }

  /** @internal Let the schedule of a run set the rate, until the result is called. */
  runSchedule(): () => void {
    const { _rate, _attached } = this;
    const saved = this.schedulerState();
    this._lasting = [_rate, saved];
    return () => {
      this._lasting = null;
      this._rate = _rate;
      this._attached = _attached;
      this._state.savedScheduler = saved;
    };
  }

  /** Remember the scheduler; returns what the checkpoint holds for its kind, once. */
  attach(scheduler: LRScheduler): JsonObject | null {
    this._attached = scheduler;
    const saved = this._state.savedScheduler;
    this._state.savedScheduler = null;
    if (saved === null || saved.get("kind") !== scheduler.kind) return null;
    const state = saved.get("state");
    if (!(state instanceof Map)) {
      throw new CheckpointError("the checkpoint holds a damaged state of a scheduler");
    }
    return state;
  }

  /** The scheduler that sets the learning rate, if any. */
  get scheduler(): LRScheduler | null {
    return this._attached;
  }

  // ---- state -------------------------------------------------------------------------------------

  /** The moments: those of the checkpoint, or zeros. */
  private _allocate(): Map<string, Variable[]> {
    if (this._moments) return this._moments;
    const group = this._state.groups.get(GROUP);
    const moments = new Map<string, Variable[]>();
    for (const name of this._names) {
      const wanted = momentumsOf(this._graph.model, name);
      let held = group?.states.get(name);
      if (wanted.length === 0 && held && standsForNone(held)) held = [];
      if (group && held?.length !== wanted.length) refuse(name, wanted.length, held?.length);
      const { dims } = this._state.typeOf(name);
      moments.set(
        name,
        wanted.map(({ code }, k) => momentOf(`${name}.momentum${k}`, code, dims, held?.[k])),
      );
    }
    this._state.groups.delete(GROUP);
    this._moments = moments;
    return moments;
  }

  /** Start over: no step was taken, all moments are zero. The learning rate stays. */
  reset(): Promise<void> {
    return this._state.lock.run(async () => this.resetNow());
  }

  /** @internal The same, while the lock of the state is held. */
  resetNow(): void {
    for (const moments of this._allocate().values()) {
      for (const moment of moments) moment.assign(zerosOf(moment.code, moment.dims));
    }
    this._count = 0;
    this._attached = this._state.savedScheduler = null;
  }

  /** @internal The state of the optimizer as a checkpoint holds it. */
  group(): OptimizerGroup {
    return {
      step: BigInt(this._count),
      initialLearningRate: this.initialLr,
      states: new Map(
        [...this._allocate()].map(([name, moments]) => [
          name,
          moments.length > 0 ? moments.map((m) => m.stored()) : [noState()],
        ]),
      ),
    };
  }

  /** @internal The state of the scheduler as a checkpoint holds it. */
  schedulerState(): JsonObject | null {
    if (this._lasting) return this._lasting[1];
    if (!this._attached) return this._state.savedScheduler;
    return new Map<string, string | JsonObject>([
      ["kind", this._attached.kind],
      ["state", this._attached.state()],
    ]);
  }

  /** @internal */
  async download(): Promise<void> {
    for (const moments of this._moments?.values() ?? []) {
      for (const moment of moments) await moment.download();
    }
  }

  /** Free the session. */
  async release(): Promise<void> {
    await this._state.lock.run(async () => {
      await this._graph.release();
      for (const moments of this._moments?.values() ?? []) {
        for (const moment of moments) moment.release();
      }
    });
  }
}

/** The saved state of a stateless optimizer: ONNX Runtime's SGD requires one tensor. */
function noState(): Stored {
  return { code: FLOAT, dims: [1], data: new Uint8Array(4) };
}

/** Whether saved tensors mean no state: a single tensor of zeros. */
function standsForNone(held: readonly Stored[]): boolean {
  return held.length === 1 && held[0]!.data.every((byte) => byte === 0);
}

const FLOATS = [FLOAT, 10, 11]; // float, float16, double

function momentOf(
  label: string,
  code: number,
  dims: readonly number[],
  held: Stored | undefined,
): Variable {
  if (!FLOATS.includes(code)) {
    throw new ModelError(
      `the optimizer graph keeps ${quoted(label)} as ${typeName(code)}, not as floats. Generate the ` +
        "artifacts anew",
    );
  }
  if (!held) return new Variable(code, dims, zerosOf(code, dims));
  const made = Variable.of(held);
  if (!made.fits(code, dims)) {
    throw new CheckpointError(
      `the checkpoint has ${quoted(label)} with another shape or type than the parameter: its ` +
        "optimizer state is of another model",
    );
  }
  return made;
}

function refuse(name: string, wanted: number, held: number | undefined): never {
  if (held === undefined) {
    throw new CheckpointError(
      `the checkpoint has an optimizer state, but none for the parameter ${quoted(name)}: it is of ` +
        "another model",
    );
  }
  throw new CheckpointError(
    `the optimizer keeps ${wanted} tensors for each parameter, and the checkpoint has ${held} for ` +
      `${quoted(name)}: it was saved with another optimizer. Load the checkpoint without its ` +
      "optimizer state, or use that optimizer",
  );
}

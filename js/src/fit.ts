/** The training loop: batches, epochs, evaluation, saving, early stopping, abort. */

import { ArgumentError, NonFiniteError, OnnxTrainError, quoted } from "./errors.js";
import { type Batch, type BatchSource, type FitData, makeSource } from "./fit-data.js";
import { Evaluation, type EvaluationOptions, whole } from "./fit-evaluation.js";
import { type EpochRecord, type History, stepsOf } from "./history.js";
import {
  type Best,
  checkOrder,
  KEY,
  newResumeState,
  type ResumeState,
  readResumeState,
  savedScheduler,
  writeResumeState,
} from "./resume-state.js";
import { numberOf } from "./module.js";
import type { Json } from "./json.js";
import type { Parameter } from "./parameters.js";
import type { ReplayOptions, RunReplay } from "./replay.js";
import { startingSeed } from "./random.js";
import { RangeFreeze } from "./range-freeze.js";
import type { TypedArray } from "./runtime.js";
import {
  isScheduler,
  type LRScheduler,
  PlateauLRScheduler,
  schedulerNames,
  SCHEDULERS,
} from "./schedulers.js";
import type { TrainingSession } from "./session.js";

export { accuracy } from "./fit-evaluation.js";

/** A progress event of a run. */
export type ProgressEvent =
  | {
      readonly type: "step";
      readonly epoch: number;
      readonly epochs: number;
      readonly step: number;
      readonly batch: number;
      readonly batches: number | null;
      readonly loss: number;
      readonly learningRate: number;
    }
  | { readonly type: "epoch"; readonly epochs: number; readonly record: EpochRecord }
  | { readonly type: "skipped"; readonly epoch: number; readonly batch: number; readonly why: string }
  | { readonly type: "saved"; readonly step: number; readonly bytes: number };

export interface EarlyStopping {
  /** "loss", "evalLoss" or the name of a metric; the loss of evaluation by default. */
  readonly monitor?: string | undefined;
  /** The number of epochs to wait for a better value. */
  readonly patience?: number | undefined;
  readonly minDelta?: number | undefined;
  readonly mode?: "min" | "max" | undefined;
  /** Whether to restore the parameters of the best epoch at the end. */
  readonly restoreBest?: boolean | undefined;
}

interface Early {
  readonly monitor: string;
  readonly patience: number;
  readonly minDelta: number;
  readonly mode: "min" | "max";
  readonly restoreBest: boolean;
}

export interface FitOptions extends EvaluationOptions {
  /** The number of epochs; a resumed run counts those that are done. */
  readonly epochs?: number | undefined;
  /** Shuffle the samples of arrays in each epoch, depending on the seed. */
  readonly shuffle?: boolean | undefined;
  readonly seed?: number | bigint | undefined;
  readonly dropLast?: boolean | undefined;
  /** The number of batches per update. */
  readonly accumulate?: number | undefined;
  /**
   * Mix samples of earlier runs into each batch, so that what they taught is not forgotten: how
   * many to keep, a size such as "5MB", or both and more as an object. They are in the checkpoint.
   */
  readonly replay?: number | string | ReplayOptions | undefined;
  /** Data for evaluation after each epoch. */
  readonly evaluate?: FitData | undefined;
  /** A scheduler, or its name and settings; missing ones are derived from the data. */
  readonly scheduler?:
    | LRScheduler
    | string
    | ({ readonly name: string } & Readonly<Record<string, unknown>>)
    | undefined;
  readonly earlyStopping?: EarlyStopping | number | undefined;
  /** Called with the bytes of a checkpoint, such as `store.saver("my model")`. */
  readonly save?: ((checkpoint: Uint8Array) => unknown) | undefined;
  /** "epoch", or a number of steps. */
  readonly saveEvery?: "epoch" | number | undefined;
  /** Resume the run of the session's checkpoint, if there is one. */
  readonly resume?: boolean | undefined;
  readonly onProgress?: ((event: ProgressEvent) => void) | undefined;
  /**
   * What to do with a batch whose loss or gradients are infinite or NaN, which never changes
   * anything: "stop" with an error, or "skip" it, up to ten in a row, or as many as given here.
   */
  readonly nonfinite?: "stop" | "skip" | number | undefined;
  /** Ends the run after the current step; the result is kept and saved. */
  readonly signal?: AbortSignal | undefined;
}

/** Train for some epochs. Resolves at the end of the run, also after an abort. */
export async function fit(
  session: TrainingSession,
  data: FitData,
  options: FitOptions = {},
): Promise<History> {
  const { scheduler } = options;
  // The schedule of a run ends with it; a scheduler of the caller stays.
  const isOwn = scheduler !== undefined && !isScheduler(scheduler);
  const end = isOwn ? session.requireOptimizer().runSchedule() : undefined;
  try {
    const replay = options.replay === undefined ? null : await import("./replay.js");
    return await new Run(session, data, options, replay?.RunReplay ?? null).run();
  } finally {
    end?.();
  }
}

/** The mean loss (`evalLoss`) and metrics over data. */
export async function evaluate(
  session: TrainingSession,
  data: FitData,
  options: EvaluationOptions = {},
): Promise<Record<string, number>> {
  return new Evaluation(session, data, options).run(0);
}

/** Batches in a row; more are a sign that training itself has failed. */
const SKIPS = 10;

/** The longest time without yielding to other work of the thread, if steps are shorter. */
const TURN = 20; // milliseconds

class Run {
  private readonly _source: BatchSource;
  private readonly _replay: RunReplay | null;
  private readonly _resumeState: ResumeState;
  private readonly _history: History;
  private readonly _evaluation: Evaluation | null;
  private readonly _scheduler: LRScheduler | null;
  private readonly _order: ReadonlyMap<string, Json>;
  private readonly _early: Early | null;
  private _best: Best | null = null;
  private _snapshot: Map<string, TypedArray> | null = null;
  private readonly _rangeFreeze: RangeFreeze;
  private readonly _epochs: number;
  private readonly _accumulate: number;
  /** The sum of accumulated gradients, each times its samples, divided by `unit`. */
  private _pending: { batches: number; samples: number; lossSum: number; unit: number } | null =
    null;
  private _began = 0;
  private _paused = performance.now();
  private _savedAt = "";
  private readonly _mostSkips: number;
  private _skipsInARow = 0;

  constructor(
    private readonly _session: TrainingSession,
    data: FitData,
    private readonly _options: FitOptions,
    Replay: typeof RunReplay | null,
  ) {
    const optimizer = _session.requireOptimizer();
    this._epochs = whole("epochs", _options.epochs ?? 1, 0);
    this._accumulate = whole("accumulate", _options.accumulate ?? 1, 1);
    this._mostSkips = this._skips();
    if (typeof _options.saveEvery === "number") whole("saveEvery", _options.saveEvery, 1);
    this._evaluation = _options.evaluate ? new Evaluation(_session, _options.evaluate, _options) : null;
    if (!this._evaluation && _options.metrics) {
      throw new ArgumentError("metrics are measured in evaluation: pass the data as evaluate");
    }
    this._early = this._earlyStopping();
    const record = _options.resume ? _session.state.privateRecord.get(KEY) : undefined;
    const saved = record === undefined ? null : readResumeState(record, optimizer.stepCount);
    const seed = _options.seed === undefined ? null : BigInt(_options.seed);
    this._resumeState =
      saved?.position ?? newResumeState(seed ?? startingSeed() & ((1n << 63n) - 1n), optimizer.stepCount);
    if (saved && seed !== null) this._resumeState.seed = seed;
    this._history = this._resumeState.history;
    const { inputs } = _session.module.trainPass.signature;
    const { seed: ofRun } = this._resumeState;
    this._replay = Replay && new Replay(_options.replay!, _session, ofRun, saved !== null);
    const batchSize = whole("batchSize", _options.batchSize ?? 32, 1);
    const source = makeSource(data, inputs, {
      batchSize: this._replay?.newInBatch(batchSize) ?? batchSize,
      shuffle: _options.shuffle ?? true,
      dropLast: _options.dropLast ?? false,
      seed: ofRun,
    });
    this._source = this._replay?.mixed(source, inputs) ?? source;
    this._rangeFreeze = new RangeFreeze(_session.state, this._totalSteps());
    this._order = new Map<string, Json>([
      ...source.order,
      ["accumulate", BigInt(this._accumulate)],
      ...(this._replay ? [["replay", this._replay.settings()] as const] : []),
    ]);
    if (saved) checkOrder(saved.order, this._order, this._resumeState);
    if (this._early) {
      const { monitor } = this._early;
      const earlier = saved?.best ?? null;
      this._best =
        earlier?.monitor === monitor ? earlier : { monitor, value: null, epoch: null, waited: 0 };
    }
    // A new run has a schedule of its own.
    _session.state.savedScheduler = saved
      ? savedScheduler(saved.position, optimizer.schedulerState())
      : null;
    this._scheduler = this._makeScheduler();
    if (saved && saved.position.rate !== null) optimizer.setLearningRate(saved.position.rate);
  }

  async run(): Promise<History> {
    while (this._resumeState.epoch < this._epochs && !this._reasonToStop()) {
      await this._trainEpoch();
      if (!this._isAborted()) await this._endEpoch();
    }
    this._history.aborted = this._isAborted();
    this._history.stopped = this._reasonToStop();
    this._remember();
    if (this._options.save && this._savedAt !== this._position()) await this._save();
    if (this._early?.restoreBest && this._snapshot) {
      for (const [name, values] of this._snapshot) this._session.state.setValue(name, values);
    }
    return this._history;
  }

  private _isAborted(): boolean {
    return this._options.signal?.aborted ?? false;
  }

  private _reasonToStop(): string {
    if (this._isAborted()) return "aborted";
    if (!this._early || !this._best || this._best.waited < this._early.patience) return "";
    return `no better ${this._best.monitor} for ${this._best.waited} epochs`;
  }

  // ---- steps -------------------------------------------------------------------------------------

  private async _trainEpoch(): Promise<void> {
    const { _resumeState: position } = this;
    this._began = performance.now() - 1000 * position.seconds;
    for await (const batch of this._source.epoch(position.epoch, position.batch)) {
      try {
        if (this._accumulate === 1) {
          const loss = await this._lossOf(async () => (await this._session.step(batch.feeds)).loss);
          if (loss === null) position.batch += 1;
          else await this._endStep(loss, 1, batch.samples);
        } else await this._addBatch(batch);
      } catch (error) {
        if (error instanceof OnnxTrainError && !(error instanceof NonFiniteError)) {
          error.message += ` (epoch ${position.epoch + 1}, batch ${position.batch + 1}, ${batch.samples} samples)`;
        }
        throw error;
      }
      await this._takeTurns();
      if (this._isAborted()) return;
    }
    if (this._pending) await this._update();
  }

  /** Accumulate the gradients of a batch, so that their mean is over samples. */
  private async _addBatch(batch: Batch): Promise<void> {
    if (!this._pending) this._session.module.lazyResetGrad();
    const pending = (this._pending ??= { batches: 0, samples: 0, lossSum: 0, unit: 0 });
    const isScaled = pending.samples > 0 && pending.unit !== batch.samples;
    const before = isScaled ? await this._scaleGradients(pending.unit / batch.samples) : [];
    const loss = await this._lossOf(async () => {
      const made = await this._session.runTrainStep(batch.feeds);
      return numberOf(made[this._session.lossName]!);
    });
    pending.batches += 1;
    if (loss === null) {
      for (const [parameter, gradient] of before) parameter.grad = gradient;
    } else {
      pending.unit = batch.samples;
      pending.samples += batch.samples;
      pending.lossSum += loss * batch.samples;
    }
    if (pending.batches === this._accumulate) await this._update();
  }

  private async _update(): Promise<void> {
    const { batches, samples, lossSum, unit } = this._pending!;
    this._pending = null;
    if (!samples) {
      this._resumeState.batch += batches; // all were skipped
      return;
    }
    if (unit !== samples) await this._scaleGradients(unit / samples);
    const before = this._session.skippedSteps;
    await this._session.runOptimizerStep();
    this._session.module.lazyResetGrad();
    if (this._session.skippedSteps > before) {
      this._skip("the accumulated gradients are not finite, or too large", batches);
      this._resumeState.batch += batches;
    } else await this._endStep(lossSum / samples, batches, samples);
  }

  /** Scale the accumulated gradients; returns what they were. */
  private async _scaleGradients(factor: number): Promise<[Parameter, TypedArray][]> {
    await this._session.state.download();
    const scale = Math.fround(factor);
    const before: [Parameter, TypedArray][] = [];
    for (const [, parameter] of this._session.state.parameters) {
      const gradient = parameter.requiresGrad ? (parameter.grad as Float32Array | null) : null;
      if (!gradient) continue;
      before.push([parameter, gradient]);
      parameter.grad = gradient.map((value) => value * scale);
    }
    return before;
  }

  /** Run a batch, and return its loss; null if it was not finite, and skipped. */
  private async _lossOf(run: () => Promise<number>): Promise<number | null> {
    const before = this._session.skippedBatches;
    const loss = await this._rangeFreeze.during(stepsOf(this._history), run);
    const isSkipped = this._session.skippedBatches > before;
    if (Number.isFinite(loss) && !isSkipped) {
      this._skipsInARow = 0;
      return loss;
    }
    const names = this._session.state.notFinite.slice(0, 5).map(quoted).join(", ");
    const what = names ? `the gradient of ${names}` : "a running statistic";
    this._skip(
      Number.isFinite(loss) ? `${what} is not finite, or too large` : `the loss is ${loss}`,
      1,
    );
    return null;
  }

  /** Count batches that are left out; throws if there are too many in a row. */
  private _skip(why: string, batches: number): void {
    const { epoch, batch } = this._resumeState;
    this._skipsInARow += batches;
    if (this._skipsInARow > this._mostSkips) {
      const kept = this._session.checksFinite ? "the parameters are those of before, and " : "";
      throw new NonFiniteError(
        `epoch ${epoch + 1}, step ${stepsOf(this._history) + 1} of the run: ${why}. A lower learning ` +
          `rate usually helps; ${kept}what was saved before is not touched`,
      );
    }
    this._history.skipped += batches;
    this._options.onProgress?.({ type: "skipped", epoch: epoch + 1, batch: batch + 1, why });
  }

  private async _endStep(loss: number, batches: number, samples: number): Promise<void> {
    const { _resumeState: position, _history: history, _options: options } = this;
    position.batch += batches;
    position.samples += samples;
    position.lossSum += loss * samples;
    const step = stepsOf(history) + 1;
    history.losses.push(loss);
    history.lossSteps.push(step);
    if (this._scheduler && !(this._scheduler instanceof PlateauLRScheduler)) this._scheduler.step();
    if (typeof options.saveEvery === "number" && step % options.saveEvery === 0) {
      await this._save();
    }
    options.onProgress?.({
      type: "step",
      epoch: position.epoch + 1,
      epochs: this._epochs,
      step,
      batch: position.batch,
      batches: this._source.batches,
      loss,
      learningRate: this._session.getLearningRate(),
    });
  }

  /** Yield to other work of the thread now and then, such as rendering or an abort. */
  private async _takeTurns(): Promise<void> {
    if (performance.now() - this._paused < TURN) return;
    await new Promise((resolve) => setTimeout(resolve));
    this._paused = performance.now();
  }

  // ---- the end of an epoch -----------------------------------------------------------------------

  private async _endEpoch(): Promise<void> {
    const { _resumeState: position, _history: history } = this;
    const values = this._evaluation ? await this._evaluation.run(position.epoch) : {};
    const record: EpochRecord = {
      epoch: position.epoch + 1,
      steps: stepsOf(history),
      samples: position.samples,
      loss: position.samples ? position.lossSum / position.samples : NaN,
      learningRate: this._session.getLearningRate(),
      seconds: (performance.now() - this._began) / 1000,
      values,
    };
    history.epochs.push(record);
    if (this._scheduler instanceof PlateauLRScheduler) {
      this._scheduler.step(values["evalLoss"] ?? record.loss);
    }
    if (this._best && this._early) this._judge(values[this._best.monitor] ?? record.loss, record.epoch);
    position.epoch += 1;
    position.batch = position.samples = position.lossSum = position.seconds = 0;
    if (this._options.save && typeof this._options.saveEvery !== "number") await this._save();
    this._options.onProgress?.({ type: "epoch", epochs: this._epochs, record });
  }

  private _judge(value: number, epoch: number): void {
    const best = this._best!;
    const { mode, minDelta, restoreBest } = this._early!;
    const sign = mode === "min" ? 1 : -1;
    const isBetter = best.value === null || sign * value < sign * best.value - minDelta;
    if (isBetter && !Number.isNaN(value)) {
      Object.assign(best, { value, epoch, waited: 0 });
      this._history.bestEpoch = epoch;
      if (restoreBest) {
        const { state } = this._session;
        this._snapshot = new Map(
          this._session.module.trainPass.signature.parameters.map(({ name }) => [
            name,
            state.valueOf(name).slice(),
          ]),
        );
      }
    } else best.waited += 1;
  }

  // ---- saving ------------------------------------------------------------------------------------

  private _position(): string {
    return `${this._resumeState.epoch}/${stepsOf(this._history)}`;
  }

  private _remember(): void {
    const { _resumeState: position, _session: session } = this;
    if (position.batch) position.seconds = (performance.now() - this._began) / 1000;
    const { stepCount: step, learningRate } = session.requireOptimizer();
    position.rate = learningRate;
    if (this._scheduler) {
      position.scheduler = new Map<string, Json>([
        ["name", this._scheduler.kind],
        ...(position.scheduler ?? []),
        ["state", this._scheduler.state()],
      ]);
    }
    this._replay?.record(position.epoch, position.batch);
    session.state.privateRecord.set(KEY, writeResumeState(position, step, this._order, this._best));
  }

  private async _save(): Promise<void> {
    this._remember();
    const bytes = await this._session.saveCheckpoint();
    await this._options.save?.(bytes);
    this._savedAt = this._position();
    this._options.onProgress?.({
      type: "saved",
      step: stepsOf(this._history),
      bytes: bytes.length,
    });
  }

  // ---- arguments ---------------------------------------------------------------------------------

  private _skips(): number {
    const { nonfinite = "stop" } = this._options;
    if (nonfinite === "stop") return 0;
    const most = nonfinite === "skip" ? SKIPS : whole("nonfinite", nonfinite, 0);
    if (most && !this._session.checksFinite) {
      throw new ArgumentError(
        "nonfinite: 'skip' needs artifacts of this version of onnxtrain: generate them anew",
      );
    }
    return most;
  }

  private _earlyStopping(): Early | null {
    const given = this._options.earlyStopping;
    if (given === undefined) return null;
    const {
      monitor,
      patience = 3,
      minDelta = 0,
      mode,
      restoreBest = false,
    } = typeof given === "number" ? { patience: given } : given;
    const watched = monitor ?? (this._evaluation ? "evalLoss" : "loss");
    const known = ["loss", ...(this._evaluation ? ["evalLoss", ...this._evaluation.names] : [])];
    if (!known.includes(watched)) {
      throw new ArgumentError(
        `earlyStopping cannot watch ${quoted(watched)}: there is ${known.join(", ")}`,
      );
    }
    const isLoss = watched === "loss" || watched === "evalLoss";
    if (!mode && !isLoss && watched !== "accuracy") {
      throw new ArgumentError(
        `earlyStopping needs mode: whether a high ${quoted(watched)} is good`,
      );
    }
    return {
      monitor: watched,
      patience: whole("patience", patience, 1),
      minDelta,
      mode: mode ?? (isLoss ? "min" : "max"),
      restoreBest,
    };
  }

  /** The number of steps of the whole run, if it is known. */
  private _totalSteps(): number | null {
    const { batches } = this._source;
    return batches === null ? null : this._epochs * Math.ceil(batches / this._accumulate);
  }

  private _makeScheduler(): LRScheduler | null {
    const given = this._options.scheduler;
    if (given === undefined) return null;
    if (isScheduler(given)) return given;
    const { name, ...settings } = (typeof given === "string" ? { name: given } : given) as {
      name: string;
    } & Record<string, unknown>;
    if (!Object.hasOwn(SCHEDULERS, name)) {
      throw new ArgumentError(
        `there is no scheduler ${quoted(name)}: there are ${schedulerNames()}`,
      );
    }
    const kind = name as keyof typeof SCHEDULERS;
    const make = SCHEDULERS[kind] as unknown as new (
      optimizer: unknown,
      settings: object,
    ) => LRScheduler;
    if (kind === "plateau") return new make(this._session.optimizer, settings);
    if (
      ["linear", "cosine", "onecycle"].includes(kind) &&
      settings["totalStepCount"] === undefined
    ) {
      const total = this._totalSteps();
      if (total === null) {
        throw new ArgumentError(
          `the scheduler ${quoted(name)} needs totalStepCount: the data have no length`,
        );
      }
      settings["totalStepCount"] = total;
    }
    settings["firstStep"] ??= this._resumeState.firstStep;
    const [rate, pythonRate] =
      kind === "onecycle" ? ["maxLr", "max_lr"] : ["initialLr", "initial_lr"];
    const saved =
      this._resumeState.scheduler?.get("name") === name ? this._resumeState.scheduler.get(pythonRate) : undefined;
    settings[rate] ??= typeof saved === "number" ? saved : this._session.getLearningRate();
    this._resumeState.scheduler = new Map<string, Json>([
      ["name", name],
      [pythonRate, settings[rate] as number],
    ]);
    return new make(this._session.optimizer, settings);
  }
}

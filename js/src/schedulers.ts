/**
 * Learning-rate schedulers: the rate as a function of the optimizer's steps.
 *
 * A scheduler is made for an optimizer, sets its learning rate at once, and sets it anew at each
 * `step()`, which is called after each step of the optimizer. The step is the optimizer's, so a run
 * that was resumed goes on where it was. What a scheduler has to remember is saved in the checkpoint.
 */

import { ArgumentError, CheckpointError } from "./errors.js";
import type { Json, JsonObject } from "./python-json.js";
import { byCodePoints } from "./text.js";

/** What a scheduler needs of an optimizer. */
export interface ScheduledOptimizer {
  initialLr: number;
  readonly stepCount: number;
  getLearningRate(): number;
  setLearningRate(learningRate: number): void;
  attach(scheduler: LRScheduler): JsonObject | null;
}

/** Called with what is worth knowing, but no error. By default it goes to the console. */
export type Warn = (message: string) => void;

// ---- arguments -----------------------------------------------------------------------------------

function whole(name: string, value: unknown, least = 0): number {
  if (!Number.isSafeInteger(value) || (value as number) < least) {
    throw new ArgumentError(
      `${name} must be a whole number of at least ${least}, not ${String(value)}`,
    );
  }
  return value as number;
}

function finite(name: string, value: unknown): number {
  if (typeof value !== "number" || !Number.isFinite(value)) {
    throw new ArgumentError(`${name} must be a finite number, not ${String(value)}`);
  }
  return value;
}

function notNegative(name: string, value: unknown): number {
  if (finite(name, value) < 0)
    throw new ArgumentError(`${name} must not be negative, but is ${String(value)}`);
  return value as number;
}

function positive(name: string, value: unknown): number {
  if (finite(name, value) <= 0)
    throw new ArgumentError(`${name} must be more than 0, not ${String(value)}`);
  return value as number;
}

function choice<T extends string>(name: string, value: T, choices: readonly T[]): T {
  if (!choices.includes(value)) {
    throw new ArgumentError(`${name} must be one of ${choices.join(", ")}, not ${value}`);
  }
  return value;
}

function savedNumber(saved: JsonObject, name: string): number {
  const value = saved.get(name);
  const number = typeof value === "bigint" ? Number(value) : value;
  if (typeof number !== "number" || !Number.isFinite(number)) {
    throw new CheckpointError(
      `the checkpoint has ${String(value)} as ${name} of a scheduler, where a number should be`,
    );
  }
  return number;
}

// ---- what all have in common ---------------------------------------------------------------------

/** What all schedulers have in common. `kind` is the name in checkpoints and in `fit`. */
export abstract class LRScheduler {
  abstract readonly kind: string;
  protected readonly settings: JsonObject;

  protected constructor(
    protected readonly optimizer: ScheduledOptimizer,
    settings: readonly (readonly [string, Json])[],
  ) {
    this.settings = new Map(settings);
  }

  /** Set the learning rate of the optimizer's next step. */
  abstract step(metric?: number): void;

  /** @internal What a checkpoint keeps of the scheduler. */
  state(): JsonObject {
    return new Map(this.settings);
  }

  /** Join the optimizer; the saved state, if there is one of this kind. */
  protected join(): JsonObject | null {
    const saved = this.optimizer.attach(this);
    // A scheduler that was made without a rate takes over the saved one.
    if (saved && this.settings.get("initial_lr") === null) {
      this.settings.set("initial_lr", savedNumber(saved, "initial_lr"));
    }
    return saved;
  }

  /** Say which settings are not as saved, and return whether there are any. */
  protected warnOfChanges(saved: JsonObject): boolean {
    const changed = [...this.settings].filter(([key, value]) => !isSame(saved.get(key), value));
    if (!changed.length) return false;
    const details = changed.map(
      ([key, value]) => `${key}=${String(value)} (saved: ${String(saved.get(key))})`,
    );
    console.warn(
      `onnxtrain: the scheduler '${this.kind}' goes on with other settings than the checkpoint has: ` +
        details.join(", "),
    );
    return true;
  }
}

function isSame(a: Json | undefined, b: Json): boolean {
  const plain = (value: Json | undefined): unknown =>
    typeof value === "bigint" ? Number(value) : value;
  return plain(a) === plain(b);
}

/** What schedulers with a formula take beside their own settings. */
export interface FormulaSettings {
  /** The rate to start from; by default the optimizer's. */
  readonly initialLr?: number | undefined;
  /** The step of the optimizer at which the schedule begins. */
  readonly firstStep?: number | undefined;
}

/** A scheduler whose rate is a formula of the number of steps. */
export abstract class FormulaLRScheduler extends LRScheduler {
  private readonly firstStep: number;

  protected constructor(
    optimizer: ScheduledOptimizer,
    { initialLr, firstStep = 0 }: FormulaSettings,
    settings: readonly (readonly [string, Json])[],
  ) {
    super(optimizer, [
      ...settings,
      ["initial_lr", initialLr === undefined ? null : notNegative("initialLr", initialLr)],
      ["first_step", BigInt(whole("firstStep", firstStep))],
    ]);
    this.firstStep = firstStep;
  }

  get initialLr(): number {
    return Number(this.settings.get("initial_lr"));
  }

  /** Begin, when the fields of the class are there. */
  protected begin(): void {
    const saved = this.join();
    if (this.settings.get("initial_lr") === null) {
      this.settings.set("initial_lr", this.optimizer.getLearningRate());
    }
    this.check();
    if (!saved || this.warnOfChanges(saved)) {
      this.optimizer.initialLr = this.initialLr;
      this.step();
    }
  }

  /** Check what can be checked only when the initial rate is known. */
  protected check(): void {
    // Most have nothing to check.
  }

  /** The learning rate after `step` steps of the optimizer, in double precision. */
  learningRate(step: number): number {
    return this.rate(Math.max(0, step - this.firstStep));
  }

  protected abstract rate(step: number): number;

  override step(): void {
    this.optimizer.setLearningRate(this.learningRate(this.optimizer.stepCount));
  }
}

/** The factor during the warm-up: from 0 to 1 in equal steps; null after it. */
function warmedUp(step: number, warmup: number): number | null {
  return step < warmup ? step / Math.max(1, warmup) : null;
}

function counts(warmup: number, total: number): [string, Json][] {
  whole("warmupStepCount", warmup);
  whole("totalStepCount", total);
  if (warmup > total) {
    throw new ArgumentError(
      `warmupStepCount (${warmup}) is more than totalStepCount (${total}): the warm-up is a part of ` +
        "all steps",
    );
  }
  return [
    ["warmup_step_count", BigInt(warmup)],
    ["total_step_count", BigInt(total)],
  ];
}

// ---- the schedulers ------------------------------------------------------------------------------

export interface LinearSettings extends FormulaSettings {
  readonly warmupStepCount?: number | undefined;
  readonly totalStepCount: number;
}

/** From 0 to `initialLr` during the warm-up, then down to 0 in equal steps. */
export class LinearLRScheduler extends FormulaLRScheduler {
  readonly kind = "linear";
  private readonly warmup: number;
  private readonly total: number;

  constructor(optimizer: ScheduledOptimizer, settings: LinearSettings) {
    const { warmupStepCount = 0, totalStepCount } = settings;
    super(optimizer, settings, counts(warmupStepCount, totalStepCount));
    this.warmup = warmupStepCount;
    this.total = totalStepCount;
    this.begin();
  }

  protected override rate(step: number): number {
    const factor =
      warmedUp(step, this.warmup) ??
      Math.max(0, (this.total - step) / Math.max(1, this.total - this.warmup));
    return this.initialLr * factor;
  }
}

export interface ConstantSettings extends FormulaSettings {
  readonly warmupStepCount?: number | undefined;
}

/** From 0 to `initialLr` during the warm-up, and constant after it. */
export class ConstantLRScheduler extends FormulaLRScheduler {
  readonly kind = "constant";
  private readonly warmup: number;

  constructor(optimizer: ScheduledOptimizer, settings: ConstantSettings = {}) {
    const warmup = whole("warmupStepCount", settings.warmupStepCount ?? 0);
    super(optimizer, settings, [["warmup_step_count", BigInt(warmup)]]);
    this.warmup = warmup;
    this.begin();
  }

  protected override rate(step: number): number {
    return this.initialLr * (warmedUp(step, this.warmup) ?? 1);
  }
}

export interface CosineSettings extends LinearSettings {
  readonly minLr?: number | undefined;
  /** How many waves there are: half a wave, from the top to the bottom, is the default. */
  readonly cycles?: number | undefined;
}

/** From 0 to `initialLr` during the warm-up, then down to `minLr` along a cosine. */
export class CosineLRScheduler extends FormulaLRScheduler {
  readonly kind = "cosine";
  private readonly warmup: number;
  private readonly total: number;
  private readonly minLr: number;
  private readonly cycles: number;

  constructor(optimizer: ScheduledOptimizer, settings: CosineSettings) {
    const { warmupStepCount = 0, totalStepCount, minLr = 0, cycles = 0.5 } = settings;
    super(optimizer, settings, [
      ...counts(warmupStepCount, totalStepCount),
      ["min_lr", notNegative("minLr", minLr)],
      ["cycles", positive("cycles", cycles)],
    ]);
    this.warmup = warmupStepCount;
    this.total = totalStepCount;
    this.minLr = minLr;
    this.cycles = cycles;
    this.begin();
  }

  protected override check(): void {
    if (this.minLr > this.initialLr) {
      throw new ArgumentError(
        `minLr (${this.minLr}) is more than the initial rate (${this.initialLr})`,
      );
    }
  }

  protected override rate(step: number): number {
    const factor = warmedUp(step, this.warmup);
    if (factor !== null) return this.initialLr * factor;
    const falling = Math.max(1, this.total - this.warmup);
    const progress = Math.min(1, (step - this.warmup) / falling);
    const wave = 0.5 * (1 + Math.cos(Math.PI * this.cycles * 2 * progress));
    return this.minLr + (this.initialLr - this.minLr) * Math.max(0, wave);
  }
}

export interface EverySettings extends FormulaSettings {
  readonly gamma?: number | undefined;
  /** The number of optimizer steps that count as one. */
  readonly every?: number | undefined;
}

export interface StepSettings extends EverySettings {
  readonly stepSize: number;
}

/** The rate times `gamma` each `stepSize`. */
export class StepLRScheduler extends FormulaLRScheduler {
  readonly kind = "step";
  private readonly size: number;
  private readonly gamma: number;
  private readonly every: number;

  constructor(optimizer: ScheduledOptimizer, settings: StepSettings) {
    const { stepSize, gamma = 0.1, every = 1 } = settings;
    super(optimizer, settings, [
      ["step_size", BigInt(whole("stepSize", stepSize, 1))],
      ["gamma", positive("gamma", gamma)],
      ["every", BigInt(whole("every", every, 1))],
    ]);
    this.size = stepSize;
    this.gamma = gamma;
    this.every = every;
    this.begin();
  }

  protected override rate(step: number): number {
    return this.initialLr * this.gamma ** Math.floor(Math.floor(step / this.every) / this.size);
  }
}

export interface MultiStepSettings extends EverySettings {
  /** Numbers of steps, in rising order. */
  readonly milestones: readonly number[];
}

/** The rate times `gamma` at each of the `milestones`. */
export class MultiStepLRScheduler extends FormulaLRScheduler {
  readonly kind = "multistep";
  private readonly milestones: readonly number[];
  private readonly gamma: number;
  private readonly every: number;

  constructor(optimizer: ScheduledOptimizer, settings: MultiStepSettings) {
    const { gamma = 0.1, every = 1 } = settings;
    const milestones = [...(settings.milestones ?? [])].map((step) => whole("a milestone", step));
    const isRising = milestones.every((step, i) => i === 0 || step >= milestones[i - 1]!);
    if (!milestones.length || !isRising) {
      throw new ArgumentError(
        `milestones must be numbers of steps in rising order, not ${String(settings.milestones)}`,
      );
    }
    super(optimizer, settings, [
      ["milestones", milestones.join(",")],
      ["gamma", positive("gamma", gamma)],
      ["every", BigInt(whole("every", every, 1))],
    ]);
    this.milestones = milestones;
    this.gamma = gamma;
    this.every = every;
    this.begin();
  }

  protected override rate(step: number): number {
    const now = Math.floor(step / this.every);
    return this.initialLr * this.gamma ** this.milestones.filter((at) => at <= now).length;
  }
}

export interface ExponentialSettings extends EverySettings {
  readonly gamma: number;
}

/** The rate times `gamma` at each step, or each `every` steps of the optimizer. */
export class ExponentialLRScheduler extends FormulaLRScheduler {
  readonly kind = "exponential";
  private readonly gamma: number;
  private readonly every: number;

  constructor(optimizer: ScheduledOptimizer, settings: ExponentialSettings) {
    const { gamma, every = 1 } = settings;
    super(optimizer, settings, [
      ["gamma", positive("gamma", gamma)],
      ["every", BigInt(whole("every", every, 1))],
    ]);
    this.gamma = gamma;
    this.every = every;
    this.begin();
  }

  protected override rate(step: number): number {
    return this.initialLr * this.gamma ** Math.floor(step / this.every);
  }
}

export interface OneCycleSettings {
  readonly maxLr: number;
  readonly totalStepCount: number;
  /** The fraction of all steps that the rise takes. */
  readonly pctStart?: number | undefined;
  readonly annealStrategy?: "cos" | "linear" | undefined;
  readonly divFactor?: number | undefined;
  readonly finalDivFactor?: number | undefined;
  readonly threePhase?: boolean | undefined;
  readonly firstStep?: number | undefined;
}

/** Up from `maxLr / divFactor` to `maxLr`, then down far below where it began. */
export class OneCycleLRScheduler extends FormulaLRScheduler {
  readonly kind = "onecycle";
  private readonly phases: readonly (readonly [end: number, start: number, goal: number])[];
  private readonly linear: boolean;

  constructor(optimizer: ScheduledOptimizer, settings: OneCycleSettings) {
    const { maxLr, totalStepCount, pctStart = 0.3, annealStrategy = "cos" } = settings;
    const { divFactor = 25, finalDivFactor = 1e4, threePhase = false, firstStep } = settings;
    notNegative("maxLr", maxLr);
    whole("totalStepCount", totalStepCount, 1);
    if (notNegative("pctStart", pctStart) > (threePhase ? 0.5 : 1)) {
      throw new ArgumentError(`pctStart must be at most ${threePhase ? 0.5 : 1}, not ${pctStart}`);
    }
    const start = maxLr / positive("divFactor", divFactor);
    const end = start / positive("finalDivFactor", finalDivFactor);
    super(optimizer, { initialLr: start, firstStep }, [
      ["max_lr", maxLr],
      ["total_step_count", BigInt(totalStepCount)],
      ["pct_start", pctStart],
      ["anneal_strategy", choice("annealStrategy", annealStrategy, ["cos", "linear"])],
      ["div_factor", divFactor],
      ["final_div_factor", finalDivFactor],
      ["three_phase", threePhase],
    ]);
    this.linear = annealStrategy === "linear";
    this.phases = [
      [pctStart * totalStepCount - 1, start, maxLr],
      ...(threePhase ? [[2 * pctStart * totalStepCount - 2, maxLr, start] as const] : []),
      [totalStepCount - 1, threePhase ? start : maxLr, end],
    ];
    this.begin();
  }

  protected override rate(step: number): number {
    let begin = 0;
    const last = this.phases[this.phases.length - 1]!;
    for (const phase of this.phases) {
      if (phase === last) break;
      if (step <= phase[0]) return this.between(phase, begin, step);
      begin = phase[0];
    }
    return this.between(last, begin, Math.min(step, last[0]));
  }

  private between(
    [end, start, goal]: readonly [number, number, number],
    begin: number,
    step: number,
  ): number {
    const progress = end > begin ? (step - begin) / (end - begin) : 1;
    if (this.linear) return start + (goal - start) * progress;
    return goal + ((start - goal) / 2) * (1 + Math.cos(Math.PI * progress));
  }
}

export interface PlateauSettings {
  readonly mode?: "min" | "max" | undefined;
  readonly factor?: number | undefined;
  readonly patience?: number | undefined;
  readonly threshold?: number | undefined;
  readonly thresholdMode?: "rel" | "abs" | undefined;
  readonly cooldown?: number | undefined;
  readonly minLr?: number | undefined;
  readonly eps?: number | undefined;
  readonly initialLr?: number | undefined;
}

/**
 * The rate times `factor` when a measure has not become better for `patience` steps.
 *
 * `step(metric)` is called after each evaluation.
 */
export class PlateauLRScheduler extends LRScheduler {
  readonly kind = "plateau";
  readonly mode: "min" | "max";
  private best: number | null = null;
  private badSteps = 0;
  private resting = 0;
  private rate = 0;

  constructor(optimizer: ScheduledOptimizer, settings: PlateauSettings = {}) {
    const { mode = "min", factor = 0.1, patience = 10, threshold = 1e-4, initialLr } = settings;
    const { thresholdMode = "rel", cooldown = 0, minLr = 0, eps = 1e-8 } = settings;
    if (positive("factor", factor) >= 1) {
      throw new ArgumentError(`factor must be less than 1, not ${factor}`);
    }
    super(optimizer, [
      ["mode", choice("mode", mode, ["min", "max"])],
      ["factor", factor],
      ["patience", BigInt(whole("patience", patience))],
      ["threshold", notNegative("threshold", threshold)],
      ["threshold_mode", choice("thresholdMode", thresholdMode, ["rel", "abs"])],
      ["cooldown", BigInt(whole("cooldown", cooldown))],
      ["min_lr", notNegative("minLr", minLr)],
      ["eps", notNegative("eps", eps)],
      ["initial_lr", initialLr === undefined ? null : notNegative("initialLr", initialLr)],
    ]);
    this.mode = mode;
    const saved = this.join();
    if (saved) this.restore(saved);
    else this.begin();
  }

  private setting(name: string): number {
    return Number(this.settings.get(name));
  }

  private begin(): void {
    if (this.settings.get("initial_lr") === null) {
      this.settings.set("initial_lr", this.optimizer.getLearningRate());
    }
    this.rate = this.setting("initial_lr");
    this.optimizer.initialLr = this.rate;
    this.optimizer.setLearningRate(this.rate);
  }

  /** Go on with what was counted; the rate is the optimizer's, which was restored. */
  private restore(saved: JsonObject): void {
    const isNewRate = this.setting("initial_lr") !== savedNumber(saved, "initial_lr");
    if (this.warnOfChanges(saved) && isNewRate) {
      this.begin();
      return;
    }
    this.best = (saved.get("best") ?? null) === null ? null : savedNumber(saved, "best");
    this.badSteps = savedNumber(saved, "bad_steps");
    this.resting = savedNumber(saved, "resting");
    this.rate = savedNumber(saved, "rate");
  }

  override state(): JsonObject {
    return new Map<string, Json>([
      ...this.settings,
      ["best", this.best],
      ["bad_steps", BigInt(this.badSteps)],
      ["resting", BigInt(this.resting)],
      ["rate", this.rate],
    ]);
  }

  /** Take note of a measure; lower the rate if it has not become better for too long. */
  override step(metric?: number): void {
    if (typeof metric !== "number") {
      throw new ArgumentError("the scheduler 'plateau' is told the measure: step(metric)");
    }
    if (this.isBetter(metric)) {
      this.best = metric;
      this.badSteps = 0;
    } else this.badSteps += 1;
    if (this.resting > 0) {
      this.resting -= 1;
      this.badSteps = 0;
    }
    if (this.badSteps > this.setting("patience")) {
      this.fall();
      this.resting = this.setting("cooldown");
      this.badSteps = 0;
    }
  }

  private isBetter(value: number): boolean {
    if (Number.isNaN(value)) return false;
    const isMin = this.mode === "min";
    if (this.best === null) return isMin ? value < Infinity : value > -Infinity;
    const by = (isMin ? -1 : 1) * this.setting("threshold");
    const isRelative = this.settings.get("threshold_mode") === "rel";
    const bound = isRelative ? this.best * (1 + by) : this.best + by;
    return isMin ? value < bound : value > bound;
  }

  private fall(): void {
    const current = this.optimizer.getLearningRate();
    // The optimizer's rate is rounded to 32 bits; unless somebody changed it, ours is exact.
    const size = Math.max(Math.abs(current), Math.abs(this.rate));
    if (Math.abs(current - this.rate) > 1e-6 * size) this.rate = current;
    const lower = Math.max(this.rate * this.setting("factor"), this.setting("min_lr"));
    if (this.rate - lower > this.setting("eps")) {
      this.rate = lower;
      this.optimizer.setLearningRate(lower);
    }
  }
}

/** All schedulers by their kind. */
export const SCHEDULERS = {
  linear: LinearLRScheduler,
  constant: ConstantLRScheduler,
  cosine: CosineLRScheduler,
  step: StepLRScheduler,
  multistep: MultiStepLRScheduler,
  exponential: ExponentialLRScheduler,
  onecycle: OneCycleLRScheduler,
  plateau: PlateauLRScheduler,
} as const;

/** The names of the schedulers, for messages. */
export function schedulerNames(): string {
  return Object.keys(SCHEDULERS).sort(byCodePoints).join(", ");
}

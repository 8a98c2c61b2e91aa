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

// ---- arguments -----------------------------------------------------------------------------------

type Values = Readonly<Record<string, any>>;
/** What a checkpoint keeps of a setting; an error if it is none. */
type Check = (value: any, name: string) => Json;
/** The name of a setting, what it must be, and what it is if it is left out. */
type Row = readonly [name: string, check: Check, otherwise?: unknown];

function refuse(name: string, value: unknown, wanted: string): never {
  throw new ArgumentError(`${name} must be ${wanted}, not ${String(value)}`);
}

const whole =
  (least: number): Check =>
  (value, name) =>
    Number.isSafeInteger(value) && value >= least
      ? BigInt(value)
      : refuse(name, value, `a whole number of at least ${least}`);
const count = whole(0);
const positiveCount = whole(1);

const number =
  (isRight: (value: number) => boolean, wanted: string): Check =>
  (value, name) =>
    Number.isFinite(value) && isRight(value) ? value : refuse(name, value, wanted);
const notNegative = number((value) => value >= 0, "a number that is not negative");
const positive = number((value) => value > 0, "more than 0");
const rateOrNone: Check = (value, name) => (value === undefined ? null : notNegative(value, name));
const flag: Check = (value) => Boolean(value);
const choice =
  (...choices: readonly string[]): Check =>
  (value, name) =>
    choices.includes(value) ? value : refuse(name, value, `one of ${choices.join(", ")}`);

const rising: Check = (steps: readonly number[] | undefined, name) => {
  const isRising = steps?.every((step, i) => !i || step >= steps[i - 1]!);
  if (!steps?.length || !isRising) return refuse(name, steps, "numbers of steps in rising order");
  for (const step of steps) count(step, name);
  return steps.join(",");
};

/** The settings with what was left out. */
function complete(given: object, rows: readonly Row[]): Values {
  const entries = rows.map(([name, , otherwise]) => [name, (given as Values)[name] ?? otherwise]);
  return Object.fromEntries(entries) as Values;
}

/** The settings as checkpoints have them, which is as Python writes them. */
function savedSettings(values: Values, rows: readonly Row[]): JsonObject {
  const snake = (name: string): string => name.replace(/[A-Z]/g, (c) => `_${c.toLowerCase()}`);
  return new Map(rows.map(([name, check]) => [snake(name), check(values[name], name)]));
}

function savedNumber(saved: JsonObject, name: string): number {
  const value = saved.get(name);
  const found = typeof value === "bigint" ? Number(value) : value;
  if (!Number.isFinite(found)) {
    throw new CheckpointError(
      `the checkpoint has ${String(value)} as ${name} of a scheduler, where a number should be`,
    );
  }
  return found as number;
}

// ---- what all have in common ---------------------------------------------------------------------

const INITIAL = "initial_lr";

/** What all schedulers have in common. `kind` is the name in checkpoints and in `fit`. */
export abstract class LRScheduler {
  protected readonly values: Values;
  protected readonly settings: JsonObject;

  protected constructor(
    protected readonly optimizer: ScheduledOptimizer,
    readonly kind: string,
    given: object,
    rows: readonly Row[],
  ) {
    this.values = complete(given, rows);
    this.settings = savedSettings(this.values, rows);
  }

  /** Set the learning rate of the optimizer's next step. */
  abstract step(metric?: number): void;

  /** @internal What a checkpoint keeps of the scheduler. */
  state(): JsonObject {
    return new Map(this.settings);
  }

  /** The rate to start from. */
  get initialLr(): number {
    return Number(this.settings.get(INITIAL));
  }

  /** Join the optimizer; the saved state, if there is one of this kind. */
  protected join(): JsonObject | null {
    const saved = this.optimizer.attach(this);
    if (this.settings.get(INITIAL) === null) {
      // A scheduler that was made without a rate takes over the saved one.
      this.settings.set(
        INITIAL,
        saved ? savedNumber(saved, INITIAL) : this.optimizer.getLearningRate(),
      );
    }
    return saved;
  }

  /** Say which settings are not as saved, and return whether there are any. */
  protected warnOfChanges(saved: JsonObject): boolean {
    const plain = (value: Json | undefined): unknown =>
      typeof value === "bigint" ? Number(value) : value;
    const changed = [...this.settings].filter(
      ([key, value]) => plain(saved.get(key)) !== plain(value),
    );
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

/** What schedulers with a formula take beside their own settings. */
export interface FormulaSettings {
  /** The rate to start from; by default the optimizer's. */
  readonly initialLr?: number | undefined;
  /** The step of the optimizer at which the schedule begins. */
  readonly firstStep?: number | undefined;
}

/** A scheduler whose rate is a formula of the number of steps. */
export abstract class FormulaLRScheduler extends LRScheduler {
  protected constructor(
    optimizer: ScheduledOptimizer,
    kind: string,
    settings: object,
    rows: readonly Row[],
    private readonly rate: (step: number, settings: Values, initialLr: number) => number,
    check: (settings: Values, initialLr: number) => void = () => undefined,
  ) {
    super(optimizer, kind, settings, [...rows, ["initialLr", rateOrNone], ["firstStep", count, 0]]);
    check(this.values, 0);
    const saved = this.join();
    check(this.values, this.initialLr);
    if (!saved || this.warnOfChanges(saved)) {
      optimizer.initialLr = this.initialLr;
      this.step();
    }
  }

  /** The learning rate after `step` steps of the optimizer, in double precision. */
  learningRate(step: number): number {
    const { values, initialLr } = this;
    return this.rate(Math.max(0, step - values["firstStep"]), values, initialLr);
  }

  override step(): void {
    this.optimizer.setLearningRate(this.learningRate(this.optimizer.stepCount));
  }
}

const WARMUP: Row = ["warmupStepCount", count, 0];
const TOTAL: Row = ["totalStepCount", count];
const GAMMA: Row = ["gamma", positive, 0.1];
const EVERY: Row = ["every", positiveCount, 1];

/** The factor during the warm-up: from 0 to 1 in equal steps; null after it. */
function warmedUp(step: number, { warmupStepCount: warmup }: Values): number | null {
  return step < warmup ? step / Math.max(1, warmup) : null;
}

function requireRoom({ warmupStepCount: warmup, totalStepCount: total }: Values): void {
  if (warmup > total) {
    throw new ArgumentError(
      `warmupStepCount (${warmup}) is more than totalStepCount (${total}): the warm-up is a part of ` +
        "all steps",
    );
  }
}

// ---- the schedulers ------------------------------------------------------------------------------

export interface LinearSettings extends FormulaSettings {
  readonly warmupStepCount?: number | undefined;
  readonly totalStepCount: number;
}

/** From 0 to `initialLr` during the warm-up, then down to 0 in equal steps. */
export class LinearLRScheduler extends FormulaLRScheduler {
  constructor(optimizer: ScheduledOptimizer, settings: LinearSettings) {
    super(
      optimizer,
      "linear",
      settings,
      [WARMUP, TOTAL],
      (step, s, lr) =>
        lr *
        (warmedUp(step, s) ??
          Math.max(
            0,
            (s["totalStepCount"] - step) / Math.max(1, s["totalStepCount"] - s["warmupStepCount"]),
          )),
      requireRoom,
    );
  }
}

export interface ConstantSettings extends FormulaSettings {
  readonly warmupStepCount?: number | undefined;
}

/** From 0 to `initialLr` during the warm-up, and constant after it. */
export class ConstantLRScheduler extends FormulaLRScheduler {
  constructor(optimizer: ScheduledOptimizer, settings: ConstantSettings = {}) {
    super(
      optimizer,
      "constant",
      settings,
      [WARMUP],
      (step, s, lr) => lr * (warmedUp(step, s) ?? 1),
    );
  }
}

export interface CosineSettings extends LinearSettings {
  readonly minLr?: number | undefined;
  /** How many waves there are: half a wave, from the top to the bottom, is the default. */
  readonly cycles?: number | undefined;
}

/** From 0 to `initialLr` during the warm-up, then down to `minLr` along a cosine. */
export class CosineLRScheduler extends FormulaLRScheduler {
  constructor(optimizer: ScheduledOptimizer, settings: CosineSettings) {
    super(
      optimizer,
      "cosine",
      settings,
      [WARMUP, TOTAL, ["minLr", notNegative, 0], ["cycles", positive, 0.5]],
      (step, s, lr) => {
        const factor = warmedUp(step, s);
        if (factor !== null) return lr * factor;
        const warmup = s["warmupStepCount"];
        const falling = Math.max(1, s["totalStepCount"] - warmup);
        const progress = Math.min(1, (step - warmup) / falling);
        const wave = 0.5 * (1 + Math.cos(Math.PI * s["cycles"] * 2 * progress));
        return s["minLr"] + (lr - s["minLr"]) * Math.max(0, wave);
      },
      (s, lr) => {
        requireRoom(s);
        if (lr && s["minLr"] > lr) {
          throw new ArgumentError(`minLr (${s["minLr"]}) is more than the initial rate (${lr})`);
        }
      },
    );
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

const counted = (step: number, s: Values): number => Math.floor(step / s["every"]);

/** The rate times `gamma` each `stepSize`. */
export class StepLRScheduler extends FormulaLRScheduler {
  constructor(optimizer: ScheduledOptimizer, settings: StepSettings) {
    super(
      optimizer,
      "step",
      settings,
      [["stepSize", positiveCount], GAMMA, EVERY],
      (step, s, lr) => lr * s["gamma"] ** Math.floor(counted(step, s) / s["stepSize"]),
    );
  }
}

export interface MultiStepSettings extends EverySettings {
  /** Numbers of steps, in rising order. */
  readonly milestones: readonly number[];
}

/** The rate times `gamma` at each of the `milestones`. */
export class MultiStepLRScheduler extends FormulaLRScheduler {
  constructor(optimizer: ScheduledOptimizer, settings: MultiStepSettings) {
    super(
      optimizer,
      "multistep",
      settings,
      [["milestones", rising], GAMMA, EVERY],
      (step, s, lr) => {
        const passed = (s["milestones"] as number[]).filter((at) => at <= counted(step, s));
        return lr * s["gamma"] ** passed.length;
      },
    );
  }
}

export interface ExponentialSettings extends EverySettings {
  readonly gamma: number;
}

/** The rate times `gamma` at each step, or each `every` steps of the optimizer. */
export class ExponentialLRScheduler extends FormulaLRScheduler {
  constructor(optimizer: ScheduledOptimizer, settings: ExponentialSettings) {
    super(
      optimizer,
      "exponential",
      settings,
      [["gamma", positive], EVERY],
      (step, s, lr) => lr * s["gamma"] ** counted(step, s),
    );
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

const ONE_CYCLE: readonly Row[] = [
  ["maxLr", notNegative],
  ["totalStepCount", positiveCount],
  ["pctStart", notNegative, 0.3],
  ["annealStrategy", choice("cos", "linear"), "cos"],
  ["divFactor", positive, 25],
  ["finalDivFactor", positive, 1e4],
  ["threePhase", flag, false],
];

/** Up from `maxLr / divFactor` to `maxLr`, then down far below where it began. */
export class OneCycleLRScheduler extends FormulaLRScheduler {
  constructor(optimizer: ScheduledOptimizer, settings: OneCycleSettings) {
    const s = complete(settings, ONE_CYCLE);
    savedSettings(s, ONE_CYCLE); // what is wrong is wrong before it is computed with
    const { maxLr, totalStepCount: total, pctStart, threePhase } = s;
    const most = threePhase ? 0.5 : 1;
    if (pctStart > most) refuse("pctStart", pctStart, `at most ${most}`);
    const start = maxLr / s["divFactor"];
    const phases: [end: number, start: number, goal: number][] = [
      [pctStart * total - 1, start, maxLr],
      [total - 1, threePhase ? start : maxLr, start / s["finalDivFactor"]],
    ];
    if (threePhase) phases.splice(1, 0, [2 * pctStart * total - 2, maxLr, start]);
    const rate = (step: number): number => {
      const at = Math.min(step, total - 1);
      const index = phases.findIndex(([end], k) => at <= end || k === phases.length - 1);
      const begin = phases[index - 1]?.[0] ?? 0;
      const [end, from, goal] = phases[index]!;
      const progress = end > begin ? (at - begin) / (end - begin) : 1;
      if (s["annealStrategy"] === "linear") return from + (goal - from) * progress;
      return goal + ((from - goal) / 2) * (1 + Math.cos(Math.PI * progress));
    };
    super(optimizer, "onecycle", { ...settings, initialLr: start }, ONE_CYCLE, rate);
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
  private best: number | null = null;
  private badSteps = 0;
  private resting = 0;
  private rate = 0;

  constructor(optimizer: ScheduledOptimizer, settings: PlateauSettings = {}) {
    super(optimizer, "plateau", settings, [
      ["mode", choice("min", "max"), "min"],
      ["factor", number((value) => value > 0 && value < 1, "more than 0 and less than 1"), 0.1],
      ["patience", count, 10],
      ["threshold", notNegative, 1e-4],
      ["thresholdMode", choice("rel", "abs"), "rel"],
      ["cooldown", count, 0],
      ["minLr", notNegative, 0],
      ["eps", notNegative, 1e-8],
      ["initialLr", rateOrNone],
    ]);
    const saved = this.join();
    const isNewRate = saved && this.initialLr !== savedNumber(saved, INITIAL);
    if (!saved || (this.warnOfChanges(saved) && isNewRate)) {
      this.rate = optimizer.initialLr = this.initialLr;
      optimizer.setLearningRate(this.rate);
      return;
    }
    // Go on with what was counted; the rate is the optimizer's, which was restored.
    this.best = (saved.get("best") ?? null) === null ? null : savedNumber(saved, "best");
    this.badSteps = savedNumber(saved, "bad_steps");
    this.resting = savedNumber(saved, "resting");
    this.rate = savedNumber(saved, "rate");
  }

  get mode(): "min" | "max" {
    return this.values["mode"];
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
    if (this.badSteps > this.values["patience"]) {
      this.fall();
      this.resting = this.values["cooldown"];
      this.badSteps = 0;
    }
  }

  private isBetter(value: number): boolean {
    if (Number.isNaN(value)) return false;
    const isMin = this.mode === "min";
    if (this.best === null) return isMin ? value < Infinity : value > -Infinity;
    const by = (isMin ? -1 : 1) * this.values["threshold"];
    const isRelative = this.values["thresholdMode"] === "rel";
    const bound = isRelative ? this.best * (1 + by) : this.best + by;
    return isMin ? value < bound : value > bound;
  }

  private fall(): void {
    const current = this.optimizer.getLearningRate();
    // The optimizer's rate is rounded to 32 bits; unless somebody changed it, ours is exact.
    const size = Math.max(Math.abs(current), Math.abs(this.rate));
    if (Math.abs(current - this.rate) > 1e-6 * size) this.rate = current;
    const lower = Math.max(this.rate * this.values["factor"], this.values["minLr"]);
    if (this.rate - lower > this.values["eps"]) {
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

/** All schedulers by name, and those other than the linear one. */

import { ArgumentError } from "./errors.js";
import type { Json, JsonObject } from "./json.js";
import {
  type Check,
  complete,
  count,
  FormulaLRScheduler,
  type FormulaSettings,
  INITIAL,
  LinearLRScheduler,
  type LinearSettings,
  LRScheduler,
  notNegative,
  number,
  positive,
  positiveCount,
  rateOrNone,
  refuse,
  requireRoom,
  type Row,
  savedNumber,
  savedSettings,
  type ScheduledOptimizer,
  TOTAL,
  type Values,
  warmedUp,
  WARMUP,
} from "./scheduler-base.js";
import { byCodePoints } from "./text.js";

export {
  FormulaLRScheduler,
  type FormulaSettings,
  LinearLRScheduler,
  type LinearSettings,
  LRScheduler,
  type ScheduledOptimizer,
} from "./scheduler-base.js";

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

const GAMMA: Row = ["gamma", positive, 0.1];
const EVERY: Row = ["every", positiveCount, 1];


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
  /** The number of cosine waves; half a wave, from top to bottom, by default. */
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
  /** The number of optimizer steps per step of the schedule. */
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
  /** Numbers of steps, in ascending order. */
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
  /** The fraction of steps with a rising rate. */
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
 * Multiplies the rate by `factor` when a metric has not improved for `patience` steps.
 *
 * `step(metric)` is called after each evaluation.
 */
export class PlateauLRScheduler extends LRScheduler {
  private _best: number | null = null;
  private _badSteps = 0;
  private _resting = 0;
  private _rate = 0;

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
      this._rate = optimizer.initialLr = this.initialLr;
      optimizer.setLearningRate(this._rate);
      return;
    }
    // Go on with what was counted; the rate is the optimizer's, which was restored.
    this._best = (saved.get("best") ?? null) === null ? null : savedNumber(saved, "best");
    this._badSteps = savedNumber(saved, "bad_steps");
    this._resting = savedNumber(saved, "resting");
    this._rate = savedNumber(saved, "rate");
  }

  get mode(): "min" | "max" {
    return this.values["mode"];
  }

  override state(): JsonObject {
    return new Map<string, Json>([
      ...this.settings,
      ["best", this._best],
      ["bad_steps", BigInt(this._badSteps)],
      ["resting", BigInt(this._resting)],
      ["rate", this._rate],
    ]);
  }

  /** Record a metric; lower the rate if it has not improved for too long. */
  override step(metric?: number): void {
    if (typeof metric !== "number") {
      throw new ArgumentError("the scheduler 'plateau' is told the measure: step(metric)");
    }
    if (this._isBetter(metric)) {
      this._best = metric;
      this._badSteps = 0;
    } else this._badSteps += 1;
    if (this._resting > 0) {
      this._resting -= 1;
      this._badSteps = 0;
    }
    if (this._badSteps > this.values["patience"]) {
      this._fall();
      this._resting = this.values["cooldown"];
      this._badSteps = 0;
    }
  }

  private _isBetter(value: number): boolean {
    if (Number.isNaN(value)) return false;
    const isMin = this.mode === "min";
    if (this._best === null) return isMin ? value < Infinity : value > -Infinity;
    const by = (isMin ? -1 : 1) * this.values["threshold"];
    const isRelative = this.values["thresholdMode"] === "rel";
    const bound = isRelative ? this._best * (1 + by) : this._best + by;
    return isMin ? value < bound : value > bound;
  }

  private _fall(): void {
    const current = this.optimizer.getLearningRate();
    // The optimizer's rate is rounded to 32 bits; unless it was changed, ours is exact.
    const size = Math.max(Math.abs(current), Math.abs(this._rate));
    if (Math.abs(current - this._rate) > 1e-6 * size) this._rate = current;
    const lower = Math.max(this._rate * this.values["factor"], this.values["minLr"]);
    if (this._rate - lower > this.values["eps"]) {
      this._rate = lower;
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

/** @internal Whether this is a scheduler, and not the name or the settings of one. */
export function isScheduler(given: object | string): given is LRScheduler {
  return typeof given === "object" && "kind" in given && "step" in given;
}

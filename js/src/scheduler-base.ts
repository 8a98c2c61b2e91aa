/**
 * Learning-rate schedulers: the rate as a function of the optimizer's steps.
 *
 * A scheduler belongs to an optimizer. It sets the learning rate at once, and again at each
 * `step()`, which is called after each step of the optimizer. The step is the optimizer's, so a run
 * that was resumed continues where it was. The checkpoint holds the scheduler's state.
 */

import { ArgumentError, CheckpointError } from "./errors.js";
import type { Json, JsonObject } from "./json.js";

/** The part of an optimizer that a scheduler needs. */
export interface ScheduledOptimizer {
  initialLr: number;
  readonly stepCount: number;
  getLearningRate(): number;
  setLearningRate(learningRate: number): void;
  attach(scheduler: LRScheduler): JsonObject | null;
}

// ---- arguments -----------------------------------------------------------------------------------

export type Values = Readonly<Record<string, any>>;
/** A setting in the form of checkpoints; an error if it is invalid. */
export type Check = (value: any, name: string) => Json;
/** The name of a setting, its check, and its default. */
export type Row = readonly [name: string, check: Check, otherwise?: unknown];

export function refuse(name: string, value: unknown, wanted: string): never {
  throw new ArgumentError(`${name} must be ${wanted}, not ${String(value)}`);
}

const whole =
  (least: number): Check =>
  (value, name) =>
    Number.isSafeInteger(value) && value >= least
      ? BigInt(value)
      : refuse(name, value, `a whole number of at least ${least}`);
export const count = whole(0);
export const positiveCount = whole(1);

export const number =
  (isRight: (value: number) => boolean, wanted: string): Check =>
  (value, name) =>
    Number.isFinite(value) && isRight(value) ? value : refuse(name, value, wanted);
export const notNegative = number((value) => value >= 0, "a number that is not negative");
export const positive = number((value) => value > 0, "more than 0");
export const rateOrNone: Check = (value, name) => (value === undefined ? null : notNegative(value, name));
/** The settings with defaults. */
export function complete(given: object, rows: readonly Row[]): Values {
  const entries = rows.map(([name, , otherwise]) => [name, (given as Values)[name] ?? otherwise]);
  return Object.fromEntries(entries) as Values;
}

/** The settings as in checkpoints, with Python's names. */
export function savedSettings(values: Values, rows: readonly Row[]): JsonObject {
  const snake = (name: string): string => name.replace(/[A-Z]/g, (c) => `_${c.toLowerCase()}`);
  return new Map(rows.map(([name, check]) => [snake(name), check(values[name], name)]));
}

export function savedNumber(saved: JsonObject, name: string): number {
  const value = saved.get(name);
  const found = typeof value === "bigint" ? Number(value) : value;
  if (!Number.isFinite(found)) {
    throw new CheckpointError(
      `the checkpoint has ${String(value)} as ${name} of a scheduler, where a number should be`,
    );
  }
  return found as number;
}

// ---- base class ----------------------------------------------------------------------------------

export const INITIAL = "initial_lr";

/** The base class of schedulers. `kind` is the name in checkpoints and in `fit`. */
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

  /** The initial rate. */
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

  /** Warn about settings that differ from saved ones; return whether there are any. */
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

/** The common settings of schedulers with a formula. */
export interface FormulaSettings {
  /** The initial rate; the optimizer's by default. */
  readonly initialLr?: number | undefined;
  /** The step of the optimizer at which the schedule begins. */
  readonly firstStep?: number | undefined;
}

/** A scheduler whose rate is a function of the number of steps. */
export abstract class FormulaLRScheduler extends LRScheduler {
  protected constructor(
    optimizer: ScheduledOptimizer,
    kind: string,
    settings: object,
    rows: readonly Row[],
    private readonly _rate: (step: number, settings: Values, initialLr: number) => number,
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
    return this._rate(Math.max(0, step - values["firstStep"]), values, initialLr);
  }

  override step(): void {
    this.optimizer.setLearningRate(this.learningRate(this.optimizer.stepCount));
  }
}

export const WARMUP: Row = ["warmupStepCount", count, 0];
export const TOTAL: Row = ["totalStepCount", count];
/** The factor during the warm-up: from 0 to 1 in equal steps; null after it. */
export function warmedUp(step: number, { warmupStepCount: warmup }: Values): number | null {
  return step < warmup ? step / Math.max(1, warmup) : null;
}

export function requireRoom({ warmupStepCount: warmup, totalStepCount: total }: Values): void {
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

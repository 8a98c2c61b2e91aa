/** What a training run has come to: the loss of each step, the values of each epoch. */

/** One epoch: `steps` counts from the start of the run, `values` are the metrics. */
export interface EpochRecord {
  readonly epoch: number;
  readonly steps: number;
  readonly samples: number;
  readonly loss: number;
  readonly learningRate: number;
  readonly seconds: number;
  readonly values: Readonly<Record<string, number>>;
}

/**
 * The course of a run. A checkpoint keeps at most a thousand losses and epochs, evenly spread, and
 * the best and the last one.
 */
export interface History {
  /** The loss of each optimizer step. */
  readonly losses: number[];
  /** The step of each loss, from 1: each step, unless a run of more than 1,000 was resumed. */
  readonly lossSteps: number[];
  readonly epochs: EpochRecord[];
  /** Why the run ended early, if it did. */
  stopped: string;
  /** Whether the signal aborted it. */
  aborted: boolean;
  bestEpoch: number | null;
}

/** The number of optimizer steps of a run. */
export function stepsOf(history: History): number {
  return history.lossSteps.at(-1) ?? 0;
}

/** Of losses, and of epochs, in a checkpoint. */
const MOST = 1000;

/**
 * What a checkpoint keeps: multiples of a power of two, the best and the last. It is the same as if
 * a resumed run had not been interrupted, since the power of two only grows.
 */
export function thinned(history: History): Pick<History, "losses" | "lossSteps" | "epochs"> {
  const { losses, lossSteps, epochs } = history;
  // In a record of Python, a loss may be NaN.
  const isLower = (a: number, b: number): boolean => a < b || (Number.isNaN(b) && !Number.isNaN(a));
  const best = losses.reduce((low, loss, i) => (isLower(loss, losses[low]!) ? i : low), 0);
  const kept = spread(lossSteps, lossSteps[best]);
  const numbers = epochs.map(({ epoch }) => epoch);
  return {
    losses: kept.map((i) => losses[i]!),
    lossSteps: kept.map((i) => lossSteps[i]!),
    epochs: spread(numbers, history.bestEpoch).map((i) => epochs[i]!),
  };
}

/** Where the numbers to keep are. */
function spread(numbers: readonly number[], best: number | null | undefined): number[] {
  const last = numbers.at(-1) ?? 0;
  let stride = 1;
  while (Math.floor(last / stride) > MOST) stride *= 2;
  return [...numbers.keys()].filter((i) => {
    const number = numbers[i]!;
    return number % stride === 0 || number === best || number === last;
  });
}

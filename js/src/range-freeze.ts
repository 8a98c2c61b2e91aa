/**
 * The ranges of activations in a run: they follow training, and rest in its last quarter.
 *
 * So the last steps train for the very integers that will be exported. Whether ranges rest follows
 * from the position of the run, not from what the checkpoint holds: a resumed run goes on in the
 * same way, and a new one begins with ranges that move.
 */

import { zerosOf } from "./elements.js";
import { RANGE_MOMENTUM } from "./graph-signature.js";
import type { CheckpointState } from "./state.js";

/** The part of a run in which ranges move. */
const MOVING = 0.75;

export class RangeFreeze {
  private readonly _first: number;

  /** @param total the number of steps of the run; if it is null, ranges move to the end. */
  constructor(
    private readonly _state: CheckpointState,
    total: number | null,
  ) {
    this._first = total === null || !_state.has(RANGE_MOMENTUM) ? Infinity : MOVING * total;
  }

  /** Take a step after so many others; afterwards, the momentum is that of before. */
  async during<T>(step: number, run: () => Promise<T>): Promise<T> {
    if (step < this._first) return run();
    const momentum = this._state.variable(RANGE_MOMENTUM);
    await momentum.download();
    const before = momentum.array;
    momentum.assign(zerosOf(momentum.code, momentum.dims));
    try {
      return await run();
    } finally {
      momentum.assign(before);
    }
  }
}

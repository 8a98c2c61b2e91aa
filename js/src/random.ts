/**
 * Random numbers, the same in all languages: the seed of each step, the order of samples.
 *
 * Training graphs that draw random numbers (Dropout, for one) have the input `random_seed`: two
 * words, computed from a seed and the number of draws so far. Both are saved with the state of the
 * optimizer, so a resumed run draws what it would have drawn.
 */

import { ArgumentError } from "./errors.js";
import type { JsonObject } from "./json.js";

const MASK = (1n << 64n) - 1n;
const GOLDEN = 0x9e3779b97f4a7c15n;

let processSeed: bigint | null = null;
let timesSeeded = 0;

/** Set the seed of all randomness in training from now on. */
export function setSeed(seed: number | bigint): void {
  if (typeof seed !== "bigint" && !Number.isSafeInteger(seed)) {
    throw new ArgumentError(`a seed is an integer, not ${seed}`);
  }
  processSeed = BigInt(seed) & MASK;
  timesSeeded += 1;
}

/** The last seed of `setSeed`, or a new one. */
export function startingSeed(): bigint {
  return processSeed ?? crypto.getRandomValues(new BigUint64Array(1))[0]!;
}

/** A sequence of seeds, whose position can be saved. */
export class RandomState {
  private _seed: bigint;
  private _draws: bigint;
  private _seenSeeds = timesSeeded;

  constructor(saved?: JsonObject) {
    this._seed = saved ? (saved.get("seed") as bigint) & MASK : startingSeed();
    this._draws = saved ? (saved.get("draws") as bigint) : 0n;
  }

  /** The next seed, two words of 32 bits. */
  next(): Uint32Array {
    this._heedSetSeed();
    this._draws += 1n;
    const mixed = mix((this._seed + this._draws * GOLDEN) & MASK);
    return Uint32Array.of(Number(mixed & 0xffffffffn), Number(mixed >> 32n));
  }

  /** Take back the last draw: the run that it was for has changed nothing. */
  undo(): void {
    this._draws -= 1n;
  }

  saved(): JsonObject {
    this._heedSetSeed();
    return new Map([
      ["seed", this._seed],
      ["draws", this._draws],
    ]);
  }

  /** Restart if `setSeed` was called since. */
  private _heedSetSeed(): void {
    if (this._seenSeeds === timesSeeded) return;
    this._seenSeeds = timesSeeded;
    this._seed = startingSeed();
    this._draws = 0n;
  }
}

/** Spread the bits of a counter over a number of 64 bits. */
function mix(z: bigint): bigint {
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return z ^ (z >> 31n);
}

// ---- the order of samples ------------------------------------------------------------------------

const MASK_128 = (1n << 128n) - 1n;
const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

/**
 * The order of the samples in an epoch: that of numpy's PCG64 seeded with [seed, epoch], samples
 * sorted by its words. So a run can resume in another language.
 */
export function shuffled(samples: number, seed: bigint, epoch: number): Uint32Array {
  const words = randomWords([seed, BigInt(epoch)], samples);
  const order = Uint32Array.from({ length: samples }, (_, i) => i);
  return order.sort((a, b) => (words[a]! < words[b]! ? -1 : words[a]! > words[b]! ? 1 : a - b));
}

/** Words of numpy's PCG64, seeded with a few numbers. */
export function randomWords(entropy: readonly bigint[], count: number): BigUint64Array {
  const [stateHigh, stateLow, incHigh, incLow] = seedWords(entropy);
  const increment = ((((incHigh! << 64n) | incLow!) << 1n) | 1n) & MASK_128;
  const advance = (state: bigint): bigint => (state * MULTIPLIER + increment) & MASK_128;
  let state = advance((advance(0n) + ((stateHigh! << 64n) | stateLow!)) & MASK_128);
  const words = new BigUint64Array(count);
  for (let i = 0; i < count; i++) {
    state = advance(state);
    const folded = ((state >> 64n) ^ state) & MASK;
    const turn = state >> 122n;
    words[i] = ((folded >> turn) | (folded << (64n - turn))) & MASK;
  }
  return words;
}

/** numpy's SeedSequence: four words of 64 bits from a few numbers. */
function seedWords(entropy: readonly bigint[]): bigint[] {
  const given: number[] = [];
  for (let value of entropy) {
    do {
      given.push(Number(value & 0xffffffffn));
      value >>= 32n;
    } while (value > 0n);
  }
  let constant = 0x43b0d7e5;
  const hash = (value: number): number => {
    value = (value ^ constant) >>> 0;
    constant = Math.imul(constant, 0x931e8875) >>> 0;
    value = Math.imul(value, constant) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const blend = (x: number, y: number): number => {
    const mixed = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) >>> 0;
    return (mixed ^ (mixed >>> 16)) >>> 0;
  };
  const pool = Array.from({ length: 4 }, (_, i) => hash(given[i] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) {
      if (from !== to) pool[to] = blend(pool[to]!, hash(pool[from]!));
    }
  }
  for (const extra of given.slice(4)) {
    for (let to = 0; to < 4; to++) pool[to] = blend(pool[to]!, hash(extra));
  }
  let other = 0x8b51f9dd;
  const words = Array.from({ length: 8 }, (_, i) => {
    let value = (pool[i % 4]! ^ other) >>> 0;
    other = Math.imul(other, 0x58f38ded) >>> 0;
    value = Math.imul(value, other) >>> 0;
    return BigInt((value ^ (value >>> 16)) >>> 0);
  });
  return Array.from({ length: 4 }, (_, i) => words[2 * i]! | (words[2 * i + 1]! << 32n));
}

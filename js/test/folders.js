/** Where the tests find what they read. */

import { readFile } from "node:fs/promises";

export const golden = (name) => new URL(`./golden/${name}/`, import.meta.url);
export const python = (name) => new URL(`../../tests/golden/${name}/`, import.meta.url);

export async function bytes(folder, file) {
  return new Uint8Array(await readFile(new URL(file, folder)));
}

/** Numbers that look random and are the same each time. */
export function numbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

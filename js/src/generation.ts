/** The generation: what binds the graphs and the checkpoint of an artifact folder to each other. */

import { crc32 } from "./checksum.js";
import { CheckpointError, ModelError } from "./errors.js";
import type { ModelFile } from "./model-file.js";

/** The reserved property of a checkpoint that has it. */
export const GENERATION = "generation";

/** The format version in the metadata of the graphs. */
const FORMAT = 1;

/** An identifier, and the size and CRC-32 of each graph file. */
export interface Generation {
  readonly id: string;
  readonly digests: readonly (readonly [size: number, crc: number])[];
}

/** Read the property of an untrusted checkpoint. */
export function readGeneration(property: unknown): Generation | null {
  if (property === undefined) return null;
  try {
    const { id, files } = JSON.parse(property as string) as { id: unknown; files: object };
    const digests = Object.values(files) as [number, number][];
    if (
      typeof id === "string" &&
      /^[0-9a-f]{32}$/.test(id) &&
      digests.every((digest) => digest.length === 2 && digest.every(Number.isSafeInteger))
    ) {
      return { id, digests };
    }
  } catch {
    // It is damaged.
  }
  throw new CheckpointError(
    "the checkpoint holds a damaged record of the graphs that it belongs to",
  );
}

/**
 * Refuse a graph that was written with other files; return the generation of the graphs.
 *
 * `earlier` is that of the graphs so far, or "". Graphs and checkpoints of earlier versions and of
 * ONNX Runtime have none, and are taken with any.
 */
export function checkGeneration(model: ModelFile, held: Generation | null, earlier: string): string {
  const { format = FORMAT, generation: own = "" } = model.notes;
  if (format !== FORMAT) {
    throw new ModelError(
      `${model.source} is of format ${format}, and this version of onnxtrain knows format ` +
        `${FORMAT}: use a newer one`,
    );
  }
  const expected = held?.id ?? earlier;
  if (!own || !expected) return own || earlier;
  if (own !== expected) {
    throw new CheckpointError(
      `${model.source} is of generation ${own.slice(0, 8)}, and ` +
        `${held ? "the checkpoint is" : "the other graphs are"} of ${expected.slice(0, 8)}: they ` +
        "do not belong together. Use files that one run of prepare wrote. A checkpoint can be taken " +
        "to other graphs with `state.generation = null`.",
    );
  }
  const { data } = model;
  const digests = held?.digests ?? [];
  const sum = digests.length ? crc32(data) : 0;
  if (digests.length && !digests.some(([size, crc]) => size === data.length && crc === sum)) {
    throw new ModelError(
      `${model.source} is damaged: its size or checksum is not the one that the checkpoint has for ` +
        "it. Copy it anew. If you changed it on purpose, set `state.generation = null`.",
    );
  }
  return own;
}

/**
 * Goes on with a run, and prints its losses as JSON:
 * `node leg.js FOLDER CHECKPOINT EXPORTED START STOP` saves to the checkpoint, and exports.
 */

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

import { TrainingSession } from "../dist/index.js";
import { batch } from "./golden.js";
import { node } from "./runtimes.js";

const [path, file, exported, start, stop] = process.argv.slice(2);
const folder = pathToFileURL(`${path}/`);
const expected = JSON.parse(readFileSync(new URL("expected.json", folder), "utf-8"));
const session = await TrainingSession.fromFolder({ ort: await node(), folder, checkpoint: file });
const losses = [];
for (let step = Number(start); step < Number(stop); step++) {
  losses.push((await session.step(batch(step, expected))).loss);
}
writeFileSync(file, await session.saveCheckpoint());
writeFileSync(exported, await session.exportModelForInferencing(["y"]));
await session.release();
console.log(JSON.stringify(losses));

// A classifier of movements that learns how one person moves: node examples/node/personalise.mjs
import { writeFile } from "node:fs/promises";
import ort from "onnxruntime-node";
import { evaluate, fit, TrainingSession } from "onnxtrain";

// This person: slower than most, and with the phone in another pocket, so that the axes are swapped.
const ACTIVITIES = [[0.3, [0.1, 0.1, 0.1]], [1.4, [1.1, 0.5, 0.4]], [2.2, [2.0, 0.9, 0.9]], [1.0, [0.9, 0.3, 0.8]]];
function record(count) {
  const [window, labels] = [new Float32Array(count * 3 * 64), []];
  for (let i = 0; i < count; i++) {
    const [rhythm, strength] = ACTIVITIES[labels[i] = i % 4];
    for (let axis = 0, phase = 7 * Math.random(); axis < 3; axis++, phase += 2) for (let t = 0; t < 64; t++) {
      const wave = Math.sin((2 * Math.PI * rhythm * t) / 32 + phase);
      window[(3 * i + axis) * 64 + t] = strength[axis] * wave + 0.3 * (Math.random() - 0.5);
    }
  }
  return { arrays: { window, labels } };
}

const session = await TrainingSession.fromFolder({ ort, folder: new URL("model", import.meta.url) });
const [lessons, others] = [record(40), record(400)]; // forty windows that the person has labelled
const before = await evaluate(session, others, { metrics: ["accuracy"] });

session.setLearningRate(0.005);
const history = await fit(session, lessons, { epochs: 30, batchSize: 8, scheduler: "cosine" });
const after = await evaluate(session, others, { metrics: ["accuracy"] });
console.log(`${history.losses.length} steps; right before: ${before.accuracy}, after: ${after.accuracy}`);

const folder = new URL(process.argv[2] ? `file://${process.argv[2]}/` : "./", import.meta.url);
await writeFile(new URL("mine.checkpoint", folder), await session.saveCheckpoint()); // to go on from
await writeFile(new URL("mine.onnx", folder), await session.exportModelForInferencing(["scores"])); // to use

/** Not run: that this compiles shows that the types fit those of onnxruntime's packages. */

import * as node from "onnxruntime-node";
import * as web from "onnxruntime-web";

import {
  CheckpointState,
  connect,
  fit,
  type History,
  LinearLRScheduler,
  TrainingSession,
  type WorkerSession,
} from "../dist/index.js";

export async function train(): Promise<History> {
  const checkpointState = await CheckpointState.load(new Uint8Array());
  const sources = {
    checkpointState,
    trainModel: "training_model.onnx",
    optimizerModel: new Uint8Array(),
  };
  const session = await TrainingSession.create(
    { ort: web, ...sources },
    { executionProviders: ["wasm"] },
  );
  await TrainingSession.create({ ort: node, ...sources });
  await TrainingSession.fromFolder({ ort: node, folder: new URL("file:///artifacts") });
  const input = new web.Tensor("float32", new Float32Array(4), [1, 4]);
  await session.runTrainStep({ input, labels: [1] });
  const { loss, outputs } = await session.step([input, BigInt64Array.of(1n)]);
  console.log(loss, outputs["output"]?.dims, session.state.parameters.get("w").data.length);
  if (session.optimizer) new LinearLRScheduler(session.optimizer, { totalStepCount: 10 });
  return fit(
    session,
    { arrays: { input, labels: [0] } },
    {
      epochs: 2,
      scheduler: { name: "cosine", warmupStepCount: 1 },
      onProgress: (event) => event.type === "step" && console.log(event.loss),
    },
  );
}

export function inWorker(): Promise<WorkerSession> {
  return connect(new Worker("worker.js", { type: "module" }), { folder: "artifacts" });
}

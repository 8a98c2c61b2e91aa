"""A script written for onnxruntime-training 1.19."""

import numpy as np
import onnx
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

model = onnx.load("digits.onnx")
weights = [tensor.name for tensor in model.graph.initializer]
artifacts.generate_artifacts(
    model,
    requires_grad=[name for name in weights if name.startswith("fc")],
    frozen_params=[name for name in weights if not name.startswith("fc")],
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="artifacts",
)

state = CheckpointState.load_checkpoint("artifacts/checkpoint")
module = Module("artifacts/training_model.onnx", state, "artifacts/eval_model.onnx")
optimizer = Optimizer("artifacts/optimizer_model.onnx", module)
optimizer.set_learning_rate(2e-3)
scheduler = LinearLRScheduler(optimizer, 0, 84, 2e-3)

data = np.load("digits.npz")
module.train()
for epoch in range(3):
    for start in range(0, 1400, 50):
        batch = slice(start, start + 50)
        loss = module(data["images"][batch], data["labels"][batch])
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    print(f"epoch {epoch + 1}: loss of the last batch {loss:.4f}")

module.eval()
print(f"loss on unseen digits {module(data['images'][1400:], data['labels'][1400:]):.4f}")
CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
module.export_model_for_inferencing("trained.onnx", ["scores"])

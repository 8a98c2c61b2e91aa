"""The MNIST notebook, on the device: train, evaluate, save, export, infer."""

import json

import numpy as np
import onnxruntime.training.api as orttraining
from onnxruntime import InferenceSession
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

rng = np.random.default_rng(0)
prototypes = rng.standard_normal((10, 784)).astype(np.float32)


def loader(batches):
    for _ in range(batches):
        target = rng.integers(0, 10, 64)
        noise = 2 * rng.standard_normal((64, 784)).astype(np.float32)
        yield prototypes[target] + noise, target


state = CheckpointState.load_checkpoint("checkpoint")
model = Module("training_model.onnx", state, "eval_model.onnx")
optimizer = Optimizer("optimizer_model.onnx", model)
scheduler = LinearLRScheduler(optimizer, 5, 100, 0.002)


def train_epoch():
    model.train()
    losses = []
    for data, target in loader(15):
        train_loss, _ = model(data, target)
        optimizer.step()
        scheduler.step()
        model.lazy_reset_grad()
        losses.append(float(train_loss))
    return sum(losses) / len(losses)


def test_epoch():
    model.eval()
    losses, right = [], 0
    for data, target in loader(4):
        test_loss, logits = model(data, target)
        losses.append(float(test_loss))
        right += int((np.argmax(logits, axis=1) == target).sum())
    return sum(losses) / len(losses), right / 256


history = [train_epoch() for _ in range(3)]
test_loss, accuracy = test_epoch()

state.properties["epochs"] = 3
CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
model.export_model_for_inferencing("inference_model.onnx", ["output"])
session = InferenceSession("inference_model.onnx", providers=["CPUExecutionProvider"])
data, target = next(loader(1))
predicted = np.argmax(session.run(["output"], {"input": data})[0], axis=1)

again = CheckpointState.load_checkpoint("trained")
print(
    json.dumps(
        {
            "history": history,
            "test_loss": test_loss,
            "accuracy": accuracy,
            "exported": float((predicted == target).mean()),
            "parameters": sorted(name for name, _ in again.parameters),
            "epochs": again.properties["epochs"],
            "sizes": [model.get_parameters_size(), model.get_parameters_size(False)],
            "module": orttraining.__name__,
        }
    )
)

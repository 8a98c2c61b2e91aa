"""The whole life of a model on a device, in an environment with nothing but the package.

    whole_life.py <folder> <name of the output>

The folder has artifacts and `data.npz` with the inputs by name. Loads, trains, evaluates, saves,
resumes, exports and infers; answers with a line of JSON.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

import onnxtrain
from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer, TrainingSession

FORBIDDEN = ("onnx", "onnx_ir", "torch", "google.protobuf", "onnxscript")
STEPS = 12


def parts(data, step, size=4):
    """A batch, by names."""
    count = len(next(iter(data.values())))
    rows = np.arange(step * size, (step + 1) * size) % count
    return {name: array[rows] for name, array in data.items()}


def digest(state: CheckpointState) -> str:
    return hashlib.sha256(state.to_bytes(include_optimizer_state=True)).hexdigest()


def by_parts(folder: Path, data) -> float:
    """The classes of upstream: module, optimizer, scheduler."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    scheduler = LinearLRScheduler(optimizer, 1, STEPS, 0.01)
    for step in range(3):
        module.train()
        module(**parts(data, step))
        optimizer.step()
        module.lazy_reset_grad()
        scheduler.step()
    return float(module.eval()(**parts(data, 0))[0])


def by_session(folder: Path, data, output: str) -> dict:
    """The session: trained, saved and resumed in the middle, exported, and run without us."""
    onnxtrain.set_seed(1)
    session = TrainingSession.from_folder(folder)
    session.set_learning_rate(0.005)
    whole = {name: array[:8] for name, array in data.items()}
    before = float(session.eval_step(**whole)[0])
    losses = [float(session.step(**parts(data, step))[0]) for step in range(STEPS // 2)]
    session.save_checkpoint(folder / "halfway")
    resumed = TrainingSession.from_folder(folder, checkpoint=folder / "halfway")
    for step in range(STEPS // 2, STEPS):
        losses.append(float(session.step(**parts(data, step))[0]))
        assert losses[-1] == float(resumed.step(**parts(data, step))[0])
    assert digest(session.state) == digest(resumed.state)
    loss, scores = resumed.eval_step(**whole)
    resumed.export_model_for_inferencing(folder / "inference.onnx", [output])
    model = ort.InferenceSession(folder / "inference.onnx", providers=["CPUExecutionProvider"])
    name = model.get_inputs()[0].name
    (inferred,) = model.run([output], {name: whole[name]})
    np.testing.assert_allclose(inferred, scores, rtol=1e-4, atol=1e-5)
    return {
        "before": before,
        "after": float(loss),
        "losses": losses,
        "digest": digest(session.state),
    }


def by_loop(folder: Path, data) -> list[float]:
    """The loop, which shuffles, evaluates and saves."""
    onnxtrain.set_seed(2)
    session = TrainingSession.from_folder(folder)
    arrays = tuple(data[name] for name in session.input_names())
    history = onnxtrain.fit(
        session, arrays, epochs=2, batch_size=4, validation=arrays, metrics=["accuracy"],
        callbacks=onnxtrain.SaveCheckpoint(folder / "fitted"), progress=False, seed=3,
    )  # fmt: skip
    return [float(loss) for loss in history.losses]


def live(folder: Path, output: str) -> dict:
    with np.load(folder / "data.npz") as stored:
        data = dict(stored)
    found = by_session(folder, data, output)
    found["by parts"] = by_parts(folder, data)
    found["by the loop"] = by_loop(folder, data)
    return found


if __name__ == "__main__":
    answer = live(Path(sys.argv[1]), sys.argv[2])
    answer["imported"] = [name for name in FORBIDDEN if name in sys.modules]
    answer["package"] = onnxtrain.__file__
    print(json.dumps(answer))

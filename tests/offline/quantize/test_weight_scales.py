"""Scales of 4-bit weights: of least error in the weights, or in what a layer puts out."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.passes.quantize.patches import sample_inputs
from onnxtrain.offline.passes.quantize.places import find_places
from onnxtrain.offline.quantize import as_quantize

RNG = np.random.default_rng(0)
X = np.maximum(RNG.normal(0.5, 1, size=(32, 6, 9, 8)), 0).astype(np.float32)  # as behind a Relu
CONVOLUTIONS = {
    "plain": {},
    "strides and padding": {"strides": [2, 1], "pads": [1, 0, 2, 1]},
    "dilations": {"dilations": [2, 3]},
    "groups": {"group": 2, "pads": [1, 1, 1, 1]},
    "depthwise": {"group": 6, "pads": [1, 1, 1, 1]},
}


def network(outputs: int = 12, **how: object):
    weight = RNG.standard_t(3, size=(outputs, 6 // int(how.get("group", 1)), 3, 2)).astype("f4")
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], **how),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("Gemm", ["f", "v", "d"], ["y"], transB=1),
        ],
        "graph",
        [helper.make_tensor_value_info("x", 1, ["n", 6, 9, 8])],
        [helper.make_tensor_value_info("y", 1, ["n", 5])],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(RNG.normal(size=outputs).astype("f4"), "b"),
            numpy_helper.from_array(RNG.standard_t(3, size=(5, outputs)).astype("f4"), "v"),
            numpy_helper.from_array(np.zeros(5, np.float32), "d"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("how", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_samples_are_windows_of_the_convolution(how) -> None:
    given = canonical_model(network(**how))
    settings = as_quantize("int4-weights")
    layers = find_places(given, ["y"], settings).layers
    samples = sample_inputs(given, layers, [X[:16], X[16:]])
    windows, rows = (samples[layer.node] for layer in layers)
    weight = torch.tensor(layers[0].weight.const_value.numpy())
    pads = how.get("pads", [0, 0, 0, 0])
    wide = torch.nn.functional.pad(torch.tensor(X), (pads[1], pads[3], pads[0], pads[2]))
    whole = torch.nn.functional.conv2d(
        wide, weight, stride=how.get("strides", 1), dilation=how.get("dilations", 1),
        groups=how.get("group", 1),
    )  # fmt: skip
    found = torch.nn.functional.conv2d(
        torch.tensor(windows), weight, groups=how.get("group", 1)
    ).flatten(1)
    known = {tuple(np.round(v, 2)) for v in whole.movedim(1, -1).reshape(-1, 12).numpy()}
    assert found.shape == (2048, 12) and rows.shape == (2048, 12)
    hits = [tuple(np.round(v, 2)) in known for v in found.numpy()]
    assert np.mean(hits) > 0.9  # but for what rounding separates


@pytest.mark.parametrize("how", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_calibration_lowers_the_error_of_the_output(how, tmp_path) -> None:
    given = network(**how)
    wanted = run(given, X)
    errors, means = [], []
    for number, data in enumerate((None, [X])):
        folder = tmp_path / str(number)
        onnxtrain.prepare(given, folder, quantize="int4-weights", calibration=data)
        session = onnxtrain.TrainingSession(folder)
        session.export_model_for_inferencing(folder / "int4.onnx", ["y"])
        change = run(str(folder / "int4.onnx"), X) - wanted
        errors.append(np.square(change).mean())
        means.append(np.abs(change.mean(0)).max())
    assert errors[1] < 0.7 * errors[0]
    assert means[1] < 0.7 * means[0]


def run(model, x):
    given = model if isinstance(model, str) else model.SerializeToString()
    session = ort.InferenceSession(given, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]

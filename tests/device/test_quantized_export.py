"""Models that train for integers are exported as integers, which onnxruntime computes first."""

import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx_bytes import FLOAT, graph, model, node, tensor, value
from small_runs import open_module, open_session, samples

from onnxtrain.device.export import fold
from onnxtrain.device.export.inference_model import export_model
from onnxtrain.device.export.layout import stored_data
from onnxtrain.device.export.model_parts import take_apart
from onnxtrain.device.loop import evaluate, fit
from onnxtrain.errors import ModelError, OnnxTrainError, StateError
from onnxtrain.format.checkpoint.content import RawTensor
from onnxtrain.format.model.file import ModelFile, read_value_type
from onnxtrain.format.model.tensor import read_tensor_type
from onnxtrain.format.model.wire import Reader, bytes_field, number_field, text_field

INT8, INT32 = 3, 6
WEIGHTS = ("conv1.weight", "conv2.weight", "fc.weight")
X = samples(40, "int8", seed=7)[0]


@pytest.fixture(scope="module")
def trained():
    session = open_session("int8", learning_rate=0.01)
    fit(session, samples(24, "int8"), 2, batch_size=4, progress=False, seed=2)
    return session


def export(session, names=("output",), target=None, **options):
    return session.export_model_for_inferencing(target, list(names), **options)


def run(source, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    source = str(source) if isinstance(source, Path) else source
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    feeds = {i.name: X for i in session.get_inputs()}
    return session.run(None, feeds)


def tensors_in(source) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The element types and shapes of the initializers of a model, by name."""
    reader, parts = Reader("model"), take_apart(ModelFile.read(source))
    return {n: tuple(read_tensor_type(reader, d, n)) for n, d in parts.initializers.items()}


def levels(array, scale, axis=0):
    """An array as 8-bit integers."""
    scale = scale.reshape([-1 if a == axis else 1 for a in range(array.ndim)])
    return np.clip(np.rint(array / scale), -128, 127).astype(np.int8)


def test_evaluation_rounds_as_the_exported_model(trained) -> None:
    labels = samples(40, "int8", seed=7)[1]
    scores = trained.predict(X)
    found = evaluate(trained, (X, labels), ["accuracy"])
    assert found["accuracy"] == pytest.approx((scores.argmax(1) == labels).mean())
    np.testing.assert_allclose(run(export(trained))[0], scores, atol=1e-6)


def test_the_model_has_integers_and_no_copy_of_floats(trained) -> None:
    made = export(trained)
    held = tensors_in(made)
    assert not {*WEIGHTS, "quantization.ranges", "quantization.momentum"} & held.keys()
    assert not any(name.endswith(".bias") for name in held)
    stored = stored_data(ModelFile.read(made), held)
    for name in WEIGHTS:
        weight = trained.get_parameter(name)
        assert held[f"{name}_quantized"] == (INT8, weight.shape)
        scale = np.frombuffer(stored[f"{name}_scale"], np.float32)
        largest = np.abs(weight.reshape(len(weight), -1)).max(1)
        np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
        integers = np.frombuffer(stored[f"{name}_quantized"], np.int8).reshape(weight.shape)
        np.testing.assert_array_equal(integers, levels(weight, scale))
    biases = [kind for name, kind in held.items() if name.endswith("bias_quantized")]
    assert [code for code, _ in biases] == [INT32] * 3
    # Nothing quantizes weights any more: what is left reads the input of the model.
    nodes = take_apart(ModelFile.read(made)).nodes
    made_by_nodes = {name for n in nodes for name in n.outputs}
    for n in nodes:
        if {call.name for call in n.calls} != {"DequantizeLinear"}:
            assert n.reads & (made_by_nodes | {"input"}), n.outputs


def test_twice_is_the_same(trained) -> None:
    assert export(trained) == export(trained)


def test_parts_are_computed_as_the_whole(trained, monkeypatch) -> None:
    whole = export(trained)
    for size in (0, 200, 3000):
        monkeypatch.setattr(fold, "_PART", size)
        assert export(trained) == whole
    monkeypatch.setattr(fold, "MAX_FILE_SIZE", 100)
    with pytest.raises(OnnxTrainError, match=r"computed from .* bytes: layers of more than 100"):
        export(trained)


def test_tensors_in_a_file_of_their_own(trained, tmp_path) -> None:
    module, path = trained.module, tmp_path / "m.onnx"
    held = {name: module.training_state.held(name) for name in module.training_state.names()}
    source = module.evaluation_executor.graph.model
    export_model(source, ["output"], held, path, external_data_threshold=0)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert "conv2.weight_quantized" in ModelFile.read(path).external
    np.testing.assert_array_equal(run(path)[0], run(export(trained))[0])


@pytest.mark.parametrize("options", [{"optimize": True}, {"format": "ort"}], ids=str)
def test_optimised_and_in_the_ort_format(trained, tmp_path, options) -> None:
    name = "m.ort" if "format" in options else "m.onnx"
    export(trained, target=tmp_path / name, **options)
    np.testing.assert_allclose(run(tmp_path / name)[0], run(export(trained))[0], atol=1e-5)
    if name == "m.onnx":  # onnxruntime has not turned weights into floats again
        held = tensors_in(tmp_path / name)
        assert {f"{w}_quantized" for w in WEIGHTS} <= held.keys()
        floats = [n for n, (code, dims) in held.items() if code == FLOAT and len(dims) > 1]
        assert not floats


def test_both_optimised_in_the_ort_format(trained, tmp_path) -> None:
    export(trained, target=tmp_path / "m.ort", optimize=True, format="ort")
    found, wanted = run(tmp_path / "m.ort")[0], run(export(trained))[0]
    assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.9


def test_any_value_can_be_an_output(trained) -> None:
    names = ["g", "output", "fc.weight_quantized", "fc.weight_scale", "fc.weight", "fc.bias_scale"]
    made = export(trained, names)
    found = dict(zip(names, run(made), strict=True))
    weight = trained.get_parameter("fc.weight")
    np.testing.assert_array_equal(found["fc.weight"], weight)
    np.testing.assert_array_equal(
        found["fc.weight_quantized"], levels(weight, found["fc.weight_scale"])
    )
    np.testing.assert_array_equal(found["output"], run(export(trained))[0])
    assert found["g"].shape == (40, 8, 1, 1)
    parts = take_apart(ModelFile.read(made))
    types = [read_value_type(Reader("m"), data, "output") for data in parts.outputs.values()]
    assert [(t.element_type, t.dims) for t in types[1:4]] == [
        (FLOAT, ("N", 3)), (INT8, (3, 8)), (FLOAT, (3,)),
    ]  # fmt: skip
    # A value before the integers needs no input, and no integers.
    only = export(trained, ["fc.weight_scale"])
    assert ModelFile.read(only).inputs == () and ModelFile.read(only).node_count == 0
    np.testing.assert_array_equal(run(only)[0], found["fc.weight_scale"])


def test_a_nominal_checkpoint_has_nothing_to_export() -> None:
    with pytest.raises(StateError, match="load the"):
        open_module("int8", "nominal_checkpoint").export_model_for_inferencing(None, ["output"])


def test_the_ort_format_has_no_integers_of_4_bits(tmp_path) -> None:
    body = graph([node("Cast", ["h"], ["y"], to=1)], [value("h", 22, [3])], [value("y", FLOAT)])
    values = {"h": RawTensor(22, (3,), np.array([0x21, 0x03], np.uint8))}
    with pytest.raises(OnnxTrainError, match="no 4-bit integers: export in the format 'onnx'"):
        export_model(ModelFile.read(model(body)), ["y"], values, tmp_path / "m.ort", format="ort")


def test_nothing_is_behind_an_odd_number_of_narrow_integers() -> None:
    zero = number_field(2, 22) + text_field(8, "zero") + bytes_field(9, b"\0")
    body = graph(
        [
            node("QuantizeLinear", ["w", "s", "zero"], ["q"]),
            node("DequantizeLinear", ["q", "s", "zero"], ["y"]),
        ],
        [value("w", FLOAT, [3])],
        [value("y", FLOAT, [3])],
        [zero, tensor("s", np.array(1, np.float32))],
    )
    source = model(body, {"format": 1, "trainable": ["w"], "folded": ["q"]}, {"": 21})
    for _ in range(9):  # onnxruntime leaves the last half of a byte as it was in memory
        made = export_model(ModelFile.read(source), ["y"], {"w": np.array([1, -2, 3], "f4")})
        assert bytes(stored_data(ModelFile.read(made), ["q"])["q"]) == b"\xe1\x03"


def test_the_size_is_a_quarter() -> None:
    weight = np.random.default_rng(0).normal(size=(64, 1000)).astype(np.float32)
    source = model(
        graph(
            [
                node("Mul", ["s", "one"], ["scale"]),
                node("QuantizeLinear", ["w", "scale", "zero"], ["q"], axis=0),
                node("DequantizeLinear", ["q", "scale", "zero"], ["d"], axis=0),
                node("MatMul", ["x", "d"], ["y"]),
            ],
            [value("x", FLOAT, ["n", 64]), value("w", FLOAT, [64, 1000]), value("s", FLOAT, [64])],
            [value("y", FLOAT, ["n", 1000])],
            [tensor("zero", np.zeros(64, np.int8)), tensor("one", np.ones(1, np.float32))],
        ),
        {"format": 1, "trainable": ["w", "s"], "folded": ["scale", "q"]},
    )
    values = {"w": weight, "s": np.abs(weight).max(1) / 127}
    made = export_model(ModelFile.read(source), ["y"], values)
    assert weight.nbytes / 4 < len(made) < weight.nbytes / 4 + 1000


# ---- metadata that are not to be trusted ---------------------------------------------------------


def listed(*names, nodes=()):
    body = graph(
        [node("Abs", ["w"], ["a"]), node("Add", ["x", "a"], ["y"]), *nodes],
        [value("x", FLOAT, [2]), value("w", FLOAT, [2])],
        [value("y", FLOAT, [2])],
        [tensor("k", np.ones(2, np.float32))],
    )
    return ModelFile.read(model(body, {"format": 1, "trainable": ["w"], "folded": list(names)}))


W = {"w": np.array([-1, 2], np.float32)}


def test_what_is_listed_is_computed_once() -> None:
    for names in (["a"], ["a", "a"], ["a", "w", "k"]):  # parameters and constants are computed
        made = ModelFile.read(export_model(listed(*names), ["y"], W))
        assert (made.node_count, made.initializer_names) == (1, ("a",))
        assert bytes(stored_data(made, ["a"])["a"]) == np.array([1, 2], np.float32).tobytes()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", "nothing"], "lists 'nothing' among what to compute before export .* no such value"),
        ([""], "no such value"),
        (["a", "y"], "lists 'y' among what depends on parameters alone .* on the input 'x'"),
    ],
)
def test_wrong_lists_are_refused(names, text) -> None:
    with pytest.raises(ModelError, match=text):
        export_model(listed(*names), ["y"], W)


def test_a_cycle_is_refused() -> None:
    round_trip = [node("Add", ["w", "d"], ["c"]), node("Neg", ["c"], ["d"])]
    with pytest.raises(ModelError, match="the graph has a cycle"):
        export_model(listed("c", "d", nodes=round_trip), ["c"], W)


def test_what_onnxruntime_cannot_compute_is_told() -> None:
    wrong = [node("Reshape", ["w", "w"], ["r"]), node("Add", ["x", "r"], ["z"])]
    with pytest.raises(OnnxTrainError, match="onnxruntime could not quantize the parameters"):
        export_model(listed("r", nodes=wrong), ["z"], W)


def test_a_node_with_two_results_is_computed_as_a_whole() -> None:
    nodes = [
        node("Split", ["w"], ["s", "t"], num_outputs=2),
        node("Concat", ["t", "x"], ["z"], axis=0),
        node("Neg", ["s"], ["n"]),
    ]
    made = export_model(listed("s", nodes=nodes), ["z", "n"], W)
    read = ModelFile.read(made)
    assert (read.node_count, read.initializer_names) == (2, ("s", "t"))

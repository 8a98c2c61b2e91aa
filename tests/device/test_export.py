"""Export for inference: what is kept, what is written, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx_bytes import (
    BOOL,
    FLOAT,
    INT64,
    evaluated,
    evaluation_model,
    evaluation_values,
    external,
    graph,
    model,
    node,
    tensor,
    value,
)

from onnxtrain.device.export.inference_model import export_model
from onnxtrain.device.export.layout import stored_data
from onnxtrain.errors import (
    ArgumentError,
    CheckpointError,
    ModelError,
    OnnxTrainError,
    StateError,
    UnknownNameError,
)
from onnxtrain.format.checkpoint.content import RawTensor
from onnxtrain.format.metadata import GraphMetadata
from onnxtrain.format.model.file import ModelFile, ValueType
from onnxtrain.format.model.wire import bytes_field, number_field, text_field

HERE = Path(__file__).resolve().parent
EXTERNAL = {"external_data_threshold": 0}


def export(names, target=None, source=None, values=None, **options):
    read = ModelFile.read(evaluation_model() if source is None else source)
    given = evaluation_values() if values is None else values
    return export_model(read, names, given, target, **options)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal((5, n), np.float32) for name, n in (("x", 4), ("target", 3))}


def run(source, feeds=None) -> list[np.ndarray]:
    """Load the model as anybody would, and feed what it asks for."""
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    given = batch() if feeds is None else feeds
    return session.run(None, {i.name: given[i.name] for i in session.get_inputs()})


def names(values) -> list[str]:
    return [v.name for v in values]


# ---- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "inputs", "initializers"),
    [
        (["scores"], ["x"], ["mean", "w", "b", "table"]),
        (["scaled"], ["x"], ["mean", "w", "b", "table", "small"]),
        (["loss"], ["x", "target"], ["mean", "w", "b", "table", "small", "two"]),
        (["error", "looked up"], ["x", "target"], ["mean", "w", "b", "table", "small"]),
        (["aside"], ["x"], ["table"]),
        (["x", "aside"], ["x"], ["table"]),
        (["w"], [], ["w"]),
        (["table", "mean"], [], ["table", "mean"]),
    ],
)
def test_any_value_of_the_graph(outputs, inputs, initializers) -> None:
    made = export(outputs)
    read = ModelFile.read(made)
    assert names(read.outputs) == outputs
    assert names(read.inputs) == inputs
    assert sorted(read.initializer_names) == sorted(initializers)
    assert (read.external, read.metadata, read.opsets) == ({}, GraphMetadata(), {"": 18})
    wanted = evaluated(outputs, **batch())
    for found, expected in zip(run(made), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_types_stay_and_missing_ones_are_found() -> None:
    read = ModelFile.read(export(["scores", "error", "scaled", "loss", "b", "table"]))
    assert read.outputs == (
        ValueType("scores", FLOAT, ("batch", 3)),
        ValueType("error", FLOAT, ("batch", 3)),  # the model has the type without a shape,
        ValueType("scaled", FLOAT, ("batch", 3)),  # and of this one nothing
        ValueType("loss", FLOAT, ()),
        ValueType("b", FLOAT, (3,)),
        ValueType("table", FLOAT, (4, 6)),
    )


def test_a_scalar_and_an_unknown_shape_are_told_apart() -> None:
    nodes = [node("ReduceSum", ["x"], ["sum"], keepdims=0), node("Reshape", ["x", "s"], ["y"])]
    inputs = [value("x", FLOAT, [4]), value("s", INT64, None)]
    source = model(graph(nodes, inputs, [value("z", FLOAT)]))
    read = ModelFile.read(export(["sum", "y"], source=source, values={}))
    assert read.outputs == (ValueType("sum", FLOAT, ()), ValueType("y", FLOAT, None))


def test_a_sequence_as_output() -> None:
    nodes = [node("SequenceConstruct", ["x", "x"], ["s"]), node("Relu", ["x"], ["y"])]
    source = model(graph(nodes, [value("x", FLOAT, [2])], [value("y", FLOAT)]))
    (found,) = run(export(["s"], source=source), {"x": np.ones(2, np.float32)})
    assert [list(item) for item in found] == [[1, 1], [1, 1]]


def test_the_current_values_are_exported() -> None:
    values = evaluation_values()
    values["small"] = np.array([1, 2, 3], np.float32)  # differs from what is in the file
    values["w"] = np.asfortranarray(values["w"] + 1)
    read = ModelFile.read(export(["scaled"], values=values))
    stored = stored_data(read, read.initializer_names)
    for name in ("small", "w", "b", "mean", "table"):
        assert bytes(stored[name]) == values[name].tobytes(), name


def test_nodes_and_constants_are_copied_byte_for_byte() -> None:
    made = export(["loss"])
    for piece in (
        node("MatMul", ["centred", "w"], ["product"]),
        node("ReduceMean", ["squares"], ["loss"], keepdims=0),
        tensor("two", np.array(2, np.float32)),
        value("x", FLOAT, ["batch", 4]),
    ):
        assert made.count(piece) == 1


def test_other_metadata_stay() -> None:
    body = graph([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])])
    made = export(["y"], source=model(body, {"format": 1}, metadata={"author": "me"}))
    assert ModelFile.read(made).metadata == GraphMetadata()
    assert b"author" in made and b"onnxtrain" not in made


def branch(name: str, *nodes: bytes) -> bytes:
    return graph(nodes, outputs=[value(name, FLOAT, [2])], name=name)


def nested_ifs() -> bytes:
    """The value `outer` and the parameter `p` are read two bodies deep and nowhere else."""
    inner = branch("z", node("Add", ["outer", "p"], ["z"]))
    other = branch("z2", node("Neg", ["x"], ["z2"]))
    chosen = node("If", ["c"], ["chosen"], then_branch=inner, else_branch=other)
    middle = branch("chosen", chosen)
    last = branch("k", node("Identity", ["k0"], ["k"]))
    nodes = [
        node("Relu", ["x"], ["outer"]),
        node("Relu", ["q"], ["unused"]),
        node("If", ["c"], ["y"], then_branch=middle, else_branch=last),
    ]
    inputs = [value(name, FLOAT, [2]) for name in ("x", "p", "q", "k0")]
    inputs.append(value("c", BOOL, []))
    return model(graph(nodes, inputs, [value("y", FLOAT, [2])]))


def test_bodies_read_values_of_the_graphs_around_them() -> None:
    values = {name: np.full(2, i, np.float32) for i, name in enumerate(("p", "q", "k0"))}
    made = export(["y"], source=nested_ifs(), values=values)
    read = ModelFile.read(made)
    assert names(read.inputs) == ["x", "c"]
    assert set(read.initializer_names) == {"p", "k0"}
    assert read.node_count == 2
    x = np.array([-1, 1], np.float32)
    for taken, wanted in ((True, [0, 1]), (False, [2, 2])):
        (found,) = run(made, {"x": x, "c": np.array(taken)})
        assert found.tolist() == wanted


def test_values_within_a_body_cannot_be_outputs() -> None:
    with pytest.raises(UnknownNameError, match="'z2'"):
        export(["z2"], source=nested_ifs(), values={})


def function(name: str, *nodes: bytes) -> bytes:
    message = text_field(1, name) + text_field(4, "a") + text_field(5, "r")
    message += b"".join(bytes_field(7, item) for item in nodes)
    imports = b"".join(
        bytes_field(9, text_field(1, domain) + number_field(2, version))
        for domain, version in (("", 18), ("mine", 1))
    )
    return message + imports + text_field(10, "mine")


def test_functions_and_imports_that_are_needed_stay() -> None:
    functions = [
        function("Outer", node("Inner", ["a"], ["r"], domain="mine")),
        function("Inner", node("Neg", ["a"], ["r"])),
        function("Other", node("Abs", ["a"], ["r"])),
    ]
    nodes = [
        node("Outer", ["x"], ["y"], domain="mine"),
        node("Other", ["x"], ["z"], domain="mine"),
        node("Relu", ["x"], ["r"], domain="ai.onnx"),
    ]
    outputs = [value(name, FLOAT, [2]) for name in "yzr"]
    imports = {"": 18, "mine": 1, "ai.onnx.ml": 3}
    source = model(graph(nodes, [value("x", FLOAT, [2])], outputs), None, imports, functions)
    made = export(["y"], source=source)
    assert [made.count(f) for f in functions] == [1, 1, 0]
    assert ModelFile.read(made).opsets == {"": 18, "mine": 1}
    assert run(made, {"x": np.ones(2, np.float32)})[0].tolist() == [-1, -1]
    plain = export(["r"], source=source)
    assert not any(plain.count(f) for f in functions)
    assert ModelFile.read(plain).opsets == {"": 18}


def test_nodes_in_any_order_come_out_in_order() -> None:
    nodes = [node("Neg", ["a"], ["y"]), node("Relu", ["x"], ["a"])]
    source = model(graph(nodes, [value("x", FLOAT, [1])], [value("y", FLOAT, [1])]))
    made = export(["y"], source=source)
    assert made.index(nodes[1]) < made.index(nodes[0])


def test_types_beyond_numpy_and_texts() -> None:
    half = RawTensor(16, (2,), np.frombuffer(np.array([0x3F80, 0x4000], "<u2").tobytes(), "u1"))
    texts = np.array(["a", "é"], object)
    initializers = [external("text", 1, [1], location="f")]
    inputs = [value("h", 16, [2]), value("t", 8, [2]), value("empty", FLOAT, [0, 3])]
    body = graph([node("Cast", ["h"], ["y"], to=1)], inputs, [value("y", FLOAT, [2])], initializers)
    values = {"h": half, "t": texts, "empty": np.zeros((0, 3), np.float32)}
    made = export(["y", "t", "empty"], source=model(body), values=values)
    y, t, empty = run(made)
    assert (y.tolist(), t.tolist(), empty.shape) == ([1, 2], ["a", "é"], (0, 3))


def test_an_initializer_that_is_an_input_too_stays_both() -> None:
    body = graph(
        [node("Add", ["x", "k"], ["y"])],
        [value("x", FLOAT, [2]), value("k", FLOAT, [2])],
        [value("y", FLOAT, [2])],
        [tensor("k", np.ones(2, np.float32))],
    )
    read = ModelFile.read(export(["y"], source=model(body), values={}))
    assert (names(read.inputs), read.initializer_names) == (["x", "k"], ("k",))
    given = {"k": np.zeros(2, np.float32)}
    read = ModelFile.read(export(["y"], source=model(body), values=given))
    assert (names(read.inputs), read.initializer_names) == (["x"], ("k",))
    assert bytes(stored_data(read, ["k"])["k"]) == bytes(8)


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_or_its_bytes(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.onnx").write_bytes(evaluation_model())
    made = export(["scores"])
    for source in ("eval.onnx", Path("eval.onnx"), evaluation_model()):
        assert export(["scores"], "out.onnx", source) is None  # a name without a directory
        assert (tmp_path / "out.onnx").read_bytes() == made
    assert sorted(os.listdir()) == ["eval.onnx", "out.onnx"]


def test_large_models_have_their_tensors_beside_them(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    for _ in range(2):  # the second time there are files to replace
        export(["scaled"], path, **EXTERNAL)
        assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
        read = ModelFile.read(path)
        # Tensors of less than 64 bytes stay inside.
        assert {t.name: t.offset for t in read.external.values()} == {"w": 0, "table": 128}
        assert {t.location for t in read.external.values()} == {"m.onnx.data"}
        np.testing.assert_array_equal(run(path)[0], run(export(["scaled"]))[0])


def test_the_threshold_counts_tensors(tmp_path) -> None:
    size = 4 * (6 * 3 + 3 + 6 + 4 * 6)
    export(["scores"], tmp_path / "inside.onnx", external_data_threshold=size + 1)
    export(["scores"], tmp_path / "outside.onnx", external_data_threshold=size)
    assert sorted(os.listdir(tmp_path)) == ["inside.onnx", "outside.onnx", "outside.onnx.data"]


def test_large_tensors_begin_at_a_page(tmp_path) -> None:
    values = {"p": np.ones(17, np.float32), "q": np.ones(1 << 18, np.float32)}
    inputs = [value(name, FLOAT, [len(array)]) for name, array in values.items()]
    body = graph([node("Concat", ["p", "q"], ["y"], axis=0)], inputs, [value("y", FLOAT)])
    export(["y"], tmp_path / "m.onnx", model(body), values, **EXTERNAL)
    read = ModelFile.read(tmp_path / "m.onnx")
    assert [t.offset for t in read.external.values()] == [0, 4096]
    assert run(tmp_path / "m.onnx", {})[0].sum() == 17 + (1 << 18)


def test_external_tensors_that_are_no_parameters_come_from_their_file(tmp_path) -> None:
    (tmp_path / "eval.onnx").write_bytes(evaluation_model(location="w.bin", offset=4))
    table = evaluation_values().pop("table")
    values = {n: v for n, v in evaluation_values().items() if n != "table"}
    with pytest.raises(ModelError, match=r"there is no model at .*w\.bin"):
        export(["aside"], source=tmp_path / "eval.onnx", values=values)
    (tmp_path / "w.bin").write_bytes(b"1234" + table.tobytes())
    made = export(["aside"], source=tmp_path / "eval.onnx", values=values)
    assert made == export(["aside"])
    (tmp_path / "w.bin").write_bytes(table.tobytes())
    with pytest.raises(ModelError, match=r"ends at byte 100 of w\.bin, which is shorter"):
        export(["aside"], source=tmp_path / "eval.onnx", values=values)
    with pytest.raises(ModelError, match="a model in memory"):
        export(["aside"], values=values)


@pytest.mark.parametrize("options", [{}, EXTERNAL], ids=["inside", "external"])
def test_optimised(tmp_path, options) -> None:
    rng = np.random.default_rng(0)
    shapes = {"k": [8, 3, 3, 3], "scale": [8], "shift": [8], "mean": [8], "var": [8]}
    values = {name: rng.uniform(0.5, 1, dims).astype("f4") for name, dims in shapes.items()}
    body = graph(
        [
            node("Conv", ["x", "k"], ["a"]),
            node("BatchNormalization", ["a", "scale", "shift", "mean", "var"], ["b"]),
            node("Identity", ["b"], ["c"]),
            node("Relu", ["c"], ["y"]),
        ],
        [value("x", FLOAT, ["n", 3, 8, 8]), *(value(n, FLOAT, d) for n, d in shapes.items())],
        [value("y", FLOAT, ["n", 8, 6, 6])],
    )
    feeds = {"x": rng.standard_normal((2, 3, 8, 8), np.float32)}
    path = tmp_path / "m.onnx"
    export(["y"], path, model(body), values, optimize=True, **options)
    read = ModelFile.read(path)
    assert read.node_count == 2  # Conv and Relu
    assert read.opsets == {"": 18}
    assert read.outputs == (ValueType("y", FLOAT, ("n", 8, 6, 6)),)
    assert bool(read.external) == bool(options)
    assert sorted(os.listdir(tmp_path)) == sorted(
        {"m.onnx"} | ({"m.onnx.data"} if options else set())
    )
    plain = run(export(["y"], source=model(body), values=values), feeds)
    np.testing.assert_allclose(run(path, feeds)[0], plain[0], rtol=1e-5, atol=1e-6)
    if not options:
        made = export(["y"], source=model(body), values=values, optimize=True)
        np.testing.assert_array_equal(run(made, feeds)[0], run(path, feeds)[0])


@pytest.mark.parametrize("options", [{}, EXTERNAL], ids=["inside", "external"])
@pytest.mark.parametrize("optimize", [False, True])
def test_the_ort_format(tmp_path, optimize, options) -> None:
    path = tmp_path / "m.ort"
    export(["scaled"], path, format="ort", optimize=optimize, **options)
    assert os.listdir(tmp_path) == ["m.ort"]
    assert ModelFile.read(path).is_ort
    made = export(["scaled"], format="ort", optimize=optimize)
    wanted = run(export(["scaled"]))[0]
    for source in (path, made):
        np.testing.assert_allclose(run(source)[0], wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(ModelError, match=r"in the ORT format.*pass the \.onnx"):
        export(["scaled"], source=path)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "kind", "complaint"),
    [
        ([], ArgumentError, "empty"),
        ("scores", ArgumentError, "list of names, not 'scores'"),
        ([1], ArgumentError, "list of names"),
        (["scores", "scores"], ArgumentError, "twice"),
        (["scorse"], UnknownNameError, "no value 'scorse'; near are 'scores'"),
        (["scores", "zzz"], UnknownNameError, "no value 'zzz'; its outputs are 'loss'"),
        ([""], UnknownNameError, "no value ''"),
    ],
)
def test_wrong_outputs(tmp_path, outputs, kind, complaint) -> None:
    with pytest.raises(kind, match=complaint):
        export(outputs, tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


W = np.zeros((6, 3), np.float32)


@pytest.mark.parametrize(
    ("wrong", "kind", "complaint"),
    [
        pytest.param(None, CheckpointError, "no value for the parameter 'w'", id="missing"),
        pytest.param(W.T, CheckpointError, r"shape \(3, 6\) and .*\(6, 3\)", id="transposed"),
        pytest.param(W[None], CheckpointError, r"\(1, 6, 3\) and .*\(6, 3\)", id="rank"),
        pytest.param(W.astype(float), CheckpointError, "DOUBLE of .* wants FLOAT", id="type"),
        pytest.param([1.0], CheckpointError, "'w': list is not", id="list"),
        pytest.param(
            RawTensor(1, (6, 3), np.zeros(0, "u1")), StateError,
            "Please load the model parameters first", id="nominal",
        ),
    ],
)  # fmt: skip
def test_wrong_values(tmp_path, wrong, kind, complaint) -> None:
    values = {**evaluation_values(), "w": wrong}
    if wrong is None:
        del values["w"]
    with pytest.raises(kind, match=complaint):
        export(["scores"], tmp_path / "m.onnx", values=values)
    assert os.listdir(tmp_path) == []
    # What the outputs do not need may be missing or wrong.
    assert export(["aside"], values=values) is not None


def test_a_frozen_parameter_of_another_model() -> None:
    values = {**evaluation_values(), "small": np.zeros(4, np.float32)}
    with pytest.raises(CheckpointError, match="'small' is FLOAT of shape"):
        export(["scaled"], values=values)


def test_wrong_targets(tmp_path) -> None:
    folder = tmp_path / "artifacts"
    folder.mkdir()
    source = folder / "eval.onnx"
    source.write_bytes(evaluation_model())
    (folder / "checkpoint").write_bytes(b"precious")
    for target, options, complaint in (
        (tmp_path / "missing" / "m.onnx", {}, "there is no directory"),
        (folder, {}, "is a directory"),
        (source, {}, "is what training reads"),
        (folder / "checkpoint", {}, "is what training reads"),
        (tmp_path / "m.ort", {}, "say format='ort'"),
        (tmp_path / "m.onnx", {"format": "ort"}, "ends in .ort"),
        (tmp_path / "m.onnx", {"format": "tflite"}, "not 'tflite'"),
    ):
        with pytest.raises(OnnxTrainError, match=complaint):
            export(["scores"], target, source, **options)
    assert os.listdir(tmp_path) == ["artifacts"]
    assert source.read_bytes() == evaluation_model()


def test_what_is_too_large_for_one_file_is_refused_at_once(tmp_path) -> None:
    count = (1 << 29) + 1
    values = {"p": np.zeros(count, np.float32)}  # takes no memory until somebody looks at it
    body = graph([node("Relu", ["p"], ["y"])], [value("p", FLOAT, [count])], [value("y", FLOAT)])
    with pytest.raises(OnnxTrainError, match="without other files holds less than 2,147,483,647"):
        export(["y"], source=model(body), values=values)
    with pytest.raises(OnnxTrainError, match="the ORT format holds less than"):
        export(["y"], tmp_path / "m.ort", model(body), values, format="ort")
    assert os.listdir(tmp_path) == []


def test_operators_that_onnxruntime_does_not_know(tmp_path) -> None:
    nodes = [node("Magic", ["x"], ["a"], domain="mine"), node("Relu", ["a"], ["y"])]
    body = graph(nodes, [value("x", FLOAT, [1])], [value("y", FLOAT)])
    source = model(body, opsets={"": 18, "mine": 1})
    # Its type is known.
    read = ModelFile.read(export(["y"], source=source))
    assert (read.opsets, read.outputs) == ({"": 18, "mine": 1}, (ValueType("y", FLOAT, None),))
    with pytest.raises(ModelError, match="does not say of which type 'a' is"):
        export(["a"], source=source)
    for options in ({"optimize": True}, {"format": "ort"}):
        with pytest.raises(OnnxTrainError, match="onnxruntime could not"):
            export(["y"], source=source, **options)
        with pytest.raises(OnnxTrainError, match="onnxruntime could not"):
            target = tmp_path / ("m.ort" if "format" in options else "m.onnx")
            export(["y"], target, source, **options)
    assert os.listdir(tmp_path) == []


NO_ONNX = """
import sys
sys.path.insert(0, sys.argv[1])
import test_export as t
t.run(t.export(["scores"]))
t.export(["scores"], optimize=True)
print([m for m in ("onnx", "google.protobuf", "torch", "flatbuffers") if m in sys.modules])
"""


def test_neither_onnx_nor_protobuf_is_imported() -> None:
    result = subprocess.run(
        [sys.executable, "-c", NO_ONNX, str(HERE)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_integers_of_the_right_kind() -> None:
    """An index that trains nobody, but is in the checkpoint."""
    body = graph(
        [node("Gather", ["x", "at"], ["y"], axis=0)],
        [value("x", FLOAT, [3]), value("at", INT64, [2])],
        [value("y", FLOAT, [2])],
    )
    made = export(["y"], source=model(body), values={"at": np.array([2, 0])})
    assert run(made, {"x": np.arange(3, dtype=np.float32)})[0].tolist() == [2, 0]

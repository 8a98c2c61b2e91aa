"""Models exported from real artifacts: equal to the evaluation graph, valid, and complete.

`onnx` is the second opinion here; the export itself does without.
"""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from exporting import export as export_torch
from graphs import model, value
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.device.export.inference_model import export_model
from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.checkpoint.file import read_checkpoint
from onnxtrain.format.model.file import ModelFile
from zoo import NETWORKS


class Dropping(nn.Sequential):
    """What behaves differently in training."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(144, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 5),
        )  # fmt: skip


CASES = {
    "MLP": NETWORKS["MLP"],
    "Dropping": (Dropping, lambda batch: torch.randn(batch, 3, 8, 8)),
    "Bert": NETWORKS["FreshBert"],
    "ResNet18": NETWORKS["ResNet18"],
    "MobileNetV2": NETWORKS["MobileNetV2"],
    "LSTM": NETWORKS["BidirectionalLSTM"],
}


class Case:
    """An artifact folder with the parameters of a device that has trained a bit."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        make, sample = CASES[name]
        net = make().train(name == "Dropping")
        x = sample(3)
        exported = export_torch(net, x, "torchscript")
        lists = {}
        if name == "MobileNetV2":
            head = [t.name for t in exported.graph.initializer if "classifier" in t.name]
            rest = {t.name for t in exported.graph.initializer} - set(head)
            lists = {"requires_grad": head, "frozen_params": sorted(rest)}
        generate_artifacts(exported, loss=LossType.MSELoss, artifact_directory=folder, **lists)
        self.path = folder / "eval_model.onnx"
        self.file = ModelFile.read(self.path)
        self.proto = onnx.load(self.path, load_external_data=False)
        content = read_checkpoint(folder / "checkpoint")
        self.values = {n: np.array(v) for n, v in {**content.trainable, **content.frozen}.items()}
        for parameter in content.trainable:
            self.values[parameter] *= np.float32(1.25)
        with torch.no_grad():
            target = net(x).numpy() + 1
        self.feeds = {"x": x.numpy(), "target": target}

    def evaluate(self, names: list[str], plain: bool) -> list[np.ndarray]:
        """Run the evaluation graph, with these values as outputs."""
        types = {v.name: v for v in (*self.proto.graph.output, *self.proto.graph.value_info)}
        changed = onnx.ModelProto()
        changed.CopyFrom(self.proto)
        del changed.graph.output[:]
        changed.graph.output.extend(types[name] for name in names)
        path = self.path.with_name("changed.onnx")
        path.write_bytes(changed.SerializeToString())
        return run(path, {**self.values, **self.feeds}, plain)


def run(source, feeds, plain: bool) -> list[np.ndarray]:
    options = ort.SessionOptions()
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("artifacts"))


def computed(proto: onnx.ModelProto) -> list[str]:
    return [name for node in proto.graph.node for name in node.output if name]


def test_every_value_equals_that_of_the_evaluation_graph_to_the_bit(case) -> None:
    """In sessions that run both alike: what is constant, as weights are in one of them only, they
    would otherwise fold into its neighbours and store in another order, which rounds otherwise.
    """
    names = computed(case.proto)
    made = export_model(case.file, names, case.values)
    onnx.checker.check_model(made, full_check=True)
    for name, found, wanted in zip(
        names, run(made, case.feeds, True), case.evaluate(names, True), strict=True
    ):
        assert found.tobytes() == wanted.tobytes() and found.shape == wanted.shape, name


@pytest.mark.parametrize("options", [{}, {"optimize": True}], ids=["plain", "optimised"])
def test_the_output_of_the_user_s_model(case, tmp_path, options) -> None:
    path = tmp_path / "m.onnx"
    export_model(case.file, ["y"], case.values, path, **options)
    onnx.checker.check_model(str(path), full_check=True)
    made = onnx.load(path)
    assert [i.name for i in made.graph.input] == ["x"]
    assert [o.name for o in made.graph.output] == ["y"]
    assert {o.domain for o in made.opset_import} == {""}
    keys = [entry.key for entry in made.metadata_props]
    assert keys in ([], ["onnxtrain.activation"])
    (wanted,) = case.evaluate(["y"], False)
    (found,) = run(path, case.feeds, False)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_only_what_the_output_needs_is_there(case) -> None:
    """By another way to find out: onnx's own extraction of a part of a model."""
    made = onnx.load_from_string(export_model(case.file, ["y"], case.values))
    given = [i.name for i in case.proto.graph.input if i.name not in ("target",)]
    wanted = onnx.utils.Extractor(case.proto).extract_model(given, ["y"])
    assert [n.SerializeToString() for n in made.graph.node] == [
        n.SerializeToString() for n in wanted.graph.node
    ]
    read = {name for node in made.graph.node for name in node.input}
    assert {t.name for t in made.graph.initializer} == read - set(computed(made)) - {"", "x"}
    for tensor in made.graph.initializer:
        if tensor.name in case.values:
            array = numpy_helper.to_array(tensor)
            np.testing.assert_array_equal(array, case.values[tensor.name])


def test_external_data(case, tmp_path) -> None:
    path = tmp_path / "m.onnx"
    export_model(case.file, ["y"], case.values, path, external_data_threshold=0)
    onnx.checker.check_model(str(path), full_check=True)
    whole = onnx.load(path)
    inside = onnx.load_from_string(export_model(case.file, ["y"], case.values))
    arrays = [
        {t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (whole, inside)
    ]
    assert arrays[0].keys() == arrays[1].keys()
    for name, array in arrays[0].items():
        np.testing.assert_array_equal(array, arrays[1][name])
    assert run(path, case.feeds, True)[0].tobytes() == case.evaluate(["y"], True)[0].tobytes()


def test_nothing_is_left_of_training_mode(case) -> None:
    made = onnx.load_from_string(export_model(case.file, ["y"], case.values))
    for node in made.graph.node:
        if node.op_type == "Dropout":
            assert len(node.input) < 3 or not node.input[2]
        if node.op_type == "BatchNormalization":
            mode = {a.name: a.i for a in node.attribute}.get("training_mode", 0)
            assert mode == 0 and len(node.output) == 1
    first, second = (run(made.SerializeToString(), case.feeds, False)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_flipped_bits_of_real_files_agree_with_protobuf(case) -> None:
    """A broken file is refused; what is read of it is what protobuf reads."""
    rng = random.Random(7)
    original = case.path.read_bytes()
    agreed = 0
    for _ in range(60):
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            read = ModelFile.read(bytes(data))
        except OnnxTrainError:
            continue
        with contextlib.suppress(OnnxTrainError):
            export_model(read, [read.outputs[0].name], case.values)
        try:
            proto = onnx.load_from_string(bytes(data))
        except Exception:  # what is not looked at may be broken
            continue
        agreed += 1
        assert [i.name for i in read.inputs] == [i.name for i in proto.graph.input]
        assert [o.name for o in read.outputs] == [o.name for o in proto.graph.output]
        assert list(read.initializer_names) == [t.name for t in proto.graph.initializer]
        assert read.node_count == len(proto.graph.node)
        assert read.ir_version == proto.ir_version
    assert agreed > 10


def test_types_that_the_graph_does_not_state(case, tmp_path) -> None:
    """Without any type of a value in between, the outputs get one that the checker accepts."""
    bare = onnx.ModelProto()
    bare.CopyFrom(case.proto)
    del bare.graph.value_info[:]
    names = computed(bare)
    made = export_model(ModelFile.read(bare.SerializeToString()), names, case.values)
    onnx.checker.check_model(made, full_check=True)
    kinds = {v.name: v.type.tensor_type.elem_type for v in case.proto.graph.value_info}
    for output in onnx.load_from_string(made).graph.output:
        assert output.type.tensor_type.elem_type == kinds.get(output.name, TensorProto.FLOAT)


def test_bodies_of_loops_and_scans(tmp_path) -> None:
    """Values of the graph around are read by name from within; the result is checked by onnx."""
    body = helper.make_graph(
        [helper.make_node("Mul", ["row", "weight"], ["part"]),
         helper.make_node("Add", ["sum", "part"], ["next"]),
         helper.make_node("Add", ["next", "shift"], ["out"])],
        "body", [value("sum", [2]), value("row", [2])], [value("next", [2]), value("out", [2])],
    )  # fmt: skip
    proto = model(
        [helper.make_node("Neg", ["bias"], ["shift"]),
         helper.make_node("Scan", ["start", "x"], ["last", "all"], body=body, num_scan_inputs=1),
         helper.make_node("ReduceSum", ["all"], ["loss"], keepdims=0),
         helper.make_node("Abs", ["other"], ["apart"])],
        [value("x", ["n", 2]), value("weight", [2]), value("bias", [2]), value("other", [2])],
        [value("loss", [])],
        {"start": np.zeros(2, np.float32)},
    )  # fmt: skip
    onnx.checker.check_model(proto, full_check=True)
    values = {n: np.array([i, 2], np.float32) for i, n in enumerate(("weight", "bias", "other"))}
    made = export_model(ModelFile.read(proto.SerializeToString()), ["all"], values)
    onnx.checker.check_model(made, full_check=True)
    assert {t.name for t in onnx.load_from_string(made).graph.initializer} == {
        "weight", "bias", "start",
    }  # fmt: skip
    x = np.array([[1, 2], [3, 4]], np.float32)
    wanted = np.cumsum(x * values["weight"], 0) - values["bias"]
    np.testing.assert_array_equal(run(made, {"x": x}, False)[0], wanted)


def test_sparse_initializers_and_quantization_notes_go_with_their_values() -> None:
    proto = model(
        [helper.make_node("Add", ["x", "sparse"], ["y"]), helper.make_node("Neg", ["k"], ["z"])],
        [value("x", [3]), value("k", [3])],
        [value("y", [3]), value("z", [3])],
    )
    entries = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    places = numpy_helper.from_array(np.array([1]), "places")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(entries, places, [3]))
    for name in ("x", "k"):
        proto.graph.quantization_annotation.add(tensor_name=name)
    read = ModelFile.read(proto.SerializeToString())
    made = onnx.load_from_string(export_model(read, ["y"], {}))
    assert len(made.graph.sparse_initializer) == 1
    assert [q.tensor_name for q in made.graph.quantization_annotation] == ["x"]
    found = run(made.SerializeToString(), {"x": np.zeros(3, np.float32)}, False)
    assert found[0].tolist() == [0, 1, 0]
    assert not onnx.load_from_string(export_model(read, ["z"], {})).graph.sparse_initializer

"""Files that a model names and that are not its own: never read, wherever the model names them."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from graphs import model, value
from onnxtrain.errors import OnnxTrainError

SECRET = np.array([[7.25, -3.5], [9.125, 1], [2, 3]], np.float32)
node = helper.make_node
CALLS: dict[str, Callable] = {
    "prepare": lambda given, out: onnxtrain.prepare(given, out, loss="mse", optimizer="sgd"),
    "dynamic-batch": lambda given, out: onnxtrain.prepare(
        given, out, loss="mse", dynamic_batch=True),
    "classes": lambda given, out: onnxtrain.prepare(given, out, classes=4, after="y"),
    "gradient": lambda given, _: onnxtrain.gradient(given, "x"),
    "inspect": lambda given, _: onnxtrain.inspect(given),
    "loss": lambda given, out: onnxtrain.prepare(plain(), out, loss=given, of="p"),
}  # fmt: skip


def plain() -> onnx.ModelProto:
    w = np.ones((3, 2), np.float32)
    nodes = [node("MatMul", ["x", "k"], ["p"])]
    return model(nodes, [value("x", [2, 3])], [value("p", [2, 2])], {"k": w})


def naming(where: str, location: str) -> onnx.ModelProto:
    """y = x (w + s), where s is in a file: an initializer, in an attribute, body or function."""
    s = TensorProto(name="s", data_type=1, dims=[3, 2], data_location=TensorProto.EXTERNAL)
    s.external_data.add(key="location", value=location)
    add, read = node("Add", ["w", "s"], ["v"]), node("Constant", [], ["s"], value=s)
    inputs = [value("x", [2, 3])]
    nodes = [add]
    if where == "attribute":
        nodes = [read, add]
    elif where == "function":
        nodes = [node("F", ["w"], ["v"], domain="my")]
    elif where == "body":
        bodies = {
            name: helper.make_graph([add], name, [], [value("v", [3, 2])], [s])
            for name in ("then_branch", "else_branch")
        }
        nodes, inputs = [node("If", ["c"], ["v"], **bodies)], [*inputs, value("c", [], 9)]
    made = model(
        [*nodes, node("MatMul", ["x", "v"], ["y"])], inputs, [value("y", [2, 2])],
        {"w": np.ones((3, 2), np.float32)}, domains=["my"],
    )  # fmt: skip
    if where == "initializer":
        made.graph.initializer.append(s)
    if where == "function":
        imports = [helper.make_opsetid("", 18)]
        made.functions.append(helper.make_function("my", "F", ["w"], ["v"], [read, add], imports))
    return made


def stored(folder: Path, kind: str) -> str:
    """Put the secret outside of a folder, and a way to it inside; return how the model names it."""
    secret = folder.parent / "secret.bin"
    secret.write_bytes(SECRET.tobytes())
    if kind == "symlink":
        (folder / "w.bin").symlink_to(secret)
    elif kind == "hard link":
        os.link(secret, folder / "w.bin")
    elif kind == "link to a folder":
        (folder / "inner").symlink_to(folder.parent)
        return "inner/secret.bin"
    elif kind == "fifo":
        os.mkfifo(folder / "w.bin")
    elif kind == "own":
        (folder / "w.bin").write_bytes(SECRET.tobytes())
    return {"dots": "../secret.bin", "absolute": str(secret)}.get(kind, "w.bin")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", ["initializer", "attribute", "body", "function"])
@pytest.mark.parametrize(
    "kind", ["symlink", "hard link", "link to a folder", "fifo", "dots", "absolute"]
)
def test_files_of_others(tmp_path: Path, call: str, where: str, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model.onnx"
    file.write_bytes(naming(where, stored(folder, kind)).SerializeToString())
    with pytest.raises(OnnxTrainError, match=r"w\.bin|secret\.bin|no batch|branch"):
        CALLS[call](file, tmp_path / "out")
    written = [f for f in (tmp_path / "out").rglob("*") if f.is_file()]
    assert not any(SECRET.tobytes() in f.read_bytes() for f in written)


@pytest.mark.parametrize("where", ["initializer", "attribute", "body", "function"])
def test_a_proto_names_no_file_elsewhere(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    given = naming(where, stored(folder, "absolute"))
    for call in CALLS.values():
        with pytest.raises(OnnxTrainError):
            call(given, tmp_path / "out")


@pytest.mark.parametrize("where", ["initializer", "attribute", "body", "function"])
def test_its_own_files_are_read(tmp_path: Path, where: str) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(naming(where, stored(tmp_path, "own")).SerializeToString())
    assert onnxtrain.prepare(file, tmp_path / "out", loss="mse").trainable
    extended = onnxtrain.gradient(file, "x")
    found = [numpy_helper.to_array(t) for t in extended.graph.initializer]
    if where != "body":
        assert any(np.array_equal(array, SECRET) for array in found)

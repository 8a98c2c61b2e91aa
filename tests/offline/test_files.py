"""Model files and the files beside them: what is read, and what is refused with which words."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf import json_format, text_format

import onnxtrain
from graphs import linear
from onnxtrain.errors import ModelError


def refusal(model: object) -> str:
    with pytest.raises(ModelError) as caught:
        onnxtrain.gradient(model, "w")
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"bytes", "load_from_string"),
        (io.BytesIO(b"bytes"), "onnx.load"),
        (linear().graph, "make_model"),
        (None, "NoneType"),
        ("", "no model file"),
        (os.devnull, "no model file"),
        ("a\0b", "no model file"),
    ],
    ids=["bytes", "stream", "graph", "none", "empty-path", "device", "null-in-path"],
)
def test_what_is_no_model(given: object, words: str) -> None:
    assert words in refusal(given)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", "x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (zipped(), "zip archive"),
        (b"<!doctype html><html></html>", "web page"),
        (b'{"irVersion": "8"}', ".json"),
        (text_format.MessageToString(linear()).encode(), ".textproto"),
        (b"\x18\0\0\0ORTM" + bytes(50), "ORT format"),
        (b"\x1f\x8b\x08" + bytes(50), "gzip"),
    ],
    ids=["lfs", "zip", "html", "json", "text", "ort", "gzip"],
)
def test_other_files_are_told_apart(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    message = refusal(file)
    assert words in message and "model.onnx" in message


@pytest.mark.parametrize("name", ["broken.json", "broken.textproto"])
def test_broken_files_of_the_other_formats(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{ graph")
    assert name in refusal(tmp_path / name)


def test_the_other_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json_format.MessageToJson(linear()))
    (tmp_path / "model.textproto").write_text(text_format.MessageToString(linear()))
    expected = onnxtrain.gradient(linear(), "w")
    assert onnxtrain.gradient(tmp_path / "model.json", "w") == expected
    assert onnxtrain.gradient(tmp_path / "model.textproto", "w") == expected


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    file = tmp_path / 'mödel no. 1 "x".onnx'
    onnx.save(linear(), file)
    file.chmod(0o444)
    assert onnxtrain.gradient(file, "w") == onnxtrain.gradient(linear(), "w")


# ---- external data -------------------------------------------------------------------------------


def with_external(folder: Path, **entries: str) -> Path:
    """Write the linear model, with w (24 bytes) wherever the entries say."""
    model = linear()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString())
    return file


@pytest.mark.parametrize("location", ["w.bin", "./w.bin", "inner/w.bin", "link.bin"])
def test_external_data_in_the_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("w.bin", "inner/w.bin"):
        (tmp_path / name).write_bytes(np.arange(6, dtype=np.float32).tobytes())
    (tmp_path / "link.bin").symlink_to("w.bin")
    extended = onnxtrain.gradient(with_external(tmp_path, location=location), "w")
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in extended.graph.initializer}
    np.testing.assert_array_equal(stored["w"], np.arange(6, dtype=np.float32).reshape(3, 2))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"location": "w.bin", "offset": "8"}, "32 are needed"),
        ({"location": "w.bin", "length": "12"}, "12 bytes"),
        ({"location": "w.bin", "offset": "-4"}, "not a number of bytes"),
        ({"location": "w.bin", "length": "x"}, "not a number of bytes"),
        ({"location": "w.bin", "offset": "9" * 30}, "are needed"),
        ({"location": "../secret.bin"}, "outside of the folder"),
        ({"location": "link.bin"}, "outside of the folder"),
        ({"location": "twin.bin"}, "hard link"),
        ({"location": "inner"}, "not there"),
        ({"location": "none.bin"}, "not there"),
        ({"location": ""}, "does not name"),
        ({"location": "a\0b"}, "not valid"),
        ({}, "does not name"),
    ],
    ids=lambda entry: "-".join(entry.values())[:20] if isinstance(entry, dict) else None,
)
def test_external_data_that_are_refused(tmp_path: Path, entries: dict, words: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "inner").mkdir()
    (folder / "w.bin").write_bytes(bytes(24))
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    if "twin.bin" in entries.values():
        os.link(tmp_path / "secret.bin", folder / "twin.bin")
    message = refusal(with_external(folder, **entries))
    assert words in message and "'w'" in message


def test_an_absolute_path_to_external_data(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    folder = tmp_path / "model"
    folder.mkdir()
    file = with_external(folder, location=str(tmp_path / "secret.bin"))
    assert "outside of the folder" in refusal(file)


def test_a_cache_of_links_to_one_store(tmp_path: Path) -> None:
    """As download caches have it: the model and its data are links into another folder."""
    store, shown = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    shown.mkdir()
    onnx.save(
        linear(), store / "model.onnx", save_as_external_data=True, location="model.onnx.data",
        size_threshold=0,
    )  # fmt: skip
    (store / "model.onnx").rename(store / "1234")
    (store / "model.onnx.data").rename(store / "5678")
    (shown / "model.onnx").symlink_to(store / "1234")
    (shown / "model.onnx.data").symlink_to(store / "5678")
    extended = onnxtrain.gradient(shown / "model.onnx", "w")
    given = {t.name: onnx.numpy_helper.to_array(t) for t in linear().graph.initializer}
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in extended.graph.initializer}
    np.testing.assert_array_equal(stored["w"], given["w"])


def test_external_data_of_a_constant_node(tmp_path: Path) -> None:
    file = with_external(tmp_path, location="gone.bin")
    model = onnx.load(file, load_external_data=False)
    tensor = model.graph.initializer.pop(0)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=tensor))
    file.write_bytes(model.SerializeToString())
    assert "gone.bin" in refusal(file)
    (tmp_path / "gone.bin").write_bytes(bytes(24))
    assert onnxtrain.gradient(file, "w").graph.output[-1].name == "w_grad"

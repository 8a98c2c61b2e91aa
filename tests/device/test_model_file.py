"""What is read of a graph file, and that broken and hostile files end in an error."""

import contextlib
import importlib.util
import json
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from onnx_bytes import (
    FLOAT,
    INT64,
    METADATA,
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
from onnxtrain.device.export.layout import stored_data, with_initializers
from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.format.metadata import GraphMetadata
from onnxtrain.format.model.file import ExternalTensor, ModelFile, ValueType
from onnxtrain.format.model.wire import bytes_field, number_field, text_field, varint_bytes

HOSTILE = Path(__file__).resolve().parents[1] / "golden" / "hostile"


def sources(tmp_path, data: bytes):
    path = tmp_path / "a model.onnx"
    path.write_bytes(data)
    return [path, str(path), data, bytearray(data), memoryview(data)]


@pytest.mark.parametrize("kind", range(5), ids=["Path", "str", "bytes", "bytearray", "memoryview"])
def test_what_is_read(tmp_path, kind) -> None:
    data = evaluation_model()
    source = sources(tmp_path, data)[kind]
    read = ModelFile.read(source)
    assert read.source_name == (str(source) if kind < 2 else "model in memory")
    assert read.path == (Path(source) if kind < 2 else None)
    assert read.data == data and not read.is_ort
    assert read.metadata == GraphMetadata(
        checkpoint="checkpoint", loss="loss", trainable=("w", "b"), frozen=("table", "small"),
        statistics=("mean",),
    )  # fmt: skip
    assert json.loads(read.metadata.to_json()) == METADATA
    assert read.inputs == (
        ValueType("x", FLOAT, ("batch", 4)),
        ValueType("target", FLOAT, ("batch", 3)),
        ValueType("w", FLOAT, (6, 3)),
        ValueType("b", FLOAT, (3,)),
        ValueType("mean", FLOAT, (6,)),
    )
    assert read.outputs == (ValueType("loss", FLOAT, ()),)
    assert read.external == {"table": ExternalTensor("table", FLOAT, (4, 6), "checkpoint", 0, 96)}
    assert read.initializer_names == ("table", "small", "two")
    assert (read.node_count, read.opsets, read.ir_version) == (9, {"": 18}, 8)


def test_the_bytes_of_a_model_in_memory_cannot_be_changed_from_outside() -> None:
    data = bytearray(evaluation_model())
    read = ModelFile.read(data)
    data[:] = bytes(len(data))
    assert ModelFile.read(read.data).metadata.checkpoint == "checkpoint"


def test_unknown_types_and_dimensions() -> None:
    sequence = text_field(1, "s") + bytes_field(2, bytes_field(4, b""))
    inputs = [value("a", FLOAT), value("b", None), value("c", INT64, ["", -1, 0]), sequence]
    read = ModelFile.read(model(graph([], inputs)))
    assert read.inputs == (
        ValueType("a", FLOAT, None),
        ValueType("b", 0, None),
        ValueType("c", INT64, (None, None, 0)),
        ValueType("s", 0, None),
    )
    assert read.metadata == GraphMetadata()


def test_defaults_of_external_data_and_packed_dims() -> None:
    entry = bytes_field(13, text_field(1, "location") + text_field(2, "a/b.bin"))
    packed = bytes_field(1, varint_bytes(2) + varint_bytes(300))
    message = packed + number_field(2, 16) + text_field(8, "w") + entry + number_field(14, 1)
    read = ModelFile.read(model(graph([], initializers=[message])))
    assert read.external["w"] == ExternalTensor("w", 16, (2, 300), "a/b.bin", 0, 1200)


def test_domains_by_their_short_name() -> None:
    read = ModelFile.read(model(graph([]), opsets={"ai.onnx": 20, "my.own": 3}))
    assert read.opsets == {"": 20, "my.own": 3}


def test_a_file_in_the_ort_format_is_told_apart(tmp_path) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    body = graph([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [2])], [value("y", FLOAT, [2])])
    ort.InferenceSession(model(body), options)
    for source in (tmp_path / "m.ort", (tmp_path / "m.ort").read_bytes()):
        read = ModelFile.read(source)
        assert read.is_ort
        assert (read.inputs, read.outputs, read.external) == ((), (), {})
        assert read.metadata == GraphMetadata()
    # A producer whose name begins with the same four letters.
    named = number_field(1, 8) + text_field(2, "ORTModule") + bytes_field(7, graph([]))
    assert bytes(named[4:8]) == b"ORTM"
    assert not ModelFile.read(named).is_ort


def test_paths_without_a_model(tmp_path) -> None:
    (tmp_path / "empty").touch()
    for path, complaint in {
        "missing": "there is no model at",
        "": "is a directory",
        "empty": "is empty",
        "zero\0byte": "cannot read",
    }.items():
        with pytest.raises(ModelError, match=complaint):
            ModelFile.read(os.path.join(tmp_path, path))
    with pytest.raises(ModelError, match="not int"):
        ModelFile.read(5)  # type: ignore[arg-type]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelError, match="not a regular file"):
            ModelFile.read(tmp_path / "pipe")


# ---- values of initializers ----------------------------------------------------------------------


def typed(name: str, code: int, dims: list[int], number: int, data: bytes) -> bytes:
    """A tensor whose elements are not raw bytes."""
    head = b"".join(number_field(1, dim) for dim in dims) + number_field(2, code)
    return head + text_field(8, name) + bytes_field(number, data)


def test_stored_data_in_all_the_forms_of_onnx() -> None:
    varints = b"".join(map(varint_bytes, (1, -2, 3)))
    floats = np.array([1.5, -2.5], "<f4")
    initializers = [
        tensor("raw", np.arange(3)),
        typed("floats", 1, [2], 4, floats.tobytes()),
        typed("doubles", 11, [1], 10, np.array([0.1], "<f8").tobytes()),
        typed("int64s", 7, [3], 7, varints),
        typed("int8s", 3, [3], 5, varints),
        typed("halves", 10, [1], 5, varint_bytes(0x3C00)),
        typed("uint32s", 12, [1], 11, varint_bytes(2**32 - 1)),
        typed("nibbles", 22, [3], 5, varint_bytes(0x21) + varint_bytes(0x03)),
        typed("texts", 8, [1], 6, b"hi"),
        number_field(2, 1) + text_field(8, "alone") + b"\x25" + floats.tobytes()[:4],
        external("far", 1, [1], location="f"),
    ]
    read = ModelFile.read(model(graph([], initializers=initializers)))
    stored = stored_data(read, [*read.initializer_names, "no such"])
    assert {name: bytes(data) for name, data in stored.items()} == {
        "raw": np.arange(3).tobytes(),
        "floats": floats.tobytes(),
        "doubles": np.array([0.1]).tobytes(),
        "int64s": np.array([1, -2, 3]).tobytes(),
        "int8s": np.array([1, -2, 3], "i1").tobytes(),
        "halves": np.array([1], "<f2").tobytes(),
        "uint32s": b"\xff" * 4,
        "nibbles": b"\x21\x03",
        "alone": floats[:1].tobytes(),
    }
    assert stored_data(read, []) == {}


@pytest.mark.parametrize(
    "message",
    [
        typed("t", 1, [3], 4, b"12345678"),
        typed("t", 7, [1], 7, b"\1\2"),
        typed("t", 7, [3], 7, b"\1\2"),
        typed("t", 1, [2], 9, b"1234567"),
        typed("t", 99, [2], 9, b"1234567"),
        typed("t", 7, [2**40, 2**40], 9, b"1"),
        number_field(2, 1) + text_field(8, "t") + number_field(4, 1),
    ],
)
def test_stored_data_that_contradict_the_shape(message) -> None:
    read = ModelFile.read(model(graph([], initializers=[message])))
    with pytest.raises(ModelError, match="initializer"):
        stored_data(read, ["t"])


def test_initializers_are_replaced_and_the_rest_stays() -> None:
    data = evaluation_model()
    read = ModelFile.read(data)
    values = evaluation_values()
    made = with_initializers(read, {"table": values["table"], "w": values["w"]})
    assert ModelFile.read(made).external == {}
    again = ModelFile.read(made)
    assert bytes(stored_data(again, ["table"])["table"]) == values["table"].tobytes()
    assert (again.inputs, again.metadata) == (read.inputs, read.metadata)
    assert again.node_count == 9
    assert with_initializers(read, {}) == data
    with pytest.raises(OnnxTrainError, match="'table' is DOUBLE"):
        with_initializers(read, {"table": values["table"].astype(float)})


# ---- broken and hostile files --------------------------------------------------------------------


def read_and_export(source) -> None:
    read = ModelFile.read(source)
    made = export_model(read, ["loss"], evaluation_values())
    assert made is not None
    # What comes out of a file that is sound as far as one can tell is sound as well.
    assert ModelFile.read(made).outputs[0].name == "loss"


@pytest.mark.parametrize("name", sorted(path.stem for path in (HOSTILE / "models").iterdir()))
def test_hostile_models(name) -> None:
    with pytest.raises(OnnxTrainError):
        read_and_export(HOSTILE / "models" / f"{name}.onnx")


def test_the_hostile_models_are_those_that_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_models", HOSTILE / "make_models.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    stored = {path.stem: path.read_bytes() for path in (HOSTILE / "models").iterdir()}
    assert stored == {name: make() for name, make in script.MODELS.items()}
    # But for what is wrong with them they would do.
    read_and_export(script.sound())
    read_and_export(script.nested_bodies(20))
    read_and_export(script.dims(64))


def test_truncated_at_every_byte() -> None:
    data = evaluation_model()
    sound = 0
    for size in range(len(data)):
        try:
            read_and_export(data[:size])
            sound += 1
        except OnnxTrainError:
            pass
    # Only where nothing but a whole field at the end is missing can it go unnoticed.
    assert sound <= 2


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_and_overwritten_bytes(seed) -> None:
    rng = random.Random(seed)
    original = evaluation_model()
    for _ in range(500):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 1, 4])):
            place = rng.randrange(len(data))
            data[place] = rng.choice([data[place] ^ 1 << rng.randrange(8), 0, 0x7F, 0x80, 0xFF])
        with contextlib.suppress(OnnxTrainError):
            read_and_export(bytes(data))


@pytest.mark.parametrize("piece", ["node", "unknown"])
def test_a_file_of_tiny_pieces_does_not_fill_the_memory(piece) -> None:
    small = {"node": b"\x0a\x00", "unknown": b"\x98\x06\x00"}[piece]
    data = model(small * 50_000 + graph([]))
    tracemalloc.start()
    try:
        read = ModelFile.read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read.node_count == (50_000 if piece == "node" else 0)
    assert peak < 250_000


@pytest.mark.parametrize(
    "metadata",
    [
        GraphMetadata(),
        GraphMetadata(checkpoint="c", loss="loss", outputs=("target",), trainable=("NaN",)),
        GraphMetadata(checkpoint="c", target="webgpu", on_cpu=("a",), memory={"sizes": {"N": 4}}),
    ],
)
def test_metadata_survives(metadata: GraphMetadata) -> None:
    text = metadata.to_json()
    assert GraphMetadata.from_json(text.replace('"checkpoint": "", ', "")) == metadata
    assert ("target" in json.loads(text)) == (metadata.target != "cpu")

"""Adapter files in C++: the bytes and the sentences are those of Python."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_readers import adapters, with_note
from capi_calls import Calls, error_of
from mutations import mutated

from onnxtrain import Adapter
from onnxtrain.format.adapter.onnx_file import AdapterContent, onnx_adapter_bytes
from onnxtrain.format.adapter.pairs import Pair

CONV = {
    "c.lora_A.weight": np.ones((2, 3, 5, 5), "f4"),
    "c.lora_B.weight": np.ones((4, 2, 1, 1), "f4"),
    "bias": np.arange(4, dtype="f4"),
}
UNREADABLE = "the record at its end cannot be read"


def assert_same(calls: Calls, path: Path) -> None:
    """Read an adapter and write it again in both languages; or both refuse it."""
    theirs, ours = path.with_name("python.onnx_adapter"), path.with_name("cpp.onnx_adapter")
    expected = error_of(lambda: Adapter.read(path).save(theirs))
    succeeded, text = calls("copy_adapter", path, ours)
    assert succeeded == (expected is None), (expected, text)
    if expected is None:
        assert ours.read_bytes() == theirs.read_bytes()
    elif UNREADABLE in expected:  # the rest is the sentence of Python's reader of JSON
        assert text.startswith(expected[: expected.index(UNREADABLE) + len(UNREADABLE)])
    else:
        assert text == expected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.onnx_adapter"


def test_a_copy_is_what_python_writes(calls, path) -> None:
    pairs = [
        Pair("é", "é.lora_A.weight", "é.lora_B.weight", 2, 1 / 3, "linear"),
        Pair("whole", "a", "b", 1, 4, "linear"),
    ]
    tensors = {
        "é.lora_A.weight": np.arange(6, dtype="f8").reshape(3, 2),
        "é.lora_B.weight": np.arange(8, dtype="f2").reshape(2, 4),
        "a": np.ones((0, 1), "f4"),
        "b": np.ones((1, 7), "f4"),
    }
    convolution = Adapter(CONV)
    described = Adapter(tensors, pairs=pairs, base="0f" * 16)
    files = [*adapters(), convolution.to_bytes(), convolution.astype("float16").to_bytes()]
    for data in (*files, described.to_bytes()):
        path.write_bytes(data)
        assert_same(calls, path)
        calls.result("copy_adapter", path, path.with_name("cpp.onnx_adapter"))


def content(tensors: dict[str, Any], **note: Any) -> bytes:
    return onnx_adapter_bytes(AdapterContent(tensors, note))


def pair(**changed: Any) -> dict[str, Any]:
    made = {"layer": "c", "a": "c.lora_A.weight", "b": "c.lora_B.weight", "rank": 2, "scale": 1.0}
    return {**made, "kind": "conv", **changed}


@pytest.mark.parametrize(
    "note",
    [
        {"lora": []},
        {"lora": {"a": [None, True, 1.5, "it's", {}]}},
        {"lora": [pair(), pair()]},
        {"lora": [pair(rank=2.0)]},
        {"lora": [pair(rank=0)]},
        {"lora": [pair(rank=10**30)]},
        {"lora": [pair(scale=0)]},
        {"lora": [pair(scale="NaN")]},
        {"lora": [pair(kind="other")]},
        {"lora": [pair(kind="linear")]},
        {"lora": [pair(layer="x" * 500)], "base": 7},
        {"lora": [pair(a="d" * 300)]},
        {"base": "0F" * 16},
        {"base": None, "lora": None},
    ],
    ids=str,
)
def test_wrong_records(calls, path, note) -> None:
    path.write_bytes(content(CONV, **note))
    assert_same(calls, path)


@pytest.mark.parametrize("text", [b"[1, 2]", b"nonsense", b'{"a": 1, "a": 2}', b"\xff"])
def test_a_record_that_is_no_object(calls, path, text) -> None:
    data = content(CONV)[:-18]
    path.write_bytes(with_note(data + text + len(text).to_bytes(4, "little") + b"0000TORTNOTE"))
    assert UNREADABLE in str(error_of(Adapter.read, path))
    assert_same(calls, path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"w.lora_A.weight": np.ones((2, 1), "f4")},
        {"w.lora_B.x.weight": np.ones((2, 1), "f4")},
        {"w.lora_A.x.weight": np.ones((2, 1), "f4"), "w.lora_B.weight": np.ones((1, 2), "f4")},
        {"w.lora_A.x.weight": np.ones((2, 1), "f4"), "w.lora_A.weight": np.ones((2, 1), "f4")},
        {"w.lora_A.x-y.weight": np.ones((2, 1), "f4")},
        {"w.lora_A.lora_B.weight": np.ones((2, 1), "f4")},
        {".lora_A.weight": np.ones((2, 1), "f4")},
        {"a\nb.lora_A.weight": np.ones((2, 1), "f4")},
        {"w.lora_C": np.ones((2, 1), "f4")},
        {"w.lora_magnitude_vector": np.ones(2, "f4")},
        {"w.lora_A.quant.weight": np.ones((2, 1), "f4")},
        {"w.lora_embedding_A": np.ones((2, 1), "f4")},
        {"w.lora_A.weight": np.ones((2, 1), "u1")},
        {"w.lora_A.weight": np.ones((2, 1), "f4"), "w.lora_B.weight": np.ones((2, 2), "f4")},
        {"w.lora_A.weight": np.ones(2, "f4"), "w.lora_B.weight": np.ones(2, "f4")},
        {"whole": np.ones(3, "f4")},
        {},
    ],
    ids=lambda tensors: "-".join(map(repr, tensors)),
)
def test_tensors_that_are_no_factors(calls, path, tensors) -> None:
    path.write_bytes(content(tensors)[:-18] if not tensors else content(tensors, base="00" * 16))
    assert_same(calls, path)


def test_what_is_no_adapter(calls, path, tmp_path) -> None:
    for data in (
        b"",
        b"TORT",
        b"some text that is long enough",
        b"\0\0\0\0TORT",
        content(CONV)[:-1],
    ):
        path.write_bytes(data)
        assert_same(calls, path)
    for other in (tmp_path / "none", tmp_path):
        assert calls("copy_adapter", other, path) == (False, error_of(Adapter.read, other))
    Adapter(CONV).save(path)
    nowhere = tmp_path / "nowhere" / "x.onnx_adapter"
    expected = error_of(Adapter.read(path).save, nowhere)
    assert calls("copy_adapter", path, nowhere) == (False, expected)
    folder = tmp_path / "peft"
    Adapter({n: t for n, t in CONV.items() if n != "bias"}).save(folder)
    for other in (folder, folder / "adapter_model.safetensors"):
        succeeded, text = calls("copy_adapter", other, path)
        assert not succeeded and "onnxtrain adapter convert" in text


@pytest.mark.parametrize("seed", range(4))
def test_changed_files_are_refused_as_python_refuses_them(calls, path, seed) -> None:
    """`ONNXTRAIN_MUTATIONS` files for each seed; 300 by default."""
    chooser, good = random.Random(seed), [*adapters(), content(CONV, lora=[pair()])]
    for _ in range(int(os.environ.get("ONNXTRAIN_MUTATIONS", "300"))):
        data = mutated("flatbuffers", chooser, chooser.choice(good), good)
        data = with_note(data) if chooser.random() < 0.9 else data
        if data[4:8] != b"TORT" and data[8:9] == b"{":
            continue  # Python reads it as safetensors
        path.write_bytes(data)
        assert_same(calls, path)


def test_the_record_is_pythons(calls, path) -> None:
    path.write_bytes(content(CONV, lora=[pair(scale=4)], base="ab" * 16))
    made = path.with_name("cpp.onnx_adapter")
    calls.result("copy_adapter", path, made)
    end = made.read_bytes()[:-16]
    assert json.loads(end[end.index(b'{"lora"') :]) == {
        "lora": [pair(scale=4)],
        "base": "ab" * 16,
    }

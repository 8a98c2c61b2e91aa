"""Adapter files: onnxruntime and safetensors read ours, we read theirs, and damage is refused."""

import json
import struct

import numpy as np
import onnxruntime as ort
import pytest
from adapter_models import factors
from forger import Forger

from onnxtrain import Adapter
from onnxtrain.errors import AdapterError
from onnxtrain.format.adapter.onnx_file import (
    AdapterContent,
    onnx_adapter_bytes,
    read_onnx_adapter,
)
from onnxtrain.format.adapter.safetensors import read_safetensors, safetensors_bytes
from onnxtrain.format.checkpoint.content import RawTensor

needs_adapters = pytest.mark.skipif(
    not hasattr(ort, "AdapterFormat"), reason="this onnxruntime has no adapters"
)
TENSORS = {
    "w.lora_A.weight": np.arange(6, dtype="f4").reshape(3, 2),
    "w.lora_B.weight": np.arange(8, dtype="f2").reshape(2, 4),
    "empty": np.empty((3, 0), "f8"),
    "bytes": np.arange(5, dtype="u1"),
    "ø": np.array([[-1]], "i8"),
}


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])


@needs_adapters
def test_onnxruntime_reads_what_we_write(tmp_path) -> None:
    path = tmp_path / "a.onnx_adapter"
    path.write_bytes(onnx_adapter_bytes(AdapterContent(TENSORS, {"base": "x"}, 3, 4)))
    read = ort.AdapterFormat.read_adapter(str(path))
    assert (read.get_format_version(), read.get_adapter_version()) == (1, 3)
    assert read.get_model_version() == 4
    same({n: value.numpy() for n, value in read.get_parameters().items()}, TENSORS)
    ort.LoraAdapter().Load(str(path))


@needs_adapters
def test_we_read_what_onnxruntime_writes(tmp_path) -> None:
    path, made = tmp_path / "a.onnx_adapter", ort.AdapterFormat()
    made.set_adapter_version(5)
    made.set_model_version(6)
    made.set_parameters({n: ort.OrtValue.ortvalue_from_numpy(t) for n, t in TENSORS.items()})
    made.export_adapter(str(path))
    content = read_onnx_adapter(memoryview(path.read_bytes()), "file")
    same(content.tensors, TENSORS)
    assert (content.adapter_version, content.model_version, content.note) == (5, 6, {})


def test_what_is_written_is_read() -> None:
    bfloat16 = RawTensor(16, (2,), np.array([1, 2, 3, 4], "u1"))
    content = AdapterContent({**TENSORS, "b": bfloat16}, {"lora": [], "n": 1.5}, 7, 8)
    read = read_onnx_adapter(memoryview(onnx_adapter_bytes(content)), "file")
    raw = read.tensors.pop("b")
    assert (raw.code, raw.dims, raw.data.tolist()) == (16, (2,), [1, 2, 3, 4])
    same(read.tensors, TENSORS)
    assert (read.note, read.adapter_version, read.model_version) == (content.note, 7, 8)


def test_files_are_the_same_for_the_same_content() -> None:
    turned = dict(reversed(TENSORS.items()))
    assert onnx_adapter_bytes(AdapterContent(turned)) == onnx_adapter_bytes(AdapterContent(TENSORS))


# ---- damage --------------------------------------------------------------------------------------


def test_every_truncation_is_refused_or_leaves_all_factors() -> None:
    adapter = Adapter(factors(2))
    data = adapter.to_bytes()
    refused = 0
    for length in range(len(data)):
        try:
            read = Adapter.from_bytes(data[:length])
        except AdapterError:
            refused += 1
            continue
        same({n: read[n] for n in read}, {n: adapter[n] for n in adapter})
    assert refused > sum(array.nbytes for array in factors(2).values())


def test_every_flipped_byte_is_refused() -> None:
    data = Adapter(factors(1)).to_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x11
        with pytest.raises(AdapterError):
            Adapter.from_bytes(bytes(damaged))


def forged(*tables, version=1, identifier=b"TORT", forger=None):
    forger = forger or Forger()
    made = [forger.table(**make(forger)) for make in tables]
    root = forger.table(i0=version, u3=forger.vector(made))
    forger.builder.Finish(root, file_identifier=identifier)
    return bytes(forger.builder.Output())


def parameter(name="w", dims=(2,), raw=bytes(8), code=1):
    return lambda f: {"u0": f.string(name), "u1": f.dims(*dims), "i2": code, "u3": f.raw(raw)}


HOSTILE = {
    "another file": (forged(parameter(), identifier=b"ODTC"), "identifier"),
    "another version": (forged(parameter(), version=2), "version is 2; version 1 can be read"),
    "no name": (forged(parameter(name="")), "the name is missing"),
    "twice": (forged(parameter(), parameter()), "the name occurs twice"),
    "strings": (forged(parameter(code=8)), "STRING"),
    "bools": (forged(parameter(code=9)), "BOOL"),
    "complex": (forged(parameter(code=14)), "COMPLEX64"),
    "unknown type": (forged(parameter(code=77)), "type 77"),
    "negative type": (forged(parameter(code=-1)), "type -1"),
    "too short": (forged(parameter(dims=(3,))), "need 12 bytes of data, but there are 8"),
    "too long": (forged(parameter(dims=(1,))), "need 4 bytes of data, but there are 8"),
    "negative": (forged(parameter(dims=(-2,))), "impossible"),
    "huge": (forged(parameter(dims=(2**62, 2**62))), "impossible"),
    "huge and empty": (forged(parameter(dims=(2**62, 0), raw=b"")), "impossible"),
    "no dims": (forged(parameter(dims=(), raw=bytes(4))), "no dimensions"),
    "many dims": (forged(parameter(dims=(1,) * 40, raw=bytes(4))), "at most 32"),
    "empty": (b"", "ends after 0 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(case) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(AdapterError, match=message):
        read_onnx_adapter(memoryview(data), "file")


def test_a_vector_that_is_longer_than_the_file() -> None:
    data = bytearray(onnx_adapter_bytes(AdapterContent(TENSORS)))[:-18]
    count = data.index(struct.pack("<I", len(TENSORS)))
    struct.pack_into("<I", data, count, 0x7FFFFFFF)
    with pytest.raises(AdapterError, match="truncated or damaged"):
        read_onnx_adapter(memoryview(bytes(data)), "file")


def test_types_that_onnxruntime_refuses_are_not_written() -> None:
    for array in (np.zeros(2, bool), np.zeros(2, "c8"), np.array(1.0, "f4")):
        with pytest.raises(AdapterError, match="cannot hold"):
            onnx_adapter_bytes(AdapterContent({"w": array}))


# ---- safetensors ---------------------------------------------------------------------------------


def test_safetensors_reads_and_writes_the_same_bytes() -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    ours = safetensors_bytes(TENSORS, {"format": "pt"})
    same(library.load(ours), TENSORS)
    theirs = library.save(TENSORS, {"format": "pt"})
    same(read_safetensors(memoryview(theirs), "file"), TENSORS)
    assert len(ours) == len(theirs)


def test_safetensors_round_trip() -> None:
    same(read_safetensors(memoryview(safetensors_bytes(TENSORS, {})), "file"), TENSORS)


def tensors_file(header, data=bytes(16), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE_SAFETENSORS = {
    "empty": (b"", "not a safetensors file"),
    "long header": (tensors_file({}, length=2**63), "said to have"),
    "cut off": (tensors_file({"w": entry()}, bytes(15)), "cut off"),
    "more": (tensors_file({"w": entry()}, bytes(17)), "1 bytes at its end are not used"),
    "not JSON": (tensors_file(b"{nothing}"), "header cannot be read"),
    "not text": (tensors_file(b'{"\xff": 1}'), "header cannot be read"),
    "a list": (tensors_file([]), "not an object"),
    "deep": (tensors_file(b'{"a":' * 5000 + b"1" + b"}" * 5000), "levels"),
    "twice": (tensors_file(b'{"w": {}, "w": {}}'), "twice"),
    "no entry": (tensors_file({"w": 3}), "not an object"),
    "no shape": (tensors_file({"w": {"dtype": "F32"}}), "'shape' is missing"),
    "type": (tensors_file({"w": entry("F99")}), "'F99' is unknown"),
    "type of type": (tensors_file({"w": entry(["F32"])}), "is unknown"),
    "negative": (tensors_file({"w": entry(shape=[-4])}), "impossible"),
    "float": (tensors_file({"w": entry(shape=[4.0])}), "impossible"),
    "huge": (tensors_file({"w": entry(shape=[2**40, 2**40])}), "impossible"),
    "backwards": (tensors_file({"w": entry(offsets=[16, 0])}), "needs 16 bytes"),
    "other size": (tensors_file({"w": entry(shape=[3])}), "needs 12 bytes"),
    "overlap": (tensors_file({"v": entry(), "w": entry()}), "expected"),
    "gap": (tensors_file({"w": entry(offsets=[4, 20])}, bytes(20)), "expected"),
    "past the end": (tensors_file({"w": entry(offsets=[2**40, 2**40 + 16])}), "past the end"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_SAFETENSORS)
def test_hostile_safetensors(case) -> None:
    data, message = HOSTILE_SAFETENSORS[case]
    with pytest.raises(AdapterError, match=message):
        read_safetensors(memoryview(data), "file")

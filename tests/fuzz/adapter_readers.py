"""Readers of adapters: ONNX Runtime's file, safetensors, and PEFT's configuration."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import onnxtrain
from onnxtrain.format.adapter.onnx_file import AdapterContent, onnx_adapter_bytes

Read = Callable[[Path], None]


def adapter() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"layers.0.q_proj": (6, 2, 4), "layers.1.q_proj": (6, 3, 4)}
    tensors = {}
    for layer, (rows, rank, columns) in shapes.items():
        tensors[f"{layer}.lora_A.weight"] = rng.normal(size=(rows, rank)).astype("f4")
        tensors[f"{layer}.lora_B.weight"] = rng.normal(size=(rank, columns)).astype("f4")
    return onnxtrain.Adapter(tensors, base="0123456789abcdef" * 2)


def adapters() -> list[bytes]:
    made = adapter()
    half = made.astype("bfloat16").to_bytes()
    return [made.to_bytes(), half, onnx_adapter_bytes(AdapterContent(made.tensors))[:-18]]


def with_note(data: bytes) -> bytes:
    """The same file with a right checksum, where it has one."""
    if not data.endswith(b"TORTNOTE") or len(data) < 16:
        return data
    return data[:-12] + struct.pack("<I", zlib.crc32(data[:-12])) + data[-8:]


def use(path: Path) -> None:
    """Read an adapter and do all that reads more of it."""
    found = onnxtrain.Adapter.read(path)
    repr(found)
    found.to_bytes()
    onnxtrain.Adapter.stack([found, found], [0.5, 0.5]).astype("float16")
    with tempfile.TemporaryDirectory() as folder:
        found.save(folder, "peft")
        onnxtrain.Adapter.read(folder)


def read_adapters() -> Read:
    return use


def peft_folders() -> list[bytes]:
    """The two files of a folder in one: the size of the configuration, then both."""
    found = []
    for more in ({}, {"alpha_pattern": {"layers.1.*proj": 3, r"^layers\.0\.q_proj": 5}}):
        with tempfile.TemporaryDirectory() as folder:
            adapter().save(folder, "peft", config=more)
            config = Path(folder, "adapter_config.json").read_bytes()
            weights = Path(folder, "adapter_model.safetensors").read_bytes()
            found.append(struct.pack("<I", len(config)) + config + weights)
    return found


def read_peft() -> Read:
    folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))

    def read(path: Path) -> None:
        blob = path.read_bytes()
        size = int.from_bytes(blob[:4], "little")
        (folder / "adapter_config.json").write_bytes(blob[4 : 4 + size])
        (folder / "adapter_model.safetensors").write_bytes(blob[4 + size :])
        use(folder)

    return read


def configurations() -> list[bytes]:
    return [blob[4 : 4 + int.from_bytes(blob[:4], "little")] for blob in peft_folders()]


def read_configurations() -> Read:
    folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))
    adapter().save(folder, "peft")

    def read(path: Path) -> None:
        shutil.copyfile(path, folder / "adapter_config.json")
        use(folder)

    return read


def headers() -> list[bytes]:
    return [
        json.dumps({"w.lora_A.weight": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
                    "w.lora_B.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [8, 16]}}
        ).encode()
    ]  # fmt: skip


def read_headers() -> Read:
    """Safetensors with the header that is changed, and enough behind it."""
    folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))
    adapter().save(folder, "peft")

    def read(path: Path) -> None:
        header = path.read_bytes()
        data = struct.pack("<Q", len(header)) + header + bytes(16)
        (folder / "adapter_model.safetensors").write_bytes(data)
        use(folder)

    return read

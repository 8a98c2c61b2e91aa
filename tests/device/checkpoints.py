"""What the tests of checkpoint files share: contents, and how two of them are compared."""

import struct
import zlib
from pathlib import Path

import numpy as np

from onnxtrain.format.checkpoint.content import CheckpointContent, OptimizerGroup, RawTensor
from onnxtrain.format.element_types import ELEMENT_TYPES, STRING, data_size

CHECKSUM_SIZE = 16  # at the end of a file
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "checkpoints"


def without_checksum(data: bytes) -> bytes:
    """A file of ours as ONNX Runtime would have it: neither its front nor its end is special."""
    return data[:8] + bytes(24) + data[32:-CHECKSUM_SIZE]


def with_checksum(data: bytes) -> bytes:
    """A file of ours that was changed, with the checksum of what it is now."""
    rest = data[:16] + struct.pack("<Q", len(data)) + data[24:-CHECKSUM_SIZE]
    return rest + b"ODTCCRC=%08x" % zlib.crc32(rest)


def as_plain_data(content: CheckpointContent):
    """Everything in a content, to the bit, as tuples that can be compared with ==."""

    def tensor(value):
        if isinstance(value, RawTensor):
            return value.code, value.dims, bytes(value.data)
        if value.dtype == object:
            return "strings", value.shape, tuple(value.flat)
        return value.dtype.str, value.shape, value.tobytes()

    return (
        [(name, tensor(value)) for name, value in content.trainable.items()],
        [(name, tensor(value)) for name, value in content.frozen.items()],
        content.nominal,
        [
            (
                name,
                group.step,
                repr(group.initial_learning_rate),
                [
                    (key, [tensor(value) for value in values])
                    for key, values in group.states.items()
                ],
            )
            for name, group in content.optimizer_groups.items()
        ],
        # Properties are grouped by type in the file; their order has no meaning.
        sorted(
            (name, type(value).__name__, repr(value)) for name, value in content.properties.items()
        ),
        content.has_external_data,
    )


def of_every_type(dims: tuple[int, ...]) -> dict:
    """A tensor of each element type, filled with a pattern."""
    rng = np.random.default_rng(len(dims))
    tensors = {}
    for code, element in ELEMENT_TYPES.items():
        if code == STRING:
            tensors["STRING"] = np.array(
                [f"é{i}" for i in range(int(np.prod(dims)))], object
            ).reshape(dims)
            continue
        data = rng.integers(0, 2 if element.name == "BOOL" else 256, data_size(code, dims))
        data = data.astype(np.uint8)
        tensors[element.name] = (
            RawTensor(code, dims, data)
            if element.dtype is None
            else data.view(element.dtype).reshape(dims)
        )
    return tensors


def a_training_state(scale: float = 1.0, size: int = 5) -> CheckpointContent:
    """A content with something of everything."""
    w = np.arange(size * 4, dtype=np.float32).reshape(size, 4) * scale
    b = np.full(4, scale, np.float32)
    return CheckpointContent(
        trainable={"w": w, "b": b},
        frozen={"table": np.arange(size, dtype=np.int64), "flag": np.array([True, False])},
        optimizer_groups={
            "group0": OptimizerGroup(7, 0.5, {"w": [w * 2, w * 3], "b": [b * 2, b * 3]})
        },
        properties={"epoch": 3, "zero": 0, "loss": 0.25, "name": "été", "empty": ""},
    )

"""Writes small ONNX models without `onnx`, which a device does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.format.checkpoint.content import tensor_code
from onnxtrain.format.model.wire import bytes_field, number_field, text_field

FLOAT, INT64, BOOL = 1, 7, 9
_INT, _INTS, _GRAPH = 2, 7, 5  # numbers of AttributeProto.AttributeType


def value(name: str, code: int | None, dims: Sequence[Any] | None = None) -> bytes:
    """A ValueInfoProto; without a code, of unknown type."""
    if code is None:
        return text_field(1, name)
    tensor = number_field(1, code)
    if dims is not None:
        sizes = [text_field(2, d) if isinstance(d, str) else number_field(1, d) for d in dims]
        tensor += bytes_field(2, b"".join(bytes_field(1, size) for size in sizes))
    return text_field(1, name) + bytes_field(2, bytes_field(1, tensor))


def tensor(name: str, array: np.ndarray) -> bytes:
    head = b"".join(number_field(1, dim) for dim in array.shape)
    head += number_field(2, tensor_code(array, name)) + text_field(8, name)
    return head + bytes_field(9, array.tobytes())


def external(name: str, code: int, dims: Sequence[int], **entries: Any) -> bytes:
    """A tensor in another file; `entries` are location, offset and length."""
    head = b"".join(number_field(1, dim) for dim in dims)
    head += number_field(2, code) + text_field(8, name)
    for key, entry in entries.items():
        head += bytes_field(13, text_field(1, key) + text_field(2, str(entry)))
    return head + number_field(14, 1)


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
) -> bytes:
    """A NodeProto. Attributes are numbers, lists of numbers, or the bytes of graphs."""
    message = b"".join(text_field(1, name) for name in inputs)
    message += b"".join(text_field(2, name) for name in outputs) + text_field(4, op)
    for key, given in attributes.items():
        message += bytes_field(5, text_field(1, key) + _attribute(given))
    return message + (text_field(7, domain) if domain else b"")


def _attribute(given: Any) -> bytes:
    if isinstance(given, bytes):
        return bytes_field(6, given) + number_field(20, _GRAPH)
    if isinstance(given, int):
        return number_field(3, given) + number_field(20, _INT)
    return b"".join(number_field(8, item) for item in given) + number_field(20, _INTS)


def graph(
    nodes: Sequence[bytes],
    inputs: Sequence[bytes] = (),
    outputs: Sequence[bytes] = (),
    initializers: Sequence[bytes] = (),
    value_infos: Sequence[bytes] = (),
    name: str = "graph",
) -> bytes:
    pieces = [bytes_field(1, item) for item in nodes]
    pieces.append(text_field(2, name))
    pieces += [bytes_field(5, item) for item in initializers]
    pieces += [bytes_field(11, item) for item in inputs]
    pieces += [bytes_field(12, item) for item in outputs]
    pieces += [bytes_field(13, item) for item in value_infos]
    return b"".join(pieces)


def model(
    body: bytes,
    about: Any = None,
    opsets: Mapping[str, int] | None = None,
    functions: Sequence[bytes] = (),
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    message = number_field(1, 8) + text_field(2, "tests") + bytes_field(7, body)
    for domain, version in (opsets or {"": 18}).items():
        message += bytes_field(8, text_field(1, domain) + number_field(2, version))
    entries = dict(metadata or {})
    if about is not None:
        entries["onnxtrain"] = about if isinstance(about, str) else json.dumps(about)
    for key, entry in entries.items():
        message += bytes_field(14, text_field(1, key) + text_field(2, entry))
    return message + b"".join(bytes_field(25, function) for function in functions)


# ---- an evaluation model as a device gets it -----------------------------------------------------

METADATA = {
    "format": 1, "checkpoint": "checkpoint", "loss": "loss", "outputs": [],
    "trainable": ["w", "b"], "frozen": ["table", "small"], "statistics": ["mean"],
}  # fmt: skip


def evaluation_model(about: Any = METADATA, **table: Any) -> bytes:
    """Two layers and a squared error.

    `w` and `b` train, `mean` is a running statistic, `table` a frozen parameter in the checkpoint
    file, `small` one that is in the graph as well, and `two` a constant.
    """
    place = {"location": "checkpoint", "offset": 0, "length": 96, **table}
    nodes = [
        node("MatMul", ["x", "table"], ["looked up"]),
        node("Sub", ["looked up", "mean"], ["centred"]),
        node("MatMul", ["centred", "w"], ["product"]),
        node("Add", ["product", "b"], ["scores"]),
        node("Mul", ["scores", "small"], ["scaled"]),
        node("Relu", ["looked up"], ["aside"]),
        node("Sub", ["scaled", "target"], ["error"]),
        node("Pow", ["error", "two"], ["squares"]),
        node("ReduceMean", ["squares"], ["loss"], keepdims=0),
    ]
    return model(
        graph(
            nodes,
            inputs=[
                value("x", FLOAT, ["batch", 4]),
                value("target", FLOAT, ["batch", 3]),
                value("w", FLOAT, [6, 3]),
                value("b", FLOAT, [3]),
                value("mean", FLOAT, [6]),
            ],
            outputs=[value("loss", FLOAT, [])],
            initializers=[
                external("table", FLOAT, [4, 6], **place),
                tensor("small", np.full(3, 0.5, np.float32)),
                tensor("two", np.array(2, np.float32)),
            ],
            value_infos=[value("scores", FLOAT, ["batch", 3]), value("error", FLOAT)],
        ),
        about,
    )


def evaluation_values() -> dict[str, np.ndarray]:
    """Values of the parameters of `evaluation_model`."""
    rng = np.random.default_rng(5)
    shapes = {"w": (6, 3), "b": (3,), "mean": (6,), "table": (4, 6)}
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {**values, "small": np.full(3, 0.5, np.float32)}


def evaluated(names: Sequence[str], x: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """What values of `evaluation_model` are, by numpy."""
    p = evaluation_values()
    found = {"x": x, "looked up": x @ p["table"]}
    found["aside"] = np.maximum(found["looked up"], 0)
    found["scores"] = (found["looked up"] - p["mean"]) @ p["w"] + p["b"]
    found["scaled"] = found["scores"] * p["small"]
    found["error"] = found["scaled"] - target
    found["loss"] = np.mean(found["error"] ** 2)
    return [{**p, **found}[name] for name in names]

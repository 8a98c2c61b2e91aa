"""Writes the model files in `models/`: each is broken, or made to harm, in one way.

    python tests/golden/hostile/make_models.py

Reading or exporting any of them must end in an error of `onnxtrain.errors`, and soon.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "models"
sys.path.insert(0, str(HERE.parents[1] / "device"))

import numpy as np  # noqa: E402
from onnx_bytes import (  # noqa: E402
    BOOL,
    FLOAT,
    METADATA,
    evaluation_model,
    external,
    graph,
    model,
    node,
    tensor,
    value,
)

from onnxtrain.format.model.wire import bytes_field, header, number_field, text_field  # noqa: E402

X, Y = value("x", FLOAT, [2]), value("loss", FLOAT, [2])


def one_node(*initializers: bytes, inputs: tuple[bytes, ...] = (X,), read: str = "x") -> bytes:
    nodes = [node("Relu", [read], ["loss"])]
    return model(graph(nodes, inputs, [Y], initializers))


def with_note(text: str) -> bytes:
    return evaluation_model(about=text)


def nested_bodies(depth: int) -> bytes:
    body = graph([node("Relu", ["x"], ["z"])], outputs=[value("z", FLOAT)])
    for level in range(depth):
        inner = node("If", ["c"], [f"z{level}"], then_branch=body, else_branch=b"")
        body = graph([inner], outputs=[value(f"z{level}", FLOAT)])
    top = node("If", ["c"], ["loss"], then_branch=body, else_branch=b"")
    return model(graph([top], [X, value("c", BOOL, [])], [Y]))


def ring_of_nodes() -> bytes:
    nodes = [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]),
             node("Relu", ["b"], ["loss"])]  # fmt: skip
    return model(graph(nodes, [X], [Y]))


def made_twice() -> bytes:
    nodes = [node("Relu", ["x"], ["loss"]), node("Neg", ["x"], ["loss"])]
    return model(graph(nodes, [X], [Y]))


def external_in_body() -> bytes:
    weights = external("k", FLOAT, [2], location="checkpoint", offset=0, length=8)
    body = graph([node("Add", ["x", "k"], ["z"])], (), [value("z", FLOAT)], [weights])
    top = node("If", ["c"], ["loss"], then_branch=body, else_branch=body)
    return model(graph([top], [X, value("c", BOOL, [])], [Y]))


def dims(count: int) -> bytes:
    return one_node(inputs=(value("x", FLOAT, [1] * count),))


def packed_dims() -> bytes:
    head = bytes_field(1, b"\1" * 5000) + number_field(2, FLOAT) + text_field(8, "w")
    entry = text_field(1, "location") + text_field(2, "checkpoint")
    return one_node(head + bytes_field(13, entry) + number_field(14, 1))


def sound() -> bytes:
    return evaluation_model()


MODELS: dict[str, Callable[[], bytes]] = {
    # ---- not a model, or part of one
    "empty": lambda: b"",
    "text": lambda: b"This is not the model that you are looking for.\n",
    "zeros": lambda: bytes(64),
    "truncated": lambda: sound()[: len(sound()) // 2],
    "without_a_graph": lambda: number_field(1, 8) + text_field(2, "tests"),
    "two_graphs": lambda: sound() + bytes_field(7, graph([], [X], [X])),
    "not_quite_ort": lambda: b"\xff\xff\xff\x7fORTM" + bytes(56),
    "ort_without_content": lambda: b"\x10\0\0\0ORTM" + bytes(56),
    # ---- the wire format
    "length_past_the_end": lambda: number_field(1, 8) + header(7, 1_000_000),
    "length_of_all_bits": lambda: number_field(1, 8) + header(7, (1 << 64) - 1),
    "endless_number": lambda: b"\x08" + b"\xff" * 20,
    "field_zero": lambda: sound() + b"\x00\x01",
    "group": lambda: sound() + b"\x0b\x0c",
    "graph_is_a_number": lambda: number_field(1, 8) + number_field(7, 1),
    "name_is_a_number": lambda: model(graph([], [number_field(1, 5)], [X])),
    "node_is_a_number": lambda: model(number_field(1, 1) + graph([], [X], [X])),
    "input_of_node_is_a_number": lambda: model(
        graph([number_field(1, 1) + text_field(2, "loss")], [X], [Y])
    ),
    "name_not_utf8": lambda: model(graph([], [bytes_field(1, b"\xff\xfe")], [X])),
    # ---- shapes
    "five_thousand_dimensions": lambda: dims(5000),
    "packed_dimensions": packed_dims,
    "negative_dimension": lambda: one_node(
        external("w", FLOAT, [-4, -4], location="checkpoint", offset=0, length=64)
    ),
    "shape_beyond_any_memory": lambda: one_node(
        external("w", FLOAT, [2**62, 2**62], location="checkpoint", offset=0)
    ),
    "type_declared_twice": lambda: one_node(inputs=(X + value("", FLOAT, [3]),)),
    # ---- external data
    "climbs_out": lambda: evaluation_model(location="../../etc/passwd"),
    "climbs_out_inside": lambda: evaluation_model(location="data/../../secret"),
    "absolute": lambda: evaluation_model(location="/etc/passwd"),
    "climbs_out_in_windows": lambda: evaluation_model(location="..\\secret"),
    "absolute_in_windows": lambda: evaluation_model(location="C:\\secret"),
    "location_empty": lambda: evaluation_model(location=""),
    "location_with_zero": lambda: evaluation_model(location="check\0point"),
    "offset_is_a_word": lambda: evaluation_model(offset="here"),
    "offset_negative": lambda: evaluation_model(offset=-1),
    "offset_of_many_digits": lambda: evaluation_model(offset="9" * 5000),
    "length_contradicts_shape": lambda: evaluation_model(length=95),
    "external_text": lambda: one_node(
        external("w", 8, [2], location="checkpoint", offset=0, length=8)
    ),
    "element_type_unknown": lambda: one_node(
        external("w", 99, [2], location="checkpoint", offset=0, length=8)
    ),
    "external_in_body": external_in_body,
    # ---- names
    "initializer_twice": lambda: one_node(
        tensor("w", np.ones(2, np.float32)), tensor("w", np.zeros(2, np.float32))
    ),
    "input_twice": lambda: one_node(inputs=(X, X)),
    "input_without_name": lambda: one_node(inputs=(X, value("", FLOAT, [2]))),
    "value_made_twice": made_twice,
    "ring_of_nodes": ring_of_nodes,
    "missing_parameter": lambda: one_node(read="weights"),
    "bodies_too_deep": lambda: nested_bodies(60),
    # ---- the note
    "note_not_json": lambda: with_note("{"),
    "note_not_an_object": lambda: with_note("[1]"),
    "note_nested": lambda: with_note("[" * 20_000),
    "note_with_long_number": lambda: with_note('{"format": ' + "9" * 5000 + "}"),
    "note_climbs_out": lambda: evaluation_model({**METADATA, "checkpoint": "../checkpoint"}),
    "note_of_other_types": lambda: evaluation_model({**METADATA, "trainable": {"w": 1}}),
}


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in MODELS.items():
        (FOLDER / f"{name}.onnx").write_bytes(make())


if __name__ == "__main__":
    main()

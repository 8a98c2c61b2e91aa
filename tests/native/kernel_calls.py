"""Runs one native kernel by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from onnx import helper

from native.harness import run

Array = np.ndarray[Any, Any]


def call(
    kind: str,
    inputs: Sequence[Array],
    outputs: int = 1,
    *,
    left_out: Collection[int] = (),
    **attributes: Any,
) -> list[Array]:
    """Return what a kernel makes of inputs; the body of its function does not matter."""
    names, made = [f"i{n}" for n in range(len(inputs))], [f"o{n}" for n in range(outputs)]
    opsets = [helper.make_opsetid("", 18)]
    body = [helper.make_node("Identity", names[:1], [output]) for output in made]
    function = helper.make_function("ai.onnxtrain", f"{kind}_0", names, made, body, opsets)
    asked = ["" if n in left_out else output for n, output in enumerate(made)]
    node = helper.make_node(f"{kind}_0", names, asked, domain="ai.onnxtrain", **attributes)
    types = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs]
    graph = helper.make_graph(
        [node],
        "graph",
        [
            helper.make_tensor_value_info(name, element, [None] * array.ndim)
            for name, element, array in zip(names, types, inputs, strict=True)
        ],
        [helper.make_tensor_value_info(name, 1, None) for name in asked if name],
    )
    model = helper.make_model(
        graph, functions=[function], ir_version=10,
        opset_imports=[*opsets, helper.make_opsetid("ai.onnxtrain", 1)],
    )  # fmt: skip
    return run(model, dict(zip(names, inputs, strict=True)), native=True)

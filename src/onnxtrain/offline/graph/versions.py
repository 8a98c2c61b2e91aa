"""The opsets and IR versions of what is taken and of what is written."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

NOTED_OPSET = 12  # models older than this are upgraded with a word
FLOOR_OPSET = 18  # of a graph that is written
FLOOR_IR_VERSION = 8


def least_ir_version(opset_imports: Mapping[str, int]) -> int:
    """Return the IR version that came with the opsets of a model, 8 or newer."""
    known = onnx.helper.OP_SET_ID_VERSION_MAP
    names = {"": "ai.onnx"}
    came_with = (known.get((names.get(d, d), version), 0) for d, version in opset_imports.items())
    return max([FLOOR_IR_VERSION, *came_with])

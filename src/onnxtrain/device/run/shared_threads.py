"""One pool of threads for graphs that run in turns.

Each session has threads of its own, which keep spinning for a while after a run. Where a training
graph and an optimizer graph take turns, the threads of one are in the way of the other's: on two
cores a step of a small network takes 1.3 ms with one pool for both, and 1.8 ms with two.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import onnxruntime as ort

from onnxtrain.device.export.layout import value_info
from onnxtrain.format.model.file import GraphField, ModelField, ValueType
from onnxtrain.format.model.wire import bytes_field, number_field, text_field
from onnxtrain.format.names import GRADIENT, LAZY_RESET

_FLOAT = 1
_lock = threading.Lock()
_found: list[bool] = []


def takes_turns(inputs: Sequence[ValueType]) -> bool:
    """Whether a graph is one of those that make up a step together."""
    return any(value.name == LAZY_RESET or value.name.endswith(GRADIENT) for value in inputs)


def share_threads(options: Any) -> None:
    """Let a session use the common pool, where onnxruntime has one for Python."""
    with _lock:
        if not _found:
            _found.append(_makes_pool())
        if _found[0]:
            options.use_per_session_threads = False


def _makes_pool() -> bool:
    """Make the pool, and try it: not every onnxruntime has one, or lets us make it late."""
    try:
        ort.set_global_thread_pool_sizes(0, 1)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.use_per_session_threads = False
        ort.InferenceSession(_smallest_model(), options, providers=["CPUExecutionProvider"])
    except Exception:  # an AttributeError, or one of onnxruntime's many kinds of errors
        return False
    return True


def _smallest_model() -> bytes:
    node = text_field(1, "x") + text_field(2, "y") + text_field(4, "Identity")
    graph = bytes_field(GraphField.NODE, node) + text_field(GraphField.NAME, "graph")
    graph += bytes_field(GraphField.INPUT, value_info("x", _FLOAT, [1]))
    graph += bytes_field(GraphField.OUTPUT, value_info("y", _FLOAT, [1]))
    opset = bytes_field(ModelField.OPSET_IMPORT, number_field(2, 13))
    return number_field(ModelField.IR_VERSION, 7) + bytes_field(ModelField.GRAPH, graph) + opset

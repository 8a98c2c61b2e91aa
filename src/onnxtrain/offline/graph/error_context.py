"""Unexpected errors, raised as errors of onnxtrain that say where they happened.

Rules, adapters and definitions expect valid nodes, and no check covers everything: onnx looks at
the weights of an LSTM only at run time. If one of them fails, the user gets an error that names the
node, with the original error as its cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.offline.graph.names import label_of


@contextmanager
def error_context(node: ir.Node, doing: str) -> Iterator[None]:
    """Raise an unexpected error as one that says what was done to which node."""
    try:
        yield
    except OnnxTrainError:
        raise
    except Exception as error:
        inputs = ", ".join("none" if v is None else _described(v) for v in node.inputs)
        raise ModelError(
            f"{doing} {node.op_type} (node {label_of(node)!r}) failed with {type(error).__name__}: "
            f"{error}. Its inputs are {inputs or 'none'}. Check that the node is valid (does the "
            "model run in onnxruntime?); if it is, this is a bug in onnxtrain: please report it"
        ) from error


@contextmanager
def model_error_context(doing: str) -> Iterator[None]:
    """Raise an unexpected error that belongs to no single node as an error of onnxtrain."""
    try:
        yield
    except (OnnxTrainError, OSError, Warning):  # a full disk and the like are not the model's fault
        raise
    except MemoryError as error:
        raise ModelError(
            f"{doing} the model failed: there is not enough memory. {error}"
        ) from error
    except Exception as error:
        raise ModelError(
            f"{doing} the model failed with {type(error).__name__}: {error}. Check the model with "
            "onnx.checker.check_model, and that it runs in onnxruntime; if so, this is a bug in "
            "onnxtrain: please report it"
        ) from error


def _described(value: ir.Value) -> str:
    dtype = "unknown type" if value.dtype is None else value.dtype.name
    shape = " of unknown rank" if value.shape is None else str(value.shape)
    return f"{value.name!r} {dtype}{shape}"

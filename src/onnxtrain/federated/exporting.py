"""Exports of servers and clients: what can only fail is said before the first round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import ArgumentError, StateError
from onnxtrain.federated.bundle import Source


def checked_outputs(export: Any, outputs: Any) -> list[str]:
    """Return the names of what an exported model gives out."""
    names = [] if isinstance(outputs, str) else _listed(outputs)
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"outputs is a list of names, such as ['output'], not {outputs!r}")
    if export is not None and not names:
        raise ArgumentError("export needs outputs=[...]: what the model is to give out")
    return names


def _listed(outputs: Any) -> list[Any]:
    try:
        return list(outputs)
    except TypeError:
        return [None]


def check_export(session: TrainingSession, target: Source, outputs: Sequence[str]) -> None:
    """Refuse an export that could only fail in the end."""
    from onnxtrain.device.export.inference_model import check_request

    evaluation = session.module.evaluation_executor
    if evaluation is None:
        raise StateError(
            "export needs the evaluation graph in the ONNX format, and the artifacts here have "
            "none: install it, or leave out export"
        )
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    check_request(evaluation.graph.model, outputs, target)

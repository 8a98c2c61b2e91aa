"""Arguments that clients and servers share: data, and exports, checked before the first round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from onnxtrain.device.loop.batches import count_samples
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import ArgumentError, StateError
from onnxtrain.federated.bundle import Source, require_path
from onnxtrain.federated.client_state import claim, client_name, given_name

Data = Any | Callable[[Context], Any]
_CLIENT = "{client}"  # stands for the client's name in `export`


def data_of(given: Data, context: Context, purpose: str) -> Any:
    """Return the data of a client; no data is an error."""
    data = made_by(given, context)
    if data is None or samples_in(data) == 0:
        raise ArgumentError(f"this client has no data {purpose}")
    return data


def made_by(given: Data, context: Context) -> Any:
    """Return the data, or what a function of the context returns: a new iterator per epoch."""
    data = given(context) if callable(given) else given
    if callable(given) and isinstance(data, Iterator):
        first = [data]
        return lambda: first.pop() if first else given(context)
    return data


def samples_in(data: Any) -> int:
    """Return the number of samples; iterators count as 1, as they can be read only once."""
    if isinstance(data, Mapping):
        return count_samples(list(data.values()))
    if isinstance(data, tuple):
        return count_samples(list(data)) if data else 0
    if isinstance(data, np.ndarray):
        return len(data)
    if isinstance(data, list):
        return sum(samples_in(tuple(b) if isinstance(b, list) else b) for b in data)
    return 1


# ---- exports -------------------------------------------------------------------------------------


def checked_outputs(export: Any, outputs: Any) -> list[str]:
    """Return the output names of an exported model."""
    is_list = isinstance(outputs, Iterable) and not isinstance(outputs, str)
    names: list[Any] = list(outputs) if is_list else [None]
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"outputs is a list of names, such as ['output'], not {outputs!r}")
    if export is not None and not names:
        raise ArgumentError("export needs outputs=[...], the outputs of the exported model")
    return names


def check_export(session: TrainingSession, target: Source, outputs: Sequence[str]) -> None:
    """Raise an error for an export that would fail after the last round."""
    from onnxtrain.device.export.inference_model import check_request

    evaluation = session.module.evaluation_executor
    if evaluation is None:
        raise StateError(
            "export needs the evaluation graph in the ONNX format, which these artifacts do not "
            "have: add it, or leave out export"
        )
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    check_request(evaluation.graph.model, outputs, target)


def write_export(session: TrainingSession, target: Source, outputs: Sequence[str]) -> None:
    """Export the model; its folder is created if it does not exist."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    session.export_model_for_inferencing(target, outputs)


class ClientExport:
    """The model that a client exports after the last round."""

    def __init__(self, target: Source, outputs: list[str]) -> None:
        self._target, self._outputs = str(require_path("export", target)), outputs
        self._is_checked = False

    def check(self, session: TrainingSession, context: Context, folder: Path | None) -> None:
        """Raise an error if the export would fail; the first call looks."""
        if not self._is_checked:
            check_export(session, self._path(context, folder), self._outputs)
            self._is_checked = True

    def write(self, session: TrainingSession, context: Context, folder: Path | None) -> None:
        """Export the model."""
        path = self._path(context, folder)
        claim(path, context, f"give each a folder of its own, or put {_CLIENT!r} into export")
        write_export(session, path, self._outputs)

    def _path(self, context: Context, folder: Path | None) -> Path:
        """Return the file; clients that share a folder have a file each."""
        name = given_name(context)
        path = Path(self._target.replace(_CLIENT, client_name(context)))
        shares = _CLIENT not in self._target and "state-dir" not in context.node_config
        if name is not None and shares:
            path = path.with_name(f"{path.stem}-{name}{path.suffix}")
        return path if folder is None else folder / path

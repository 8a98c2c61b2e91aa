"""`onnxtrain train --head`: the last layer is computed, without steps."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnxtrain.cli.console import Console
from onnxtrain.device.heads import fit_head
from onnxtrain.device.loop import evaluate
from onnxtrain.device.session import TrainingSession


def compute_head(
    session: TrainingSession,
    data: Any,
    validation: Any,
    metrics: list[Any],
    saved: Path,
    options: argparse.Namespace,
    console: Console,
) -> int:
    """Compute the last layer, save the checkpoint, and measure."""
    size = options.batch_size or 32
    found = fit_head(session, data, options.head, add=options.add, batch_size=size)
    values = {}
    if validation is not None:
        values = evaluate(session, validation, metrics, batch_size=size)
    session.save_checkpoint(saved)
    content = asdict(found)
    content["left_out_accuracy"] = content.pop("accuracy")
    console.result({**content, **values, "checkpoint": str(saved)})
    rows: list[tuple[str, Any]] = [("samples", found.samples)]
    if found.accuracy is not None:
        rows.append(("accuracy, left out", found.accuracy))
    rows += [(name, value) for name, value in values.items() if isinstance(value, float)]
    console.table(("measure", "value"), rows)
    console.note(f"saved     {saved}")
    return 0

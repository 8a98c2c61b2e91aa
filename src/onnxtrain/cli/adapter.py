"""The commands about adapters: show, export, convert, stack, merge."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from onnxtrain.cli.console import Console, megabytes
from onnxtrain.cli.files import check_target
from onnxtrain.errors import ArgumentError, OnnxTrainError
from onnxtrain.format.adapter.adapter import Adapter


def show_command(options: argparse.Namespace, console: Console) -> int:
    """Show what an adapter holds, and whether it fits a model."""
    adapter = Adapter.read(options.adapter)
    content = _described(adapter, options.adapter)
    lines = [
        f"adapter        {options.adapter}: {len(adapter.pairs)} layers, {adapter.dtype}, "
        f"{adapter.size:,} elements",
        f"base           {adapter.base or 'not told'}",
    ]
    if options.fits:
        adapter.check(fits=options.fits)
        content["fits"] = options.fits
        lines.append(f"fits           {options.fits}")
    console.result(content, "\n".join(lines))
    rows: list[tuple[Any, ...]]
    rows = [(p.layer, p.kind, p.rank, p.scale, _shapes(adapter, p.a, p.b)) for p in adapter.pairs]
    rows += [(name, "whole", "", "", str(list(adapter[name].shape))) for name in adapter.whole]
    console.table(("layer", "kind", "rank", "scale", "shapes"), rows)
    return 0


def export_command(options: argparse.Namespace, console: Console) -> int:
    """Write the adapter that a run has trained."""
    from onnxtrain.cli.device import artifact_folder, chosen_checkpoint
    from onnxtrain.device.session import TrainingSession

    folder = artifact_folder(options.artifacts)
    checkpoint = chosen_checkpoint(folder, options.checkpoint)
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    adapter = session.adapter(allow_nonfinite=options.allow_nonfinite)
    return _saved(adapter, options.output, console)


def convert_command(options: argparse.Namespace, console: Console) -> int:
    """Write an adapter in another format, or with another element type."""
    adapter = Adapter.read(options.adapter)
    return _saved(
        adapter.astype(options.dtype) if options.dtype else adapter, options.output, console
    )


def stack_command(options: argparse.Namespace, console: Console) -> int:
    """Write one adapter that does what several do together."""
    if options.weight and len(options.weight) != len(options.adapters):
        raise ArgumentError(
            f"--weight: there are {len(options.adapters)} adapters and {len(options.weight)} "
            "weights: give one for each"
        )
    adapters = [Adapter.read(path) for path in options.adapters]
    return _saved(Adapter.stack(adapters, options.weight), options.output, console)


def merge_command(options: argparse.Namespace, console: Console) -> int:
    """Write a model with an adapter in it."""
    from onnxtrain.offline.merge_adapter import merge_adapter

    if not Path(options.model).is_file():
        raise OnnxTrainError(f"there is no model {options.model!r}: give an .onnx file")
    target = Path(options.output)
    check_target(target, "--output", {Path(options.model): "the model to read"})
    merged = merge_adapter(options.model, options.adapter, target, merge=options.merge)
    layers = [
        {"layer": layer.layer, "how": layer.how, "mean_error": layer.errors.mean,
         "largest_error": layer.errors.largest, "error_of_update": layer.errors.of_update}
        for layer in merged.layers
    ]  # fmt: skip
    size = target.stat().st_size
    content = {"output": str(target), "bytes": size, "layers": layers}
    console.result(content, f"{target}: {megabytes(size)}\n{merged}")
    return 0


def _saved(adapter: Adapter, output: str, console: Console) -> int:
    target = Path(output)
    if target.suffix == ".onnx_adapter":
        check_target(target, "--output")
    adapter.save(target)
    content = _described(adapter, output)
    console.result(
        content, f"{output}: {megabytes(content['bytes'])}, {len(adapter.pairs)} layers, rank "
        f"{adapter.rank}, {adapter.dtype}"
    )  # fmt: skip
    return 0


def _described(adapter: Adapter, path: str) -> dict[str, Any]:
    place = Path(path)
    files = list(place.iterdir()) if place.is_dir() else [place]
    return {
        "adapter": path,
        "bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "rank": adapter.rank,
        "elements": adapter.size,
        "dtype": adapter.dtype,
        "base": adapter.base or None,
        "layers": [pair._asdict() for pair in adapter.pairs],
        "whole": list(adapter.whole),
    }


def _shapes(adapter: Adapter, *names: str) -> str:
    return " ".join(str(list(adapter[name].shape)) for name in names)

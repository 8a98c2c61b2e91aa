"""The commands about adapters: show, export, convert, stack, merge."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxtrain.cli.console import Console, megabytes
from onnxtrain.cli.files import check_not_read, check_target, of_artifacts, of_run
from onnxtrain.errors import ArgumentError, OnnxTrainError
from onnxtrain.format.adapter.adapter import Adapter
from onnxtrain.format.adapter.peft import WEIGHTS


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
    read = of_artifacts(folder) | of_run(checkpoint)
    return _saved(adapter, options.output, read, console)


def convert_command(options: argparse.Namespace, console: Console) -> int:
    """Write an adapter in another format, or with another element type."""
    adapter = Adapter.read(options.adapter)
    changed = adapter.astype(options.dtype) if options.dtype else adapter
    return _saved(changed, options.output, _read([options.adapter]), console)


def stack_command(options: argparse.Namespace, console: Console) -> int:
    """Write one adapter that does what several do together."""
    if options.weight and len(options.weight) != len(options.adapters):
        raise ArgumentError(
            f"--weight: there are {len(options.adapters)} adapters and {len(options.weight)} "
            "weights: give one for each"
        )
    adapters = [Adapter.read(path) for path in options.adapters]
    stacked = Adapter.stack(adapters, options.weight)
    return _saved(stacked, options.output, _read(options.adapters), console)


def merge_command(options: argparse.Namespace, console: Console) -> int:
    """Write a model with an adapter in it."""
    from onnxtrain.offline.merge_adapter import merge_adapter

    if not Path(options.model).is_file():
        raise OnnxTrainError(f"there is no model {options.model!r}: give an .onnx file")
    target = Path(options.output)
    check_target(target, "--output", _read([options.adapter], options.model))
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


def _read(adapters: Iterable[str], model: str | None = None) -> dict[Path, str]:
    paths = [Path(name) for name in adapters]
    paths += [p / WEIGHTS for p in paths] + [p.parent for p in paths if p.name == WEIGHTS]
    found = dict.fromkeys(paths, "the adapter to read")
    return found if model is None else found | {Path(model): "the model to read"}


def _saved(adapter: Adapter, output: str, read: Mapping[Path, str], console: Console) -> int:
    target = Path(output)
    for path in (target, target.parent) if target.name == WEIGHTS else (target,):
        check_not_read(path, "--output", read)
    if target.suffix == ".onnx_adapter":
        check_target(target, "--output")
    elif target.is_file() and target.name != WEIGHTS:
        raise ArgumentError(
            f"--output: {output!r} is a file: give a name that ends with .onnx_adapter, or a folder"
        )
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

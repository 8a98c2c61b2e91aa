"""`onnxtrain doctor`: what training would run on here, and why native kernels would not."""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain import __version__
from onnxtrain.cli.console import Console
from onnxtrain.cli.device import artifact_folder
from onnxtrain.device.run.native import Library, native_status
from onnxtrain.format.model.file import ModelFile


def doctor_command(options: argparse.Namespace, console: Console) -> int:
    """Show the versions, the processor and the native library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is a line of the report
        status = native_status()
    library = status.library
    native: dict[str, Any] = {"in_use": library is not None, "reason": status.reason or None}
    if library is not None:
        native |= {
            "library": library.path,
            "version": library.version,
            "instruction_set": library.instruction_set,
            "kernels": list(library.kernels),
        }
    content: dict[str, Any] = {
        "onnxtrain": __version__,
        "onnxruntime": ort.__version__,
        "providers": ort.get_available_providers(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": _cores(),
        "native": native,
    }
    if options.artifacts is not None:
        content["graphs"] = _graphs(artifact_folder(options.artifacts), library)
    console.result(content, "\n".join(_lines(content)))
    return 0


def _graphs(folder: Path, library: Library | None) -> dict[str, Any]:
    """By the names of the graphs, their functions, and the kernels that stand in for some."""
    found = {}
    for path in sorted(folder.glob("*_model.onnx")):
        functions = ModelFile.read(path).metadata.kernels
        served = library.served(functions) if library is not None and functions else ()
        kernels = sorted({name.partition("_")[0] for name in served})
        found[path.stem] = {"functions": len(functions), "native": len(served), "kernels": kernels}
    return found


def _cores() -> int:
    """The number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # a system that does not tell
        return os.cpu_count() or 1


def _lines(content: dict[str, Any]) -> list[str]:
    return [*_system_lines(content), *_graph_lines(content.get("graphs", {}))]


def _graph_lines(graphs: dict[str, Any]) -> list[str]:
    lines = []
    for name, graph in graphs.items():
        kernels = f": {', '.join(graph['kernels'])}" if graph["kernels"] else ""
        count = f"{graph['native']} of {graph['functions']} functions run native{kernels}"
        lines.append(f"{name:<17}{count if graph['functions'] else 'plain operators'}")
    return lines


def _system_lines(content: dict[str, Any]) -> list[str]:
    native = content["native"]
    lines = [
        f"onnxtrain        {content['onnxtrain']}, Python {content['python']}",
        f"onnxruntime      {content['onnxruntime']}, {', '.join(content['providers'])}",
        f"system           {content['system']}, {content['cores']} cores",
    ]
    if not native["in_use"]:
        return [*lines, f"native           off: {native['reason']}"]
    kernels = native["kernels"]
    return [
        *lines,
        f"native           {native['version']}, {native['instruction_set']}, {native['library']}",
        f"kernels          {len(kernels)}: {', '.join(kernels)}",
    ]

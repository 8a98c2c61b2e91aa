"""The files of an artifact folder are replaced as one.

A writer puts all new files into a hidden folder, with a list of them, and commits them with one
rename of that folder to `COMMITTED` inside the artifact folder. From then on the new files are the
artifacts, wherever they are. `finish_moves` moves them to their places; whoever opens the folder
after a crash goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path

from onnxtrain.errors import ModelError

COMMITTED = ".onnxtrain-generation"
_LIST = "files.json"
GRAPHS = ("training_model", "eval_model", "optimizer_model", "step_model")
CHECKPOINTS = ("checkpoint", "checkpoint.data", "nominal_checkpoint")
_GRAPH_ENDS = (".onnx", ".ort", ".required_operators.config")
INFERENCE_MODEL, BASE_DATA = "inference_model", "base.data"  # where low-rank factors train
ARTIFACTS = (
    *CHECKPOINTS,
    *(graph + end for graph in GRAPHS for end in _GRAPH_ENDS),
    f"{INFERENCE_MODEL}.onnx",
    BASE_DATA,
)
# Whatever else a list names is not from us, and could be any file.
_NAME = re.compile(
    r"[^/\\\0]*(" + "|".join(map(re.escape, ARTIFACTS)) + r"|\.data\.(old|[0-9a-f]{16}))"
)


def remove_tree(folder: str | Path, *, ignore_errors: bool = False) -> None:
    """Delete a folder with everything in it."""
    from shutil import rmtree  # brings compressors, 0.4 MB that training does not need

    rmtree(folder, ignore_errors=ignore_errors)


def is_unfinished(folder: Path) -> bool:
    """Whether a process ended while it moved new files into place."""
    return os.path.lexists(folder / COMMITTED)


def list_files(staging: Path, present: list[str], absent: list[str]) -> None:
    """Write the list of a committed folder: what is in it, and what is to be removed."""
    with open(staging / _LIST, "x", encoding="utf-8") as file:
        json.dump({"files": present, "remove": absent}, file)
        file.flush()
        os.fsync(file.fileno())


def finish_moves(folder: Path) -> None:
    """Move the files of a committed folder into place, if there is one, from any point on."""
    committed = folder / COMMITTED
    try:
        mode = os.lstat(committed).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise ModelError(f"{committed} is not a folder, as it should be: delete it")
    try:
        listed = json.loads((committed / _LIST).read_bytes())
        names, absent = listed["files"], listed["remove"]
        if not all(isinstance(n, str) and _NAME.fullmatch(n) for n in [*names, *absent]):
            raise ValueError
    except FileNotFoundError:
        names = absent = []  # all was in place when the list was removed
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ModelError(
            f"the list of files in {committed} is damaged: delete this folder, and write the "
            "artifacts anew"
        ) from None
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # moved already
            os.replace(committed / name, folder / name)
    for name in absent:
        (folder / name).unlink(missing_ok=True)
    sync_folder(committed)
    sync_folder(folder)
    (committed / _LIST).unlink(missing_ok=True)
    remove_tree(committed)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames durable, if the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems cannot sync folders.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

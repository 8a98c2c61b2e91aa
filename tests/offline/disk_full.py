"""Generates artifacts where no file may grow beyond a limit, as on a disk that is full.

`python disk_full.py <folder>` prints, as JSON, what came of it for each limit: the error, and
whether the folders are as they were before.
"""

import json
import resource
import sys
from pathlib import Path

from graphs import linear
from onnxtrain.artifacts import OptimType, generate_artifacts
from onnxtrain.errors import OnnxTrainError


def generate(folder: Path, **more: object) -> dict[str, int]:
    return generate_artifacts(
        linear(), optimizer=OptimType.AdamW, nominal_checkpoint=True, artifact_directory=folder,
        ort_format=True, **more,
    ).files  # fmt: skip


def limit_files(size: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def attempt(root: Path, target: str, limit: int) -> dict[str, object]:
    before = content(root)
    limit_files(limit)
    try:
        generate(root / target, additional_output_names=["y"])
        error, kind = "", "none"
    except Exception as failure:
        error, kind = str(failure), "ours" if isinstance(failure, OnnxTrainError) else "other"
    limit_files(resource.RLIM_INFINITY)
    untouched = content(root) == before
    return {"limit": limit, "error": error, "kind": kind, "untouched": untouched}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    sizes = generate(root / "old")
    limits = sorted({size - 1 for size in sizes.values()})
    print(json.dumps([
        attempt(root, target, limit) for limit in limits for target in ("old", "new/folder")
    ]))  # fmt: skip

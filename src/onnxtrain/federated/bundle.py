"""The artifacts of a federation: a folder, or one file inside a Flower app.

Flower's app bundles hold source files, TOML, YAML, Markdown and JSON only. `pack` writes the graphs
and a checkpoint without weights into one JSON file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.device.run.session_settings import default_options
from onnxtrain.device.session import TrainingSession
from onnxtrain.device.state import CheckpointState, TrainingState
from onnxtrain.errors import ArgumentError, ModelError, OnnxTrainError
from onnxtrain.federated.files import replace_file
from onnxtrain.federated.selection import is_float
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.committed_folder import BASE_DATA, GRAPHS
from onnxtrain.format.folder_lock import reading
from onnxtrain.format.model.file import ModelFile

FORMAT = 1
# A larger file is not read; Flower's bundles have 10 MB at most.
MOST_PACKED_BYTES = 1 << 31
Source = str | os.PathLike[str]


@dataclass
class Bundle:
    """Artifacts in memory, which make sessions.

    `version` is a hash of the graphs. `checkpoint` is that of the folder, or a nominal one without
    weights.
    """

    name: str
    graphs: dict[str, bytes]
    checkpoint: bytes | Path
    base: Path | None = None  # the file that the frozen weights are in, where factors train
    version: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for name in GRAPHS:
            digest.update(name.encode() + hashlib.sha256(self.graphs.get(name, b"")).digest())
        self.version = digest.hexdigest()[:16]

    def session(self, threads: int | None = None, **options: Any) -> TrainingSession:
        """Make a session with a number of threads; all cores by default."""

        def with_threads() -> Any:
            made = default_options()
            made.intra_op_num_threads = threads
            return made

        if threads is not None:
            options.setdefault("session_options", with_threads)
        graphs = [self.graphs.get(name) for name in GRAPHS]
        assert graphs[0] is not None
        return TrainingSession(self.checkpoint, graphs[0], *graphs[1:], base=self.base, **options)


def open_artifacts(source: Source, prefix: str = "") -> Bundle:
    """Read artifacts from a folder, or from a file that `pack` wrote."""
    path = require_path("artifacts", source)
    if path.is_dir():
        return _from_folder(path, prefix)
    if path.is_file():
        return _from_file(path)
    raise ModelError(f"there are no artifacts at {str(path)!r}: it is neither a folder nor a file")


def require_path(name: str, given: Any) -> Path:
    """Return an argument as a path, or raise an error."""
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(f"{name} is a path, not {given!r}")
    return Path(given)


def pack(
    artifacts: Source, file: Source, *, prefix: str = "", weights: bool = False
) -> dict[str, int]:
    """Write artifacts into one JSON file, which Flower includes in its app bundles.

    Args:
        artifacts: the artifact folder.
        file: the file to write, such as `my_app/artifacts.json`.
        prefix: the prefix of the file names in the folder.
        weights: whether to include the weights. Without them clients get their initial weights
            from the server; large frozen layers are better packed.

    Returns:
        The size of each part in bytes.

    """
    folder = Path(artifacts)
    with reading((folder / f"{prefix}checkpoint").parent):
        parts, version = _parts(folder, prefix, weights)
    content = {
        "onnxtrain-artifacts": FORMAT,
        "version": version,
        "files": {name: base64.b64encode(data).decode() for name, data in parts.items()},
    }
    replace_file(Path(file), json.dumps(content, indent=1).encode())
    return {name: len(data) for name, data in parts.items()}


def _parts(folder: Path, prefix: str, weights: bool) -> tuple[dict[str, bytes], str]:
    """Return what is packed, and the version of the graphs."""
    bundle = _read_folder(folder, prefix)
    parts = dict(bundle.graphs)
    if weights:
        checkpoint = CheckpointState.load_checkpoint(folder / f"{prefix}checkpoint")
        parts["checkpoint"] = checkpoint.to_bytes()
    else:
        nominal = folder / f"{prefix}nominal_checkpoint"
        if not nominal.is_file():
            raise ModelError(
                f"there is no '{prefix}nominal_checkpoint' in {str(folder)!r}: generate the "
                "artifacts with nominal_checkpoint=True, or pack them with weights=True"
            )
        parts["nominal_checkpoint"] = nominal.read_bytes()
    if bundle.base is not None:
        parts[BASE_DATA] = bundle.base.read_bytes()
    return parts, bundle.version


def _from_folder(folder: Path, prefix: str) -> Bundle:
    with reading((folder / f"{prefix}checkpoint").parent):
        return _read_folder(folder, prefix)


def _read_folder(folder: Path, prefix: str) -> Bundle:
    graphs = {}
    for name in GRAPHS:
        for file in (folder / f"{prefix}{name}.onnx", folder / f"{prefix}{name}.ort"):
            if name not in graphs and file.is_file():
                graphs[name] = file.read_bytes()
    if "training_model" not in graphs:
        raise ModelError(f"there is no '{prefix}training_model.onnx' in {str(folder)!r}")
    for name in (f"{prefix}checkpoint", f"{prefix}nominal_checkpoint"):
        if (folder / name).is_file():
            base = _base_name(graphs)
            return Bundle(str(folder), graphs, folder / name, folder / base if base else None)
    raise ArgumentError(f"there is no '{prefix}checkpoint' in {str(folder)!r}")


def _base_name(graphs: Mapping[str, bytes]) -> str:
    """Return the name of the file that the frozen weights are in, "" if there is none."""
    return ModelFile.read(graphs["training_model"]).metadata.base


def _unpack_base(bundle: Bundle, data: bytes) -> None:
    """Write a packed base to a file that onnxruntime reads, in a folder that the bundle removes."""
    folder = tempfile.mkdtemp(prefix="onnxtrain-base-")
    weakref.finalize(bundle, shutil.rmtree, folder, ignore_errors=True)
    bundle.base = Path(folder, Path(_base_name(bundle.graphs) or BASE_DATA).name)
    bundle.base.write_bytes(data)


def _from_file(path: Path) -> Bundle:
    try:
        size = path.stat().st_size
        if size > MOST_PACKED_BYTES:
            raise ValueError(f"it has {size:,} bytes")
        content = json.loads(path.read_bytes())
        if content["onnxtrain-artifacts"] != FORMAT:
            found = f"{str(path)!r} is of format {content['onnxtrain-artifacts']!r}"
            raise ModelError(f"{found}, and onnxtrain knows format {FORMAT}: use a newer version")
        files = content["files"]
        known = [n for n in (*GRAPHS, "checkpoint", "nominal_checkpoint", BASE_DATA) if n in files]
        parts = {name: base64.b64decode(files.pop(name), validate=True) for name in known}
        checkpoint = parts.pop("checkpoint", None) or parts.pop("nominal_checkpoint")
        base = parts.pop(BASE_DATA, None)
        bundle = Bundle(str(path), parts, checkpoint)
        if bundle.version != content["version"] or "training_model" not in parts:
            raise ValueError("its content does not match its version")
        if base is not None:
            _unpack_base(bundle, base)
    except OnnxTrainError:
        raise
    except Exception as error:  # json raises RecursionError too, for one
        raise ModelError(
            f"{str(path)!r} is not a file of packed artifacts, or it is damaged ({error}): write "
            "it with onnxtrain.federated.pack"
        ) from None
    return bundle


# ---- shared sessions -----------------------------------------------------------------------------


@dataclass
class SharedSession:
    """A session and its initial values, for one client at a time."""

    bundle: Bundle
    session: TrainingSession
    initial: dict[str, Array]
    nominal: bool  # whether the artifacts have no weights of their own
    learning_rate: float  # the artifacts' own
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> TrainingState:
        """The state of the session."""
        return self.session.module.training_state

    @property
    def changing(self) -> list[str]:
        """The names of trainable parameters and running statistics."""
        return [*self.state.trainable_names(), *self.session.module.statistics]

    @property
    def size(self) -> int:
        """The bytes of all parameters."""
        module, state = self.session.module, self.state
        sizes = ((module.shape_of(name), state.type_of(name)[1]) for name in state.names())
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)

    def has(self, name: str, array: Array) -> bool:
        """Whether the artifacts hold this value for a frozen parameter."""
        if self.nominal:
            return False
        own = self.initial[name] if name in self.initial else self.state.value_of(name)
        return np.array_equal(own, array)

    def load(self, values: Mapping[str, Array]) -> None:
        """Set parameters; the artifacts' values of frozen ones are kept for other clients."""
        if not self.nominal:
            frozen = set(values) - set(self.initial) - set(self.changing)
            self.initial |= {name: np.array(self.state.value_of(name)) for name in frozen}
        self.session.load_parameters(values)


_sessions: dict[tuple[Any, ...], SharedSession] = {}
_lock = threading.Lock()


@contextmanager
def borrowed(source: Source | Bundle, prefix: str, threads: int | None) -> Iterator[SharedSession]:
    """Lend the session that this process has for some artifacts.

    Making a session takes longer than a round of a small model, so simulated clients in one
    process share it. The borrower sets everything that training changes.
    """
    key: tuple[Any, ...]
    if isinstance(source, Bundle):
        key = (source.version, id(source), threads)
    else:
        path = Path(source).absolute()
        file = path / f"{prefix}training_model.onnx" if path.is_dir() else path
        key = (str(path), prefix, threads, file.stat().st_mtime_ns if file.exists() else 0)
    with _lock:
        if key not in _sessions:
            bundle = source if isinstance(source, Bundle) else open_artifacts(source, prefix)
            session = bundle.session(threads)
            optimizer, nominal = session.optimizer, session.module.training_state.nominal
            rate = 0.0 if optimizer is None else optimizer.get_learning_rate()
            shared = SharedSession(bundle, session, {}, nominal, rate)
            if not shared.nominal:
                names = [name for name in shared.changing if is_float(shared.state, name)]
                shared.initial = {name: np.array(shared.state.value_of(name)) for name in names}
            _sessions[key] = shared
        shared = _sessions[key]
    with shared.lock:
        yield shared

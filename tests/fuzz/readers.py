"""Every reader of foreign bytes, with good files to begin from.

A reader is a function of a path. It raises an `OnnxTrainError` for what it cannot take; anything
else that it raises is a defect. To add one, write a function that returns it, and a line in
`READERS`. The readers of another language are a program (`PROGRAMS`): each line of its input is the
name of a reader, a tab and a path; it answers with a line of JSON, `{"outcome": "read"}`,
`{"outcome": "refused"}` or `{"outcome": "foreign", "error": "..."}`. This file is the program of
Python, `javascript.mjs` that of JavaScript; one for C would be another line.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shutil
import struct
import sys
import tempfile
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
GOLDEN = TESTS / "golden"
CORPUS = HERE / "corpus"
sys.path[:0] = [str(TESTS.parent / "src"), str(TESTS / "device"), str(HERE)]

import adapter_readers  # noqa: E402
from small_runs import open_session, samples  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.device.session import TrainingSession  # noqa: E402
from onnxtrain.device.state import CheckpointState  # noqa: E402
from onnxtrain.errors import OnnxTrainError  # noqa: E402
from onnxtrain.format.checkpoint import checksum, store  # noqa: E402
from onnxtrain.format.checkpoint.content import CheckpointContent  # noqa: E402
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint  # noqa: E402
from onnxtrain.format.model.wire import bytes_field, text_field  # noqa: E402

Read = Callable[[Path], None]
TRAINING, GENERATION = "__onnxtrain__.training", "__onnxtrain__.generation"
MLP = GOLDEN / "mlp"


@dataclass(frozen=True)
class Reader:
    """How hostile files are made and read.

    `kind` chooses the mutations. `make` returns the function that reads, `seeds` good files.
    `repair` puts in order what a harmful writer would: checksums. `room` is what reading may take
    in memory beyond twice the file. `language` says which program reads; `make` is for Python.
    """

    kind: str
    make: Callable[[], Read] | None
    seeds: Callable[[], list[bytes]]
    repair: Callable[[bytes], bytes] = bytes
    room: int = 64 << 20
    language: str = "python"


PROGRAMS = {
    "python": [sys.executable, __file__],
    "javascript": ["node", str(HERE / "javascript.mjs")],
}


# ---- checkpoints ---------------------------------------------------------------------------------


@functools.cache
def run_saved() -> bytes:
    """A checkpoint of a run of `fit`, with a scheduler, metrics and a best epoch."""
    session = open_session(learning_rate=0.01)
    session.add_property("note", "text")
    session.add_property("count", 3)
    session.set_metadata(classes=["cat", "dog", "owl"], mean=[0.5], std=[0.25], size=[6, 6])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c")
        fit(session, 2, [onnxtrain.SaveCheckpoint(path, ("epoch", "best"))])
        return path.read_bytes()


def fit(session: TrainingSession, epochs: int, callbacks: Any = (), **more: Any) -> None:
    onnxtrain.fit(
        session, samples(16), epochs, batch_size=8, validation=samples(8), metrics=["accuracy"],
        schedule="cosine", callbacks=[*callbacks, onnxtrain.EarlyStopping(patience=9)],
        progress=False, **more,
    )  # fmt: skip


def checkpoints() -> list[bytes]:
    folder = GOLDEN / "checkpoints"
    found = [folder / name for name in ("generated", "nominal", "saved", "version1")]
    found += [GOLDEN / model / "checkpoint" for model in ("mlp", "head", "cnn")]
    return [path.read_bytes() for path in found] + [run_saved()]


def with_checksum(data: bytes) -> bytes:
    """The same file with a right checksum, where it has one."""
    rest = data[: -checksum.END_SIZE]
    if data[len(rest) :].startswith(b"ODTCCRC="):
        if rest[8:16] == b"ODTCSIZE":
            rest = rest[:16] + len(data).to_bytes(8, "little") + rest[24:]
        return rest + checksum.end(zlib.crc32(rest))
    return data


def use_checkpoint(source: Any) -> None:
    """Load a checkpoint and go on with it, in all ways that read more of it."""
    state = CheckpointState.load_checkpoint(source)
    repr(state)
    for _, parameter in () if state.nominal else state.parameters:
        np.array(parameter.data)
    for model in ("mlp", "head", "cnn"):
        with contextlib.suppress(OnnxTrainError):  # that it is of another model, mostly
            resume(read_checkpoint(source), model)
    state.to_bytes(include_optimizer_state=True)


def resume(content: CheckpointContent, model: str = "mlp") -> None:
    """Continue from a checkpoint: with schedulers, and the run that it holds."""
    for kind in ("linear", "plateau"):
        session = TrainingSession.from_folder(GOLDEN / model, checkpoint=CheckpointState(content))
        session.metadata  # noqa: B018
        given = {"warmup_step_count": 1, "total_step_count": 9} if kind == "linear" else {}
        make = onnxtrain.device.schedulers.SCHEDULERS[kind]
        make(session.optimizer, **given).restore(session.optimizer.saved_scheduler(kind))
    session = TrainingSession.from_folder(GOLDEN / model, checkpoint=CheckpointState(content))
    if model == "mlp":
        fit(session, 2, resume=True)


def read_checkpoints() -> Read:
    return use_checkpoint


def external() -> list[bytes]:
    """The two files of a checkpoint in one: the size of the first, then both."""
    found = []
    golden = GOLDEN / "checkpoints" / "external"
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder, "c")
        state = read_checkpoint(run_saved())
        state.has_external_data = True
        write_checkpoint(ours, state)
        for path in (golden, ours):
            main = path.read_bytes()
            main += b"\0" * (-len(main) % 4) if path is golden else b""
            data = path.with_name(f"{path.name}.data").read_bytes()
            found.append(struct.pack("<I", len(main)) + main + data)
    return found


def read_external() -> Read:
    folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))

    def read(path: Path) -> None:
        blob = path.read_bytes()
        size = int.from_bytes(blob[:4], "little")
        main = folder / "c"
        main.write_bytes(blob[4 : 4 + size])
        (folder / "c.data").write_bytes(blob[4 + size :])
        use_checkpoint(main)

    return read


def repair_external(blob: bytes) -> bytes:
    size = int.from_bytes(blob[:4], "little")
    return blob[:4] + with_checksum(blob[4 : 4 + size]) + with_blocks(blob[4 + size :])


def with_blocks(data: bytes) -> bytes:
    """The same external data with right checksums of its blocks, where it has some."""
    end = len(data) - store.FOOTER_SIZE
    if end < checksum.TABLE_SIZE or data[end - checksum.TABLE_SIZE :][:8] != b"ODTCBLKS":
        return data
    length = int.from_bytes(data[end - checksum.TABLE_SIZE :][8:16], "little")
    file = io.BytesIO()
    blocks = checksum.BlockWriter(file)
    blocks.write(data[: min(length, end)])
    blocks.finish()
    return file.getvalue() + data[end:]


# ---- records -------------------------------------------------------------------------------------


def records() -> list[bytes]:
    text = read_checkpoint(run_saved()).properties[TRAINING]
    plateau = {"kind": "plateau", "state": {"mode": "min", "factor": 0.1, "patience": 10}}
    plateau["state"] |= {"initial_lr": 0.1, "best": 1.0, "bad_steps": 1, "resting": 0, "rate": 0.1}
    linear = {"kind": "linear", "state": {"warmup_step_count": 1, "total_step_count": 9}}
    linear["state"] |= {"initial_lr": 0.1, "first_step": 0}
    record = json.loads(str(text))
    return [
        str(text).encode(),
        *(json.dumps(record | {"scheduler": each}).encode() for each in (plateau, linear)),
    ]


def read_records(name: str) -> Callable[[], Read]:
    """Read a checkpoint with another text for one of its records."""

    def read(path: Path) -> None:
        held = read_checkpoint(run_saved())
        held.properties[name] = path.read_bytes().decode("utf-8", "replace")
        resume(held)

    return lambda: read


def generations() -> list[bytes]:
    return [str(read_checkpoint(run_saved()).properties[GENERATION]).encode()]


def histories() -> list[bytes]:
    session = open_session(learning_rate=0.01)
    run = onnxtrain.fit(session, samples(16), 2, validation=samples(8), progress=False)
    return [run.to_json().encode()]


def read_histories() -> Read:
    from onnxtrain.device.loop.history import History

    def read(path: Path) -> None:
        history = History.from_json(path.read_bytes())
        repr(history), history.to_json()

    return read


def metadata() -> list[bytes]:
    eval_model = onnxtrain.format.model.file.ModelFile.read(MLP / "eval_model.onnx")
    properties = open_session(checkpoint=run_saved()).metadata.properties()
    properties["data"] = '{"size": 6, "classes": ["a", "b"], "mean": [0.5]}'  # of old versions
    return [
        json.dumps({"onnxtrain": eval_model.metadata.to_json(), **properties}).encode(),
        json.dumps({key: json.loads(value) for key, value in properties.items()}).encode(),
    ]


def read_metadata() -> Read:
    """Put properties into a model and into a checkpoint, as text or as JSON in text."""
    from onnxtrain.cli.reading import remembered
    from onnxtrain.format.model.file import ModelFile

    model = (MLP / "eval_model.onnx").read_bytes()
    options = Namespace(
        label=None, columns=None, class_names=None, image_size=None, mean=None, std=None, map=()
    )

    def read(path: Path) -> None:
        try:
            found = json.loads(path.read_bytes())
            items = {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in found.items()}
            entries = [text_field(1, k) + text_field(2, v) for k, v in items.items()]
        except (ValueError, AttributeError, RecursionError):  # no mapping of texts
            return
        ModelFile.read(model + b"".join(bytes_field(14, entry) for entry in entries))
        held = read_checkpoint(run_saved())
        held.properties |= items
        session = TrainingSession.from_folder(MLP, checkpoint=CheckpointState(held))
        remembered(session, options)

    return read


# ---- models --------------------------------------------------------------------------------------


def graphs() -> list[bytes]:
    names = ("training_model", "eval_model", "optimizer_model", "step_model")
    found = [GOLDEN / model / f"{name}.onnx" for model in ("mlp", "head") for name in names]
    return [path.read_bytes() for path in found]


def read_graphs() -> Read:
    """Take a file for each of the graphs of a folder; onnxruntime is not asked."""
    from onnxtrain.format.model.file import ModelFile

    good = {p.stem.removesuffix("_model"): p for p in MLP.glob("*_model.onnx")}

    def read(path: Path) -> None:
        ModelFile.read(path)
        for place in ("training", "eval", "optimizer", "step"):
            files = good | {place: path}
            graphs = [files[name] for name in ("training", "eval", "optimizer", "step")]
            state = CheckpointState.load_checkpoint(MLP / "checkpoint")
            state.generation = None  # that it is not the file which was written is known
            with contextlib.suppress(OnnxTrainError):  # that it is another graph, mostly
                session = TrainingSession(state, *graphs)
                names = session.output_names(training=False)
                with contextlib.suppress(OnnxTrainError):
                    session.metadata  # noqa: B018
                session.export_model_for_inferencing(None, names[1:])

    return read


def models() -> list[bytes]:
    """Models as users have them, with most of what a file can hold."""
    found = [(GOLDEN / m / "eval_model.onnx").read_bytes() for m in ("mlp", "cnn")]
    return found + [path.read_bytes() for path in sorted((CORPUS / "model").glob("seed-*"))]


def read_models() -> Read:
    from onnxtrain.offline.inspect import inspect

    def read(path: Path) -> None:
        str(inspect(path))

    return read


# ---- data of the command line --------------------------------------------------------------------


def arrays(kind: str) -> list[bytes]:
    x, labels = samples(6)
    found = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, x=x, labels=labels)
        found.append(file.getvalue())
    if kind == "npy":
        found = []
        for array in (x, x.astype(np.float64)):
            file = io.BytesIO()
            np.save(file, array)
            found.append(file.getvalue())
    return found


def tables() -> list[bytes]:
    x, labels = samples(6)
    header = ",".join([*(f"f{i}" for i in range(8)), "label"])
    rows = [",".join([*map(str, row), str(label)]) for row, label in zip(x, labels, strict=True)]
    words = [",".join([*map(str, row), "cat" if n else "dog"]) for row, n in zip(x, labels)]  # noqa: B905
    return ["\n".join([header, *lines]).encode() for lines in (rows, words)]


def images() -> list[bytes]:
    from PIL import Image

    found = []
    for ending in ("png", "jpeg", "gif", "bmp", "webp", "tiff"):
        file = io.BytesIO()
        Image.fromarray(np.arange(108, dtype=np.uint8).reshape(6, 6, 3)).save(file, ending)
        found.append(file.getvalue())
    return found


def read_data(ending: str) -> Callable[[], Read]:
    """Read training data, and what a model is to be applied to."""

    def make() -> Read:
        from onnxtrain.cli.data import load, load_samples
        from onnxtrain.cli.reading import Reading

        session = open_session("cnn" if ending == "png" else "mlp")
        folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))
        (folder / "cat").mkdir()
        (folder / "dog").mkdir()
        good = folder / "good.npy"
        np.save(good, samples(6)[1])

        def read(path: Path) -> None:
            named = folder / f"x.{ending}"
            shutil.copyfile(path, named)
            given = [str(named)]
            if ending == "png":
                for name in ("cat", "dog"):
                    shutil.copyfile(path, folder / name / "1.png")
                given = [str(folder)]
            if ending == "npy":
                given.append(str(good))
            try:
                load(given, session, Reading(), "--data")
            finally:
                load_samples([str(named)], session.input_types()[:1], Reading())

        return read

    return make


# ---- the command line ----------------------------------------------------------------------------


def read_shown() -> Read:
    """Show a file on a terminal: nothing that moves the cursor may come out."""
    from onnxtrain.cli import main

    def read(path: Path) -> None:
        codes = []
        for more in ([], ["--json"]):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                codes.append(code := main(["checkpoint", "show", str(path), *more]))
            raw = re.search(r"[^\n -~\u00a1-\uffff\U00010000-\U0010ffff]|\u202e", said.getvalue())
            if code not in (0, 1, 2) or raw:
                raise AssertionError(f"exit code {code}, {raw}: {said.getvalue()[-2000:]!r}")
        if any(codes):
            raise OnnxTrainError("the command said no")

    return read


READERS: dict[str, Reader] = {
    "checkpoint": Reader("flatbuffers", read_checkpoints, checkpoints, with_checksum),
    "external_data": Reader("flatbuffers", read_external, external, repair_external),
    "records": Reader("json", read_records(TRAINING), records),
    "generation": Reader("json", read_records(GENERATION), generations),
    "history": Reader("json", read_histories, histories),
    "metadata": Reader("json", read_metadata, metadata),
    "graphs": Reader("protobuf", read_graphs, graphs),
    "model": Reader("protobuf", read_models, models),
    "npz": Reader("zip", read_data("npz"), lambda: arrays("npz")),
    "npy": Reader("npy", read_data("npy"), lambda: arrays("npy")),
    "csv": Reader("table", read_data("csv"), tables),
    "image": Reader("bytes", read_data("png"), images, room=256 << 20),  # of 16 million pixels
    "show": Reader("flatbuffers", read_shown, checkpoints, with_checksum),
    "adapter": Reader(
        "flatbuffers",
        adapter_readers.read_adapters,
        adapter_readers.adapters,
        adapter_readers.with_note,
    ),
    "peft": Reader("bytes", adapter_readers.read_peft, adapter_readers.peft_folders),
    "peft_config": Reader(
        "json", adapter_readers.read_configurations, adapter_readers.configurations
    ),
    "safetensors": Reader("json", adapter_readers.read_headers, adapter_readers.headers),
    "js_checkpoint": Reader("flatbuffers", None, checkpoints, with_checksum, language="javascript"),
    "js_external_data": Reader(
        "flatbuffers", None, external, repair_external, language="javascript"
    ),
    "js_generation": Reader("json", None, generations, language="javascript"),
    "js_records": Reader("json", None, records, language="javascript"),
    "js_graphs": Reader("protobuf", None, graphs, language="javascript"),
    "js_adapter": Reader(
        "flatbuffers",
        None,
        adapter_readers.adapters,
        adapter_readers.with_note,
        language="javascript",
    ),
}
with contextlib.suppress(ImportError):  # where Flower is installed
    from federated_readers import FEDERATED

    READERS |= FEDERATED


def kept(name: str) -> list[bytes]:
    """The files of the corpus: what once broke the reader, and what leads deep into it."""
    folder = CORPUS / name.removeprefix("js_")
    return [path.read_bytes() for path in sorted(folder.glob("*"))]


def outcome(read: Read, path: Path) -> dict[str, str]:
    """Read a file, and return what came of it."""
    import traceback

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)
    except OnnxTrainError:
        return {"outcome": "refused"}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = traceback.format_exception(error)
        return {"outcome": "foreign", "error": "".join(lines)[-4000:]}
    return {"outcome": "read"}


def _serve() -> None:
    made: dict[str, Read] = {}
    for line in sys.stdin:
        name, _, path = line.rstrip("\n").partition("\t")
        if name not in made:
            make = READERS[name].make
            assert make is not None
            made[name] = make()
        print(json.dumps(outcome(made[name], Path(path))), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    _serve()

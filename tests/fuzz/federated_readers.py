"""The readers of federations, for an environment with Flower; see `readers` for what a reader is.

They read what a client or a server finds on its own disk, and what the other one sends.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "federated")]

from federations import FAST, federate, of_client, rows  # noqa: E402
from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAdam  # noqa: E402
from readers import GOLDEN, Read, Reader  # noqa: E402

from onnxtrain import errors  # noqa: E402
from onnxtrain.errors import OnnxTrainError  # noqa: E402
from onnxtrain.federated import (  # noqa: E402
    Checks,
    LocalGrid,
    client_app,
    open_artifacts,
    pack,
    to_arrays,
)
from onnxtrain.federated.arrays import from_arrays  # noqa: E402
from onnxtrain.federated.checks import Expected, check_arrays, check_metrics  # noqa: E402
from onnxtrain.federated.compression import Compression  # noqa: E402
from onnxtrain.federated.files import pack_arrays, unpack_arrays  # noqa: E402
from onnxtrain.federated.server import Server  # noqa: E402

MLP = GOLDEN / "mlp"
KINDS = ("float16", "int8", "top-k:0.2", "top-k:0.9")


def strategy() -> FedAdam:
    return FedAdam(eta=0.05, fraction_evaluate=0.0)


@functools.cache
def files() -> dict[str, bytes]:
    """All files of a federation with all that it can keep, by their names."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        app = client_app(MLP, of_client, state=folder, keep_optimizer=True)
        federate(MLP, app, strategy(), state=folder, which=["fc1.*"], evaluate=rows(9),
                 config={**FAST, "compression": "int8"})  # fmt: skip
        pack(GOLDEN / "head", folder / "artifacts.json")
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def raise_told(reply: Message) -> None:
    """Raise what a client tells: ours, or a defect."""
    if reply.has_error():
        kind = getattr(errors, str(reply.error.reason).partition(" at ")[0], None)
        raise (OnnxTrainError if kind is not None else AssertionError)(reply.error.reason)


def ask(app: Any, record: Any, config: dict[str, Any] | None = None) -> None:
    content = {"arrays": record, "config": ConfigRecord({**FAST, **(config or {})})}
    message = LocalGrid(app, 1).create_message(RecordDict(content), "train", 1, "1")
    raise_told(app(message, Context(1, 1, {}, RecordDict(), {})))


# ---- files ---------------------------------------------------------------------------------------


def read_federation(name: str) -> Any:
    def make() -> Read:
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))
        server = Server(
            open_artifacts(MLP), strategy(), rounds=3, which=["fc1.*"], folder=folder, resume=False
        )

        def read(path: Path) -> None:
            for known, data in files().items():
                if known in ("federation.npz", "history.json"):
                    (folder / known).write_bytes(path.read_bytes() if known == name else data)
            server.strategy = strategy()
            progress = server._begin(resume=True)  # as a server that is started again
            from_arrays(server.session, progress.record())
            progress.result()

        return read

    return make


def read_client_state() -> Read:
    folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))
    app = client_app(open_artifacts(MLP), rows(0, 20), state=folder, keep_optimizer=True)
    record = to_arrays(open_artifacts(MLP).session(), ["fc1.*"])

    def read(path: Path) -> None:
        (folder / "client-0.npz").write_bytes(path.read_bytes())
        for identity in ((2, "f"), (3, "f"), (1, "g")):
            ask(app, record, {"server-round": identity[0], "onnxtrain-federation": identity[1],
                              "compression": "int8"})  # fmt: skip

    return read


def client_states() -> list[bytes]:
    state = unpack_arrays(files()["client-1.npz"], "the file")
    state["round"] = state["before/round"] = np.frombuffer(b"f/2", np.uint8)
    return [files()["client-0.npz"], pack_arrays(state), pack_arrays({})]


def read_packed() -> Read:
    def read(path: Path) -> None:
        open_artifacts(path).session()

    return read


# ---- messages ------------------------------------------------------------------------------------


def read_initial() -> Read:
    app = client_app(open_artifacts(GOLDEN / "head"), rows(0, 20))
    record = to_arrays(open_artifacts(GOLDEN / "head").session(), "trainable")

    def read(path: Path) -> None:
        ask(app, record, {"onnxtrain-initial": path.read_bytes()})

    return read


def initial_values() -> list[bytes]:
    state = open_artifacts(GOLDEN / "head").session().state
    values = {name: np.array(parameter.data) for name, parameter in state.parameters}
    frozen = {name: array for name, array in values.items() if name.startswith("fc1")}
    return [pack_arrays(frozen), pack_arrays(values)]


def as_npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def weight() -> np.ndarray:
    session = open_artifacts(MLP).session()
    return np.array(session.get_parameter("fc1.weight"))


def read_weights() -> Read:
    app = client_app(open_artifacts(MLP), rows(0, 20))
    session = open_artifacts(MLP).session()

    def read(path: Path) -> None:
        record = to_arrays(session)
        array = record["fc1.weight"]
        record["fc1.weight"] = Array(array.dtype, array.shape, array.stype, path.read_bytes())
        ask(app, record)

    return read


def read_replies() -> Read:
    """The first byte says how the rest is compressed: a server believes none of it."""
    sent = {"w": weight()}
    stypes = ["numpy.ndarray", *(f"onnxtrain/{kind.partition(':')[0]}" for kind in KINDS), "x"]

    def read(path: Path) -> None:
        data = path.read_bytes() or b"\0"
        array = Array("float32", sent["w"].shape, stypes[data[0] % len(stypes)], data[1:])
        metrics = MetricRecord({"num-examples": 60})
        content = RecordDict({"arrays": ArrayRecord({"w": array}), "metrics": metrics})
        reply = LocalGrid(ask, 1).create_message(content, "train", 1, "1")
        check_metrics(reply, "num-examples", Checks())
        check_arrays(reply, Expected(sent, clip_norm=1.0), Checks())

    return read


def replies() -> list[bytes]:
    update = {"w": np.random.default_rng(0).normal(size=weight().shape).astype(np.float32)}
    made = [b"\0" + as_npy(weight())]
    for place, kind in enumerate(KINDS, start=1):
        compression = Compression.read(kind)
        assert compression is not None
        made.append(bytes([place]) + compression.encode(update, {})[0]["w"].data)
    return made


FEDERATED: dict[str, Reader] = {
    "federation": Reader(
        "zip", read_federation("federation.npz"), lambda: [files()["federation.npz"]]
    ),
    "federation_history": Reader(
        "json", read_federation("history.json"), lambda: [files()["history.json"]]
    ),
    "client_state": Reader("zip", read_client_state, client_states),
    "packed_artifacts": Reader("json", read_packed, lambda: [files()["artifacts.json"]]),
    "initial_values": Reader("zip", read_initial, initial_values),
    "weights": Reader("npy", read_weights, lambda: [as_npy(weight())]),
    "reply": Reader("bytes", read_replies, replies),
}

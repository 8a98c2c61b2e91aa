"""What a client takes from a server, and what it refuses before it costs memory or time."""

import io
import math
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, LOG, rows
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from onnxtrain.errors import ArgumentError, ModelError
from onnxtrain.federated import LocalGrid, RoundLimits, client_app, open_artifacts, pack, to_arrays
from onnxtrain.federated.files import pack_arrays

X, Y = rows(0, 40)
MLP = GOLDEN / "mlp"
app = client_app(MLP, (X, Y), (X, Y))


def ask(client=app, kind="train", node=None, arrays=None, **config):
    record = to_arrays(open_artifacts(MLP).session()) if arrays is None else arrays
    settings = {**FAST, **{key.replace("_", "-"): value for key, value in config.items()}}
    made = ConfigRecord()
    made.__dict__["_data"] = dict(settings)  # a hostile server is not held by Flower's checks
    message = LocalGrid(client, 1).create_message(
        RecordDict({"arrays": record, "config": made}), kind, 1, "1"
    )
    return client(message, Context(1, 1, node or {}, RecordDict(), {}))


def told(reply) -> str:
    assert reply.has_error()
    return reply.error.reason


# ---- settings ------------------------------------------------------------------------------------

NO_NUMBERS = (-1, 0, 1.5, math.nan, math.inf, "3", True, b"3", [3], 10**18, 2**63, 2**200, 10**5000)


@pytest.mark.parametrize("key", ["local-epochs", "batch-size"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_counts_that_no_round_has(key, value) -> None:
    began = time.monotonic()
    assert told(ask(**{key: value})) == f"ArgumentError at setting {key}"
    assert time.monotonic() - began < 5


BAD = {
    "learning-rate": (-1.0, math.nan, math.inf, "0.1", True, 1e7, 2**200, [0.1]),
    "lr": (-1.0, math.nan, 1e39),
    "seed": (-1, 0.5, math.nan, "1", 2**63, 2**200),
    "proximal-mu": (-1.0, math.nan, math.inf, "1"),
    "clip-norm": (0.0, -1.0, math.nan, math.inf, "1"),
    "compression": ("zip", "top-k:0", "top-k:nan", 5, b"int8", "x" * 10**6, ["int8"]),
    "server-round": (-1, 0.5, math.nan, "1", 2**63),
    "onnxtrain-federation": (5, b"x", "x" * 10**6, ["x"]),
    "onnxtrain-reply": (5, "x" * 10**6),
}


@pytest.mark.parametrize("key", BAD)
def test_settings_that_make_no_sense(key) -> None:
    place = {"lr": "learning-rate"}.get(key, key)
    for value in BAD[key]:
        others = {"learning-rate": None} if key == "lr" else {}
        assert told(ask(**others, **{key: value})) == f"ArgumentError at setting {place}", value


def test_limits_of_the_app_and_of_the_node() -> None:
    small = client_app(
        MLP, (X, Y), limits=RoundLimits(local_epochs=3, batch_size=20, learning_rate=0.5)
    )
    assert not ask(small, local_epochs=3, batch_size=20, learning_rate=0.5).has_error()
    for key, value in (("local-epochs", 4), ("batch-size", 21), ("learning-rate", 0.51)):
        assert told(ask(small, **{key: value})) == f"ArgumentError at setting {key}"
    # The app may come from the server; the node's configuration does not.
    node = {"max-local-epochs": 2, "max-batch-size": 100}
    assert told(ask(small, node=node, local_epochs=3)) == "ArgumentError at setting local-epochs"
    assert told(ask(small, node=node, batch_size=21)) == "ArgumentError at setting batch-size"
    assert told(ask(node={"max-seconds": "x"})) == "ArgumentError at client"
    # A server's message is no place for them, and neither is the run's configuration.
    assert told(ask(small, local_epochs=4, max_local_epochs=9)).endswith("local-epochs")


@pytest.mark.parametrize("given", [{"seconds": 1e-6}, {"steps": 2}])
def test_a_round_that_takes_too_long_ends(given) -> None:
    assert told(ask(client_app(MLP, (X, Y), limits=RoundLimits(**given)), local_epochs=900)) == (
        "ArgumentError at training"
    )
    assert "the round takes more than" in LOG.texts[-1]


def test_a_round_of_endless_batches_ends() -> None:
    def endless(context):
        while True:
            yield X[:8], Y[:8]

    began = time.monotonic()
    told(ask(client_app(MLP, endless, limits=RoundLimits(seconds=0.5))))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("given", [{"local_epochs": 0}, {"seconds": math.nan}, {"steps": None},
                                   {"batch_size": "x"}, {"message_bytes": -1}])  # fmt: skip
def test_limits_that_make_no_sense(given) -> None:
    with pytest.raises(ArgumentError):
        RoundLimits(**given)
    with pytest.raises(ArgumentError, match="RoundLimits"):
        client_app(MLP, (X, Y), limits=given)


# ---- bombs ---------------------------------------------------------------------------------------


def npz(entries, compression=zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def npy(shape, dtype="<f4", data=b"", version=b"\1\0") -> bytes:
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    size = len(header).to_bytes(2 if version == b"\1\0" else 4, "little")
    return b"\x93NUMPY" + version + size + header + data


def names(*given) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([name.encode().hex() for name in given]))
    return buffer.getvalue()


def overlapping() -> bytes:
    """Two hundred entries, all of them the same bytes."""
    data = bytearray(npz({"names.npy": names("a"), "a0.npy": npy((10**5,), data=bytes(4 * 10**5))}))
    end = data.rfind(b"PK\5\6")
    begin = int.from_bytes(data[end + 16 : end + 20], "little")
    entry = data[data.index(b"PK\1\2", begin + 1) : end]
    data[end:end] = entry * 200
    end = data.rfind(b"PK\5\6")
    data[end + 8 : end + 12] = (202).to_bytes(2, "little") * 2
    data[end + 12 : end + 16] = (end - begin).to_bytes(4, "little")
    return bytes(data)


def crowded() -> bytes:
    """An archive whose directory alone would take a hundred times its bytes."""
    entry = b"PK\1\2" + bytes(42)
    directory = entry * 10**6
    return directory + b"PK\5\6" + bytes(8) + len(directory).to_bytes(4, "little") + bytes(6)


BOMBS = {
    "deflated": lambda: npz({"names.npy": names("fc1.weight"),
                             "a0.npy": npy((3 * 10**7,), data=bytes(12 * 10**7))},
                            zipfile.ZIP_DEFLATED),
    "bzip2": lambda: npz({"names.npy": names("fc1.weight"),
                          "a0.npy": npy((10**7,), data=bytes(4 * 10**7))},
                         zipfile.ZIP_BZIP2),
    "a shape": lambda: npz({"names.npy": names("fc1.weight"), "a0.npy": npy((10**12,))}),
    "shapes": lambda: npz({"names.npy": names("fc1.weight"), "a0.npy": npy((2**31, 2**31, 2**31))}),
    "wide text": lambda: npz({"names.npy": npy((1,), "<U1000000000")}),
    "no width": lambda: npz({"names.npy": npy((10**15,), "<U0")}),
    "objects": lambda: npz({"names.npy": npy((1,), "|O", b"cos\nsystem\n(S'true'\ntR.")}),
    "records": lambda: npz({"names.npy": npy((1,), [("a", "<f4")], b"    ")}),
    "negative": lambda: npz({"names.npy": names("a"), "a0.npy": npy((-4,))}),
    "long header": lambda: npz({"names.npy": npy((1,) * 3000)}),
    "nested header": lambda: npz({"names.npy": npy("(" * 5000)}),
    "overlapping": overlapping,
    "crowded": crowded,
    "too much": lambda: bytes(50_000_000),
    "nothing": lambda: b"",
    "not an archive": lambda: b"x" * 1000,
    "a number": lambda: 4_000_000_000,
    "a text": lambda: "x" * 1000,
    "a list": lambda: [1, 2, 3],
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_initial_values_that_are_a_bomb(name) -> None:
    bomb = BOMBS[name]()
    size = len(bomb) if isinstance(bomb, bytes) else 0
    ask()  # the session is there
    tracemalloc.start()
    began = time.monotonic()
    try:
        reason = told(ask(onnxtrain_initial=bomb))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason.endswith(" at initial weights")
    assert time.monotonic() - began < 5
    assert peak < 2 * size + 64_000_000


@pytest.mark.parametrize("name", ["deflated", "a shape", "overlapping", "crowded"])
def test_bombs_in_the_client_s_own_file_and_on_the_server(name, tmp_path) -> None:
    from onnxtrain.errors import StateError
    from onnxtrain.federated.client_state import ClientState
    from onnxtrain.federated.progress import Progress

    bomb = BOMBS[name]()
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match="damaged"):
            ClientState.from_bytes(bomb, "the file")
        (tmp_path / "federation.npz").write_bytes(bomb)
        with pytest.raises(StateError, match="damaged"):
            Progress.read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(bomb) + 64_000_000
    finally:
        tracemalloc.stop()


def record(**changed):
    made = to_arrays(open_artifacts(MLP).session())
    for name, array in changed.items():
        made[name.replace("__", ".")] = array
    return made


ARRAYS = {
    "shape": Array("float32", (3,), "numpy.ndarray", npy((10**12,))),
    "cut": Array("float32", (3,), "numpy.ndarray", npy((3,), data=b"  ")),
    "more": Array("float32", (3,), "numpy.ndarray", npy((3,), data=b" " * 16)),
    "objects": Array("float32", (3,), "numpy.ndarray", npy((3,), "|O", b"cos\nsystem\n.")),
    "version": Array("float32", (3,), "numpy.ndarray", npy((3,), data=b" " * 12, version=b"\t\0")),
    "pickle": Array("float32", (3,), "pickle", b"cos\nsystem\n(S'true'\ntR."),
    "empty": Array("float32", (3,), "numpy.ndarray", b""),
    "text": Array(np.array(["a", "b", "c"])),
    "large": Array(np.zeros(10**6, np.float32)),
    "nothing of numpy": Array("float32", (3,), "onnxtrain/int8", b"1234567"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_weights_that_are_none(name, kind) -> None:
    tracemalloc.start()
    try:
        reply = ask(kind=kind, arrays=record(fc2__bias=ARRAYS[name]))
        assert tracemalloc.get_traced_memory()[1] < 32_000_000
    finally:
        tracemalloc.stop()
    assert told(reply) == "ArgumentError at received weights"


def test_the_size_of_a_message() -> None:
    wide = ArrayRecord({n: Array(a.numpy().astype(np.float64)) for n, a in record().items()})
    assert not ask(arrays=wide).has_error()
    own = client_app(MLP, (X, Y), limits=RoundLimits(message_bytes=1000))
    assert told(ask(own)) == "ArgumentError at received weights"
    assert told(ask(node={"max-message-bytes": 1000})) == "ArgumentError at received weights"
    initial = pack_arrays({"fc1.weight": np.zeros(4 * 10**5, np.float32)})
    assert told(ask(onnxtrain_initial=initial)) == "ArgumentError at initial weights"


def test_reading_takes_no_more_than_the_process_may_have() -> None:
    """With a limit of the operating system, not only of what Python counts."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * 2**20, before[1]))
    try:
        for array in ARRAYS.values():
            told(ask(arrays=record(fc2__bias=array)))
        for name in ("a shape", "shapes", "wide text", "a number"):
            told(ask(onnxtrain_initial=BOMBS[name]()))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---- bundles -------------------------------------------------------------------------------------


def test_a_bundle_names_no_files(tmp_path) -> None:
    """Its parts are held in memory under the names that onnxtrain knows."""
    import json

    file = tmp_path / "a.json"
    pack(GOLDEN / "head", file)
    content = json.loads(file.read_text())
    for name in ("../../evil", "/etc/passwd", "checkpoint/../x", "C:\\x"):
        content["files"][name] = "AAAA"
    file.write_text(json.dumps(content))
    assert set(open_artifacts(file).graphs) == set(open_artifacts(GOLDEN / "head").graphs)
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "content",
    [b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b'{"onnxtrain-artifacts": 1}',
     b'{"onnxtrain-artifacts": 1, "files": [1], "version": "x"}'],
)  # fmt: skip
def test_a_bundle_that_is_none(content, tmp_path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ModelError, match="packed artifacts"):
        open_artifacts(tmp_path / "a.json")


def test_a_bundle_that_is_too_large_is_not_read(tmp_path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**31 + 1)
    with pytest.raises(ModelError, match="2,147,483,649 bytes"):
        open_artifacts(tmp_path / "a.json")

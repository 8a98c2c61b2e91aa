"""Smaller updates: bytes, what they lose, and that it is not lost for ever."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, arrays, federate, of_client, rows
from flwr.clientapp import mod
from flwr.serverapp.strategy import FedAvg

from onnxtrain.errors import ArgumentError, NonFiniteError
from onnxtrain.federated import Compression, client_app
from onnxtrain.federated.compression import decode

RNG = np.random.default_rng(0)
UPDATE = {
    "weight": RNG.normal(size=(30, 40)).astype(np.float32),
    "bias": (1e-3 * RNG.normal(size=40)).astype(np.float32),
    "scalar": np.array(0.25, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "zeros": np.zeros(5, np.float32),
}
BASE = {name: np.ones_like(array) for name, array in UPDATE.items()}
KINDS = ("float16", "int8", "top-k:0.1", "top-k:1", "top-k:0.0001")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_and_what_is_lost_are_the_update(kind) -> None:
    compression = Compression.read(kind)
    record, lost = compression.encode(UPDATE, {})
    made = decode(record, BASE)
    for name, array in UPDATE.items():
        assert made[name].shape == array.shape
        assert made[name].dtype == np.float32
        if compression.has_memory:
            np.testing.assert_allclose(made[name] - 1 + lost[name], array, atol=3e-7)
        else:
            np.testing.assert_allclose(made[name] - 1, array, rtol=1e-3, atol=1e-6)
            assert not lost


@pytest.mark.parametrize(("kind", "most"), [("float16", 2.01), ("int8", 1.05), ("top-k:0.05", 0.4)])
def test_bytes_for_each_number(kind, most) -> None:
    record, _ = Compression.read(kind).encode({"weight": UPDATE["weight"]}, {})
    assert len(record["weight"].data) <= most * UPDATE["weight"].size


def test_top_k_takes_the_largest_of_all_tensors() -> None:
    record, lost = Compression("top-k", 0.02).encode(UPDATE, {})
    made = {name: array - 1 for name, array in decode(record, BASE).items()}
    sent = [abs(v) for a in made.values() for v in a.reshape(-1) if v]
    left = [abs(v) for a in lost.values() for v in a.reshape(-1) if v]
    assert len(sent) == int(np.ceil(0.02 * sum(a.size for a in UPDATE.values())))
    assert min(sent) >= max(left) - 1e-6
    assert not made["bias"].any()


@pytest.mark.parametrize("kind", ["int8", "top-k:0.05"])
def test_what_was_lost_comes_with_later_updates(kind) -> None:
    compression = Compression.read(kind)
    update = {"weight": UPDATE["weight"], "bias": 50 * UPDATE["bias"]}
    total = {name: np.zeros_like(array) for name, array in update.items()}
    residual = {}
    for _ in range(200):
        record, residual = compression.encode(update, residual)
        for name, array in decode(record, {n: np.zeros_like(a) for n, a in update.items()}).items():
            total[name] += array
    for name, array in update.items():
        np.testing.assert_allclose(total[name] / 200, array, atol=0.15 if "k" in kind else 1e-3)
    # Without memory the small ones would never arrive.
    assert np.abs(total["bias"]).max() > 1


@pytest.mark.parametrize("kind", ["int8", "top-k:0.5"])
def test_numbers_that_are_not_finite_are_refused(kind) -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(NonFiniteError):
            Compression.read(kind).encode({"a": np.array([1, bad], np.float32)}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_were_cut_are_refused(kind) -> None:
    record, _ = Compression.read(kind).encode({"weight": UPDATE["weight"]}, {})
    record["weight"].data = record["weight"].data[:-3]
    with pytest.raises(ArgumentError, match="bytes"):
        decode(record, BASE)
    record, _ = Compression.read(kind).encode({"weight": UPDATE["weight"]}, {})
    with pytest.raises(ArgumentError, match="shape"):
        decode(record, {"weight": np.ones(3, np.float32)})
    with pytest.raises(ArgumentError, match="not sent"):
        decode(record, {})


def test_a_place_beyond_the_tensor_is_refused() -> None:
    record, _ = Compression("top-k", 0.001).encode({"weight": UPDATE["weight"]}, {})
    data = bytearray(record["weight"].data)
    assert data[0] == 0
    data[1:5] = (10**9).to_bytes(4, "little")
    record["weight"].data = bytes(data)
    with pytest.raises(ArgumentError, match="bytes"):
        decode(record, BASE)


@pytest.mark.parametrize("given", ["zip", "top-k:0", "top-k:-1", "top-k:nan", "int9", "top-k:"])
def test_what_is_no_compression(given) -> None:
    with pytest.raises(ArgumentError, match="top-k"):
        Compression.read(given)
    assert Compression.read("none") is Compression.read("") is Compression.read(None) is None


@pytest.mark.parametrize("kind", ["float16", "int8", "top-k:0.1"])
@pytest.mark.parametrize("state", [True, False])
def test_a_federation_with_smaller_updates(kind, state, tmp_path) -> None:
    app = client_app(GOLDEN / "mlp", of_client, of_client, state=tmp_path if state else None,
                     mods=[mod.arrays_size_mod])  # fmt: skip
    plain = federate(GOLDEN / "mlp", app, rounds=6, evaluate=rows(9))
    small = federate(GOLDEN / "mlp", app, rounds=6, evaluate=rows(9),
                     config={**FAST, "compression": kind})  # fmt: skip
    bytes_up = [r.train_metrics_clientapp[6]["bytes-up"] for r in (plain, small)]
    down = [r.train_metrics_clientapp[6]["bytes-down"] for r in (plain, small)]
    assert bytes_up[1] < {"float16": 0.35, "int8": 0.2, "top-k:0.1": 0.2}[kind] * bytes_up[0]
    assert down[0] == down[1]
    first, last, wanted = (
        small.evaluate_metrics_serverapp[0], small.evaluate_metrics_serverapp[6],
        plain.evaluate_metrics_serverapp[6],
    )  # fmt: skip
    learned = first["eval_loss"] - last["eval_loss"]
    assert learned > (0.5 if "k" in kind else 0.95) * (first["eval_loss"] - wanted["eval_loss"])


def test_clients_that_compress_and_clients_that_do_not() -> None:
    one, other = (
        client_app(GOLDEN / "mlp", of_client, defaults={"compression": kind})
        for kind in ("float16", "none")
    )

    def client(message, context):
        return (one if context.node_config["partition-id"] else other)(message, context)

    mixed, plain = (
        federate(GOLDEN / "mlp", app, FedAvg(fraction_evaluate=0.0), rounds=1)
        for app in (client, other)
    )
    for name, array in arrays(plain).items():
        np.testing.assert_allclose(arrays(mixed)[name], array, atol=2e-4)

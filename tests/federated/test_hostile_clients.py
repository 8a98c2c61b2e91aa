"""Clients that attack: huge updates, false counts, replays, NaN. The federation ends as without."""

import functools
import logging

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, arrays, federate, images_of_client, of_client, rows, same
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import mod
from flwr.serverapp import strategy as flower
from hostile_clients import ATTACKS, THREE, hostile, values_of, with_arrays, with_count

from onnxtrain.errors import ArgumentError
from onnxtrain.federated import Checks, LocalGrid, client_app, open_artifacts
from onnxtrain.federated.checks import norm_of
from onnxtrain.federated.server import Server, named_strategy

MLP = GOLDEN / "mlp"
honest = client_app(MLP, of_client, of_client)
TEST = rows(99, 1000)


def run(client, strategy=None, *, clients=5, rounds=1, config=None, model="mlp", **options):
    server = Server(
        open_artifacts(GOLDEN / model), strategy or flower.FedAvg(fraction_evaluate=0.0),
        rounds=rounds, **options,
    )  # fmt: skip
    result = server.run(LocalGrid(client, clients), config or FAST)
    return server, result


def is_training(message) -> bool:
    return message.metadata.message_type == "train"


def one(change):
    """A federation in which the reply of client 1 is changed."""

    def client(message, context):
        reply = honest(message, context)
        if context.node_config["partition-id"] != 1 or not is_training(message):
            return reply
        sent = values_of(message.content["arrays"])
        return Message(change(reply.content, sent), reply_to=message)

    return client


def without_it(**options):
    four = [{"partition-id": i} for i in (0, 2, 3, 4)]
    return run(honest, clients=four, **options)[1]


# ---- the ten -------------------------------------------------------------------------------------


@functools.cache
def accuracy(kinds=(), strategy="fedavg", rounds=8):
    result = federate(MLP, hostile(honest, kinds), named_strategy(strategy), clients=10,
                      rounds=rounds, config={**FAST, "learning-rate": 0.05}, evaluate=TEST,
                      metrics=["accuracy"])  # fmt: skip
    return 100 * result.evaluate_metrics_serverapp[rounds]["accuracy"]


MIXED = (THREE, ("largest", "count-many", "replay"), ("count-float", "nan", "huge"))


@pytest.mark.parametrize("kinds", MIXED, ids=["-".join(kinds) for kinds in MIXED])
def test_three_hostile_clients_of_ten_cost_two_points_at_most(kinds, caplog) -> None:
    caplog.set_level(logging.CRITICAL, "flwr")
    assert accuracy() > 90
    assert accuracy(kinds) > accuracy() - 2


@pytest.mark.parametrize("strategy", ["trimmed-mean:0.3", "median", "krum:3"])
def test_robust_means_withstand_updates_within_the_bounds(strategy, caplog, monkeypatch) -> None:
    """Turned around and no larger than others: nothing that a bound could notice."""
    caplog.set_level(logging.CRITICAL, "flwr")
    monkeypatch.setitem(ATTACKS, "five", lambda content, sent, *_: scaled(-5)(content, sent))
    attackers = ("five",) * 3
    assert accuracy(attackers, strategy) > accuracy((), strategy) - 12
    assert accuracy(attackers) < accuracy() - 40


# ---- one of them ---------------------------------------------------------------------------------


def count(value):
    return lambda content, sent: with_count(content, value)


def scaled(factor):
    def change(content, sent):
        moved = values_of(content["arrays"])
        return with_arrays(content, {n: sent[n] + factor * (a - sent[n]) for n, a in moved.items()})

    return change


def filled(value):
    return lambda content, sent: with_arrays(
        content, {n: np.full_like(a, value) for n, a in sent.items()}
    )


def of_type(dtype, value):
    def change(content, sent):
        made = {n: Array(np.full(a.shape, value, dtype)) for n, a in sent.items()}
        return RecordDict({**content, "arrays": ArrayRecord(made)})

    return change


def token(value):
    def change(content, sent):
        about = {} if value is None else {"reply": value}
        return RecordDict({**content, "onnxtrain": ConfigRecord(about)})

    return change


def without_record(content, sent):
    return RecordDict({k: v for k, v in content.items() if k != "onnxtrain"})


def metric(**values):
    def change(content, sent):
        return RecordDict({**content, "metrics": MetricRecord({**content["metrics"], **values})})

    return change


BAD = {
    "3e38": (filled(3e38), "values above 1.8e+19"),
    "-1e30": (filled(-1e30), "values above 1.8e+19"),
    "wide": (of_type(np.float64, 1e39), "not finite"),
    "longer": (of_type(np.longdouble, 1e300), "not finite"),
    "complex": (of_type(np.complex64, 1), "instead of a float"),
    "text": (of_type("<U1", "x"), "instead of a float"),
    "times 50": (scaled(50), "the others of the round allow"),
    "times -1e6": (scaled(-1e6), "the others of the round allow"),
    "2**62": (count(2**62), "more than 1000000000"),
    "10**6": (count(10**6), "100 times the median"),
    "1e300": (count(1e300), "is 1e+300"),
    "inf": (count(float("inf")), "is inf"),
    "nan": (count(float("nan")), "is nan"),
    "zero": (count(0), "no data"),
    "negative": (count(-(2**62)), "is -4611686018427387904"),
    "list": (count([60, 60]), "no data"),
    "false bit": (metric(norm_bit=10**9), "'norm_bit' is 1000000000"),
    "false loss": (metric(train_loss=1e308), "'train_loss' is 1e+308"),
    "no token": (token(None), "does not repeat the token"),
    "no record": (without_record, "does not repeat the token"),
    "false token": (token("0" * 32), "another message"),
    "odd token": (token(7), "another message"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_reply_that_would_spoil_the_average_is_left_out(name) -> None:
    change, words = BAD[name]
    server, result = run(one(change))
    (left_out,) = server.guarded.left_out
    assert words in left_out.reason
    assert same(arrays(result), arrays(without_it()))


@pytest.mark.parametrize("key", ["x", "metrics", "config", ""])
@pytest.mark.parametrize("strategy", ["fedavg", "trimmed-mean:0.2", "median", "krum:1"])
def test_names_of_records_do_not_matter(key, strategy) -> None:
    """One client with another name for its record would cost all clients the round."""

    def renamed(content, sent):
        about = content["onnxtrain"]
        return RecordDict({key: content["arrays"], "numbers": content["metrics"],
                           "onnxtrain": about, "more": ConfigRecord({"x": "y" * 9})})  # fmt: skip

    server, result = run(one(renamed), named_strategy(strategy))
    assert not server.guarded.left_out
    assert same(arrays(result), arrays(run(honest, named_strategy(strategy))[1]))


def test_a_client_counts_five_times_the_median_at_most(caplog) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        _, claimed = run(one(count(5999)))
    assert "claims 'num-examples' = 5999" in caplog.text
    _, most = run(one(count(300)))
    assert same(arrays(claimed), arrays(most))
    _, free = run(one(count(5999)), checks=Checks(examples_factor=None))
    assert not same(arrays(free), arrays(most))
    server, _ = run(one(count(301)), checks=Checks(max_examples=300))
    assert "more than 300" in server.guarded.left_out[0].reason


def test_a_client_with_more_data_may_move_further() -> None:
    server, _ = run(one(scaled(20)))
    assert len(server.guarded.left_out) == 1
    server, _ = run(one(lambda content, sent: with_count(scaled(20)(content, sent), 300)))
    assert not server.guarded.left_out


def test_updates_that_are_too_large_may_be_scaled_instead() -> None:
    server, result = run(one(scaled(1e6)), checks=Checks(excess="scale", norm_factor=1.0))
    assert not server.guarded.left_out
    first = {n: a.numpy() for n, a in server._first.items()}
    norms = []

    def watched(message, context):
        reply = honest(message, context)
        norms.append(norm_of(values_of(reply.content["arrays"]), first))
        return reply

    run(watched)
    assert norm_of(arrays(result), first) <= max(norms)


def test_two_updates_are_not_compared() -> None:
    server, _ = run(one(scaled(1e6)), clients=2)
    assert not server.guarded.left_out


def test_clients_that_do_not_move_are_no_measure() -> None:
    def client(message, context):
        reply = honest(message, context)
        if context.node_config["partition-id"] < 3:
            reply.content["arrays"] = message.content["arrays"]
        return reply

    server, _ = run(client)
    assert not server.guarded.left_out


# ---- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("excess", [None, "scale", "leave-out"])
def test_the_server_enforces_the_norm(excess) -> None:
    """A client that does not clip moved the model by 1,456 at a norm of 0.1."""
    server, result = run(one(scaled(1e5)), config={**FAST, "clip-norm": 0.1}, clients=2,
                         checks=Checks(excess=excess))  # fmt: skip
    first = {n: a.numpy() for n, a in server._first.items()}
    assert 0 < norm_of(arrays(result), first) <= 0.1
    assert len(server.guarded.left_out) == (excess == "leave-out")


def test_clients_that_clip_are_not_changed() -> None:
    config = {**FAST, "clip-norm": 0.1}
    _, result = run(honest, config=config)
    by_hand = run(honest, config=config, checks=Checks(norm_factor=None))[1]
    assert same(arrays(result), arrays(by_hand))


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_the_server_enforces_the_norm_of_private_strategies(kind) -> None:
    """Their noise is made for this norm: a client without the mod would not be private."""
    inner = flower.FedAvg(fraction_evaluate=0.0)
    if kind == "fixed":
        private = flower.DifferentialPrivacyClientSideFixedClipping(inner, 0.0, 0.05, 3)
        client = client_app(MLP, of_client)  # without fixedclipping_mod
    else:
        private = flower.DifferentialPrivacyClientSideAdaptiveClipping(
            inner, 0.0, 3, initial_clipping_norm=0.05, clipped_count_stddev=0.0
        )
        app = client_app(MLP, of_client, mods=[mod.adaptiveclipping_mod])

        def client(message, context):
            reply = app(message, context)
            sent = values_of(message.content["arrays"])
            return Message(scaled(1000.0)(reply.content, sent), reply_to=message)

    server, result = run(client, private, clients=3)
    first = {n: a.numpy() for n, a in server._first.items()}
    assert 0 < norm_of(arrays(result), first) <= 0.05 * (1 + 1e-6)


# ---- running statistics --------------------------------------------------------------------------

cnn = client_app(GOLDEN / "cnn", images_of_client, images_of_client)


def statistics(change):
    def client(message, context):
        reply = cnn(message, context)
        if context.node_config["partition-id"] == 1 and is_training(message):
            values = values_of(reply.content["arrays"])
            change(values)
            return Message(with_arrays(reply.content, values), reply_to=message)
        return reply

    return client


@pytest.mark.parametrize("strategy", ["fedavg", "trimmed-mean:0.2", "median", "krum:1"])
@pytest.mark.parametrize("compression", ["none", "int8", "top-k:0.2"])
def test_statistics_are_bounded_and_variances_stay_above_zero(strategy, compression) -> None:
    def much(values):
        values["bn.var"] *= 1e6

    def negative(values):
        values["bn.var"][:] = -5.0

    config = {**FAST, "compression": compression}
    server, _ = run(cnn, named_strategy(strategy), model="cnn", rounds=2, config=config)
    assert not server.guarded.left_out  # all are honest
    server, _ = run(statistics(much), named_strategy(strategy), model="cnn")
    assert "running statistics" in server.guarded.left_out[0].reason
    server, result = run(statistics(negative), named_strategy(strategy), model="cnn")
    assert not server.guarded.left_out
    assert min(arrays(result)["bn.var"]) >= 0
    if strategy == "fedavg":  # the four others count in full
        assert min(arrays(result)["bn.var"]) > 0.1


# ---- which round, and whose ----------------------------------------------------------------------


def test_replies_of_another_round_or_node_are_left_out() -> None:
    """Recorded and sent again: by the node itself, and by another one in the same round."""
    recorded = {}

    def client(message, context):
        reply, node = honest(message, context), context.node_config["partition-id"]
        number = message.content["config"]["server-round"]
        others = [content for (n, _), content in recorded.items() if n == number]
        recorded[number, node] = reply.content
        if node == 3 and number == 2:  # clients are asked in any order
            return Message((others or [recorded[1, 0]])[0], reply_to=message)
        return Message(recorded[1, 4], reply_to=message) if node == 4 else reply

    server, _ = run(client, rounds=3)
    left_out = {(out.round, out.node): out.reason for out in server.guarded.left_out}
    assert set(left_out) == {(2, 4), (2, 5), (3, 5)}
    assert all("another message" in reason for reason in left_out.values())


class Echoing(LocalGrid):
    """A network on which replies arrive twice, and from nodes that nobody asked."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if not replies:
            return []
        forged = Message(RecordDict(dict(replies[0].content)), reply_to=next(iter(messages)))
        forged.metadata.__dict__["_src_node_id"] = 77
        return [*replies, replies[0], replies[1], forged]


def test_a_reply_counts_once_and_only_from_nodes_that_were_asked() -> None:
    server = Server(open_artifacts(MLP), flower.FedAvg(fraction_evaluate=0.0), rounds=2)
    result = server.run(Echoing(honest, 3), FAST)
    assert same(arrays(result), arrays(run(honest, clients=3, rounds=2)[1]))
    assert [m["clients"] for m in result.train_metrics_clientapp.values()] == [3, 3]


def test_evaluations_are_checked_too() -> None:
    app = client_app(MLP, of_client, of_client)
    old = []

    def client(message, context):
        reply = app(message, context)
        if is_training(message):
            return reply
        node = context.node_config["partition-id"]
        if node == 1:
            return Message(with_count(reply.content, 10**7), reply_to=message)
        if node == 2:
            old.append(reply.content)
            return Message(old[0], reply_to=message)
        return reply

    server, _ = run(client, flower.FedAvg(), rounds=2)
    reasons = [(o.round, o.node) for o in server.guarded.left_out]
    assert sorted(reasons) == [(1, 2), (2, 2), (2, 3)]


def test_clients_of_other_frameworks_may_be_let_in() -> None:
    server, _ = run(one(without_record), checks=Checks(reply_token=False))
    assert not server.guarded.left_out


def test_what_clients_say_is_one_short_line_of_a_log() -> None:
    def client(message, context):
        from flwr.app import Error

        if context.node_config["partition-id"] == 1:
            return Message(Error(2, "\x1b[2J\nround 1: fine\r\x00" + "x" * 10**6), reply_to=message)
        return honest(message, context)

    server, _ = run(client)
    (left_out,) = server.guarded.left_out
    assert left_out.reason.isprintable() and len(left_out.reason) <= 300

    def long_name(content, sent):
        made = {**content["arrays"], "\n" * 10**5: Array(np.zeros(1, np.float32))}
        return RecordDict({**content, "arrays": ArrayRecord(made)})

    server, _ = run(one(long_name))
    (left_out,) = server.guarded.left_out
    assert left_out.reason.isprintable() and len(left_out.reason) <= 300


@pytest.mark.parametrize(
    "given",
    [{"norm_factor": 0.5}, {"examples_factor": "x"}, {"max_examples": 0}, {"excess": "drop"},
     {"norm_factor": True}],
)  # fmt: skip
def test_checks_that_make_no_sense(given) -> None:
    with pytest.raises(ArgumentError):
        Checks(**given)


@pytest.mark.parametrize("kind", ["float16", "int8", "top-k:0.3"])
def test_replies_that_are_compressed_are_checked_the_same(kind) -> None:
    def client(message, context):
        reply = honest(message, context)
        if context.node_config["partition-id"] == 1:
            array = reply.content["arrays"]["fc1.weight"]
            largest = b"\xff\xff\x7f\x7f"
            array.data = {
                "float16": b"\x7f" + b"\x00\x3c" * 128,
                "int8": largest + b"\x7f" * 128,
                "top-k:0.3": b"\1" + b"\xff" * 16 + largest * 128,
            }[kind]
        return reply

    server, _ = run(client, config={**FAST, "compression": kind})
    (left_out,) = server.guarded.left_out
    assert "above" in left_out.reason or "finite" in left_out.reason

"""What a client takes from whom, what it keeps for how long, and whose files are whose."""

import os
import re
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, LOG, arrays, federate, of_client, rows
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.clientapp import mod
from flwr.serverapp import strategy as flower

from onnxtrain import TrainingSession
from onnxtrain.device.loop import evaluate
from onnxtrain.errors import ArgumentError
from onnxtrain.federated import (
    Compression,
    LocalGrid,
    client_app,
    client_state,
    open_artifacts,
    pack,
)
from onnxtrain.federated.arrays import to_arrays
from onnxtrain.federated.client_state import ClientState, client_number
from onnxtrain.federated.compression import decode
from onnxtrain.federated.files import pack_arrays, replace_file, unpack_arrays

X, Y = rows(0, 50)
HEAD = ["fc2.weight", "fc2.bias"]


def node(app, number=1, *, run=None, **config):
    """A grid whose only node has this number and this configuration."""
    grid = LocalGrid(app, [{key.replace("_", "-"): value for key, value in config.items()}], run)
    (context,) = grid.contexts.values()
    context.node_id = number
    return grid


def ask(grid, kind="train", identity="/1", *, name="mlp", which="changing", initial=None, **config):
    """Ask the first node of a grid as a server would; return its reply."""
    federation, _, number = identity.partition("/")
    settings = {key.replace("_", "-"): value for key, value in config.items()}
    settings = {**FAST, "server-round": int(number), **settings}
    if federation:
        settings["onnxtrain-federation"] = federation
    if initial is not None:
        settings["onnxtrain-initial"] = pack_arrays(initial)
    record = to_arrays(TrainingSession.from_folder(GOLDEN / name), which)
    content = RecordDict({"arrays": record, "config": ConfigRecord(settings)})
    (reply,) = grid.send_and_receive([grid.create_message(content, kind, 1, "1")])
    return reply


def good(reply):
    assert not reply.has_error(), reply.error.reason
    return reply.content


def reason(reply) -> str:
    """What the client logged; the server is told the kind and the place alone."""
    assert reply.has_error()
    assert re.fullmatch(r"[A-Za-z]+ at [a-z -]+", reply.error.reason)
    return LOG.texts[-1]


def first_values(name="mlp") -> dict[str, np.ndarray]:
    state = TrainingSession.from_folder(GOLDEN / name).state
    return {name: np.array(parameter.data) for name, parameter in state.parameters}


def loss_with(values, name="mlp") -> float:
    """The loss of the golden model with some values in place of its own."""
    session = TrainingSession.from_folder(GOLDEN / name)
    session.load_parameters(values)
    return evaluate(session, (X, Y))["eval_loss"]


def loss(grid, identity="/1", **options) -> float:
    return good(ask(grid, "evaluate", identity, **options))["metrics"]["eval_loss"]


def kept(folder, name="0") -> ClientState:
    file = folder / f"client-{name}.npz"
    return ClientState.from_bytes(file.read_bytes(), str(file))


# ---- where settings come from --------------------------------------------------------------------


def test_a_run_does_not_make_fedprox_of_fedavg(tmp_path) -> None:
    """The artifacts have no proximal term, so that any µ is an error."""
    run = {"proximal-mu": 0.5, "server-round": 7, "last-round": True}
    app = client_app(GOLDEN / "mlp", (X, Y), (X, Y), export=tmp_path / "m.onnx", outputs=["output"])
    grid = node(app, run=run)
    good(ask(grid))
    good(ask(grid, "evaluate"))
    assert not list(tmp_path.iterdir())
    own = client_app(GOLDEN / "mlp", (X, Y), defaults={"proximal-mu": 0.5, "last-round": True})
    assert "proximal" in reason(ask(node(own)))
    assert "proximal" in reason(ask(grid, proximal_mu=0.5))


def test_what_a_server_passes_on_counts_in_the_run_too() -> None:
    grid = node(client_app(GOLDEN / "mlp", (X, Y)), run={"clip-norm": 1e-30, "proximal-mu": 1.0})
    for name, array in good(ask(grid))["arrays"].items():
        assert np.array_equal(array.numpy(), first_values()[name])


# ---- frozen values -------------------------------------------------------------------------------


def frozen(factor) -> dict[str, np.ndarray]:
    return {n: np.float32(factor) * a for n, a in first_values("head").items() if "fc1" in n}


@pytest.mark.parametrize("is_packed", [False, True])
def test_frozen_values_are_those_that_the_server_sent_last(tmp_path, is_packed) -> None:
    source = GOLDEN / "head"
    if is_packed:
        source = tmp_path / "head.json"
        pack(GOLDEN / "head", source)
    grid = node(client_app(source, (X, Y), (X, Y), state=tmp_path, keep_optimizer=True))
    for number, factor in enumerate((2, 3), start=1):
        good(ask(grid, identity=f"A/{number}", name="head", initial=frozen(factor)))
        wanted = loss_with(frozen(factor), "head")
        assert loss(grid, f"A/{number}", name="head") == pytest.approx(wanted, rel=1e-6)
    good(ask(grid, identity="A/3", name="head"))
    assert loss(grid, "A/3", name="head") == pytest.approx(wanted, rel=1e-6)
    stored = unpack_arrays((tmp_path / "client-0.npz").read_bytes(), "the file")
    assert [key for key in stored if key.endswith("fc1.weight")] == ["frozen:fc1.weight"]
    # A round again, also the first of another federation: it begins with the frozen values too.
    for identity, initial in (("A/3", None), ("B/1", frozen(4)), ("B/1", None)):
        good(ask(grid, identity=identity, name="head", initial=initial))
        assert set(kept(tmp_path).frozen) == set(frozen(4))
    assert np.array_equal(kept(tmp_path).frozen["fc1.weight"], frozen(4)["fc1.weight"])
    # Without them, those of the earlier federation do not stand in for them.
    reply = ask(grid, "evaluate", "C/1", name="head")
    if is_packed:
        assert "has no values for 'fc1" in reason(reply)
    else:
        own = loss_with({}, "head")
        assert good(reply)["metrics"]["eval_loss"] == pytest.approx(own, rel=1e-6)


def test_frozen_values_of_one_client_are_not_those_of_another(tmp_path) -> None:
    app = client_app(GOLDEN / "head", (X, Y), (X, Y))
    one, other = node(app, client_name="one"), node(app, client_name="other")
    good(ask(one, identity="A/1", name="head", initial=frozen(2)))
    assert loss(other, "A/1", name="head") == pytest.approx(loss_with({}, "head"), rel=1e-6)
    assert loss(one, "A/1", name="head") == pytest.approx(loss_with(frozen(2), "head"), rel=1e-6)


def test_frozen_values_that_the_artifacts_have_are_not_kept(tmp_path) -> None:
    grid = node(client_app(GOLDEN / "head", (X, Y), state=tmp_path))
    good(ask(grid, identity="A/1", name="head", initial=frozen(1)))
    assert not list(tmp_path.iterdir())


def test_frozen_values_are_not_written_again_each_round(tmp_path) -> None:
    pack(GOLDEN / "head", tmp_path / "head.json")
    grid = node(client_app(tmp_path / "head.json", (X, Y), state=tmp_path / "device"))
    file = tmp_path / "device" / "client-0.npz"
    written = set()
    for number in (1, 2, 3):
        initial = frozen(1) if number == 1 else None
        good(ask(grid, identity=f"A/{number}", name="head", initial=initial))
        written.add((file.stat().st_ino, file.stat().st_mtime_ns))
    assert len(written) == 1


def test_a_personal_head_is_kept_over_what_the_server_sends_to_begin_with(tmp_path) -> None:
    grid = node(client_app(GOLDEN / "mlp", (X, Y), (X, Y), state=tmp_path))
    other = {name: 3 * first_values()[name] for name in HEAD}
    # Before it has one, and although it has weights of its own, it is the server's.
    begun = loss(grid, "A/1", which=["fc1.*"], initial=other)
    assert begun == pytest.approx(loss_with(other), rel=1e-6)
    good(ask(grid, identity="A/1", which=["fc1.*"], initial=other))
    head = kept(tmp_path).local
    assert set(head) == set(HEAD)
    zeros = {name: np.zeros_like(array) for name, array in head.items()}
    then = loss(grid, "A/1", which=["fc1.*"], initial=zeros)
    assert then == pytest.approx(loss_with(head), rel=1e-6)


# ---- from one federation to the next -------------------------------------------------------------


@pytest.mark.parametrize("has_folder", [True, False])
def test_moments_and_what_was_rounded_end_with_the_federation(tmp_path, has_folder) -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), keep_optimizer=True,
                     state=tmp_path if has_folder else None)  # fmt: skip
    grid = node(app)

    def now() -> ClientState:
        if has_folder:
            return kept(tmp_path)
        (context,) = grid.contexts.values()
        return ClientState.from_bytes(bytes(context.state["onnxtrain"]["kept"]), "the context")

    seen = []
    for identity in ("A/1", "A/2", "B/1", "B/2"):
        good(ask(grid, identity=identity, which=["fc1.*"], compression="top-k:0.1"))
        held = now()
        assert held.previous is not None
        seen.append((held.optimizer.step, bool(held.previous.residual), set(held.previous.local)))
    steps = seen[0][0]
    assert [step for step, _, _ in seen] == [steps, 2 * steps, steps, 2 * steps]
    assert [residual for _, residual, _ in seen] == [False, True, False, True]
    # The head is the device's own, whoever asks.
    assert [local for _, _, local in seen[1:]] == [set(HEAD)] * 3


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_head_that_was_shared_meanwhile_does_not_come_back(tmp_path, has_folder) -> None:
    folder = tmp_path / "device"
    grid = node(client_app(GOLDEN / "mlp", (X, Y), (X, Y), state=folder if has_folder else None))
    good(ask(grid, identity="A/1", which=["fc1.*"]))
    good(ask(grid, identity="B/1"))
    good(ask(grid, identity="B/2"))
    other = {name: 3 * first_values()[name] for name in HEAD}
    then = loss(grid, "C/1", which=["fc1.*"], initial=other)
    assert then == pytest.approx(loss_with(other), rel=1e-6)
    assert not (folder / "client-0.npz").exists()


# ---- whose files ---------------------------------------------------------------------------------


def test_two_clients_without_names_do_not_share_a_file(tmp_path) -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), state=tmp_path, keep_optimizer=True)
    good(ask(node(app, 1)))
    said = reason(ask(node(app, 2)))
    assert "node 1 and node 2" in said
    assert "client-name" in said
    assert str(tmp_path / "client-0.npz") in said


def test_a_client_without_a_name_finds_its_file_after_a_restart(tmp_path, monkeypatch) -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), state=tmp_path, keep_optimizer=True)
    first = node(app, 1)
    good(ask(first, identity="A/1"))
    steps = kept(tmp_path).optimizer.step
    monkeypatch.setattr(client_state, "_claims", {})  # another process, with another node id
    good(ask(node(app, 2**64 - 1), identity="A/2"))
    assert kept(tmp_path).optimizer.step == 2 * steps
    # If the first one is still there, they were two.
    monkeypatch.setattr(client_state, "_claims", {})
    assert f"node 1 and node {2**64 - 1}" in reason(ask(first, identity="A/3"))


def test_names_of_clients_stay_apart_in_names_of_files(tmp_path) -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), state=tmp_path, keep_optimizer=True)
    for number, name in enumerate(("a/b", "a b", "a_b", "a%20b", "device-7.x", ".."), start=1):
        good(ask(node(app, number, client_name=name)))
    found = {file.name for file in tmp_path.iterdir()}
    names = ("a%2Fb", "a%20b", "a_b", "a%2520b", "device-7.x", "%2E%2E")
    assert found == {f"client-{name}.npz" for name in names}


def test_the_number_of_a_partition_may_be_text() -> None:
    numbers = [client_number(*node(None, 99, partition_id=given).contexts.values())
               for given in (3, "3", "north")]  # fmt: skip
    assert numbers == [3, 3, 99]


def test_clients_that_share_a_folder_write_a_model_each(tmp_path) -> None:
    def models(export, **config) -> set[str]:
        app = client_app(GOLDEN / "mlp", (X, Y), (X, Y), state=tmp_path / "all", export=export,
                         outputs=["output"])  # fmt: skip
        good(ask(node(app, **config), "evaluate", last_round=True))
        return {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.onnx")}

    assert models("mine.onnx") == {"all/mine.onnx"}
    assert models("mine.onnx", partition_id=1) == {"all/mine.onnx", "all/mine-1.onnx"}
    assert "all/mine-b.onnx" in models("mine.onnx", client_name="b", partition_id=1)
    assert "all/b/mine.onnx" in models("{client}/mine.onnx", client_name="b")
    own = str(tmp_path / "own")
    assert "own/mine.onnx" in models("mine.onnx", partition_id=1, state_dir=own)
    with pytest.raises(AssertionError, match="StateError at export"):
        models("mine.onnx", partition_id=2, state_dir=own)
    assert re.search(r"client 1 and client 2.*{client}", LOG.texts[-1])


def test_outputs_that_are_not_there_are_said_in_the_first_round(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="list of names"):
        client_app(GOLDEN / "mlp", (X, Y), export="m.onnx", outputs="output")
    app = client_app(GOLDEN / "mlp", (X, Y), export=tmp_path / "m.onnx", outputs=["outptu"])
    said = reason(ask(node(app)))
    assert "'outptu'" in said
    assert "'output'" in said


def test_moments_that_do_not_fit_are_said_with_the_file_to_delete(tmp_path) -> None:
    grid = node(client_app(GOLDEN / "mlp", (X, Y), state=tmp_path, keep_optimizer=True))
    good(ask(grid, identity="A/1"))
    held, file = kept(tmp_path), tmp_path / "client-0.npz"
    held.optimizer.states.pop("fc2.bias")
    file.write_bytes(held.to_bytes())
    said = reason(ask(grid, identity="A/2"))
    assert "'fc2.bias'" in said
    assert f"delete the client's file {file}" in said


def test_what_killed_processes_left_is_removed(tmp_path) -> None:
    file = tmp_path / "client-0.npz"
    names = {
        f".client-0.npz.{'0' * 16}.tmp": 7200,
        f".client-0.npz.{'1' * 16}.tmp": 60,
        f".client-1.npz.{'2' * 16}.tmp": 7200,
        ".client-0.npz.notes.tmp": 7200,
    }
    for name, age in names.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    replace_file(file, b"whole")
    assert file.read_bytes() == b"whole"
    assert {f.name for f in tmp_path.iterdir()} == {file.name, *list(names)[2:]}


# ---- updates -------------------------------------------------------------------------------------

KINDS = ["none", "float16", "int8", "top-k:0.1", "top-k:0.5"]


def norms(app, strategy=None, **config) -> list[float]:
    """The norms of all updates that a server receives in four rounds."""
    found = []

    def watched(message, context):
        (sent,) = message.content.array_records.values()
        base = {name: array.numpy().astype(np.float64) for name, array in sent.items()}
        reply = app(message, context)
        received = good(reply)["arrays"]
        if received["fc1.weight"].stype == "numpy.ndarray":
            update = {n: a.numpy().astype(np.float64) - base[n] for n, a in received.items()}
        else:
            update = decode(received, {n: np.zeros_like(a) for n, a in base.items()})
        found.append(np.sqrt(sum(np.square(a).sum() for a in update.values())))
        return reply

    federate(GOLDEN / "mlp", watched, strategy or flower.FedAvg(fraction_evaluate=0.0), rounds=4,
             config={**FAST, **config})  # fmt: skip
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_clipped_stays_within_its_bound(kind, tmp_path) -> None:
    app = client_app(GOLDEN / "mlp", of_client, state=tmp_path)
    for bound in (0.05, 1e-5):
        found = norms(app, **{"clip-norm": bound, "compression": kind})
        assert len(found) == 12
        assert 0 < max(found) <= bound
    assert not list(tmp_path.iterdir())  # there is nothing to keep


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_flower_clips_stays_within_its_bound(kind) -> None:
    app = client_app(GOLDEN / "mlp", of_client, mods=[mod.fixedclipping_mod])
    wrapped = flower.DifferentialPrivacyClientSideFixedClipping(
        flower.FedAvg(fraction_evaluate=0.0), noise_multiplier=0.0, clipping_norm=0.05,
        num_sampled_clients=3,
    )  # fmt: skip
    found = norms(app, wrapped, compression=kind)
    assert len(found) == 12
    assert 0 < max(found) <= 0.05 * (1 + 1e-5)  # Flower adds what it clipped to float32 weights


def test_what_was_rounded_before_is_not_added_to_a_clipped_update(tmp_path) -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), state=tmp_path)
    grid = node(app)
    good(ask(grid, identity="A/1", compression="int8"))
    assert kept(tmp_path).residual
    good(ask(grid, identity="A/2", compression="int8", clip_norm=0.01))
    assert not kept(tmp_path).residual


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-30, 1e-44, 1e38])
def test_no_number_of_a_bounded_update_grows(kind, size) -> None:
    rng = np.random.default_rng(0)
    update = {"a": (size * rng.uniform(-1, 1, (40, 50))).astype(np.float32),
              "scalar": np.array(size / 3, np.float32), "zeros": np.zeros(3, np.float32),
              "empty": np.zeros((0, 2), np.float32)}  # fmt: skip
    record, lost = Compression.read(kind).encode(update, update, bounded=True)
    assert not lost
    made = decode(record, {name: np.zeros_like(array) for name, array in update.items()})
    for name, array in update.items():
        assert (np.abs(made[name].astype(np.float64)) <= np.abs(array)).all()
        assert (made[name] * np.sign(array) >= 0).all()
    assert size < 1e-40 or np.abs(made["a"]).max() > 0.9 * np.abs(update["a"]).max()


@pytest.mark.parametrize("size", [1e-12, 1e-5, 1.0, 1e6, 1e30])
def test_float16_takes_numbers_of_all_sizes(size) -> None:
    update = {"a": (size * np.random.default_rng(0).uniform(0.1, 1, 99)).astype(np.float32)}
    record, _ = Compression("float16").encode(update, {})
    made = decode(record, {"a": np.zeros(99, np.float32)})
    np.testing.assert_allclose(made["a"], update["a"], rtol=1e-3)
    with pytest.raises(ArithmeticError, match="not finite"):
        Compression("float16").encode({"a": np.array([np.nan, 1], np.float32)}, {})


def test_float16_of_earlier_versions_is_read() -> None:
    halves = np.array([0.5, -2.0, 1e-3], "<f2")
    record = ArrayRecord({"a": Array("float32", (3,), "onnxtrain/float16", halves.tobytes())})
    made = decode(record, {"a": np.ones(3, np.float32)})
    np.testing.assert_allclose(made["a"], 1 + halves.astype(np.float32))


def renaming(message, context, call_next):
    reply = call_next(message, context)
    (key, record), *_ = reply.content.array_records.items()
    reply.content[key] = ArrayRecord({f"x.{name}": array for name, array in record.items()})
    return reply


def test_a_mod_that_renames_what_is_compressed() -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), mods=[renaming])
    said = reason(ask(node(app), compression="int8"))
    assert "'x.fc1.weight'" in said
    assert "mods" in said
    good(ask(node(app)))


def test_mods_are_for_training() -> None:
    called = []

    def noting(message, context, call_next):
        called.append(message.metadata.message_type)
        return call_next(message, context)

    grid = node(client_app(GOLDEN / "mlp", (X, Y), (X, Y), mods=[noting]))
    good(ask(grid))
    good(ask(grid, "evaluate"))
    assert called == ["train"]


# ---- data and arguments --------------------------------------------------------------------------


def batches(context):
    yield X[:20], Y[:20]
    yield X[20:], Y[20:]


@pytest.mark.parametrize("data", [batches, lambda context: batches(context)])
def test_a_generator_of_the_context_is_made_for_each_epoch(data) -> None:
    grid = node(client_app(GOLDEN / "mlp", data, data))
    assert FAST["local-epochs"] > 1
    assert good(ask(grid))["metrics"]["num-examples"] == 50
    assert good(ask(grid, "evaluate"))["metrics"]["num-examples"] == 50


def test_a_client_says_itself_which_sample_is_bad() -> None:
    x = X.copy()
    x[3, 2] = np.nan
    reply = ask(node(client_app(GOLDEN / "mlp", (x, Y))))
    assert "sample 3" in reason(reply)
    assert reply.error.reason == "NonFiniteError at training"


@pytest.mark.parametrize(
    ("given", "words"),
    [({"artifacts": 5}, "artifacts is a path, not 5"),
     ({"artifacts": None}, "artifacts is a path, not None"),
     ({"threads": -3}, "threads must be a whole number of at least 1, not -3"),
     ({"threads": "two"}, "threads must be a whole number"),
     ({"state": 5}, "state is a path, not 5"),
     ({"export": 5, "outputs": ["output"]}, "export is a path, not 5"),
     ({"outputs": 5}, "outputs is a list of names"),
     ({"outputs": [5]}, "outputs is a list of names"),
     ({"mods": renaming}, "mods is a list of Flower's mods"),
     ({"mods": ["renaming"]}, "mods is a list of Flower's mods"),
     ({"defaults": "lr"}, "defaults is a dictionary"),
     ({"fit_options": ["shuffle"]}, "fit_options is a dictionary")],
)  # fmt: skip
def test_arguments_of_wrong_types_are_said(given, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        client_app(**{"artifacts": GOLDEN / "mlp", "data": (X, Y), **given})


def test_numbers_are_for_top_k_alone() -> None:
    for kind in ("float16", "int8"):
        with pytest.raises(ArgumentError, match=f"'{kind}' takes no number"):
            Compression.read(f"{kind}:3")
    with pytest.raises(ArgumentError, match="fraction"):
        Compression("top-k", "0.1")
    with pytest.raises(ArgumentError, match="artifacts is a path"):
        open_artifacts(5)


def test_federations_one_after_the_other_are_as_those_of_new_clients(tmp_path) -> None:
    """Whole federations, with all that clients keep: the second knows nothing of the first."""

    def run(folder):
        app = client_app(GOLDEN / "mlp", of_client, of_client, keep_optimizer=True, state=folder)
        return arrays(federate(GOLDEN / "mlp", app, config={**FAST, "compression": "top-k:0.1"}))

    fresh = run(tmp_path / "new")
    run(tmp_path / "old")
    again = run(tmp_path / "old")
    assert all(fresh[name].tobytes() == again[name].tobytes() for name in fresh)

"""A round starts from the app's own settings, whatever was before it in the same process."""

import itertools

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import GOLDEN, federate, images, images_of_client, of_client, rows
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import strategy as flower

from onnxtrain import artifacts
from onnxtrain.federated import Bundle, LocalGrid, client_app, open_artifacts, to_arrays
from onnxtrain.federated.bundle import _sessions
from onnxtrain.onnxblock.optim import SGD

X, Y = rows(0, 48)
SEEDED = {"seed": 5}
SETTINGS = {
    "plain": {},
    "rate": {"learning-rate": 0.3},
    "no rate": {"learning-rate": 0.0},
    "short": {"lr": 0.05},
    "epochs": {"local-epochs": 3},
    "batch": {"batch-size": 7},
    "seed": {"seed": 9},
    "µ": {"proximal-mu": 2.0},
    "clip": {"clip-norm": 0.01},
    "int8": {"compression": "int8"},
    "evaluate": {"kind": "evaluate"},
    "fails": {"local-epochs": 0},
    "not finite": {"learning-rate": 1e6, "local-epochs": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Artifacts with momentum and a proximal term: there is something to last."""
    import sys

    sys.path.insert(0, str(GOLDEN))
    from make_artifacts import mlp

    folder = tmp_path_factory.mktemp("proximal")
    artifacts.generate_artifacts(
        mlp(), loss=artifacts.LossType.CrossEntropyLoss, optimizer=SGD(momentum=0.9),
        artifact_directory=folder, additional_output_names=["output"], proximal=True,
    )  # fmt: skip
    return folder


def fresh(folder) -> Bundle:
    """Artifacts whose session nobody has used."""
    return open_artifacts(folder)


def ask(grid, record, settings):
    settings = {**SEEDED, **settings}
    kind = settings.pop("kind", "train")
    content = RecordDict({"arrays": record, "config": ConfigRecord(settings)})
    (reply,) = grid.send_and_receive([grid.create_message(content, kind, 1, "1")])
    return reply


def bytes_of(reply):
    return {name: array.data for name, array in reply.content["arrays"].items()}


@pytest.mark.parametrize("keep", [False, True])
def test_no_setting_lasts_into_another_round_or_client(folder, keep) -> None:
    """Every setting before every other: the reply is that of a session that was never used."""
    record = to_arrays(open_artifacts(folder).session())

    def app(bundle):
        return client_app(bundle, (X, Y), (X, Y), keep_optimizer=keep)

    trained = {k: v for k, v in SETTINGS.items() if k not in ("evaluate", "fails", "not finite")}
    wanted = {}
    for name, settings in trained.items():
        wanted[name] = bytes_of(ask(LocalGrid(app(fresh(folder)), 1), record, settings))
    different = {tuple(sorted(values.items())) for values in wanted.values()}
    assert len(different) >= len(trained) - 1  # they do make a difference
    shared = app(fresh(folder))
    for before, after in itertools.product(SETTINGS, trained):
        ask(LocalGrid(shared, 1), record, SETTINGS[before])  # another client each time
        reply = ask(LocalGrid(shared, 1), record, trained[after])
        assert bytes_of(reply) == wanted[after], f"{after} after {before}"


def test_gradients_that_a_failure_left_are_not_the_next_client_s(folder) -> None:
    """Half an accumulation of a client that failed: its data would be in another's update."""
    record = to_arrays(open_artifacts(folder).session())
    fails = [True]

    def data(context):
        def batches():
            yield X[:12], Y[:12]
            if fails:
                raise OSError("the disk was unplugged")
            yield X[12:24], Y[12:24]

        return batches

    def made(bundle):
        return client_app(bundle, data, fit_options={"accumulate": 2})

    shared = made(fresh(folder))
    assert ask(LocalGrid(shared, 1), record, {}).has_error()
    fails.clear()
    again = ask(LocalGrid(shared, 1), record, {})
    assert bytes_of(again) == bytes_of(ask(LocalGrid(made(fresh(folder)), 1), record, {}))


def test_a_schedule_or_a_callback_that_changes_the_rate_ends_with_its_round(folder) -> None:
    record = to_arrays(open_artifacts(folder).session())

    class Doubling:
        def on_step_end(self, run):
            run.session.optimizer.set_learning_rate(0.9)
            run.session.module.eval()

    bundle = fresh(folder)
    loud = client_app(bundle, (X, Y), fit_options={"callbacks": [Doubling()]})
    scheduled = client_app(bundle, (X, Y), fit_options={"schedule": "cosine"})
    plain = client_app(bundle, (X, Y))
    wanted = bytes_of(ask(LocalGrid(client_app(fresh(folder), (X, Y)), 1), record, {}))
    for before in (loud, scheduled):
        ask(LocalGrid(before, 1), record, {"learning-rate": 0.2})
        assert bytes_of(ask(LocalGrid(plain, 1), record, {})) == wanted


def test_a_federation_whose_rounds_differ_equals_one_with_a_process_for_each_round() -> None:
    """Three clients in one process: rounds with and without a rate, a norm, compression."""
    rounds = [
        {"learning-rate": 0.2},
        {},
        {"clip-norm": 0.05},
        {},
        {"compression": "int8"},
        {"lr": 0.01},
    ]

    def settings(number):
        return {"seed": 1, "local-epochs": 1, **rounds[number - 1]}

    app = client_app(GOLDEN / "mlp", of_client)

    def forgetful(message, context):
        _sessions.clear()
        return app(message, context)

    strategy = {"fraction_evaluate": 0.0}
    kept = federate(GOLDEN / "mlp", app, flower.FedAvg(**strategy), rounds=6, config=settings)
    anew = federate(GOLDEN / "mlp", forgetful, flower.FedAvg(**strategy), rounds=6, config=settings)
    for name, array in kept.arrays.items():
        assert array.data == anew.arrays[name].data


def test_what_a_strategy_adds_to_the_settings_of_a_round_does_not_last() -> None:
    """Flower passes one record from round to round."""
    seen = []

    class Sometimes(flower.FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 1:
                config["clip-norm"], config["clipping_norm"] = 0.01, 0.01
            return super().configure_train(server_round, arrays, config, grid)

    app = client_app(GOLDEN / "mlp", of_client, of_client)

    def client(message, context):
        config = message.content["config"]
        seen.append((config["server-round"], "clip-norm" in config, "clipping_norm" in config))
        return app(message, context)

    federate(GOLDEN / "mlp", client, Sometimes(), rounds=2)
    assert {entry for entry in seen if entry[0] == 2} == {(2, False, False)}


def test_clients_of_one_process_keep_their_own_running_statistics() -> None:
    app = client_app(GOLDEN / "cnn", images_of_client, images_of_client)
    bundle_app = client_app(open_artifacts(GOLDEN / "cnn"), lambda c: images(2))
    grid = LocalGrid(app, 3)
    record = to_arrays(open_artifacts(GOLDEN / "cnn").session(), "trainable")
    content = RecordDict({"arrays": record, "config": ConfigRecord({"seed": 3, "lr": 0.1})})
    for node in (1, 2):
        grid.send_and_receive([grid.create_message(content, "train", node, "1")])
    (shared,) = grid.send_and_receive([grid.create_message(content, "train", 3, "1")])
    alone = LocalGrid(bundle_app, [{"partition-id": 2}])
    (own,) = alone.send_and_receive([alone.create_message(content, "train", 1, "1")])
    for name, array in own.content["arrays"].items():
        assert np.array_equal(array.numpy(), shared.content["arrays"][name].numpy())

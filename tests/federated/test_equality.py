"""A federation computes what it should: against one client, against µ = 0, against formulas."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, arrays, federate, images_of_client, of_client, rows, same
from flwr.serverapp.strategy import FedAvg, FedProx

from onnxtrain import TrainingSession, artifacts, fit
from onnxtrain.errors import ArgumentError
from onnxtrain.federated import client_app
from onnxtrain.onnxblock.optim import SGD


@pytest.fixture(scope="module")
def proximal(tmp_path_factory):
    """The golden MLP with SGD, without and with the proximal term."""
    import sys

    sys.path.insert(0, str(GOLDEN))
    from make_artifacts import mlp

    folder = tmp_path_factory.mktemp("proximal")
    for name in ("plain", "proximal"):
        artifacts.generate_artifacts(
            mlp(), loss=artifacts.LossType.CrossEntropyLoss, optimizer=SGD(momentum=0.9),
            artifact_directory=folder / name, additional_output_names=["output"],
            nominal_checkpoint=True, proximal=name == "proximal",
        )  # fmt: skip
    return folder


@pytest.mark.parametrize("folder", ["mlp", "plain"])
def test_clients_with_equal_data_are_as_one(folder, proximal) -> None:
    source = GOLDEN / "mlp" if folder == "mlp" else proximal / folder
    config = {"learning-rate": 0.02, "local-epochs": 1, "batch-size": 60}
    for clients in (1, 4):
        app = client_app(source, rows(0), fit_options={"shuffle": False})
        nodes = FedAvg(min_train_nodes=1, min_evaluate_nodes=0, min_available_nodes=1,
                       fraction_evaluate=0.0)  # fmt: skip
        result = federate(source, app, nodes, clients=clients, rounds=1, config=config)
        one = TrainingSession.from_folder(source)
        one.set_learning_rate(0.02)
        one.step(*rows(0))
        for name, array in arrays(result).items():
            np.testing.assert_allclose(array, one.get_parameter(name), rtol=3e-7, atol=1e-9)


def test_an_average_is_weighted_by_the_number_of_samples(proximal) -> None:
    sizes = [20, 60]

    def data(context):
        return rows(context.node_config["partition-id"], sizes[context.node_config["partition-id"]])

    app = client_app(proximal / "plain", data)
    result = federate(proximal / "plain", app, FedAvg(fraction_evaluate=0.0), clients=2, rounds=1,
                      config={**FAST, "local-epochs": 1, "batch-size": 100})  # fmt: skip
    trained = []
    for number, size in enumerate(sizes):
        one = TrainingSession.from_folder(proximal / "plain")
        one.set_learning_rate(FAST["learning-rate"])
        one.step(*rows(number, size))
        trained.append(one)
    for name, array in arrays(result).items():
        a, b = (one.get_parameter(name).astype(np.float64) for one in trained)
        np.testing.assert_allclose(array, (20 * a + 60 * b) / 80, rtol=1e-5, atol=1e-7)


def test_without_strength_the_proximal_term_changes_nothing(proximal) -> None:
    results = []
    for folder, strategy in (("plain", FedAvg()), ("proximal", FedAvg()),
                             ("proximal", FedProx(proximal_mu=0.0))):  # fmt: skip
        app = client_app(proximal / folder, of_client, of_client)
        results.append(federate(proximal / folder, app, strategy, rounds=3))
    first, *others = [arrays(result) for result in results]
    assert all(same(first, other) for other in others)


def test_the_proximal_term_pulls_the_weights_back(proximal) -> None:
    """Three steps of gradient descent with momentum, by hand."""
    mu, rate = 0.5, 0.02
    app = client_app(proximal / "proximal", lambda c: rows(0), fit_options={"shuffle": False})
    strategy = FedProx(proximal_mu=mu, fraction_evaluate=0.0, min_train_nodes=1,
                       min_available_nodes=1)  # fmt: skip
    config = {"learning-rate": rate, "local-epochs": 3, "batch-size": 60}
    result = federate(proximal / "proximal", app, strategy, clients=1, rounds=1, config=config)
    by_hand = TrainingSession.from_folder(proximal / "plain")
    first = {n: p.data.copy() for n, p in by_hand.state.parameters}
    speed = {n: np.zeros_like(a) for n, a in first.items()}
    for _ in range(3):
        by_hand.train_step(*rows(0))
        by_hand.lazy_reset_grad()
        for name, parameter in by_hand.state.parameters:
            gradient = parameter.grad + mu * (parameter.data - first[name])
            speed[name] = 0.9 * speed[name] + gradient
            parameter.data[:] -= rate * speed[name]
    for name, array in arrays(result).items():
        np.testing.assert_allclose(array, by_hand.get_parameter(name), rtol=2e-6, atol=1e-7)


def test_strength_without_the_term_in_the_graph_is_an_error(proximal) -> None:
    """The server says so; so does a client, whose server is another one."""
    app = client_app(proximal / "plain", of_client)
    with pytest.raises(ArgumentError, match="proximal=True"):
        federate(proximal / "plain", app, FedProx(proximal_mu=0.1), rounds=1)
    result = federate(proximal / "plain", app, rounds=1, config={**FAST, "proximal-mu": 0.1})
    assert result.train_metrics_clientapp[1]["left-out"] == 3


def test_a_federation_with_a_seed_can_be_repeated() -> None:
    source = GOLDEN / "cnn"  # it has Dropout
    made = [
        arrays(federate(source, client_app(source, images_of_client), rounds=2, config=config))
        for config in (FAST, FAST, {**FAST, "seed": 4})
    ]
    assert same(made[0], made[1])
    assert not same(made[0], made[2])


def test_the_moments_of_clients_go_on_if_they_are_kept(tmp_path) -> None:
    """One client that keeps its moments is a run that was never cut into rounds."""
    source, alone = GOLDEN / "mlp", dict(min_train_nodes=1, min_available_nodes=1,
                                         fraction_evaluate=0.0)  # fmt: skip
    config = {"learning-rate": 0.02, "local-epochs": 1, "batch-size": 60}
    made = {}
    for keep in (False, True):
        for state in (None, tmp_path):
            app = client_app(source, rows(0), keep_optimizer=keep, state=state,
                             fit_options={"shuffle": False})  # fmt: skip
            result = federate(source, app, FedAvg(**alone), clients=1, rounds=4, config=config)
            made[keep, state is None] = arrays(result)
            for file in tmp_path.iterdir():
                file.unlink()
    assert same(made[True, True], made[True, False])
    assert same(made[False, True], made[False, False])
    whole = TrainingSession.from_folder(source)
    whole.set_learning_rate(0.02)
    fit(whole, rows(0), 4, batch_size=60, shuffle=False, progress=False)
    for name, array in made[True, True].items():
        np.testing.assert_allclose(array, whole.get_parameter(name), rtol=1e-6, atol=1e-8)
    assert not same(made[True, True], made[False, True])

"""All of Flower's strategies, wrappers and mods work with our clients, unchanged."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, arrays, federate, images_of_client, of_client, same
from flwr.clientapp import mod
from flwr.serverapp import strategy as flower

from onnxtrain.federated import client_app

FIVE = {"min_train_nodes": 5, "min_available_nodes": 5}
STRATEGIES = {
    "FedAvg": flower.FedAvg,
    "FedAvgM": lambda: flower.FedAvgM(server_learning_rate=0.9, server_momentum=0.5),
    "FedAdam": lambda: flower.FedAdam(eta=0.05),
    "FedYogi": lambda: flower.FedYogi(eta=0.05),
    "FedAdagrad": lambda: flower.FedAdagrad(eta=0.05),
    "FedMedian": flower.FedMedian,
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.2),
    "Krum": lambda: flower.Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2),
    "Bulyan": lambda: flower.Bulyan(num_malicious_nodes=0),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.5, q=0.2),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.0),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_learns(name) -> None:
    app = client_app(GOLDEN / "mlp", of_client, of_client, metrics=["accuracy"])
    result = federate(GOLDEN / "mlp", app, STRATEGIES[name](), clients=5, rounds=4)
    losses = [m["eval_loss"] for _, m in sorted(result.evaluate_metrics_clientapp.items())]
    assert len(losses) == 4
    assert losses[-1] < 0.95 * losses[0]
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["clients"] + metrics["left-out"] == 5
        assert metrics["left-out"] == 0
    for array in arrays(result).values():
        assert array.dtype == np.float32


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "FedMedian", "Krum", "QFedAvg"])
def test_a_strategy_takes_running_statistics(name) -> None:
    app = client_app(GOLDEN / "cnn", images_of_client, images_of_client, metrics=["accuracy"])
    result = federate(GOLDEN / "cnn", app, STRATEGIES[name](), clients=4, rounds=2)
    assert {"bn.mean", "bn.var"} <= set(arrays(result))
    assert result.train_metrics_clientapp[2]["left-out"] == 0


SILENT = {"noise_multiplier": 0.0, "num_sampled_clients": 3}
WRAPPERS = {
    "server fixed": (
        lambda s: flower.DifferentialPrivacyServerSideFixedClipping(
            s, clipping_norm=50.0, **SILENT),
        [],
    ),
    "client fixed": (
        lambda s: flower.DifferentialPrivacyClientSideFixedClipping(
            s, clipping_norm=50.0, **SILENT),
        [mod.fixedclipping_mod],
    ),
    "server adaptive": (
        lambda s: flower.DifferentialPrivacyServerSideAdaptiveClipping(
            s, initial_clipping_norm=50.0, clipped_count_stddev=0.0, **SILENT),
        [],
    ),
    "client adaptive": (
        lambda s: flower.DifferentialPrivacyClientSideAdaptiveClipping(
            s, initial_clipping_norm=50.0, clipped_count_stddev=0.0, **SILENT),
        [mod.adaptiveclipping_mod],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_privacy_wrapper_that_adds_nothing_changes_nothing(name) -> None:
    wrap, mods = WRAPPERS[name]
    plain = federate(GOLDEN / "mlp", client_app(GOLDEN / "mlp", of_client))
    app = client_app(GOLDEN / "mlp", of_client, mods=mods)
    wrapped = federate(GOLDEN / "mlp", app, wrap(flower.FedAvg()))
    for array, wanted in zip(arrays(wrapped).values(), arrays(plain).values(), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_privacy_wrapper_clips(name) -> None:
    """With a norm of almost nothing, the weights stay where they were."""
    wrap, mods = WRAPPERS[name]
    wrapped = wrap(flower.FedAvg())
    wrapped.clipping_norm = 1e-4
    app = client_app(GOLDEN / "mlp", of_client, mods=mods)
    result = federate(GOLDEN / "mlp", app, wrapped, rounds=1)
    assert 0 < moved(result) < 1.1e-4


def moved(result) -> float:
    """How far the weights are from where the federation began."""
    from onnxtrain import TrainingSession

    first = TrainingSession.from_folder(GOLDEN / "mlp")
    return float(np.sqrt(sum(((a - first.get_parameter(n)) ** 2).sum()
                             for n, a in arrays(result).items())))  # fmt: skip


def test_noise_of_the_server_is_in_the_weights() -> None:
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(), noise_multiplier=1.0, clipping_norm=0.3, num_sampled_clients=3
    )
    app = client_app(GOLDEN / "mlp", of_client)
    noisy = federate(GOLDEN / "mlp", app, wrapped, rounds=1)
    # 195 weights, each with a deviation of 1.0 · 0.3 / 3
    assert 0.7 < moved(noisy) < 2.5


def test_local_privacy_and_sizes() -> None:
    exact = [mod.LocalDpMod(clipping_norm=50.0, sensitivity=0.0, epsilon=1.0, delta=1e-5)]
    plain = federate(GOLDEN / "mlp", client_app(GOLDEN / "mlp", of_client))
    app = client_app(GOLDEN / "mlp", of_client,
                     mods=[mod.message_size_mod, mod.arrays_size_mod, *exact])  # fmt: skip
    result = federate(GOLDEN / "mlp", app)
    for array, wanted in zip(arrays(result).values(), arrays(plain).values(), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)
    loud = [mod.LocalDpMod(clipping_norm=0.1, sensitivity=0.1, epsilon=1.0, delta=1e-5)]
    app = client_app(GOLDEN / "mlp", of_client, mods=loud)
    assert not same(arrays(federate(GOLDEN / "mlp", app)), arrays(plain))


def test_updates_are_clipped_by_their_common_norm() -> None:
    app = client_app(GOLDEN / "mlp", of_client)
    config = {**FAST, "clip-norm": 0.01}
    result = federate(GOLDEN / "mlp", app, rounds=1, config=config)
    assert 0.001 < moved(result) < 0.01001
    free = federate(GOLDEN / "mlp", app, rounds=1)
    wide = federate(GOLDEN / "mlp", app, rounds=1, config={**FAST, "clip-norm": 1e6})
    assert same(arrays(free), arrays(wide))
    assert moved(free) > 0.1


def test_privacy_skips_a_round_that_lacks_a_client() -> None:
    """The noise is made for a number of clients, so Flower's wrapper takes no fewer."""

    def data(context):
        return None if context.node_config["partition-id"] == 1 else of_client(context)

    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(), noise_multiplier=0.1, clipping_norm=1.0, num_sampled_clients=3
    )
    result = federate(GOLDEN / "mlp", client_app(GOLDEN / "mlp", data), wrapped, rounds=1)
    assert moved(result) == 0
    assert result.train_metrics_clientapp[1]["left-out"] == 1

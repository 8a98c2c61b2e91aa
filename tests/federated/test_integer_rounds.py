"""Federations of models that train for integers: their ranges are averaged as weights are."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, arrays, federate, images_of_client

import onnxtrain
from onnxtrain.device.loop import fit
from onnxtrain.federated import client_app

RANGES, MOMENTUM = "quantization.ranges", "quantization.momentum"


def of_clients(count):
    """What each client comes to by itself in one round."""
    found = []
    for number in range(count):
        session = onnxtrain.TrainingSession(GOLDEN / "int8")
        session.set_learning_rate(FAST["learning-rate"])
        context = type("Context", (), {"node_config": {"partition-id": number}})
        data = images_of_client(context)
        fit(session, data, FAST["local-epochs"], batch_size=FAST["batch-size"], progress=False)
        found.append(session.get_parameter(RANGES))
    return found


def test_ranges_are_averaged_and_move_in_each_round(tmp_path) -> None:
    app = client_app(GOLDEN / "int8", images_of_client, images_of_client, metrics=["accuracy"])
    first = arrays(federate(GOLDEN / "int8", app, clients=3, rounds=1))
    later = federate(GOLDEN / "int8", app, clients=3, rounds=4)
    second = arrays(later)
    before = onnxtrain.TrainingSession(GOLDEN / "int8").get_parameter(RANGES)
    # The first row is that of the input, which does not depend on the order of the samples much.
    mean = np.mean(of_clients(3), axis=0)
    np.testing.assert_allclose(first[RANGES][0], mean[0], rtol=0.1)
    assert not np.array_equal(first[RANGES], before)
    assert not np.array_equal(second[RANGES], first[RANGES])  # they did not stay frozen
    np.testing.assert_allclose(second[MOMENTUM], [0.1], rtol=1e-6)
    losses = [m["eval_loss"] for _, m in sorted(later.evaluate_metrics_clientapp.items())]
    assert losses[-1] < losses[0]
    # What the federation came to is exported as integers.
    session = onnxtrain.TrainingSession(GOLDEN / "int8")
    session.load_parameters(second)
    assert b"conv1.weight_quantized" in session.export_model_for_inferencing(None, ["output"])

"""The server: two devices are enough for a round, and a round does not wait for ever."""

from pathlib import Path

import numpy as np
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from onnxtrain.federated import server_app

from .data import test_set

app = ServerApp()


def fresh_weights(shapes):
    """What the federation begins with: the package has no weights."""
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        layer = shapes[name.replace(".bias", ".weight")]
        bound = 1 / np.sqrt(np.prod(layer[1:]))
        weights[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
    return weights


def finish(result, session):
    """Say how it went."""
    for number, metrics in sorted(result.train_metrics_clientapp.items()):
        print(f"round {number}: {metrics['clients']} clients", flush=True)
    central = result.evaluate_metrics_serverapp
    last = max(central)
    print(f"accuracy after round {last}: {100 * central[last]['accuracy']:.1f} %", flush=True)


@app.main()
def main(grid, context):
    """Make the server from what the run's configuration says."""
    config = context.run_config
    server = server_app(
        Path(__file__).parent / "artifacts.json",
        FedAvg(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2),
        weights=fresh_weights,
        evaluate=test_set(),
        metrics=["accuracy"],
        wait_for=3,
        timeout=float(config["round-timeout"]),
        patience=3.0,
        state=config["state"] or None,
        export=config["model"] or None,
        outputs=["scores"],
        finish=finish,
    )
    server(grid, context)

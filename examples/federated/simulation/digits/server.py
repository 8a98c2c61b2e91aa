"""The server: a strategy, a test set, and a picture in the end."""

import json
from pathlib import Path

import numpy as np
from flwr.serverapp.strategy import FedAdam, FedProx

from onnxtrain.federated import server_app

from .data import test_set


def strategy(context):
    """The strategy that the run asks for."""
    name = context.run_config["strategy"]
    if name == "fedprox":
        return FedProx(proximal_mu=float(context.run_config["proximal-mu"]))
    return FedAdam() if name == "fedadam" else name  # "fedavg", "trimmed-mean:0.3", "krum:3"


def fresh_weights(shapes):
    """What the federation begins with: the package has no weights."""
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        layer = shapes[name.replace(".bias", ".weight")]
        bound = 1 / np.sqrt(np.prod(layer[1:]))
        weights[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
    return weights


def finish(result, session, context):
    """Say how it went; write the figures, a picture and the model, if a folder is given."""
    central = result.evaluate_metrics_serverapp
    last = max(central)
    print(f"accuracy after round {last}: {100 * central[last]['accuracy']:.1f} %", flush=True)
    folder = str(context.run_config["output"])
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    rounds = {
        "config": dict(context.run_config),
        "central": {n: dict(m) for n, m in central.items()},
        "clients": {n: dict(m) for n, m in result.evaluate_metrics_clientapp.items()},
        "train": {n: dict(m) for n, m in result.train_metrics_clientapp.items()},
    }
    (Path(folder) / "rounds.json").write_text(json.dumps(rounds, indent=1))
    session.export_model_for_inferencing(Path(folder) / "digits.onnx", ["scores"])


app = server_app(
    Path(__file__).parent / "artifacts.json",
    strategy,
    weights=fresh_weights,
    evaluate=lambda context: test_set(),
    metrics=["accuracy"],
    finish=finish,
)

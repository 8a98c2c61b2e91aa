"""Small federations in one process: what the tests of this folder are made of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
FAST = {"learning-rate": 0.02, "local-epochs": 2, "batch-size": 16, "seed": 3}


class ClientLog(logging.Handler):
    """What clients log of their failures, which they do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("onnxtrain.federated.failures").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(logging.Formatter("%(message)s").format(record))


LOG = ClientLog()


def rows(number: int, samples: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Data of the golden MLP: eight numbers, and which of the first three is the largest."""
    x = np.random.default_rng(number).normal(size=(samples, 8)).astype(np.float32)
    return x, x[:, :3].argmax(axis=1)


def images(number: int, samples: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Data of the golden CNN: images whose brightest rows tell the class."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(samples, 1, 6, 6)).astype(np.float32)
    labels = rng.integers(0, 3, samples)
    for i, label in enumerate(labels):
        x[i, 0, 2 * label : 2 * label + 2] += 1.5
    return x, labels


def of_client(context: Any) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a client."""
    return rows(int(context.node_config["partition-id"]))


def images_of_client(context: Any) -> tuple[np.ndarray, np.ndarray]:
    """The images of a client."""
    return images(int(context.node_config["partition-id"]))


def federate(
    server_artifacts: Any,
    client: Any,
    strategy: Any = None,
    *,
    clients: Any = 3,
    rounds: int = 2,
    config: Any = None,
    **options: Any,
) -> Any:
    """Run a federation in this process; return Flower's result and the last session."""
    from onnxtrain.federated import run_locally, server_app

    ended: dict[str, Any] = {}

    def finish(result: Any, session: Any) -> None:
        ended.update(result=result, session=session)

    app = server_app(
        server_artifacts,
        strategy,
        num_rounds=rounds,
        config=FAST if config is None else config,
        finish=finish,
        **options,
    )
    run_locally(app, client, clients)
    return ended["result"]


def arrays(result: Any) -> dict[str, np.ndarray]:
    """The weights that a federation came to."""
    return {name: array.numpy() for name, array in result.arrays.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether all arrays are equal to the bit."""
    return set(a) == set(b) and all(a[n].tobytes() == b[n].tobytes() for n in a)

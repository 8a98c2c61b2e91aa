"""Ten clients learn digits, three of them hostile: what each defence is worth.

python examples/federated/hostile.py               # a table, as in docs/federated.md
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "simulation")]

from digits.data import test_set, train_and_test
from digits.server import fresh_weights
from hostile_clients import THREE, hostile

from onnxtrain.federated import Checks, client_app, run_locally, server_app

ARTIFACTS = HERE / "simulation" / "digits" / "artifacts.json"
CONFIG = {"learning-rate": 0.01, "local-epochs": 4, "batch-size": 16, "seed": 1}
OFF = Checks(norm_factor=None, examples_factor=None, max_examples=2**63, reply_token=False)
ATTACKS = {
    "none": (),
    "huge, false count, replay or NaN": THREE,
    "update times −20": ("large",) * 3,
    "update turned around": ("flipped",) * 3,
    "stale weights": ("stale",) * 3,
}
DEFENCES = {
    "no bounds": {"checks": OFF},
    "default": {},
    "trimmed mean": {"strategy": "trimmed-mean:0.3"},
    "median": {"strategy": "median"},
    "Krum": {"strategy": "krum:3"},
}


def accuracy(kinds, rounds, spread="iid", **options):
    """The accuracy of the global model, in per cent, after a federation with some attackers."""
    ended = []
    honest = client_app(
        ARTIFACTS, lambda c: train_and_test(c.node_config["partition-id"], 10, spread)[0], threads=1
    )
    server = server_app(
        ARTIFACTS, num_rounds=rounds, weights=fresh_weights, evaluate=test_set(),
        metrics=["accuracy"], batch_size=500, config=CONFIG, threads=1,
        finish=lambda result, session: ended.append(result), **options,
    )  # fmt: skip
    run_locally(server, hostile(honest, kinds), 10)
    central = ended[0].evaluate_metrics_serverapp
    return 100 * central[max(central)]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    print("| the three attackers | " + " | ".join(DEFENCES) + " |")
    print("|---|" + "---|" * len(DEFENCES))
    for name, kinds in ATTACKS.items():
        found = [accuracy(kinds, given.rounds, **options) for options in DEFENCES.values()]
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in found) + " |", flush=True)


if __name__ == "__main__":
    main()

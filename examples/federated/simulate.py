"""Ten clients learn digits in Flower's simulation, with data spread evenly and unevenly.

python examples/federated/simulate.py              # both, and a picture
python examples/federated/simulate.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from runtime import Flower, as_options, flower

CLIENTS = 10
RUNS = {
    "iid": ("evenly spread (FedAvg)", {"spread": "iid", "strategy": "fedavg"}),
    "labels": (
        "two digits each (FedAvg)",
        {"spread": "labels", "strategy": "fedavg", "learning-rate": 0.005},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("onnxtrain-federated"))
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home, flower(Path(home)) as here:
        here.superlink("--simulation")
        found = {name: simulate(here, name, given.output, given.rounds) for name in RUNS}
    print(f"{len(found)} federations of {CLIENTS} clients in {time.monotonic() - began:.0f} s")
    print(f"models and figures are in {given.output}; picture: {draw(found, given.output)}")
    for name, rounds in found.items():
        last = max(rounds["central"], key=int)
        accuracy = 100 * rounds["central"][last]["accuracy"]
        print(f"{RUNS[name][0]}: accuracy after round {last}: {accuracy:.1f} %")


def simulate(here: Flower, name: str, output: Path, rounds: int) -> dict[str, Any]:
    """Run one federation as `flwr run` does; return its figures."""
    title, settings = RUNS[name]
    folder = (output / name).absolute()
    print(f"{title}: {rounds} rounds", flush=True)
    log = here.run(
        HERE / "simulation",
        "--federation-config", f"num-supernodes={CLIENTS} client-resources-num-cpus=1",
        "--run-config",
        as_options([("num-server-rounds", rounds), ("output", str(folder)), *settings.items()]),
    )  # fmt: skip
    file = folder / "rounds.json"
    if not file.exists():
        raise RuntimeError(f"the federation did not come to its end:\n{log}")
    return json.loads(file.read_text())


def draw(found: dict[str, dict[str, Any]], output: Path) -> Path:
    """Draw the accuracy over the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, rounds in found.items():
        central = {int(n): m["accuracy"] for n, m in rounds["central"].items()}
        numbers = sorted(central)
        axes.plot(numbers, [100 * central[n] for n in numbers], marker="o", label=RUNS[name][0])
    axes.set(xlabel="round", ylabel="accuracy on the server's test set, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = output / "accuracy.svg"
    figure.savefig(path)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()

"""A published table, reproduced: FedAvg and FedProx on MNIST that is spread in three ways.

Ten clients, ten local epochs, batches of 64, SGD with momentum 0.9, as in Flower's baseline
`niid_bench`. The clients are those of `onnxtrain.federated.client_app`, the strategies Flower's
own; only the transport is another one: two processes of one thread each instead of Ray's workers.

All six rows advance in turn, one round of each. A run that was stopped goes on where it was.

    python benchmarks/federated/niid_bench.py --folder build/niid --rounds 50
    python benchmarks/federated/niid_bench.py --folder build/niid --table
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "examples" / "federated")]

import mnist  # noqa: E402

SPREADS = {"iid": "IID", "dirichlet": "Dirichlet(0.5)", "labels": "two labels per client"}
PUBLISHED = {
    ("FedAvg", "iid"): "99.09 ± 0.05", ("FedAvg", "dirichlet"): "98.89 ± 0.07",
    ("FedAvg", "labels"): "96.86 ± 0.30", ("FedProx", "iid"): "99.16",
    ("FedProx", "dirichlet"): "99.02", ("FedProx", "labels"): "96.85",
}  # fmt: skip
CLIENTS, ROUNDS, SEED = 10, 50, 42
CONFIG = {"learning-rate": 0.01, "local-epochs": 10, "batch-size": 64, "seed": SEED}
MU = 0.01

_worker: dict[Any, Any] = {}


def answer(folder: str, strategy: str, how: str, message: Any, context: Any) -> Any:
    """Let a client train, in a process of its own."""
    from onnxtrain.federated import client_app

    if "data" not in _worker:
        _worker["data"] = tuple(np.load(f"{folder}/{n}.npy", mmap_mode="r") for n in ("x", "y"))
    key = (strategy, how)
    if key not in _worker:
        x, y = _worker["data"]
        parts = mnist.spread(np.asarray(y), how, CLIENTS, SEED)

        def data(given: Any) -> Any:
            own = parts[given.node_config["partition-id"]]
            return x[own], y[own]

        _worker[key] = client_app(f"{folder}/{strategy}", data, threads=1)
    return _worker[key](message, context)


def prepare(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write data and artifacts, once; return the test set."""
    x, y, test_x, test_y = mnist.load(folder)
    if not (folder / "y.npy").exists():
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
    if not (folder / "FedProx" / "step_model.onnx").exists():
        from network import write_artifacts

        for name in ("FedAvg", "FedProx"):
            write_artifacts(folder / name, seed=SEED, proximal=name == "FedProx", weight_decay=1e-5)
    return test_x, test_y


def one_round(
    folder: Path, pool: ProcessPoolExecutor, strategy: str, how: str, test: Any
) -> dict[str, Any]:
    """Take the next round of one row; return what it came to."""
    from flwr.serverapp.strategy import FedAvg, FedProx

    from onnxtrain.federated import LocalGrid, open_artifacts
    from onnxtrain.federated.progress import Progress
    from onnxtrain.federated.server import Server

    def client(message: Any, context: Any) -> Any:
        return pool.submit(answer, str(folder), strategy, how, message, context).result()

    state = folder / f"{strategy}-{how}"
    saved = Progress.read(state)
    number = 1 if saved is None else saved.round + 1
    options = {"fraction_evaluate": 0.0, "min_train_nodes": CLIENTS}
    made = FedProx(proximal_mu=MU, **options) if strategy == "FedProx" else FedAvg(**options)
    began = time.time()
    server = Server(open_artifacts(folder / strategy), made, rounds=number, folder=state)
    grid = LocalGrid(client, CLIENTS, workers=2)
    result = server.run(grid, CONFIG, (test, ["accuracy"], 500))
    central = result.evaluate_metrics_serverapp[number]
    return {
        "strategy": strategy,
        "spread": how,
        "round": number,
        "accuracy": round(100 * central["accuracy"], 2),
        "loss": round(central["eval_loss"], 5),
        "seconds": round(time.time() - began, 1),
    }


def done(folder: Path) -> dict[tuple[str, str], int]:
    """Return how many rounds each row has."""
    found = dict.fromkeys(PUBLISHED, 0)
    for line in read_log(folder):
        found[line["strategy"], line["spread"]] = line["round"]
    return found


def run(folder: Path, rounds: int, spreads: Sequence[str]) -> None:
    """Advance the rows of some spreads in turn."""
    import logging

    logging.getLogger("flwr").setLevel(logging.WARNING)
    test = prepare(folder)
    with ProcessPoolExecutor(2) as pool:
        while True:
            taken = {row: count for row, count in done(folder).items() if row[1] in spreads}
            row = min(taken, key=lambda r: taken[r])
            if taken[row] >= rounds:
                return
            line = one_round(folder, pool, *row, test)
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the rounds that were taken."""
    file = folder / "log.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(folder: Path) -> str:
    """Return the table as Markdown: theirs beside ours."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in read_log(folder):
        rows.setdefault((line["strategy"], line["spread"]), []).append(line)
    text = [f"| | spread | published ({ROUNDS} rounds) | ours | rounds | best of these |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    for (strategy, how), lines in sorted(rows.items()):
        best = max(lines, key=lambda line: line["accuracy"])
        text.append(
            f"| {strategy} | {SPREADS[how]} | {PUBLISHED[strategy, how]} | "
            f"{lines[-1]['accuracy']:.2f} | {lines[-1]['round']} | "
            f"{best['accuracy']:.2f} (round {best['round']}) |"
        )
    return "\n".join(text)


def publish(folder: Path) -> None:
    """Write the table to the page, and keep the log beside this script."""
    import page

    words = "Test accuracy in per cent; our runs use one seed."
    if any(rounds < ROUNDS for rounds in done(folder).values()):
        words += (
            " A round of one row takes 45 s of processor time, so some rows have fewer than "
            f"{ROUNDS} rounds."
        )
    page.write("niid", f"{words}\n\n{table(folder)}")
    log = "".join(json.dumps(line) + "\n" for line in read_log(folder))
    (Path(__file__).parent / "niid_bench.jsonl").write_text(log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "niid_bench")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--spreads", nargs="+", choices=SPREADS, default=[*SPREADS])
    parser.add_argument("--table", action="store_true", help="print the table of what is done")
    parser.add_argument("--page", action="store_true", help="write it to docs/federated.md")
    given = parser.parse_args()
    if given.table or given.page:
        print(table(given.folder))
        if given.page:
            publish(given.folder)
    else:
        run(given.folder, given.rounds, given.spreads)


if __name__ == "__main__":
    main()

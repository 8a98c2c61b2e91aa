"""Post-training quantization against training for integers, on networks that rounding hurts.

    python benchmarks/quantize                        # all: some minutes for each network
    python benchmarks/quantize --only audio --seeds 1
    python benchmarks/quantize --show                 # what was measured before, and nothing new

Each network is trained in floats once for each seed. From there, onnxruntime.quantization,
onnxtrain and torch.ao.quantization make 8-bit and 4-bit models of it, with and without training.
Accuracy, size and time are printed as tables, and docs/images/quantize.svg is drawn. Data and
weights come from packages; where one cannot be had, its network is left out, with a word. What was
measured is kept in the folder, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import torch
from tasks import ROOT, TASKS
from ways import WAYS, measure

from data import MissingError
from report import Results, accuracy_table, draw, speed_table

PICTURE = ROOT / "docs" / "images" / "quantize.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quantize")
    parser.add_argument("--only", default=",".join(TASKS), help="networks, with commas between")
    parser.add_argument("--ways", default="", help="a word that ways of interest have in them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="measure nothing, show what is known")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("onnxtrain").setLevel(logging.WARNING)
    given.folder.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    for name in given.only.split(","):
        seeds = 1 if name == "pretrained" else given.seeds
        try:
            folder = given.folder.absolute()
            if not given.show:
                study(name, folder, seeds, given.ways)
            if found := known_results(name, folder):
                results[name] = found
        except MissingError as error:
            print(f"{TASKS[name].title} is left out: {error}")
    if results:
        show(results, given.folder.absolute())


def study(name: str, folder: Path, seeds: int, words: str) -> None:
    """Measure all ways of one network, but those that were measured before."""
    for seed in range(seeds):
        path = folder / f"{name}-{seed}" / "results.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        trained = TASKS[name].trained(path.parent, seed)
        for title, (_, way) in WAYS.items():
            if title not in known and words in title:
                known[title] = measure(way, trained)
                print(name, seed, title, known[title], file=sys.stderr, flush=True)
                path.write_text(json.dumps(known, indent=1))


def known_results(name: str, folder: Path) -> dict[str, list[dict[str, object]]]:
    """Return what was measured of a network, of all seeds."""
    found: dict[str, list[dict[str, object]]] = {}
    for path in sorted(folder.glob(f"{name}-*/results.json")):
        for title, row in json.loads(path.read_text()).items():
            found.setdefault(title, []).append(row)
    return found


def show(results: Results, folder: Path) -> None:
    """Print the tables, and draw the picture."""
    titles = {name: task.title for name, task in TASKS.items()}
    print(accuracy_table(results, titles), end="\n\n")
    print(speed_table(results, titles, folder, lambda name: TASKS[name].data(folder, 0).test[0]))
    draw(results, titles, PICTURE)


if __name__ == "__main__":
    main()

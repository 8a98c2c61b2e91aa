"""Runs every graph of an artifact folder on the onnxruntime that this interpreter has.

`python oldest_program.py <folder>`: the inputs of all graphs are taken from `feeds.npz` in the
folder; what comes out is written to `outputs.npz`. It needs numpy and onnxruntime alone.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort


def run_all(folder: Path) -> dict[str, np.ndarray]:
    feeds = np.load(folder / "feeds.npz")
    results = {}
    for file in sorted(folder.glob("*.onnx")):
        session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        values = session.run(None, {name: feeds[name] for name in names})
        for output, value in zip(session.get_outputs(), values):  # noqa: B905
            results[f"{file.stem}/{output.name}"] = value
    return results


if __name__ == "__main__":
    np.savez(Path(sys.argv[1]) / "outputs.npz", **run_all(Path(sys.argv[1])))
    print(ort.__version__)

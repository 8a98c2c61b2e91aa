"""Trains, saves, resumes and exports from a folder of artifacts, with what is installed.

python wheel_program.py FOLDER device|offline
"""

import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import onnxtrain
from onnxtrain.cli import main


def train(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    np.savez(folder / "data.npz", input=x, labels=x[:, :3].argmax(axis=1))
    artifacts, data = str(folder / "artifacts"), str(folder / "data.npz")
    run = ["train", artifacts, "--data", data, "--eval", data, "--quiet"]
    assert main([*run, "--epochs", "2"]) == 0
    assert main([*run, "--epochs", "3", "--resume"]) == 0
    assert main(["export", artifacts, "-o", str(folder / "model.onnx"), "--quiet"]) == 0


def workstation(folder: Path) -> None:
    model = onnxtrain.gradient(folder / "model.onnx", wrt="input")
    assert [value.name for value in model.graph.output][-1] == "input_grad"
    assert main(["prepare", str(folder / "model.onnx"), "-o", str(folder / "again"), "-q"]) == 0


if __name__ == "__main__":
    target, kind = Path(sys.argv[1]), sys.argv[2]
    train(target)
    if kind == "device":
        assert not {"onnx", "onnx_ir", "google.protobuf"} & set(sys.modules)
        assert main(["inspect", str(target / "model.onnx")]) == 2  # needs the extra, and says so
    else:
        workstation(target)
    print(f"{kind}: onnxtrain {onnxtrain.__version__} on onnxruntime {version('onnxruntime')}, "
          f"numpy {np.__version__}")  # fmt: skip

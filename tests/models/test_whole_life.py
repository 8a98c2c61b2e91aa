"""Artifacts that are made here live on a device that has nothing but the package."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onnxtrain
from exporting import export
from onnxtrain import artifacts
from zoo import MLP, Bert, MobileNetV2

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("ONNXTRAIN_DEVICE_PYTHON", str(HERE.parents[1] / ".venv-device/bin/python"))
PROGRAM = HERE.parent / "device" / "whole_life.py"


class Normalized(nn.Module):
    """Convolutions with BatchNorm, and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.drop, self.fc = nn.Dropout(0.25), nn.Linear(6 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


NETWORKS = {
    "MLP": (MLP, lambda n: torch.randn(n, 20), 5, None),
    "CNN": (Normalized, lambda n: torch.randn(n, 3, 8, 8), 3, None),
    "MobileNetV2": (MobileNetV2, lambda n: torch.randn(n, 3, 32, 32), 10, ["classifier.*"]),
    "BERT-like": (Bert, lambda n: torch.randint(0, 100, (n, 12)), 3, None),
}


def prepare(name: str, folder: Path) -> None:
    make, data, classes, trained = NETWORKS[name]
    torch.manual_seed(0)
    net = make().train(trained is None)
    artifacts.generate_artifacts(
        export(net, data(2), "torchscript"), requires_grad=trained,
        loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder, additional_output_names=["y"],
    )  # fmt: skip
    x, labels = data(16).numpy(), torch.randint(0, classes, (16,)).numpy()
    np.savez(folder / "data.npz", x=x, labels=labels)


def require_device() -> None:
    if not Path(PYTHON).exists():
        pytest.skip(f"no environment with the package alone at {PYTHON}; `make test` makes it")


def lived(python: str, folder: Path) -> dict:
    result = subprocess.run(
        [python, str(PROGRAM), str(folder), "y"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_whole_life_of_a_model(name: str, tmp_path: Path) -> None:
    require_device()
    prepare(name, tmp_path)
    found = lived(PYTHON, tmp_path)
    assert found.pop("imported") == []
    assert Path(PYTHON).parents[1] in Path(found.pop("package")).parents
    assert found["after"] < found["before"]
    # With all that is installed beside it here, it comes to the same numbers.
    here = lived(sys.executable, tmp_path)
    assert {key: here[key] for key in found} == found


def test_the_environment_has_nothing_else() -> None:
    require_device()
    names = ("onnx", "torch", "onnx_ir", "matplotlib")
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_environment_has_the_package_as_it_is_here() -> None:
    require_device()
    code = "import onnxtrain; print(onnxtrain.__path__[0])"
    result = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True, cwd=HERE
    )
    installed, here = Path(result.stdout.strip()), Path(onnxtrain.__file__).parent
    assert installed != here
    stale = [
        str(file.relative_to(here))
        for file in here.rglob("*.py")
        if not (installed / file.relative_to(here)).exists()
        or not filecmp.cmp(file, installed / file.relative_to(here), shallow=False)
    ]
    assert not stale, "`make test` installs it anew"

"""The code of docs/federated.md runs, block after block, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

import onnx

from onnxtrain.cli.demo.network import network

PAGE = Path(__file__).parents[2] / "docs" / "federated.md"


def test_the_page_runs(tmp_path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    onnx.save(network(), tmp_path / "model.onnx")
    for number in range(4):
        image = np.random.default_rng(number).random((48, 1, 8, 8), np.float32)
        labels = image[:, 0, 0, :3].argmax(axis=1)
        np.savez(tmp_path / f"user-{number}.npz", image=image, labels=labels)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "left out" not in done.stdout + done.stderr
    assert (tmp_path / "global.onnx").exists()
    assert all((tmp_path / "device" / f"mine-{i}.onnx").exists() for i in (0, 1))
    assert (tmp_path / "device" / "client-1.npz").exists()
    assert "['fc2.weight', 'fc2.bias']" in done.stdout


def test_the_usual_client_and_server_take_five_lines() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    client, server = blocks[1], blocks[2]
    assert len([line for line in client.splitlines() if line.strip()]) <= 6
    assert len([line for line in server.splitlines() if line.strip()]) <= 5

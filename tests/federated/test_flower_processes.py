"""Flower's own programs run the example apps: in simulation on Ray, and as separate processes."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from deploy import deploy
from runtime import flower

from onnxtrain.federated.progress import Progress

EXAMPLES = Path(__file__).parents[2] / "examples" / "federated"


def test_a_simulation_of_three_clients_and_two_rounds(tmp_path) -> None:
    with flower(tmp_path / "flower") as here:
        here.superlink("--simulation")
        log = here.run(
            EXAMPLES / "simulation",
            "--federation-config", "num-supernodes=3 client-resources-num-cpus=1",
            "--run-config", f"num-server-rounds=2 strategy='fedprox' compression='int8' "
            f"output='{tmp_path / 'out'}'",
        )  # fmt: skip
        superlink = here.log("superlink")
    assert "accuracy after round 2: " in log, f"{log[-4000:]}\n{superlink[-4000:]}"
    rounds = json.loads((tmp_path / "out" / "rounds.json").read_text())
    assert [rounds["train"][n]["clients"] for n in ("1", "2")] == [3, 3]
    assert rounds["train"]["2"]["bytes-up"] < 0.3 * rounds["train"]["2"]["bytes-down"]
    assert rounds["central"]["2"]["eval_loss"] < rounds["central"]["0"]["eval_loss"]
    model = ort.InferenceSession(tmp_path / "out" / "digits.onnx")
    assert model.run(None, {"image": np.zeros((2, 1, 28, 28), np.float32)})[0].shape == (2, 10)


LONG = bool(os.environ.get("ONNXTRAIN_LONG"))  # the accuracy of twelve rounds, in minutes


def test_a_simulation_of_ten_clients_of_which_three_attack(tmp_path) -> None:
    app = tmp_path / "app"
    shutil.copytree(EXAMPLES / "simulation", app)
    shutil.copy(EXAMPLES / "hostile_clients.py", app / "digits" / "attacks.py")
    (app / "digits" / "hostile.py").write_text(
        "from .attacks import hostile\nfrom .client import app as honest\napp = hostile(honest)\n"
    )
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(project.replace("digits.client:app", "digits.hostile:app"))

    def run(here, source):
        out = tmp_path / source.name
        log = here.run(
            source, "--federation-config", "num-supernodes=10 client-resources-num-cpus=1",
            "--run-config", f"num-server-rounds={12 if LONG else 2} output='{out}'",
        )  # fmt: skip
        assert (out / "rounds.json").exists(), log[-4000:]
        return json.loads((out / "rounds.json").read_text())

    with flower(tmp_path / "flower") as here:
        here.superlink("--simulation")
        attacked = run(here, app)
        honest = run(here, EXAMPLES / "simulation") if LONG else None
    # NaN in the first round; the second one records what the others repeat.
    assert [attacked["train"][n]["left-out"] for n in ("1", "2")] == [3, 2]
    assert attacked["central"]["2"]["eval_loss"] < attacked["central"]["0"]["eval_loss"]
    if honest is not None:
        accuracy = [rounds["central"]["12"]["accuracy"] for rounds in (attacked, honest)]
        assert accuracy[1] > 0.93
        assert accuracy[0] > accuracy[1] - 0.02


def test_a_deployment_goes_on_without_the_device_that_is_killed(tmp_path) -> None:
    log = deploy(tmp_path, rounds=3, kill_in=2)
    assert re.search(r"round 2: node \d+ is left out: ", log)
    clients = [int(n) for n in re.findall(r"^round \d+: (\d) clients", log, re.MULTILINE)]
    assert len(clients) == 3
    assert clients[0] == 3
    assert all(found == 2 for found in clients[1:])
    saved = Progress.read(tmp_path / "state")
    assert saved is not None
    assert saved.round == 3
    # Both that are left have the model, and so has the server.
    x = np.zeros((1, 1, 28, 28), np.float32)
    scores = [
        ort.InferenceSession(tmp_path / name).run(None, {"image": x})[0]
        for name in ("server.onnx", "device-0/digits.onnx", "device-1/digits.onnx")
    ]
    assert np.array_equal(scores[0], scores[1])
    assert np.array_equal(scores[0], scores[2])
    assert not (tmp_path / "device-2" / "digits.onnx").exists()

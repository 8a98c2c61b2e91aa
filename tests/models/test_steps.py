"""Whole networks: fused steps are the separate ones to the bit, in whatever order nodes run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from onnx.inliner import inline_local_functions

from aliasing import pairs, unsafe
from exporting import export
from graphs import model, value
from onnxtrain import artifacts, onnxblock
from onnxtrain.api import TrainingSession
from onnxtrain.device.random_state import set_seed
from onnxtrain.offline.optimizers import late_gradients
from optimize_program import optimize
from zoo import NETWORKS

HERE = Path(__file__).resolve().parent
OLDEST = os.environ.get("ONNXTRAIN_OLDEST_PYTHON", str(HERE.parents[1] / ".venv-oldest/bin/python"))


class Wide(torch.nn.Module):
    """One layer of more numbers than are updated in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = torch.nn.Embedding(1000, 600), torch.nn.Linear(600, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.words(x).mean(1))


ALL = {**NETWORKS, "Wide": (Wide, lambda batch: torch.randint(0, 1000, (batch, 5)))}
# Each structure once, the two exporters in turn: they write rather different graphs.
CASES = {
    name: ("torchscript", "dynamo-optimized")[number % 2]
    for number, name in enumerate(n for n in ALL if not n.startswith(("Fresh", "Smooth")))
}
OPTIMIZERS = [
    onnxblock.optim.AdamW(weight_decay=0.01, clip_grad=onnxblock.optim.ClipGradNorm(1.0)),
    onnxblock.optim.SGD(),
    onnxblock.optim.RMSprop(momentum=0.5, centered=True),
    onnxblock.optim.AdamW.torch(),
]


@pytest.fixture(scope="module", params=CASES)
def network(request, tmp_path_factory):
    """The artifacts of a network, and a batch for it."""
    name, exporter = request.param, CASES[request.param]
    number = list(CASES).index(name)
    torch.manual_seed(0)
    make, data = ALL[name]
    net = make().train(name != "UNet")
    x = data(4)
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        # All gradients that can be computed with the updates are, however small.
        patch.setattr(late_gradients, "_pays", lambda size, kept: True)
        patch.setattr(late_gradients, "_LARGE", 100)
        artifacts.generate_artifacts(
            export(net, x, exporter),
            loss=artifacts.LossType.MSELoss,
            optimizer=OPTIMIZERS[number % len(OPTIMIZERS)],
            artifact_directory=folder,
            bn="batch" if name in ("ResNet18", "MobileNetV2") else None,
        )
    target = np.random.default_rng(0).standard_normal(net(x).shape).astype(np.float32)
    return folder, (x.numpy(), target)


def parallel() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 2
    return options


ORDERS = {"priority": None, "default": ort.SessionOptions, "parallel": parallel}


def opened(folder, order):
    set_seed(1)
    return TrainingSession.from_folder(folder, session_options=ORDERS[order])


def state_of(session) -> bytes:
    return session.state.to_bytes(include_optimizer_state=True)


def separate_steps(folder, data, count=3):
    session = opened(folder, "priority")
    losses = []
    for _ in range(count):
        losses.append(session.train_step(*data))
        session.optimizer_step()
        session.lazy_reset_grad()
    return losses, state_of(session)


def test_fused_steps_are_separate_steps(network) -> None:
    folder, data = network
    losses, end = separate_steps(folder, data)
    assert losses[0] != losses[-1]
    for order in ORDERS:
        session = opened(folder, order)
        assert [session.step(*data) for _ in losses] == losses, order
        assert state_of(session) == end, order


def assert_safe(folder: Path, count: int) -> None:
    found = 0
    for file in folder.glob("*.onnx"):
        if not file.name.startswith("eval"):
            made = onnx.load(file, load_external_data=False)
            found += len(list(pairs(made.graph)))
            for form in (made, inline_local_functions(made)):  # with and without native kernels
                assert not unsafe(form.graph), f"{file.name}: {unsafe(form.graph)[:3]}"
    assert found == count


def updates_in(folder: Path) -> int:
    """How many tensors the graphs of a folder update in place."""
    return sum(
        len(list(pairs(onnx.load(file, load_external_data=False).graph)))
        for file in folder.glob("*.onnx")
    )


def test_no_parameter_is_read_after_its_update(network, tmp_path) -> None:
    """In the graphs themselves and in what onnxruntime's optimisations make of them."""
    folder, _ = network
    count = updates_in(folder)
    assert count > 3
    assert_safe(folder, count)
    optimize(folder, tmp_path)
    assert_safe(tmp_path, 2 * count)


def test_nor_in_what_the_oldest_onnxruntime_makes_of_it(network, tmp_path) -> None:
    if not Path(OLDEST).exists():
        pytest.skip(f"no environment with the oldest onnxruntime at {OLDEST}; `make test` makes it")
    folder, _ = network
    program = [OLDEST, str(HERE / "optimize_program.py"), str(folder), str(tmp_path)]
    result = subprocess.run(program, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("1.19.")
    assert_safe(tmp_path, 2 * updates_in(folder))


def test_what_is_unsafe_is_found() -> None:
    """The proof can fail: a reader beside the update, through a view, and in a body."""
    node = helper.make_node
    inputs = [value("w", [2]), value("g", [2])]
    outputs = [value("w.updated", [2]), value("y", [2])]
    update = node("Sub", ["w", "g"], ["w.updated"])
    late = [
        [node("Relu", ["w"], ["y"])],
        [node("Identity", ["w"], ["v"]), node("Relu", ["v"], ["y"])],
        [
            node("Identity", ["w"], ["v"]),
            node("Reshape", ["v", "s"], ["r"]),
            node("Neg", ["r"], ["y"]),
        ],
    ]
    for nodes in late:
        made = model([update, *nodes], inputs, outputs, {"s": np.array([2])})
        assert any("reads w after w.updated" in problem for problem in unsafe(made.graph))
    early = [
        node("Relu", ["w"], ["y"]),
        node("Add", ["g", "y"], ["gy"]),
        node("Sub", ["w", "gy"], ["w.updated"]),
    ]
    assert not unsafe(model(early, inputs, outputs).graph)
    sorted_ = [node("Relu", ["g"], ["y"]), node("CumSum", ["w", "axis"], ["w.updated"])]
    made = model(sorted_, inputs, outputs, {"axis": np.array(0)})
    assert unsafe(made.graph) == ["w.updated is written by .CumSum, which reads it"]

"""A memory budget: the same numbers, less memory, and the truth about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from exporting import export
from onnxtrain import fit
from onnxtrain.api import TrainingSession
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.device.random_state import set_seed
from onnxtrain.errors import ArgumentError, ArgumentTypeError, MemoryBudgetError, UnknownNameError
from onnxtrain.offline.passes.remat.arena import DEFAULT_LOSS, LEAN_LOSS, resident_bytes
from onnxtrain.offline.passes.remat.flow import Flow, bytes_alive, execution_order
from optimize_program import optimize
from zoo import Bert, ResNet18

OLDEST = os.environ.get(
    "ONNXTRAIN_OLDEST_PYTHON", str(Path(__file__).parents[2] / ".venv-oldest/bin/python")
)

BATCH = 16


class Dropping(torch.nn.Module):
    """Layers with dropout in between: a copy has to drop the same."""

    def __init__(self) -> None:
        super().__init__()
        parts = []
        for _ in range(6):
            parts += [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.3)]
        self.body, self.head = torch.nn.Sequential(*parts), torch.nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Mixed(torch.nn.Module):
    """A recurrent layer, which cannot be computed again, behind layers that can."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(5))
        self.rnn, self.head = torch.nn.LSTM(32, 16, batch_first=True), torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.steps:
            x = torch.nn.functional.gelu(layer(x)) + x
        return self.head(self.rnn(x)[0][:, -1])


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = []
        for channels in (3, 64, 64, 64, 64, 64):
            conv = torch.nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            layers += [conv, torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
        self.body, self.head = torch.nn.Sequential(*layers), torch.nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class DeepMLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        self.layers, self.head = torch.nn.ModuleList(layers), torch.nn.Linear(256, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.head(x)


def pictures(channels: int, side: int):
    return lambda n: torch.randn(n, channels, side, side)


# The network, its data, the batch and the part of the memory that is left to it.
CASES = {
    "DeepMLP": (DeepMLP, lambda n: torch.randn(n, 256), 256, 0.7),
    "Dropping": (lambda: Dropping().train(), lambda n: torch.randn(n, 64), 1024, 0.7),
    "ResNet18": (lambda: ResNet18(32).train(), pictures(3, 32), BATCH, 0.65),
    "Mixed": (Mixed, lambda n: torch.randn(n, 40, 32), BATCH, 0.85),
    "Bert": (lambda: Bert(3, 32, 2, 100), lambda n: torch.randint(0, 100, (n, 32)), BATCH, 0.6),
    "Wide": (lambda: Wide().train(), pictures(3, 32), 16, 0.5),
}


def made(
    folder: Path, name: str, exporter: str, fixed: bool, budget: float | None, native: bool = True
):
    torch.manual_seed(0)
    make, data, batch, _ = CASES[name]
    model = export(make(), data(batch), exporter)
    if fixed:
        for info in model.graph.input:
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = batch
        del model.graph.value_info[:]
        for info in model.graph.output:
            info.type.tensor_type.shape.dim[0].dim_value = batch
    sizes = None if fixed or budget is None else {"batch": batch}
    return generate_artifacts(
        model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=folder, memory_budget=budget, sizes=sizes, native=native,
    )  # fmt: skip


def batches(name: str, count: int):
    torch.manual_seed(1)
    _, data, batch, _ = CASES[name]
    labels = np.random.default_rng(0)
    return [(data(batch).numpy(), labels.integers(0, 3, batch)) for _ in range(count)]


def as_written() -> ort.SessionOptions:
    """Options for graphs that run as they are in the file."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def taken(folder: Path, name: str, how: str, options=None) -> tuple[list[float], bytes]:
    """Train a little; return the losses, and all that training has changed."""
    set_seed(1)
    session = TrainingSession.from_folder(folder, session_options=options)
    session.set_learning_rate(1e-3)
    data = batches(name, 4)
    if how == "fused":
        losses = [float(session.step(x, y)) for x, y in data]
    elif how == "accumulated":
        losses = []
        for x, y in data:
            losses.append(float(session.train_step(x, y)))
            if len(losses) % 2 == 0:
                session.optimizer_step()
                session.lazy_reset_grad()
    else:
        x, y = (np.concatenate(part) for part in zip(*data, strict=True))
        size = 2 * len(data[0][0])
        losses = fit(
            session,
            (x, y),
            batch_size=size,
            micro_batch_size=size // 2,
            shuffle=False,
            progress=False,
        ).losses
    return losses, b"".join(
        np.asarray(parameter.data).tobytes() for _, parameter in session.state.parameters
    )


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """The artifacts of a network without a budget and with one."""
    name, exporter, fixed = request.param
    folder = tmp_path_factory.mktemp("budget")
    plain = made(folder / "plain", name, exporter, fixed, None)
    lean = made(folder / "lean", name, exporter, fixed, CASES[name][3])
    return name, folder, plain, lean


BOTH = ("torchscript", "dynamo-optimized")
PAIRS = [(name, BOTH[i % 2], False) for i, name in enumerate(CASES) if name != "Wide"]
PAIRS += [("ResNet18", "torchscript", True), ("Bert", "dynamo-optimized", False)]


@pytest.mark.parametrize(
    "pair", PAIRS, indirect=True, ids=[f"{n}-{e}{'-fixed' * f}" for n, e, f in PAIRS]
)
class TestEachNetwork:
    @pytest.mark.parametrize("how", ["fused", "accumulated", "micro_batch"])
    def test_trains_to_the_same_numbers(self, pair, how: str) -> None:
        name, folder, _, lean = pair
        if how == "micro_batch" and not lean.memory.sizes:
            pytest.skip("the batch is fixed")
        assert lean.memory.copies, "nothing was computed again"
        losses, numbers = taken(folder / "plain", name, how, as_written)
        lean_losses, lean_numbers = taken(folder / "lean", name, how, as_written)
        assert losses == lean_losses
        assert numbers == lean_numbers

    def test_trains_to_near_numbers_where_onnxruntime_fuses_more(self, pair) -> None:
        """What no gradient reads can be computed as a part of something else."""
        name, folder, _, _ = pair
        losses, lean_losses = (taken(folder / k, name, "fused")[0] for k in ("plain", "lean"))
        np.testing.assert_allclose(losses, lean_losses, rtol=1e-4)

    def test_keeps_to_the_budget_by_its_own_account(self, pair) -> None:
        name, folder, _, lean = pair
        memory = lean.memory
        assert memory.peak <= memory.budget < memory.without
        assert memory.budget == int(memory.without * CASES[name][3])
        notes = onnx.load(folder / "lean/step_model.onnx", load_external_data=False).metadata_props
        assert json.loads(notes[0].value)["memory"] == memory.notes()
        assert "instead of" in str(lean)

    @pytest.mark.parametrize("version", ["this", "oldest"])
    def test_onnxruntime_leaves_the_copies_alone(self, pair, version: str, tmp_path: Path) -> None:
        _, folder, _, _ = pair
        if version == "oldest":
            if not Path(OLDEST).exists():
                pytest.skip("there is no environment with the oldest onnxruntime")
            program = Path(optimize.__code__.co_filename)
            subprocess.run([OLDEST, program, folder / "lean", tmp_path], check=True)
        else:
            optimize(folder / "lean", tmp_path)
        for graph in ("training_model", "step_model"):
            written = copies_in(folder / f"lean/{graph}.onnx")
            if not written:
                pytest.skip("no product is computed again")
            for level in ("EXTENDED", "ALL"):
                assert copies_in(tmp_path / f"{graph}.{level}.onnx") >= written


COSTLY = ("Conv", "Gemm", "MatMul", "FusedConv", "FusedMatMul", "FusedGemm")


def copies_in(file: Path) -> set[str]:
    """Return the names of costly values that a graph computes again."""
    graph = onnx.load(file, load_external_data=False).graph
    names = {name for node in graph.node for name in node.output}
    made = {n for node in graph.node if node.op_type in COSTLY for n in node.output}
    return {name for name in made & names if "_again" in name}


def test_a_budget_that_is_met_changes_nothing(tmp_path: Path) -> None:
    model = export(DeepMLP(), torch.randn(4, 256), "torchscript")
    plain, lean = (
        generate_artifacts(
            model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
            artifact_directory=tmp_path / kind, memory_budget=budget,
        )
        for kind, budget in (("plain", None), ("lean", 1.0))
    )  # fmt: skip
    assert plain.memory is None
    assert lean.memory is not None and lean.memory.copies == 0
    assert lean.memory.assumed == ("batch",)
    for file in ("training_model.onnx", "step_model.onnx"):
        graphs = [onnx.load(tmp_path / kind / file).graph for kind in ("plain", "lean")]
        assert graphs[0] == graphs[1]


def test_gradients_that_take_less_are_written_where_nothing_else_helps(tmp_path: Path) -> None:
    """With a fixed batch, convolutions have faster weight gradients with larger values between."""
    losses = {}
    for budget in (None, 0.6, 0.5):
        folder = tmp_path / str(budget)
        memory = made(folder, "Wide", "torchscript", True, budget).memory
        assert memory is None or memory.peak <= memory.budget
        losses[budget] = taken(folder, "Wide", "fused", as_written)[0]
    assert losses[None] == losses[0.6] != losses[0.5]
    np.testing.assert_allclose(losses[None], losses[0.5], rtol=1e-4)


def test_every_process_finds_the_same_plan(tmp_path: Path) -> None:
    """Sets of names have another order in each process."""
    torch.manual_seed(0)
    onnx.save(export(Wide(), torch.randn(4, 3, 32, 32), "torchscript"), tmp_path / "net.onnx")
    program = "import onnxtrain; onnxtrain.prepare('net.onnx', 'made', memory_budget=%r, sizes=%r)"
    found = []
    for seed in "123":
        subprocess.run(
            [sys.executable, "-c", program % ("56%", {"batch": 16})], cwd=tmp_path, check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )  # fmt: skip
        made = onnx.load(tmp_path / "made" / "step_model.onnx").graph
        found.append([(node.op_type, *node.input, *node.output) for node in made.node])
    assert found[0] == found[1] == found[2]


def test_a_budget_out_of_reach_says_what_can_be_reached(tmp_path: Path) -> None:
    with pytest.raises(
        MemoryBudgetError, match=r"Give memory_budget=\d+ or more.*micro_batch"
    ) as e:
        made(tmp_path, "DeepMLP", "torchscript", False, 0.01)
    least = int(str(e.value).split("Give memory_budget=")[1].split()[0])
    made(tmp_path, "DeepMLP", "torchscript", False, least)
    assert (tmp_path / "step_model.onnx").exists()


@pytest.mark.parametrize(
    ("budget", "sizes", "error", "words"),
    [
        (0, None, ArgumentError, "above zero"),
        (-0.5, None, ArgumentError, "above zero"),
        (float("nan"), None, ArgumentError, "above zero"),
        ("half", None, ArgumentError, "300MB"),
        (True, None, ArgumentTypeError, "fraction"),
        (10_000_000, None, ArgumentError, "sizes="),
        (0.5, {"rows": 3}, UnknownNameError, "rows"),
    ],
)
def test_what_is_no_budget(budget, sizes, error, words: str, tmp_path: Path) -> None:
    model = export(DeepMLP(), torch.randn(4, 256), "torchscript")
    with pytest.raises(error, match=words):
        generate_artifacts(
            model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
            artifact_directory=tmp_path, memory_budget=budget, sizes=sizes,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is not told here"
)
def test_the_budget_is_kept_in_a_real_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = export(ResNet18(32).train(), torch.randn(2, 3, 32, 32), "torchscript")
    taken_by = {}
    for kind, budget in (("plain", None), ("lean", 0.6)):
        memory = generate_artifacts(
            model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
            artifact_directory=tmp_path / kind, memory_budget=budget,
            sizes=None if budget is None else {"batch": 32},
        ).memory  # fmt: skip
        taken_by[kind] = measured(tmp_path / kind, 32)
    assert memory is not None
    assert taken_by["lean"] < 0.7 * taken_by["plain"]
    assert taken_by["lean"] < 1.15 * memory.budget
    assert abs(taken_by["plain"] - memory.without) < 0.25 * memory.without


def measured(folder: Path, batch: int) -> int:
    program = Path(__file__).with_name("measure_step.py")
    result = subprocess.run(
        [sys.executable, str(program), str(folder), str(batch), "3,32,32"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(result.stdout)


def test_the_order_of_execution_is_onnxruntimes(tmp_path: Path) -> None:
    made(tmp_path, "Mixed", "torchscript", False, None, native=False)
    options = as_written()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = ort.InferenceSession(tmp_path / "step_model.onnx", options)
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(uint32)": np.uint32}
    feeds = {
        i.name: np.ones([d if isinstance(d, int) else 2 for d in i.shape], types[i.type])
        for i in session.get_inputs()
    }
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    graph = onnx.load(tmp_path / "step_model.onnx").graph
    place = {node.name: i for i, node in enumerate(graph.node)}
    ran = [e["name"].removesuffix("_kernel_time") for e in events if e.get("cat") == "Node"]
    ran = [place[name] for name in ran if name in place]
    expected = execution_order(Flow.of(ir.from_proto(graph)).steps)
    assert [i for i in expected if i in set(ran)] == list(dict.fromkeys(ran))


def test_gaps_between_values_count() -> None:
    """Small values in the place of a large one that is gone leave no room for another one."""
    graph = onnx.parser.parse_graph(
        "g (float[4] x) => (float[4] y) {"
        "a = Neg(x) b = Neg(a) c = Abs(a) d = Neg(b) e = Add(c, d) y = Neg(e) }"
    )
    flow = Flow.of(ir.from_proto(graph))
    order = execution_order(flow.steps)
    sizes = {"a": 20 << 20, "b": 1 << 19, "c": 12 << 20, "d": 20 << 20, "e": 4096}
    alive = max(bytes_alive(flow, order, sizes)[0])
    lean, default = (resident_bytes(flow, order, sizes, loss) for loss in (LEAN_LOSS, DEFAULT_LOSS))
    assert alive <= lean <= default

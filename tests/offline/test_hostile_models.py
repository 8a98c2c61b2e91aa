"""Models that ask for too much: refused by name, in little time and memory, or harmless.

ONNXTRAIN_HOSTILE=all runs every model through every function, which takes half an hour.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxtrain
from graphs import linear, model, value
from hostile_models import CASES, nested, scored, tower
from onnxtrain.cli import main
from onnxtrain.errors import ArgumentTypeError, ModelError
from onnxtrain.offline.graph.layers import DataFlow

pytestmark = pytest.mark.slow
ALL = os.environ.get("ONNXTRAIN_HOSTILE") == "all"
PROGRAM = Path(__file__).with_name("hostile_program.py")
SECONDS, BYTES = 5, 700 << 20
# Of each family some, so that a run takes seconds.
SOME = [name for i, name in enumerate(CASES) if i % 7 == 0 or "functions" in name or "utf8" in name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and limits of a process")
@pytest.mark.parametrize("call", ["gradient", "inspect", "prepare", "classes", "after"])
def test_no_model_takes_the_machine_down(call: str) -> None:
    every = len(SOME) // (40 if call == "gradient" else 12)
    check(call, list(CASES) if ALL else SOME[::every])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and limits of a process")
def test_no_operator_takes_the_machine_down() -> None:
    check("gradient", [str(seed) for seed in range(0, 2000, 1 if ALL else 67)])


def check(call: str, cases: Sequence[str]) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, PROGRAM, call, "-"], input="\n".join(cases), env=env, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases), done.stderr
    wrong = [
        each
        for each in found
        if not each["outcome"].startswith(("accepted", "refused"))
        or each["seconds"] > SECONDS
        or each["bytes"] > BYTES
    ]
    assert not wrong, "\n".join(map(str, wrong))
    assert any(each["outcome"].startswith("refused") for each in found)


# ---- limits --------------------------------------------------------------------------------------


def test_a_limit_is_named_and_can_be_raised() -> None:
    """Functions that make 512 nodes of a few."""
    with pytest.raises(ModelError, match=r"Limits\(inlined_nodes="):
        onnxtrain.gradient(tower(9, 2), "w", limits=onnxtrain.Limits(inlined_nodes=500))
    assert onnxtrain.gradient(tower(9, 2), "w")
    assert onnxtrain.inspect(tower(9, 2), limits=onnxtrain.Limits(inlined_nodes=5000)).weights


def test_elements() -> None:
    big = scored(
        [helper.make_node("Expand", ["one", "n"], ["z"])], "z", {"n": np.array([2**32, 1, 1])}
    )
    with pytest.raises(ModelError, match=r"'z'.*Expand.*4,294,967,296.*elements="):
        onnxtrain.gradient(big, "w")
    assert onnxtrain.gradient(big, "w", limits=onnxtrain.Limits(elements=2**33))


def test_the_size_of_a_file(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "m.onnx")
    for function in (onnxtrain.inspect, onnxtrain.prepare):
        with pytest.raises(ModelError, match="file_bytes"):
            function(tmp_path / "m.onnx", limits=onnxtrain.Limits(file_bytes=10))
    with (tmp_path / "sparse.onnx").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelError, match="file_bytes"):
        onnxtrain.inspect(tmp_path / "sparse.onnx")


def test_nodes_and_depth() -> None:
    with pytest.raises(ModelError, match="nodes="):
        onnxtrain.inspect(linear(), limits=onnxtrain.Limits(nodes=3))
    with pytest.raises(ModelError, match="32 subgraphs"):
        onnxtrain.inspect(nested(40))


def test_functions_that_nest_subgraphs() -> None:
    """Each function has a branch in which it calls the next one: deep only once inlined."""
    made = scored([helper.make_node("f0", ["x", "flag"], ["z"], domain="my")], "z", domains=["my"])
    made.graph.input.append(value("flag", [], 9))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    for level in range(100):
        nodes = [helper.make_node("Relu", ["a"], ["r"])]
        if level < 99:
            nodes = [helper.make_node(f"f{level + 1}", ["a", "c"], ["r"], domain="my")]
        other = helper.make_graph(
            [helper.make_node("Identity", ["a"], ["o"])], "o", [], [value("o", None)]
        )
        body = helper.make_graph(nodes, "t", [], [value("r", None)])
        chosen = helper.make_node("If", ["c"], ["b"], then_branch=body, else_branch=other)
        made.functions.append(
            helper.make_function("my", f"f{level}", ["a", "c"], ["b"], [chosen], imports)
        )
    with pytest.raises(ModelError, match="subgraphs in each other"):
        onnxtrain.gradient(made, "w")


@pytest.mark.parametrize("limits", [{"nodes": 10}, 5])
def test_what_are_no_limits(limits: object) -> None:
    with pytest.raises(ArgumentTypeError, match="limits"):
        onnxtrain.inspect(linear(), limits=limits)
    with pytest.raises(ArgumentTypeError, match="nodes"):
        onnxtrain.Limits(nodes=-1)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(linear(), tmp_path / "m.onnx")
    inspect = ["inspect", str(tmp_path / "m.onnx")]
    assert main([*inspect, "--limit", "nodes=3"]) == 2
    assert "Limits(nodes=" in capsys.readouterr().err
    assert main([*inspect, "--limit", "nodes=4", "--limit", "elements=100"]) == 0
    for wrong, words in (("nodes", "NAME=NUMBER"), ("nodes=-1", "NAME=NUMBER"), ("a=1", "'a'")):
        assert main([*inspect, "--limit", wrong]) == 2
        assert words in capsys.readouterr().err


# ---- time ----------------------------------------------------------------------------------------


def test_each_node_of_a_chain_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bias asks for the layer behind it; walking back from each would be quadratic."""
    length, seen = 2000, []
    look = DataFlow._as_layer
    monkeypatch.setattr(DataFlow, "_as_layer", lambda *given: seen.append(given[1]) or look(*given))
    nodes = [
        helper.make_node("Mul" if i % 2 else "Add", [f"v{i}", f"b{i}"], [f"v{i + 1}"])
        for i in range(length)
    ]
    biases = {f"b{i}": np.ones(3, np.float32) for i in range(length)}
    given = model(nodes, [value("v0", ["n", 3])], [value(f"v{length}", ["n", 3])], biases)
    assert len(onnxtrain.inspect(given).weights) == length
    assert len(seen) <= 2 * length


def test_a_graph_that_takes_minutes_to_load_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxtrain.offline.writer.verify._MOST_NODES", 10)
    made = onnxtrain.prepare(linear(), tmp_path, loss=None, of="loss")
    assert any("were not loaded, as the largest has" in note for note in made.notes)

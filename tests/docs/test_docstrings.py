"""The examples in docstrings, which the reference shows, run."""

import contextlib
import doctest
import importlib
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import onnxtrain
from onnxtrain import onnxblock
from onnxtrain.cli.demo.network import network

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "onnxtrain"


def modules() -> list[str]:
    """Return the modules that have examples."""
    return [
        ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)
        for path in sorted(SOURCES.rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]


def energy() -> onnx.ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["positions", "positions"], ["squares"]),
            helper.make_node("ReduceSum", ["squares"], ["energy"], keepdims=0),
        ],
        "energy",
        [helper.make_tensor_value_info("positions", TensorProto.FLOAT, [4, 3])],
        [helper.make_tensor_value_info("energy", TensorProto.FLOAT, [])],
    )
    opset = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


def surroundings(module: str) -> contextlib.AbstractContextManager[object]:
    """Return the context of an example: losses are called while a model is built."""
    if module.startswith(("onnxtrain.offline.blocks", "onnxtrain.offline.losses")):
        model = network()
        model.graph.output[0].name = "output"
        model.graph.node[-1].output[0] = "output"
        return onnxblock.base(model)
    return contextlib.nullcontext()


@pytest.mark.parametrize("module", modules())
def test_the_examples_of_a_module_run(module, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests" / "golden" / "mlp", "artifacts")
    onnx.save(network(), "mobilenet.onnx")
    onnx.save(energy(), "energy.onnx")
    x = np.zeros((4, 8), np.float32)
    names = {
        "onnxtrain": onnxtrain, "onnxruntime": onnxruntime, "onnxblock": onnxblock,
        "blocks": onnxblock.blocks, "positions": np.ones((4, 3), np.float32),
        "batches": [(x, np.arange(4) % 3)] * 2,
        "images": np.arange(256, dtype=np.float32).reshape(4, 1, 8, 8),
    }  # fmt: skip
    found = importlib.import_module(module)
    tests = [t for t in doctest.DocTestFinder().find(found) if t.examples]
    assert tests
    for test in tests:
        source = "\n".join(example.source for example in test.examples)
        with surroundings(module):
            exec(compile(source, test.name, "exec"), {**vars(found), **names})


def test_no_example_is_hidden_from_these_tests() -> None:
    """Every example begins with the prompt that doctest looks for."""
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "```" not in text, path
        assert "    Example:\n" not in text, path  # the site takes it for prose
        for example in re.findall(r"^ +Examples:\n(.*)$", text, re.MULTILINE):
            assert example.strip().startswith(">>> "), path

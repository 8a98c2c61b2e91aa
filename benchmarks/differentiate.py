"""How long differentiation takes, and how much memory: it is to be linear in the graph.

Run as `python benchmarks/differentiate.py`. Each case runs in a process of its own, so that the
peak memory is its own; a Markdown table is printed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxtrain

CASES = ("chain 1,000", "chain 5,000", "chain 20,000", "wide 20,000", "BERT, 4 layers")


def chain(length: int) -> onnx.ModelProto:
    """A chain of additions and activations, with a parameter at every other node."""
    nodes, tensors, last = [], [], "x"
    for i in range(length // 2):
        tensors.append(numpy_helper.from_array(np.zeros(8, np.float32), f"b{i}"))
        nodes.append(helper.make_node("Add", [last, f"b{i}"], [f"a{i}"], f"add{i}"))
        nodes.append(helper.make_node("Tanh", [f"a{i}"], [f"t{i}"], f"tanh{i}"))
        last = f"t{i}"
    return _model(nodes, tensors, last)


def wide(count: int) -> onnx.ModelProto:
    """One value that many nodes use, all added up."""
    nodes = [helper.make_node("Exp", ["x"], [f"e{i}"], f"exp{i}") for i in range(count - 1)]
    nodes.append(helper.make_node("Sum", [n.output[0] for n in nodes], ["y"], "sum"))
    return _model(nodes, [], "y")


def _model(nodes, tensors, last: str) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", 1, ["batch", 8])
    y = helper.make_tensor_value_info(last, 1, ["batch", 8])
    graph = helper.make_graph(nodes, "graph", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def bert() -> onnx.ModelProto:
    """A BERT-like encoder of four layers, width 128, written out in about 300 nodes."""
    rng = np.random.default_rng(0)
    nodes, tensors = [], []

    def weight(name: str, *shape: int) -> str:
        tensors.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
        return name

    def vector(name: str, numbers) -> str:
        tensors.append(numpy_helper.from_array(np.array(numbers), name))
        return name

    def node(op: str, *inputs: str, **attributes) -> str:
        nodes.append(
            helper.make_node(op, inputs, [f"v{len(nodes)}"], f"n{len(nodes)}", **attributes)
        )
        return nodes[-1].output[0]

    def linear(x: str, name: str, rows: int, columns: int) -> str:
        return node("Add", node("MatMul", x, weight(f"{name}.weight", rows, columns)),
                    weight(f"{name}.bias", columns))  # fmt: skip

    def norm(x: str, name: str) -> str:
        mean = node("ReduceMean", x, "last")
        centred = node("Sub", x, mean)
        variance = node("ReduceMean", node("Mul", centred, centred), "last")
        scaled = node("Div", centred, node("Sqrt", node("Add", variance, "epsilon")))
        return node("Add", node("Mul", scaled, weight(f"{name}.weight", 128)),
                    weight(f"{name}.bias", 128))  # fmt: skip

    def heads(x: str) -> str:
        return node("Transpose", node("Reshape", x, "split"), perm=[0, 2, 1, 3])

    def gelu(x: str) -> str:
        erf = node("Erf", node("Div", x, "root2"))
        return node("Mul", node("Mul", x, node("Add", erf, "one")), "half")

    vector("last", [-1]), vector("split", [0, 0, 4, 32]), vector("join", [0, 0, 128])
    for name, number in (("epsilon", 1e-5), ("root2", 2**0.5), ("one", 1), ("half", 0.5)):
        vector(name, np.float32(number))
    vector("scale", np.float32(32**0.5))
    x = norm(node("Gather", weight("words", 30522, 128), "tokens"), "norm")
    for i in range(4):
        q, k, v = (heads(linear(x, f"{i}.{part}", 128, 128)) for part in "qkv")
        scores = node("Div", node("MatMul", q, node("Transpose", k, perm=[0, 1, 3, 2])), "scale")
        mixed = node("MatMul", node("Softmax", scores, axis=-1), v)
        joined = node("Reshape", node("Transpose", mixed, perm=[0, 2, 1, 3]), "join")
        x = norm(node("Add", x, linear(joined, f"{i}.out", 128, 128)), f"{i}.norm1")
        inner = linear(gelu(linear(x, f"{i}.up", 128, 512)), f"{i}.down", 512, 128)
        x = norm(node("Add", x, inner), f"{i}.norm2")
    tokens = helper.make_tensor_value_info("tokens", 7, ["batch", "time"])
    y = helper.make_tensor_value_info(x, 1, ["batch", "time", 128])
    graph = helper.make_graph(nodes, "bert", [tokens], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def measure(case: str) -> None:
    kind, _, size = case.partition(" ")
    count = int(size.replace(",", "")) if kind in ("chain", "wide") else 0
    model = {"chain": chain, "wide": wide}[kind](count) if count else bert()
    wrt = [t.name for t in model.graph.initializer if t.data_type == 1 and len(t.dims)] or ["x"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    onnxtrain.gradient(chain(2), "x")  # imports and first use are not what is measured
    start = time.perf_counter()
    extended = onnxtrain.gradient(model, wrt)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    nodes = (len(model.graph.node), len(extended.graph.node))
    print(f"| {case} | {nodes[0]:,} | {nodes[1]:,} | {len(wrt):,} | {seconds:.2f} | "
          f"{before:.0f} | {peak:.0f} |")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        print("| graph | nodes | with gradient | parameters | seconds | MB before | MB at peak |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for name in CASES:
            subprocess.run([sys.executable, __file__, name], check=True)

"""Lets onnxsim compile its step graph; runs in its own environment.

The arguments are the folder of a workload and what trains. The model is first brought into a form
that onnxsim can differentiate, as a user of it would write it. What it fails with is written into
the folder, and shown in the table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxsim
from onnx import helper, numpy_helper


def main() -> None:
    folder, trains = Path(sys.argv[1]), sys.argv[2]
    target = folder / "onnxsim"
    target.mkdir(exist_ok=True)
    try:
        _compile(folder / "with-loss.onnx", target, trains)
    except Exception as error:  # its message is the result
        (target / "failure.txt").write_text(f"{type(error).__name__}: {error}")


def _compile(source: Path, target: Path, trains: str) -> None:
    # Its optimizations make operators (Attention, LogSoftmax) that it cannot differentiate.
    exported = onnx.load(source)
    model, _ = onnxsim.simplify(exported, perform_optimization=False)
    _adapt(model)
    prefix = "net.head." if trains == "head" else ""
    params = [
        t.name
        for t in exported.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT
        and t.dims
        and t.name.startswith(prefix)
        and "running_" not in t.name
    ]
    loop = onnxsim.compile_training_loop(model, "loss", params)
    step = loop.step_graph
    onnx.save(model, target / "model.onnx")
    onnx.save(step.model, target / "step.onnx")
    np.savez(target / "state.npz", **loop.initial_state)
    np.savez(target / "params.npz", **{name: loop.initial_state[name] for name in params})
    names = {"params": params, "state": step.state, "loss": step.loss_name}
    (target / "names.json").write_text(json.dumps(names))


def _adapt(model: onnx.ModelProto) -> None:
    """Put what has no gradient rule there into other words, which have."""
    graph, nodes = model.graph, []
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    dims = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*inferred.input, *inferred.value_info, *inferred.output)
    }

    def shape(name: str, value: list[int]) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
        return name

    for node in graph.node:
        out = node.output[0]
        if node.op_type == "Constant":
            node.attribute[0].t.name = out
            graph.initializer.append(node.attribute[0].t)
        elif node.op_type == "Flatten":
            sizes = shape(f"{out}_sizes", dims[out])
            nodes.append(helper.make_node("Reshape", [node.input[0], sizes], [out]))
        elif node.op_type == "Gather" and len(dims.get(node.input[1], ())) > 1:
            table, index = node.input
            count, row = int(np.prod(dims[index])), dims[out][len(dims[index]) :]
            nodes += [
                helper.make_node("Reshape", [index, shape(f"{out}_n", [count])], [f"{out}_i"]),
                helper.make_node("Gather", [table, f"{out}_i"], [f"{out}_rows"], axis=0),
                helper.make_node(
                    "Reshape",
                    [f"{out}_rows", shape(f"{out}_all", [*dims[index], *row])],
                    [out],
                ),
            ]
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


if __name__ == "__main__":
    main()

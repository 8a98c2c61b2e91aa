"""Running an optimizer graph on stock onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.onnxblock.optim import Optimizer, write_optimizer

Array = np.ndarray[Any, Any]


def optimizer_graph(
    optimizer: Optimizer, parameters: Mapping[str, Array], chunked: bool = False
) -> ir.Graph:
    graph = ir.Graph([], [], nodes=[], name="optimizer", opset_imports={"": 18})
    described = [
        (name, ir.DataType.from_numpy(a.dtype), list(a.shape)) for name, a in parameters.items()
    ]
    write_optimizer(Ops(graph, 18), optimizer, described, "updated_flag", chunked=chunked)
    return graph


def optimizer_model(
    optimizer: Optimizer, parameters: Mapping[str, Array], chunked: bool = False
) -> onnx.ModelProto:
    made: onnx.ModelProto = ir.to_proto(
        ir.Model(optimizer_graph(optimizer, parameters, chunked), ir_version=8)
    )
    return made


class Training:
    """Parameters and states in memory, and the graph that updates them.

    In place, outputs are bound to the memory of the inputs that they replace.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Array],
        *,
        in_place: bool = False,
        chunked: bool = False,
        level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
        threads: int = 1,
    ) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = ort.InferenceSession(
            optimizer_model(optimizer, parameters, chunked).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        self.parameters = list(parameters)
        self.in_place = in_place
        self.steps = 0
        self.arrays = {name: a.copy() for name, a in parameters.items()}
        for name, a in parameters.items():
            for state in optimizer.states(ir.DataType.from_numpy(a.dtype)):
                fill = np.full(a.shape, state.initial, state.dtype.numpy())
                self.arrays[f"{name}.{state.name}"] = fill

    def step(self, gradients: Mapping[str, Array], learning_rate: float) -> None:
        self.steps += 1
        feeds = {
            "learning_rate": np.array([learning_rate], np.float32),
            "step": np.array([self.steps], np.int64),
            **self.arrays,
            **{f"{name}_grad": g for name, g in gradients.items()},
        }
        if self.in_place:
            self._run_in_place(feeds)
            return
        outputs = self.session.get_outputs()
        flag, *updated = self.session.run(None, feeds)
        assert flag.tolist() == [True]
        for output, array in zip(outputs[1:], updated, strict=True):
            name = output.name.removesuffix(".updated")
            self.arrays[name] = array.reshape(self.arrays[name].shape)

    def _run_in_place(self, feeds: Mapping[str, Array]) -> None:
        binding = self.session.io_binding()
        values = {n: _in_memory(a) for n, a in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        flag, *outputs = self.session.get_outputs()
        binding.bind_output(flag.name)
        for output in outputs:
            name = output.name.removesuffix(".updated")
            array = feeds[name]
            kind = ir.DataType.from_numpy(array.dtype).value
            binding.bind_output(output.name, "cpu", 0, kind, output.shape, values[name].data_ptr())
        self.session.run_with_iobinding(binding)


def _in_memory(array: Array) -> ort.OrtValue:
    """Share the memory of an array, also of a type that is not numpy's own."""
    kind = ir.DataType.from_numpy(array.dtype)
    if kind != ir.DataType.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), kind.value)

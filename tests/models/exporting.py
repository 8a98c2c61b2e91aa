"""Exports a torch module with either exporter, and lets its parameters be found again."""

from __future__ import annotations

import io
import logging
import warnings

import numpy as np
import onnx
import torch
from onnx import numpy_helper

EXPORTERS = ("torchscript", "dynamo", "dynamo-optimized")


def export(net: torch.nn.Module, x: torch.Tensor, exporter: str) -> onnx.ModelProto:
    """Export with a symbolic batch, in the mode (training or not) that the module is in."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if exporter.startswith("torchscript"):
                return _torchscript(net, x, folded=exporter == "torchscript-folded")
            return _dynamo(net, x, exporter)
    finally:
        logging.disable(logging.NOTSET)


def _torchscript(net: torch.nn.Module, x: torch.Tensor, folded: bool) -> onnx.ModelProto:
    file = io.BytesIO()
    mode = torch.onnx.TrainingMode
    torch.onnx.export(
        net, (x,), file, dynamo=False, input_names=["x"], output_names=["y"], opset_version=17,
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}, do_constant_folding=folded,
        training=mode.TRAINING if net.training else mode.EVAL,
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def _dynamo(net: torch.nn.Module, x: torch.Tensor, exporter: str) -> onnx.ModelProto:
    program = torch.onnx.export(
        net, (x,), dynamo=True, input_names=["x"], output_names=["y"], verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch")},), optimize=exporter == "dynamo-optimized",
    )  # fmt: skip
    assert program is not None
    return program.model_proto


def parameters_in(model: onnx.ModelProto, net: torch.nn.Module) -> dict[str, tuple[str, bool]]:
    """Map each parameter that is still in the model to its initializer, and say if transposed.

    The torchscript exporter shares equal initializers through Identity; the name of a parameter
    may then be that of the Identity's output. The optimising exporter folds some parameters away.
    """
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    aliases = {
        n.output[0]: stored[n.input[0]]
        for n in model.graph.node
        if n.op_type == "Identity" and n.input[0] in stored
    }
    stored.update(aliases)
    found = {}
    for name, parameter in net.named_parameters():
        array = parameter.detach().numpy()
        if name in stored and np.array_equal(stored[name], array):
            found[name] = (name, False)
            continue
        for other, candidate in stored.items():
            if array.ndim == 2 and np.array_equal(candidate, array.T):
                found[name] = (other, True)
                break
    return found

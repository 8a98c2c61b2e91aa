"""A model that is complete, opened in onnxruntime: for numbers that preparing needs."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.offline.writer.functions import write_functions
from onnxtrain.offline.writer.opset_stamp import stamp


def open_model(model: ir.Model) -> ort.InferenceSession:
    """Return a session of a model, which is changed to what would be written; nothing is logged."""
    write_functions(model, native=False)
    stamp(model)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

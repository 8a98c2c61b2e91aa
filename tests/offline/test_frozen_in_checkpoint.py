"""A graph may take its frozen tensors from the checkpoint file, by offset and length."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import write_checkpoint


@pytest.mark.parametrize("threshold", [2**40, 0], ids=["inline", "external"])
def test_onnxruntime_reads_initializers_out_of_the_checkpoint(tmp_path, threshold) -> None:
    tensors = {
        "scale": np.arange(40, dtype=np.float32),
        "shift": np.array([5, 8], np.int64),
        "table": np.arange(40, dtype=np.float64) ** 2,
    }
    written = write_checkpoint(
        tmp_path / "checkpoint",
        CheckpointContent(frozen=dict(tensors)),
        external_data_threshold=threshold,
    )
    initializers = []
    for name, value in tensors.items():
        place = written.locations[name]
        tensor = TensorProto(
            name=name,
            dims=value.shape,
            data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        entries = {"location": place.path.name, "offset": place.offset, "length": place.length}
        for key, entry in entries.items():
            tensor.external_data.add(key=key, value=str(entry))
        initializers.append(tensor)
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "scale"], ["y"]),
            helper.make_node("Neg", ["table"], ["z"]),
            helper.make_node("Neg", ["shift"], ["i"]),
        ],
        "frozen",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [40])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [40]),
            helper.make_tensor_value_info("z", TensorProto.DOUBLE, [40]),
            helper.make_tensor_value_info("i", TensorProto.INT64, [2]),
        ],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    onnx.checker.check_model(tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    y, z, i = session.run(None, {"x": np.full(40, 2, np.float32)})
    np.testing.assert_array_equal(y, 2 * tensors["scale"])
    np.testing.assert_array_equal(z, -tensors["table"])
    np.testing.assert_array_equal(i, [-5, -8])

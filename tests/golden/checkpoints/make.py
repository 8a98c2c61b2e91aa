"""Write the checkpoints of this folder with ONNX Runtime's own training package.

Run it with the interpreter of an environment that has onnxruntime-training-cpu 1.19.2 (the one that
`make test` sets up beside its own), in this folder. See README.md.
"""

import json
import tempfile
from pathlib import Path

import flatbuffers
import numpy as np
import onnx
import onnxruntime.training.api as api
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import Checkpoint as checkpoint_fbs
from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import ModuleState as module_fbs
from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import Tensor as tensor_fbs
from onnxruntime.training import artifacts

HERE = Path(__file__).resolve().parent
WEIGHTS = {
    "fc.weight": np.array([[0.5, -1.0], [1.5, 2.0], [-0.25, 0.125]], np.float32),
    "fc.bias": np.array([0.5, -1.0], np.float32),
    "scale": np.array([2.0, 3.0], np.float32),
    "shape": np.array([-1, 2], np.int64),
}
BIG = np.arange(40, dtype=np.float32).reshape(5, 8)


def model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "fc.weight"], ["product"]),
        helper.make_node("Add", ["product", "fc.bias"], ["sum"]),
        helper.make_node("Mul", ["sum", "scale"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "shape"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "golden",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(value, name) for name, value in WEIGHTS.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def build(path: Path, version: int, frozen: dict, external: bool) -> None:
    """Write a checkpoint by hand, with the classes that come with onnxruntime."""
    builder = flatbuffers.Builder(1024)
    data = b""

    def tensor(name: str, value: np.ndarray) -> int:
        nonlocal data
        label = builder.CreateString(name)
        tensor_fbs.TensorStartDimsVector(builder, value.ndim)
        for dim in reversed(value.shape):
            builder.PrependInt64(dim)
        dims = builder.EndVector()
        raw = None if external else builder.CreateByteVector(value.tobytes())
        tensor_fbs.TensorStart(builder)
        tensor_fbs.TensorAddName(builder, label)
        tensor_fbs.TensorAddDims(builder, dims)
        code = helper.np_dtype_to_tensor_dtype(value.dtype)
        tensor_fbs.TensorAddDataType(builder, code)
        if external:
            tensor_fbs.TensorAddExternalDataOffset(builder, len(data))
            data += value.tobytes()
        else:
            tensor_fbs.TensorAddRawData(builder, raw)
        return tensor_fbs.TensorEnd(builder)

    def vector(start, items: dict) -> int:
        tables = [tensor(name, value) for name, value in items.items()]
        start(builder, len(tables))
        for table in reversed(tables):
            builder.PrependUOffsetTRelative(table)
        return builder.EndVector()

    trained = {name: WEIGHTS[name] for name in ("fc.weight", "fc.bias")}
    trainable = vector(module_fbs.ModuleStateStartRequiresGradParamsVector, trained)
    constant = vector(module_fbs.ModuleStateStartFrozenParamsVector, frozen)
    module_fbs.ModuleStateStart(builder)
    module_fbs.ModuleStateAddRequiresGradParams(builder, trainable)
    module_fbs.ModuleStateAddFrozenParams(builder, constant)
    if external:
        module_fbs.ModuleStateAddHasExternalData(builder, True)
    state = module_fbs.ModuleStateEnd(builder)
    checkpoint_fbs.CheckpointStart(builder)
    checkpoint_fbs.CheckpointAddVersion(builder, version)
    checkpoint_fbs.CheckpointAddModuleState(builder, state)
    builder.Finish(checkpoint_fbs.CheckpointEnd(builder), file_identifier=b"ODTC")
    path.write_bytes(builder.Output())
    if external:
        path.with_name(path.name + ".data").write_bytes(data)


def train(folder: Path) -> None:
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    module.train()
    for _ in range(2):
        module(np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32))
        optimizer.step()
        module.lazy_reset_grad()
    state.properties["epoch"] = 3
    state.properties["zero"] = 0
    state.properties["negative"] = -5
    state.properties["best loss"] = 0.1
    state.properties["name"] = "trié"
    state.properties["empty"] = ""
    api.CheckpointState.save_checkpoint(state, HERE / "saved", include_optimizer_state=True)
    trained = {name: state.parameters[name].data.tolist() for name in ("fc.weight", "fc.bias")}
    (HERE / "saved.json").write_text(json.dumps(trained, indent=1) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            model(),
            requires_grad=["fc.weight", "fc.bias"],
            frozen_params=["scale", "shape"],
            loss=artifacts.LossType.MSELoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
            nominal_checkpoint=True,
        )
        (HERE / "generated").write_bytes((folder / "checkpoint").read_bytes())
        (HERE / "nominal").write_bytes((folder / "nominal_checkpoint").read_bytes())
        train(folder)
        # ONNX Runtime writes external data when a checkpoint is large, or was read from such files.
        frozen = {"scale": WEIGHTS["scale"], "shape": WEIGHTS["shape"], "table": BIG}
        build(folder / "external", 2, frozen, external=True)
        state = api.CheckpointState.load_checkpoint(folder / "external")
        api.CheckpointState.save_checkpoint(state, HERE / "external")
    build(HERE / "version1", 1, {"scale": WEIGHTS["scale"]}, external=False)


if __name__ == "__main__":
    main()

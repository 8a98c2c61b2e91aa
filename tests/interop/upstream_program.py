"""Runs in the environment of onnxruntime-training-cpu 1.19.2; onnxtrain is not there.

    upstream_program.py <command> <argument>...

Answers on the last line of its output, as JSON.
"""

import contextlib
import json
import os
import sys

import numpy as np


def generate(folder: str, optimizer: str = "AdamW") -> dict:
    """Write a small model and its artifacts; the weights."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.training import artifacts

    os.chdir(folder)
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((6, 8)).astype(np.float32),
        "b1": rng.standard_normal(8).astype(np.float32),
        "w2": rng.standard_normal((8, 3)).astype(np.float32),
        "scale": np.array([2.0, 3.0, 0.5], np.float32),
        "shape": np.array([-1, 3], np.int64),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["m"]),
        helper.make_node("Mul", ["m", "scale"], ["s"]),
        helper.make_node("Reshape", ["s", "shape"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, "model.onnx")
    artifacts.generate_artifacts(
        model,
        requires_grad=["w1", "b1", "w2"],
        frozen_params=["scale"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType[optimizer],
        artifact_directory=folder,
        nominal_checkpoint=True,
    )
    return {name: value.tolist() for name, value in weights.items()}


def batches(count: int) -> list:
    rng = np.random.default_rng(1)
    return [
        (
            rng.standard_normal((4, 6)).astype(np.float32),
            rng.standard_normal((4, 3)).astype(np.float32),
        )
        for _ in range(count)
    ]


def train(folder: str, checkpoint: str, steps: str, saved: str) -> dict:
    """Train from a checkpoint and save; the losses, the trained parameters and the properties."""
    import onnxruntime.training.api as api

    os.chdir(folder)
    state = api.CheckpointState.load_checkpoint(checkpoint)
    module = api.Module("training_model.onnx", state, "eval_model.onnx")
    optimizer = api.Optimizer("optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    module.train()
    losses = []
    for x, target in batches(int(steps)):
        losses.append(float(module(x, target)))
        optimizer.step()
        module.lazy_reset_grad()
    state.properties["steps"] = int(steps)
    state.properties["last loss"] = losses[-1]
    state.properties["note"] = "trié"
    api.CheckpointState.save_checkpoint(state, saved, include_optimizer_state=True)
    trained = {name: state.parameters[name].data.tolist() for name in ("w1", "b1", "w2")}
    return {"losses": losses, "trained": trained}


def describe(checkpoint: str, *properties: str) -> dict:
    """Load a checkpoint; its parameters and the named properties."""
    import onnxruntime.training.api as api

    state = api.CheckpointState.load_checkpoint(checkpoint)
    parameters = {}
    for name, parameter in state.parameters:
        value = None
        # Only parameters of type float can be looked at.
        with contextlib.suppress(Exception):
            value = np.asarray(parameter.data).tolist()
        parameters[name] = [bool(parameter.requires_grad), value]
    return {
        "parameters": parameters,
        "properties": {name: state.properties[name] for name in properties},
    }


def resave(checkpoint: str, saved: str) -> dict:
    """Load a checkpoint and save it again."""
    import onnxruntime.training.api as api

    state = api.CheckpointState.load_checkpoint(checkpoint)
    api.CheckpointState.save_checkpoint(state, saved)
    return {}


def refuse(checkpoint: str) -> dict:
    """The error that loading gives."""
    import onnxruntime.training.api as api

    try:
        api.CheckpointState.load_checkpoint(checkpoint)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": None}


def train_nominal(folder: str, nominal: str, full: str) -> dict:
    """Load a nominal checkpoint, fill it with the parameters of a full one, and train a step."""
    import onnxruntime.training.api as api

    os.chdir(folder)
    module = api.Module("training_model.onnx", api.CheckpointState.load_checkpoint(nominal))
    other = api.Module("training_model.onnx", api.CheckpointState.load_checkpoint(full))
    buffer = other.get_contiguous_parameters(trainable_only=False)
    module.copy_buffer_to_parameters(buffer, trainable_only=False)
    module.train()
    return {"loss": float(module(*batches(1)[0])), "full": float(other(*batches(1)[0]))}


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    answer = globals()[command](*arguments)
    print("\n" + json.dumps(answer))
    # ONNX Runtime's training package may crash when the interpreter ends.
    sys.stdout.flush()
    os._exit(0)

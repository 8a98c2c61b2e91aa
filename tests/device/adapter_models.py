"""A small network with low-rank factors: to train, and with slots for inference."""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

LAYERS = {"fc1": (8, 6), "fc2": (6, 3)}  # inputs and outputs
BASE = "00112233445566778899aabbccddeeff"
FACTORS = [f"{layer}.lora_{f}.weight" for layer in LAYERS for f in "AB"]


def weights(seed=0):
    """The float weights of the base."""
    rng = np.random.default_rng(seed)
    made = {}
    for layer, (rows, columns) in LAYERS.items():
        made[f"{layer}.weight"] = rng.normal(size=(rows, columns)).astype("f4")
        made[f"{layer}.bias"] = rng.normal(size=columns).astype("f4")
    return made


def factors(rank, seed=1, dtype="f4"):
    """Arrays for all slots."""
    rng = np.random.default_rng(seed)
    made = {}
    for layer, (rows, columns) in LAYERS.items():
        made[f"{layer}.lora_A.weight"] = rng.normal(size=(rows, rank)).astype(dtype)
        made[f"{layer}.lora_B.weight"] = rng.normal(size=(rank, columns)).astype(dtype)
    return made


def lora_model(rank, scale=1.0, slots=False):
    """Two layers with factors: initializers of a rank, or slots of rank 0 that are inputs."""
    nodes, value, inputs = [], "x", []
    tensors = weights() | (factors(0) if slots else factors(rank))
    for layer in LAYERS:
        a, b, y = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight", f"{layer}_y"
        nodes += [
            helper.make_node("MatMul", [value, f"{layer}.weight"], [f"{layer}_w"], f"{layer}/W"),
            helper.make_node("Add", [f"{layer}_w", f"{layer}.bias"], [f"{layer}_b"]),
            helper.make_node("MatMul", [value, a], [f"{layer}_a"]),
        ]
        low = f"{layer}_a"
        if scale != 1.0:
            tensors[f"{layer}.scale"] = np.array(scale, "f4")
            nodes.append(helper.make_node("Mul", [low, f"{layer}.scale"], [f"{layer}_s"]))
            low = f"{layer}_s"
        nodes += [
            helper.make_node("MatMul", [low, b], [f"{layer}_ab"]),
            helper.make_node("Add", [f"{layer}_b", f"{layer}_ab"], [y]),
        ]
        value = y
        if slots:
            rows, columns = LAYERS[layer]
            inputs.append(helper.make_tensor_value_info(a, TensorProto.FLOAT, [rows, "rank"]))
            inputs.append(helper.make_tensor_value_info(b, TensorProto.FLOAT, ["rank", columns]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", 3])
    stored = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "lora", [x, *inputs], [y], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    if slots:
        helper.set_model_props(model, {"onnxtrain.base": json.dumps(BASE)})
    return model


def pairs(rank, scale):
    """What a folder of artifacts says about its factors."""
    return [
        {"layer": layer, "a": f"{layer}.lora_A.weight", "b": f"{layer}.lora_B.weight",
         "rank": rank, "scale": scale, "kind": "linear"}
        for layer in LAYERS
    ]  # fmt: skip


def lora_session(folder, rank=2, scale=4.0):
    """A session that trains the factors and nothing else."""
    onnxtrain.prepare(lora_model(rank, scale), folder, train=FACTORS, loss="mse", optimizer="adamw")
    session = onnxtrain.TrainingSession(folder)
    session.set_metadata(lora=pairs(rank, scale), base=BASE)
    return session


def expected(x, tensors):
    """What the network computes with the factors of an adapter."""
    base = weights()
    for layer in LAYERS:
        low = x @ tensors[f"{layer}.lora_A.weight"] @ tensors[f"{layer}.lora_B.weight"]
        x = x @ base[f"{layer}.weight"] + base[f"{layer}.bias"] + low
    return x

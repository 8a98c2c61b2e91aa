"""Tutorial 8: train a model for the integers that it is deployed as."""

# %% [markdown]
# # 8. Train for 8 bits and for 4
#
# A model whose weights and activations are 8-bit integers takes a quarter of the space, and integer
# kernels run it. But rounding costs accuracy, and some networks lose much. This tutorial rounds a
# model that was trained in floats, sees what that costs, and then trains it *for* integers.
# [Quantization-aware training](../quantize.md) explains how that works.
#
# ## A model of floats
#
# The network reads images of digits. Any `.onnx` will do. This one is small and, as those for phones,
# has a filter of 3 × 3 weights for each channel and then mixes the channels: of so few weights, each
# counts. It is trained here.

# %%
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

import onnxtrain


def network(width: int = 16) -> onnx.ModelProto:
    rng, nodes, weights, last = np.random.default_rng(0), [], [], "image"

    def layer(kind: str, name: str, *shape: int, **attributes) -> str:
        inputs = np.prod(shape[1:])
        for part, dims in (("weight", shape), ("bias", shape[:1])):
            values = rng.uniform(-1, 1, dims) * np.sqrt(3 / inputs)
            weights.append(numpy_helper.from_array(values.astype(np.float32), f"{name}.{part}"))
        given = [last, f"{name}.weight", f"{name}.bias"]
        nodes.append(helper.make_node(kind, given, [name], name=name, **attributes))
        nodes.append(helper.make_node("Relu", [name], [f"{name}.relu"]))
        return f"{name}.relu"

    last = layer("Conv", "first", width, 1, 3, 3, pads=[1] * 4)
    for i in range(3):
        last = layer("Conv", f"filter{i}", width, 1, 3, 3, pads=[1] * 4, group=width)
        last = layer("Conv", f"mix{i}", width, width, 1, 1)
    nodes.append(helper.make_node("MaxPool", [last], ["pool"], kernel_shape=[4, 4], strides=[4, 4]))
    nodes.append(helper.make_node("Flatten", ["pool"], ["flat"]))
    last = "flat"
    layer("Gemm", "scores", 10, 4 * width, transB=1)
    nodes.pop()  # scores may be negative
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "digits", [image], [scores], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


pixels, digits = load_digits(return_X_y=True)
images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
train, test = (images[:1200], digits[:1200]), (images[1200:], digits[1200:])

onnxtrain.prepare(network(), "floats", optimizer="adamw")
session = onnxtrain.TrainingSession("floats")
session.set_learning_rate(5e-3)
onnxtrain.fit(session, train, epochs=10, schedule="linear", seed=0, progress=False)
session.export_model_for_inferencing("float.onnx", ["scores"])

# %% [markdown]
# How good is a file? Stock onnxruntime says:

# %%
import onnxruntime


def report(path: str) -> None:
    run = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (scores,) = run.run(None, {"image": test[0]})
    right = np.mean(scores.argmax(axis=1) == test[1])
    print(f"{path}: {right:.1%} right")


report("float.onnx")

# %% [markdown]
# ## Round it
#
# `quantize=` puts the rounding into the graph; `calibration=` are a few batches of inputs, which
# show how large activations become. Exported without a step of training, the model is what
# post-training quantization makes. 8 bits lose little here; 4 bits have only 16 levels, and lose
# more:

# %%
few = [images[i : i + 64] for i in range(0, 256, 64)]
made = onnxtrain.prepare("float.onnx", "int8", quantize="int8", calibration=few)
print(*made.notes)
onnxtrain.prepare("float.onnx", "int4", quantize="int4-weights", calibration=few)
for name in ("int8", "int4"):
    session = onnxtrain.TrainingSession(name)
    session.export_model_for_inferencing(f"{name}-rounded.onnx", ["scores"])
    report(f"{name}-rounded.onnx")

# %% [markdown]
# ## Train for it
#
# The same folders train as any other: each step rounds weights and activations as the deployed
# model will, and the floats behind them learn to be right after rounding. The rate is a tenth of
# that of the first training, since little has to change.

# %%
for name in ("int8", "int4"):
    session = onnxtrain.TrainingSession(name)
    session.set_learning_rate(5e-4)
    onnxtrain.fit(session, train, epochs=6, schedule="linear", seed=0, progress=False)
    session.export_model_for_inferencing(f"{name}.onnx", ["scores"])
    report(f"{name}.onnx")

# %% [markdown]
# 8 bits gain a little. With 4 bits, calibration alone came as far as training does on these few
# images; deeper networks need both.
#
# ## What was exported
#
# The files hold integers alone. onnxruntime fuses each rounding with the product beside it when it
# loads the model, so that the 8-bit model computes with integers from the first layer to the last:

# %%
options = onnxruntime.SessionOptions()
options.optimized_model_filepath = "fused.onnx"
options.log_severity_level = 3
onnxruntime.InferenceSession("int8.onnx", options, providers=["CPUExecutionProvider"])
print([node.op_type for node in onnx.load("fused.onnx").graph.node])
types = onnx.TensorProto.DataType.Name
for tensor in onnx.load("int8.onnx").graph.initializer:
    if len(tensor.dims) > 1:
        print(tensor.name, list(tensor.dims), types(tensor.data_type))

"""A model with two outputs, of which loss_input_names chooses one, with a name for the target."""

import onnx
import torch
import torch_says
from onnxruntime.training import artifacts
from onnxruntime.training.artifacts import LossType, OptimType
from several_heads import Heads

torch.manual_seed(4)
model = Heads(3, 2)
torch.onnx.export(
    model,
    (torch.randn(2, 6),),
    "two.onnx",
    input_names=["x"],
    output_names=["first", "second"],
    dynamic_axes={"x": {0: "batch"}, "first": {0: "batch"}, "second": {0: "batch"}},
    dynamo=False,
)
artifacts.generate_artifacts(
    onnx.load("two.onnx"),
    requires_grad=["body.weight", "body.bias", "heads.1.weight", "heads.1.bias"],
    frozen_params=["heads.0.weight", "heads.0.bias"],
    loss=LossType.MSELoss,
    optimizer=OptimType.SGD,
    artifact_directory=".",
    additional_output_names=["first"],
    loss_input_names=["second", "wanted"],
)

x, wanted = torch.randn(5, 6), torch.randn(5, 2)
loss = torch.nn.functional.mse_loss(model(x)[1], wanted)
torch_says.save(model, loss, x=x, wanted=wanted)

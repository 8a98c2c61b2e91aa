"""The Android example: a plain export, the last layer trains, every other initializer is frozen."""

import onnx
import torch
import torch_says
from onnxruntime.training import artifacts

from zoo import MobileNetV2

torch.manual_seed(2)
model = MobileNetV2(slim=2, classes=1000)
model.classifier[1] = torch.nn.Linear(model.classifier[1].in_features, 4)
model.eval()
torch.onnx.export(
    model,
    (torch.randn(1, 3, 96, 96),),
    "mobilenetv2.onnx",
    input_names=["input"],
    output_names=["output"],
    dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
    dynamo=False,
)
onnx_model = onnx.load("mobilenetv2.onnx")

requires_grad = ["classifier.1.weight", "classifier.1.bias"]
frozen_params = [
    param.name for param in onnx_model.graph.initializer if param.name not in requires_grad
]
artifacts.generate_artifacts(
    onnx_model,
    requires_grad=requires_grad,
    frozen_params=frozen_params,
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=".",
)

images, labels = torch.randn(4, 3, 96, 96), torch.arange(4)
for parameter in model.features.parameters():
    parameter.requires_grad_(False)
loss = torch.nn.functional.cross_entropy(model(images), labels)
torch_says.save(model, loss, input=images, labels=labels)

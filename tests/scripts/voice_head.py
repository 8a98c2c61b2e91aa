"""The iOS example: a block around a loss that takes whatever outputs there are."""

import onnx
import torch
import torch_says
from onnxruntime.training import artifacts, onnxblock
from several_heads import Heads


class CustomCELoss(onnxblock.Block):
    def __init__(self):
        self.loss = onnxblock.loss.CrossEntropyLoss()

    def build(self, logits, *args):
        return self.loss(logits)


torch.manual_seed(6)
model = Heads(2, 3)
torch.onnx.export(
    model,
    (torch.randn(1, 6),),
    "voice.onnx",
    input_names=["input"],
    output_names=["output", "hidden"],
    dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}, "hidden": {0: "batch"}},
    dynamo=False,
)
onnx_model = onnx.load("voice.onnx")
requires_grad = ["heads.0.weight", "heads.0.bias"]
frozen_params = [
    param.name for param in onnx_model.graph.initializer if param.name not in requires_grad
]
artifacts.generate_artifacts(
    onnx_model,
    requires_grad=requires_grad,
    frozen_params=frozen_params,
    loss=CustomCELoss(),
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=".",
)

voice, labels = torch.randn(3, 6), torch.tensor([0, 1, 0])
loss = torch.nn.functional.cross_entropy(model(voice)[0], labels)
torch_says.save(model, loss, input=voice, labels=labels)

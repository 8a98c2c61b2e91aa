"""A custom loss as upstream documents it: blocks, weights, no call of super().__init__()."""

import onnx
import torch
import torch_says
from onnxruntime.training import artifacts, onnxblock
from several_heads import Heads


class WeightedAverageLoss(onnxblock.Block):
    def __init__(self):
        self._loss1 = onnxblock.loss.MSELoss()
        self._loss2 = onnxblock.loss.BCEWithLogitsLoss()
        self._loss3 = onnxblock.loss.CrossEntropyLoss()
        self._w1 = onnxblock.blocks.Constant(0.4)
        self._w2 = onnxblock.blocks.Constant(0.6)
        self._add = onnxblock.blocks.Add()
        self._mul = onnxblock.blocks.Mul()

    def build(self, loss_input_name1, loss_input_name2, loss_input_name3):
        two = self._add(
            self._mul(self._w1(), self._loss1(loss_input_name1, target_name="target1")),
            self._mul(self._w2(), self._loss2(loss_input_name2, target_name="target2")),
        )
        return self._add(two, self._loss3(loss_input_name3, labels_name="target3"))


torch.manual_seed(5)
model = Heads(3, 2, 4)
batch = torch.export.Dim("batch")
program = torch.onnx.export(
    model,
    (torch.randn(2, 6),),
    dynamo=True,
    input_names=["x"],
    output_names=["a", "b", "c"],
    dynamic_shapes=({0: batch},),
    verbose=False,
)
program.save("three.onnx")
artifacts.generate_artifacts(
    onnx.load("three.onnx"),
    requires_grad=[name for name, _ in model.named_parameters()],
    loss=WeightedAverageLoss(),
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=".",
)

x, target1, target2 = torch.randn(5, 6), torch.randn(5, 3), torch.rand(5, 2)
target3 = torch.tensor([0, 3, 1, 2, 2])
a, b, c = model(x)
functional = torch.nn.functional
loss = (
    0.4 * functional.mse_loss(a, target1)
    + 0.6 * functional.binary_cross_entropy_with_logits(b, target2)
    + functional.cross_entropy(c, target3)
)
torch_says.save(model, loss, x=x, target1=target1, target2=target2, target3=target3)

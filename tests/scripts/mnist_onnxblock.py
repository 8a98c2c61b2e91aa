"""The MNIST notebook, second way: a training block written by hand, saved by hand.

It is exported as today's torch does by default, with the arguments of old.
"""

import onnx
import onnxruntime.training.onnxblock as onnxblock
import torch
import torch_says
from mnist_net import MNISTNet

torch.manual_seed(1)
pt_model = MNISTNet(784, 500, 10)
torch.onnx.export(
    pt_model,
    (torch.randn(64, 784),),
    "mnist.onnx",
    input_names=["input"],
    output_names=["output"],
    opset_version=18,
    dynamic_axes={"input": {0: "batch_size"}, "output": {0: "batch_size"}},
    verbose=False,
)
onnx_model = onnx.load("mnist.onnx")


class MNISTTrainingBlock(onnxblock.TrainingBlock):
    def __init__(self):
        super().__init__()
        self.loss = onnxblock.loss.CrossEntropyLoss()

    def build(self, output_name):
        return self.loss(output_name), output_name


training_block = MNISTTrainingBlock()
for param in onnx_model.graph.initializer:
    training_block.requires_grad(param.name, True)

with onnxblock.base(onnx_model):
    _ = training_block(*[output.name for output in onnx_model.graph.output])
    training_model, eval_model = training_block.to_model_proto()
    model_params = training_block.parameters()

optimizer_block = onnxblock.optim.AdamW()
with onnxblock.empty_base():
    _ = optimizer_block(model_params)
    optimizer_model = optimizer_block.to_model_proto()

onnxblock.save_checkpoint(model_params, "checkpoint")
onnx.save(training_model, "training_model.onnx")
onnx.save(optimizer_model, "optimizer_model.onnx")
onnx.save(eval_model, "eval_model.onnx")

data, target = torch.randn(32, 784), torch.randint(0, 10, (32,))
loss = torch.nn.functional.cross_entropy(pt_model(data), target)
torch_says.save(pt_model, loss, input=data, labels=target)

"""The MNIST notebook, first way: generate_artifacts does everything."""

import onnx
import torch
import torch_says
from mnist_net import MNISTNet
from onnxruntime.training import artifacts

batch_size, input_size, hidden_size, output_size = 64, 784, 500, 10
torch.manual_seed(0)
pt_model = MNISTNet(input_size, hidden_size, output_size)
torch.onnx.export(
    pt_model,
    (torch.randn(batch_size, input_size),),
    "mnist.onnx",
    input_names=["input"],
    output_names=["output"],
    opset_version=14,
    do_constant_folding=False,
    training=torch.onnx.TrainingMode.TRAINING,
    dynamic_axes={"input": {0: "batch_size"}, "output": {0: "batch_size"}},
    export_params=True,
    keep_initializers_as_inputs=False,
    dynamo=False,
)
onnx_model = onnx.load("mnist.onnx")

requires_grad = [name for name, param in pt_model.named_parameters() if param.requires_grad]
frozen_params = [name for name, param in pt_model.named_parameters() if not param.requires_grad]
artifacts.generate_artifacts(
    onnx_model,
    requires_grad=requires_grad,
    frozen_params=frozen_params,
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=".",
    additional_output_names=["output"],
)

data, target = torch.randn(32, input_size), torch.randint(0, output_size, (32,))
loss = torch.nn.functional.cross_entropy(pt_model(data), target)
torch_says.save(pt_model, loss, input=data, labels=target)

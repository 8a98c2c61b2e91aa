"""Images as data: a folder with one subfolder for each class."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from onnxtrain.cli.reading import Array, Data, Reading, numbered
from onnxtrain.errors import InputError
from onnxtrain.format.model_metadata import ModelMetadata

if TYPE_CHECKING:
    from PIL.Image import Image

    from onnxtrain.format.model.file import ValueType

_ENDINGS = frozenset(".png .jpg .jpeg .bmp .gif .webp .tif .tiff".split())
_MANY_PIXELS = 2**24  # in one image; a file of any size may have so many
_IN_MEMORY = 2**28  # bytes; more than that is memory-mapped from a temporary file


class Layout(NamedTuple):
    """The layout of an image in a model's input; `first` means channels first."""

    channels: int
    height: int
    width: int
    first: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a sample."""
        size = self.height, self.width
        return (self.channels, *size) if self.first else (*size, self.channels)


def read_images(folder: Path, inputs: Sequence[ValueType], reading: Reading, where: str) -> Data:
    """Read all images; the names of the subfolders are the classes."""
    found = [
        (inner.name, path)
        for inner in sorted(folder.iterdir())
        if inner.is_dir() and not inner.name.startswith(".")
        for path in sorted(inner.rglob("*"))
        if is_image(path)
    ]
    if not found:
        raise InputError(
            f"{where}: no images found: put them into one folder for each class, such as "
            f"{folder.name}/cat/1.jpg"
        )
    labels, classes = numbered([name for name, _ in found], reading.about.classes, where)
    images = decode([path for _, path in found], inputs[0], reading.about, where)
    kept = replace(reading, about=replace(reading.about, classes=classes))
    return Data({inputs[0].name: images, inputs[1].name: labels}, kept)


def image_files(paths: Sequence[Path], where: str) -> list[Path]:
    """Return images that are given one by one, and all that are in folders."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.rglob("*") if is_image(p)) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"{where}: there are no images in {str(path)!r}")
        found += inside
    return found


def is_image(path: Path) -> bool:
    """Whether the name of a file is that of an image."""
    return path.suffix.lower() in _ENDINGS


def _layout_of(value: ValueType, size: Sequence[int] | None, where: str) -> Layout:
    """Derive the layout of images from the shape of an input."""
    dims = value.dims
    if dims is None or len(dims) != 4:
        shape = "of unknown shape" if dims is None else f"of rank {len(dims)}"
        raise InputError(
            f"{where}: the input {value.name!r} is {shape}; for images, it must have 4 axes"
        )
    for first, (channels, height, width) in ((True, dims[1:]), (False, (dims[3], *dims[1:3]))):
        if channels in (1, 3, 4):
            wanted = size or (None, None)
            sides = [
                s if isinstance(s, int) else w for s, w in zip((height, width), wanted, strict=True)
            ]
            if size is not None and sides != list(size):
                raise InputError(
                    f"{where}: the model takes images of {height} x {width}: leave out --image-size"
                )
            if None in sides:
                raise InputError(
                    f"{where}: the model takes images of any size: choose one with --image-size"
                )
            return Layout(int(channels), int(sides[0] or 0), int(sides[1] or 0), first)
    raise InputError(f"{where}: the input {value.name!r} has no axis of 1, 3 or 4 channels")


def decode(paths: Sequence[Path], value: ValueType, about: ModelMetadata, where: str) -> Array:
    """Return images as an input takes them, scaled as the model wants it."""
    layout = _layout_of(value, about.size, where)
    result = room((len(paths), *layout.shape))
    mean, std = (_per_channel(v, layout, where) for v in (about.mean, about.std))
    for index, path in enumerate(paths):
        pixels = _pixels(path, layout, where)
        if mean is not None:
            pixels = pixels - mean
        if std is not None:
            pixels = pixels / std
        result[index] = pixels.transpose(2, 0, 1) if layout.first else pixels
    return result


def room(shape: tuple[int, ...]) -> Array:
    """Return memory for an array of float32, in a temporary file if it is large."""
    if 4 * math.prod(shape) <= _IN_MEMORY:
        return np.empty(shape, np.float32)
    with tempfile.TemporaryFile(prefix="onnxtrain-images-") as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def _per_channel(given: Sequence[float] | None, layout: Layout, where: str) -> Array | None:
    if given is None:
        return None
    if len(given) not in (1, layout.channels):
        raise InputError(
            f"{where}: --mean and --std take one number, or one per channel ({layout.channels})"
        )
    return np.array(given, np.float32)


def _pixels(path: Path, layout: Layout, where: str) -> Array:
    """Return an image as height × width × channels, from 0 to 1, scaled and center-cropped."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # A small file that becomes very many pixels fills the memory.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if math.prod(image.size) > max(_MANY_PIXELS, 100 * path.stat().st_size):
                    raise ValueError(f"{image.width} x {image.height} pixels in so small a file")
                return _fitted(image, layout)
    except PermissionError:
        raise
    except Exception as error:  # what Pillow raises depends on the format
        reason = f"{type(error).__name__}: {error}"[:200]
        raise InputError(
            f"{where}: {str(path)!r} cannot be read as an image ({reason}): remove or replace it"
        ) from None


def _fitted(image: Image, layout: Layout) -> Array:
    from PIL import Image, ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)  # cameras write how they were held
    if image.mode.startswith("I"):  # 16 bits, which convert() would clip to 8
        image = Image.fromarray((np.asarray(image) / 257).astype(np.uint8))
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[layout.channels]
    fitted = ImageOps.fit(image.convert(mode), (layout.width, layout.height))
    array = np.asarray(fitted, np.float32) / 255
    return array.reshape(layout.height, layout.width, layout.channels)

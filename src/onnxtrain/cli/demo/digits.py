"""Handwritten digits of many people, and of one user with another style.

scikit-learn's digits are real, but their writers are not recorded. So the user is simulated: held
out digits are all rotated, slanted and darkened in the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_SIDE = 8
_SLANT, _TURN, _PRESSURE = 0.45, 5.0, 1.2


class Samples(NamedTuple):
    """Images of shape (N, 1, 8, 8) with values from 0 to 1, and their labels."""

    images: Array
    labels: Array


class Digits(NamedTuple):
    """Training and test digits of many people and of one user."""

    people: Samples
    people_test: Samples
    user: Samples
    user_test: Samples


def load(seed: int = 0) -> Digits:
    """Return the digits; the four parts are disjoint."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, _SIDE, _SIDE)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order], labels[order].astype(np.int64)
    parts = np.split(np.arange(len(images)), [900, 1200, 1500])
    people, people_test, user, user_test = (Samples(images[i], labels[i]) for i in parts)
    return Digits(people, people_test, _by_hand(user), _by_hand(user_test))


def _by_hand(samples: Samples) -> Samples:
    """Apply the style of the user: slant and rotate the digits, and darken the strokes."""
    angle = np.deg2rad(_TURN)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = rotation @ np.array([[1.0, 0.0], [_SLANT, 1.0]])
    middle = (_SIDE - 1) / 2
    grid = np.stack(np.meshgrid(*[np.arange(_SIDE)] * 2, indexing="ij"), axis=-1) - middle
    at = grid @ matrix.T + middle
    images = np.clip(_sampled(samples.images, at) * _PRESSURE, 0, 1).astype(np.float32)
    return Samples(images, samples.labels)


def _sampled(images: Array, at: Array) -> Array:
    """Sample images bilinearly; outside they are 0."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows, columns = np.clip(np.moveaxis(at, -1, 0) + 1, 0, _SIDE + 0.999)
    top, left = rows.astype(int), columns.astype(int)
    down, right = rows - top, columns - left
    return np.asarray(
        padded[..., top, left] * (1 - down) * (1 - right)
        + padded[..., top + 1, left] * down * (1 - right)
        + padded[..., top, left + 1] * (1 - down) * right
        + padded[..., top + 1, left + 1] * down * right
    )

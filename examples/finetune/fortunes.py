"""Sayings from Debian's package `fortunes`, in rows of tokens: a style to learn."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

TOPICS = ("computers", "science", "wisdom")
END = 2  # <|im_end|>, between two sayings
INSTALLED = Path("/usr/share/games/fortunes")


def folder_of_sayings(build: Path) -> Path:
    """Return the folder of the sayings; the package is fetched where it is not installed."""
    unpacked = build / "fortunes"
    found = INSTALLED if INSTALLED.is_dir() else unpacked / str(INSTALLED)[1:]
    if not found.is_dir():
        unpacked.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", "fortunes"], cwd=unpacked)
        packages = sorted(unpacked.glob("fortunes_*.deb"))
        if done.returncode or not packages:
            raise SystemExit("install Debian's package fortunes: there is no text to learn from")
        subprocess.run(["dpkg", "-x", packages[0].name, "."], cwd=unpacked, check=True)
    return found


def rows(build: Path, length: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of tokens to train on, and rows that are held out."""
    source = folder_of_sayings(build)
    sayings = [s for name in TOPICS for s in (source / name).read_text().split("\n%\n")]
    tokenizer = Tokenizer.from_file(str(build / "smollm2" / "float" / "tokenizer.json"))
    order = np.random.default_rng(0).permutation(len(sayings))
    tokens = [t for i in order for t in (*tokenizer.encode(sayings[i].strip()).ids, END)]
    whole = np.array(tokens[: len(tokens) // length * length], np.int64).reshape(-1, length)
    return whole[16:], whole[:16]

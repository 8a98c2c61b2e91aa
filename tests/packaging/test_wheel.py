"""The wheel has what it should, and works where nothing else is installed than it asks for."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "wheel_program.py"
# numpy and onnxruntime of old, and nothing else; `make test` sets it up.
BARE = os.environ.get("ONNXTRAIN_OLDEST_PYTHON")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    pytest.importorskip(
        "hatchling", reason="the wheel is built with hatchling, which `make test` installs"
    )
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return folder


def test_the_wheel_has_the_package_its_types_and_its_command_and_nothing_else(built) -> None:
    wheel = next(built.glob("*.whl"))
    assert wheel.stat().st_size < 1_050_000  # docs/decisions/0009-the-weight-of-the-wheel.md
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
        commands = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert "onnxtrain/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"onnxtrain"}
    assert not [n for n in names if n.endswith((".pyc", ".onnx", ".png"))]
    assert "onnxtrain = onnxtrain.cli:main" in commands
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    base = {line.split()[1].split(">")[0] for line in required if "extra ==" not in line}
    assert base == {"numpy", "onnxruntime"}


def test_the_part_for_devices_is_small(built) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        sizes = {entry.filename: entry.compress_size for entry in archive.infolist()}
    # What a device does not import, or imports with an extra.
    elsewhere = ("offline/", "onnxblock/", "cli/demo/", "cli/workstation.py", "cli/compare.py",
                 "federated/")  # fmt: skip
    others = tuple(f"onnxtrain/{name}" for name in elsewhere)
    device = [size + 121 for name, size in sizes.items() if not name.startswith(others)]
    assert 100_000 < sum(device) < 320_000


def test_every_module_is_as_it_is_in_the_sources(built) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        for path in (ROOT / "src").rglob("*.py"):
            name = path.relative_to(ROOT / "src").as_posix()
            assert archive.read(name) == path.read_bytes(), name


def test_the_source_distribution_can_build_and_test_itself(built) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "Makefile", "README.md", "LICENSE", "mkdocs.yml"):
        assert name in names
    for folder in ("src/onnxtrain/api", "tests/device", "docs/tutorials", "examples"):
        assert any(name.startswith(folder) for name in names)
    assert not any("node_modules" in name or name.startswith(".venv") for name in names)


@pytest.mark.skipif(BARE is None, reason="`make test` sets up the environment")
def test_the_wheel_works_with_numpy_and_onnxruntime_alone(built, tmp_path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(installed)
    shutil.copytree(ROOT / "tests" / "golden" / "mlp", tmp_path / "artifacts")
    done = subprocess.run(
        [BARE, str(PROGRAM), str(tmp_path), "device"],
        env={**os.environ, "PYTHONPATH": str(installed)}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("device: onnxtrain ")


TYPED = """
import numpy as np
import onnxtrain
from onnxtrain import artifacts

reveal_type(artifacts.generate_artifacts("model.onnx"))
session = onnxtrain.TrainingSession.from_folder("artifacts")
reveal_type(onnxtrain.fit(session, (np.zeros(1), np.zeros(1)), epochs=5).losses)
onnxtrain.fit(session, None, epochs="five")
"""


@pytest.mark.slow
def test_users_of_the_wheel_have_its_types(built, tmp_path) -> None:
    pytest.importorskip("mypy", reason="types are checked with mypy, which `make test` installs")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "program.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent",
         "--config-file=", "program.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": "installed"}, capture_output=True, text=True,
    )  # fmt: skip
    assert 'Revealed type is "onnxtrain.offline.artifacts.Artifacts"' in done.stdout
    assert 'Revealed type is "list[float]"' in done.stdout
    assert "Found 1 error in 1 file" in done.stdout, done.stdout
    assert '"epochs" to "fit" has incompatible type "str"; expected "int"' in done.stdout

"""What the tests install is locked: a version and hashes for each package, which pip checks."""

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = {"dev": ["dev"], "device": [], "flower": ["flower", "offline", "cli"]}


def locked(file: Path) -> dict[str, list[tuple[Requirement, int]]]:
    """The packages of a lock file, and how many hashes each has."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            what, *hashes = re.split(r"\s+--hash=sha256:(?=[0-9a-f]{64}\b)", line.strip())
            wanted = Requirement(what)
            found.setdefault(canonicalize_name(wanted.name), []).append((wanted, len(hashes)))
    return found


def required(extras: list[str]) -> list[Requirement]:
    """What the package asks for, with extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            inner = Requirement(line)
            if inner.name == "onnxtrain":
                lines += [str(each) for each in required(sorted(inner.extras))]
            else:
                lines.append(line)
    return [Requirement(line) for line in lines]


pytestmark = pytest.mark.skipif(not LOCKS, reason="not in a checkout")


@pytest.mark.parametrize("file", LOCKS, ids=lambda file: file.stem)
def test_every_package_has_a_version_and_hashes(file) -> None:
    packages = [each for versions in locked(file).values() for each in versions]
    assert packages
    for wanted, hashes in packages:
        assert [spec.operator for spec in wanted.specifier] == ["=="], wanted
        assert hashes, wanted


@pytest.mark.parametrize("name", EXTRAS)
def test_the_lock_has_what_the_package_asks_for(name) -> None:
    """If this fails after a change of pyproject.toml: make lock."""
    packages = locked(ROOT / "requirements" / f"{name}.txt")
    for wanted in required(EXTRAS[name]):
        versions = packages[canonicalize_name(wanted.name)]
        for version, _ in versions:
            (pinned,) = version.specifier
            assert wanted.specifier.contains(pinned.version), f"{wanted}: {pinned}"


def test_ci_installs_nothing_without_a_lock() -> None:
    assert "LOCKED=1 make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^(\$\(\w+\)/(?:ready|dev|models)):.*\n((?:\t.*\n)+)", MAKEFILE, re.M))
    for target in ("VENV)/dev", "UPSTREAM)/ready", "OLDEST)/ready", "DEVICE)/ready", "CHECK)/ready",
                   "FLOWER)/ready", "NODE)/ready", "VENV)/models"):  # fmt: skip
        recipe = rules[f"$({target}"]
        assert "$(INSTALL)" in recipe or "--require-hashes" in recipe, target
        assert not re.search(r"pip install (?!.*--no-index)", recipe), target
    assert "npm ci" in MAKEFILE and "npm install" not in MAKEFILE


def test_a_file_that_is_not_the_locked_one(tmp_path) -> None:
    """It is refused where packages are locked; elsewhere the newest are installed, with a word."""
    make_wheel(tmp_path, "thing", "1.0")
    (strict, loose) = (
        install(tmp_path, f"thing==1.0 --hash=sha256:{'0' * 64}\n", where, **environment)
        for where, environment in (("strict", {"LOCKED": "1"}), ("loose", {}))
    )
    assert strict.returncode == 1
    assert "some.txt cannot be installed here" in strict.stderr
    assert loose.returncode == 0, loose.stderr
    assert "without hashes" in loose.stderr
    assert list((tmp_path / "loose").rglob("thing-1.0.dist-info"))
    assert not list((tmp_path / "strict").rglob("thing-1.0.dist-info"))


def test_a_release_newer_than_the_locked_one(tmp_path) -> None:
    """It is not looked at, not even where a package asks for the locked one with an extra."""
    user = make_wheel(tmp_path, "user", "1.0", needs="thing[more]>=1")
    thing = make_wheel(tmp_path, "thing", "1.0")
    make_wheel(tmp_path, "thing", "1.1")
    done = install(tmp_path, user + thing, "strict", LOCKED="1")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "strict").rglob("thing-1.0.dist-info"))


def test_a_lock_that_lacks_a_package(tmp_path) -> None:
    user = make_wheel(tmp_path, "user", "1.0", needs="thing")
    done = install(tmp_path, user, "strict", LOCKED="1")
    assert done.returncode == 1
    assert "user 1.0 requires thing, which is not installed" in done.stdout


def install(folder: Path, lock: str, where: str, **environment: str) -> subprocess.CompletedProcess:
    """Install a lock file, or else the newest `thing`, from the wheels in the folder."""
    requirements = folder / "requirements"
    requirements.mkdir(exist_ok=True)
    (requirements / "install.py").write_bytes((ROOT / "requirements" / "install.py").read_bytes())
    (requirements / "some.txt").write_text(lock)
    more = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, requirements / "install.py", folder / where, "some", "--", "thing"],
        env=more | environment, capture_output=True, text=True,
    )  # fmt: skip


def make_wheel(folder: Path, name: str, version: str, needs: str = "") -> str:
    """Write a wheel with one empty module; return its line of a lock file."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: more\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {needs}\n" * bool(needs)))
        about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", about)
        names = (f"{name}.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")
        archive.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in names))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{name}=={version} --hash=sha256:{digest}\n"

"""Power may fail at any moment: the old state or the new is there, and the next write tidies up."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from disk import Data, Entries, Recorder, Sync, Tree, crash_states, replay  # noqa: E402
from operations import OPERATIONS, Operation  # noqa: E402
from power_loss import check_operation  # noqa: E402

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders are synced on POSIX alone")


# `make crash` tries 2,000 combinations between two syncs, and more crashes of the next write.
@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_power_fails(name) -> None:
    quick = name in ("save", "save-inline", "federated")
    report = check_operation(
        OPERATIONS[name], 40 if quick else 1, 3 * quick, every=1 if quick else 7
    )
    assert not report.wrong, report.wrong[:5]
    assert not report.litter, report.litter[:5]
    assert report.found.total() > 15 and {1, 2} <= set(report.found)


def write_carelessly(folder: Path, number: int, mistake: str) -> None:
    """Replace a file, with one of the mistakes that this is about."""
    new = folder / ".new"
    new.write_bytes(bytes([number]) * 100)
    if mistake != "content":
        with open(new, "rb") as file:
            os.fsync(file.fileno())
    if mistake == "unlink":
        (folder / "file").unlink(missing_ok=True)
    os.replace(new, folder / "file")
    if mistake != "folder":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def read_carefully(folder: Path) -> int | None:
    file = folder / "file"
    if not file.exists():
        return None
    (number,) = set(file.read_bytes())
    assert len(file.read_bytes()) == 100
    return number


@pytest.mark.parametrize("mistake", ["none", "content", "folder", "unlink"])
def test_mistakes_are_found(mistake) -> None:
    """A file that is not synced, a rename that is not, a moment without a file."""

    def write(folder: Path, number: int) -> None:
        write_carelessly(folder, number, mistake)

    report = check_operation(Operation("careless", write, read_carefully), limit=100, nested=2)
    assert bool(report.wrong) == (mistake != "none")


def test_what_may_be_lost() -> None:
    start = Tree({0: {"a": 1}}, {1: b"old"})
    written = [Entries(((0, "b", 2),)), Data(2, b"data"), Sync(2)]
    renamed = Entries(((0, "a", 2), (0, "b", None)))
    states = {
        tuple((path, content) for path, _, content in tree.key()): returned
        for tree, returned in crash_states(start, [*written, renamed, Sync(0)], 100)
    }
    # After the folder was synced, one state is left; before, the content may be torn.
    assert [state for state, returned in states.items() if returned] == [(("a", b"data"),)]
    assert (("a", b"old"), ("b", b"data")) in states
    assert (("a", b"old"), ("b", bytes(4))) in states
    assert (("a", b"old"), ("b", b"da")) in states
    assert (("a", b"old"),) in states
    assert (("a", b"da"),) not in states  # it was synced before it was renamed
    without_sync = {tree.key() for tree, _ in crash_states(start, [*written[:2], renamed], 100)}
    assert (("a", 0, b"da"),) in without_sync


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_nothing_escapes_the_recorder(tmp_path) -> None:
    """It sees the calls that change names, and the syncs, in the order in which strace does."""
    if subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("strace may not follow processes here")
    log, folder = tmp_path / "log", tmp_path / "folder"
    folder.mkdir()
    calls = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,link,linkat,mkdir,rmdir"
    program = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from disk import *
from operations import OPERATIONS
folder = Path({str(folder)!r})
for name in ("save", "export", "export-optimized", "federated"):
    for number in (1, 2):
        with Recorder(folder) as recorder:
            OPERATIONS[name].write(folder, number)
        for o in recorder.operations:
            if isinstance(o, Sync): print("sync")
            elif isinstance(o, Entries):
                gone = sum(inode is None for _, _, inode in o.changes)
                known = len(o.changes) - gone
                print("rename" if gone and known else "remove" if gone else "add")
"""
    done = subprocess.run(
        ["strace", "-f", "-y", "-qq", "-s", "300", "-e", f"trace={calls}", "-o", str(log),
         sys.executable, "-c", program],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kinds = {
        "fsync": "sync",
        "fdatasync": "sync",
        "rename": "rename",
        "renameat": "rename",
        "renameat2": "rename",
        "unlink": "remove",
        "unlinkat": "remove",
        "rmdir": "remove",
    }
    seen = [
        kinds[call]
        for line in log.read_text().splitlines()
        if str(folder) in line and line.endswith(" = 0")
        for call in re.findall(r"^\d+ +(\w+)\(", line)
        if call in kinds
    ]  # fmt: skip
    recorded = [line for line in done.stdout.split() if line != "add"]
    assert recorded == seen
    assert seen.count("sync") > 20


def test_writes_that_python_does_not_see_are_recorded(tmp_path) -> None:
    import numpy as np

    with Recorder(tmp_path) as recorder:
        np.arange(9).tofile(tmp_path / "a")
        with open(tmp_path / "b", "wb") as file:
            os.write(file.fileno(), b"first")
        (tmp_path / "c").mkdir()
        os.replace(tmp_path / "b", tmp_path / "c" / "b")
        os.truncate(tmp_path / "c" / "b", 2)
    tree = replay(recorder.start, recorder.operations)
    assert [(path, content) for path, _, content in tree.key()] == [
        ("a", np.arange(9).tobytes()), ("c/", b""), ("c/b", b"fi"),
    ]  # fmt: skip

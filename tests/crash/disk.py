"""A disk that loses power: what a program did to a folder, and what may be left of it.

`Recorder` notes the changes of a folder, one operation at a time. Python announces each call that
opens, renames, links or removes a file to its audit hooks; before each of them, and at each fsync,
the folder is compared with what it was. So writes of numpy or onnxruntime that no Python code sees
are noted as well, and nothing depends on which function a writer calls.

`crash_states` returns what a disk may hold if power fails at any moment, by these rules:

- What was written to a file is durable once that file was synced. Until then, any part of it may
  be missing: all of it, its end, or its content while its length is there (zeros).
- A change of a folder (a file created, renamed, linked or removed) is durable once that folder was
  synced. Until then, any of these changes may be missing, in any combination, later ones may be
  durable before earlier ones, and none waits for the content of a file.
- A rename is one change, also between two folders: either of them makes it durable.

These are the rules of POSIX, and stricter than ext4, XFS, Btrfs, APFS and NTFS, which keep the
order of changes of a folder. Permissions and times are not followed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Inode = int  # of a folder at most 0, of a file more
ROOT: Inode = 0
_EVENTS = {
    "open", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
    "os.truncate", "os.utime",
}  # fmt: skip


@dataclass
class Tree:
    """Folders, by their inodes: entries by name; and files: their content."""

    folders: dict[Inode, dict[str, Inode]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[Inode, bytes] = field(default_factory=dict)

    def paths(self, folder: Inode = ROOT, above: str = "") -> Iterator[tuple[str, Inode]]:
        """Return all that can be reached: files by path, folders with a slash at the end."""
        for name, inode in sorted(self.folders.get(folder, {}).items()):
            if inode <= 0:
                yield f"{above}{name}/", inode
                yield from self.paths(inode, f"{above}{name}/")
            else:
                yield above + name, inode

    def key(self) -> tuple[tuple[str, int, bytes], ...]:
        """Return the same for trees that a program cannot tell apart."""
        numbers: dict[Inode, int] = {}
        return tuple(
            (path, numbers.setdefault(inode, len(numbers)), self.files.get(inode, b""))
            for path, inode in self.paths()
        )

    def write(self, folder: Path) -> None:
        """Make it real, in an empty folder; names of the same file are links."""
        first: dict[Inode, Path] = {}
        for path, inode in self.paths():
            target = folder / path
            if inode <= 0:
                target.mkdir()
            elif inode in first:
                os.link(first[inode], target)
            else:
                target.write_bytes(self.files.get(inode, b""))
                first[inode] = target


@dataclass(frozen=True)
class Entries:
    """Entries of folders changed at once: the inode of each, or None where it is gone."""

    changes: tuple[tuple[Inode, str, Inode | None], ...]

    @property
    def folders(self) -> set[Inode]:
        """Return the folders that it is a change of."""
        return {folder for folder, _, _ in self.changes}


@dataclass(frozen=True)
class Data:
    """A file got another content."""

    inode: Inode
    content: bytes


@dataclass(frozen=True)
class Sync:
    """A file or folder was synced."""

    inode: Inode


Operation = Entries | Data | Sync


class Recorder:
    """Notes what happens to a folder while it is used in a `with` statement.

    `call(number)` is called before each operation, with how many calls there were before: a place
    to die in.
    """

    def __init__(self, folder: Path, call=None) -> None:
        self.folder = folder
        self.operations: list[Operation] = []
        self._call = call
        self._calls = 0
        self._busy = False
        self._inodes: dict[tuple[int, int], Inode] = {}
        self._held: list[int] = []  # while a file is open, no other gets its inode

    def __enter__(self) -> Recorder:
        self._inodes[_identity(os.stat(self.folder))] = ROOT
        self._now = self._look()
        self.start = Tree({k: dict(v) for k, v in self._now.folders.items()}, dict(self._now.files))
        self._originals = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
        for name, original in self._originals.items():
            setattr(os, name, self._syncing(original))
        _install()
        _recorders.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._observe()
        _recorders.remove(self)
        for name, original in self._originals.items():
            setattr(os, name, original)
        for descriptor in self._held:
            os.close(descriptor)

    def event(self) -> None:
        """Note what happened before the call that comes now."""
        if not self._busy:
            self._observe()
            self._before_call()

    def _before_call(self) -> None:
        if self._call is not None:
            self._call(self._calls)
        self._calls += 1

    def _syncing(self, original):
        def sync(file) -> None:
            self.event()
            original(file)
            number = file if isinstance(file, int) else file.fileno()
            inode = self._inodes.get(_identity(os.fstat(number)))
            if inode is not None:
                self.operations.append(Sync(inode))

        return sync

    def _observe(self) -> None:
        before, self._now = self._now, self._look()
        changes = [
            (folder, name, entries.get(name))
            for folder, entries in self._now.folders.items()
            for name in entries.keys() | before.folders.get(folder, {}).keys()
            if entries.get(name) != before.folders.get(folder, {}).get(name)
        ]
        if changes:
            self.operations.append(Entries(tuple(changes)))
        self.operations += [
            Data(inode, content)
            for inode, content in self._now.files.items()
            if content != before.files.get(inode, b"")
        ]

    def _look(self) -> Tree:
        self._busy = True
        try:
            tree = Tree({}, {})
            self._read(self.folder, ROOT, tree)
            return tree
        finally:
            self._busy = False

    def _read(self, folder: Path, inode: Inode, tree: Tree) -> None:
        entries = tree.folders[inode] = {}
        for entry in os.scandir(folder):
            identity = _identity(entry.stat(follow_symlinks=False))
            if identity not in self._inodes:
                number, is_folder = len(self._inodes), entry.is_dir(follow_symlinks=False)
                self._inodes[identity] = -number if is_folder else number
                self._held.append(os.open(entry.path, os.O_RDONLY))
            entries[entry.name] = own = self._inodes[identity]
            if own < 0:
                self._read(Path(entry.path), own, tree)
            else:
                tree.files[own] = Path(entry.path).read_bytes()


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


_recorders: list[Recorder] = []
_installed: list[bool] = []


def _install() -> None:
    """Add the hook, which stays for the life of the process."""

    def hook(event: str, arguments: object) -> None:
        if event in _EVENTS:
            for recorder in _recorders:
                recorder.event()

    if not _installed:
        _installed.append(True)
        sys.addaudithook(hook)


# ---- what may be left ----------------------------------------------------------------------------


def replay(start: Tree, operations: list[Operation]) -> Tree:
    """Return the tree after all operations."""
    contents = {o.inode: o.content for o in operations if isinstance(o, Data)}
    return _apply(start, [o for o in operations if isinstance(o, Entries)], contents)


def crash_states(
    start: Tree, operations: list[Operation], limit: int, seed: int = 0
) -> Iterator[tuple[Tree, bool]]:
    """Return the trees that a disk may hold if power fails, each once, and whether it may still
    fail in this way after the last operation.

    Between two syncs at most `limit` combinations are tried: all, where there are no more.
    """
    seen = set()
    rng = random.Random(seed)
    # What may be left before a sync includes what may be left at any moment since the last one.
    moments = [k for k, o in enumerate(operations) if isinstance(o, Sync)]
    for moment in [len(operations), *moments]:
        for tree in _states_at(start, operations[:moment], limit, rng):
            key = tree.key()
            if key not in seen:
                seen.add(key)
                yield tree, moment == len(operations)


def _states_at(
    start: Tree, operations: list[Operation], limit: int, rng: random.Random
) -> Iterator[Tree]:
    synced: dict[Inode, int] = {o.inode: k for k, o in enumerate(operations) if isinstance(o, Sync)}
    entries = [(k, o) for k, o in enumerate(operations) if isinstance(o, Entries)]
    pending = [k for k, o in entries if all(synced.get(f, -1) < k for f in o.folders)]
    contents: dict[Inode, list[bytes]] = {}
    for k, operation in enumerate(operations):
        if isinstance(operation, Data):
            inode, content = operation.inode, operation.content
            if synced.get(inode, -1) > k:
                contents[inode] = [content]
            else:
                known = contents.setdefault(inode, [start.files.get(inode, b"")])
                known += [v for v in (content, *_torn(content)) if v not in known]
    choices = [(False, True)] * len(pending) + [range(len(c)) for c in contents.values()]
    for picked in _combinations(choices, limit, rng):
        lost = {k for k, kept in zip(pending, picked, strict=False) if not kept}
        chosen = dict(zip(contents, picked[len(pending) :], strict=True))
        left = [o for k, o in entries if k not in lost]
        yield _apply(start, left, {i: contents[i][n] for i, n in chosen.items()})


def _torn(content: bytes) -> list[bytes]:
    """Return what may be there of a content that was not synced."""
    half = len(content) // 2
    return [b"", content[:half], bytes(len(content)), content[:half] + bytes(len(content) - half)]


def _combinations(choices, limit: int, rng: random.Random) -> Iterator[tuple]:
    if math.prod(map(len, choices)) <= limit:
        yield from itertools.product(*choices)
        return
    none, full = [c[0] for c in choices], [c[-1] for c in choices]
    # Nothing, everything in order up to some point, all but one, and one alone.
    for k in range(len(choices) + 1):
        yield (*full[:k], *none[k:])
    for k, choice in enumerate(choices):
        for one in choice:
            yield (*full[:k], one, *full[k + 1 :])
            yield (*none[:k], one, *none[k + 1 :])
    for _ in range(limit):
        share = rng.random()
        yield tuple(
            rng.choice(c) if rng.random() < 0.5 else c[-1] if rng.random() < share else c[0]
            for c in choices
        )


def _apply(start: Tree, entries: list[Entries], contents: dict[Inode, bytes]) -> Tree:
    folders = {inode: dict(names) for inode, names in start.folders.items()}
    for operation in entries:
        for folder, name, inode in operation.changes:
            if inode is None:
                folders.setdefault(folder, {}).pop(name, None)
            else:
                folders.setdefault(folder, {})[name] = inode
    return Tree(folders, {**start.files, **contents})


@contextlib.contextmanager
def dying(folder: Path, number: int) -> Iterator[None]:
    """Kill this process before the call of that number that changes the folder."""

    def call(now: int) -> None:
        if now == number:
            os._exit(9)

    with Recorder(folder, call):
        yield

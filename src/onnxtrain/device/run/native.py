"""The native library: where it is, and how its kernels take the place of a graph's functions.

A graph names its functions in its metadata. Where the library has kernels for them, onnxruntime
runs the kernels; without the library, or for functions that it does not know, onnxruntime runs the
bodies of the functions. `ONNXTRAIN_NATIVE=0` turns the library off, and a path in that variable is
another build of it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxtrain.errors import ArgumentError, TrainingWarning

VARIABLE = "ONNXTRAIN_NATIVE"
INTERFACE = 1  # what we and the library have to agree on
INSTALL = "pip install 'onnxtrain[native]'"


@dataclass(frozen=True)
class NativeStatus:
    """The library that is in use, or why none is."""

    library: Library | None
    reason: str = ""
    is_failure: bool = False  # there is one, and it cannot be used


class Library:
    """The native library, loaded."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        if loaded.onnxtrain_interface() != INTERFACE:
            raise ValueError(
                f"{path} does not belong to this version of onnxtrain. Install both anew: "
                f"{INSTALL} --upgrade"
            )
        for name in ("version", "isa", "kernels", "accepted"):
            getattr(loaded, f"onnxtrain_{name}").restype = ctypes.c_char_p
        loaded.onnxtrain_expect.argtypes = [ctypes.c_char_p]
        loaded.onnxtrain_last_domain.restype = ctypes.c_void_p
        loaded.onnxtrain_extend.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.path = path
        self.version: str = loaded.onnxtrain_version().decode()
        self.instruction_set: str = loaded.onnxtrain_isa().decode()
        self.kernels: tuple[str, ...] = tuple(loaded.onnxtrain_kernels().decode().split())
        self._loaded = loaded
        # One thread at a time tells the library what a session has, and registers it.
        self._lock = threading.RLock()
        self._shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()

    def served(self, functions: Sequence[str]) -> tuple[str, ...]:
        """Return the functions of a graph that kernels stand in for."""
        with self._lock:
            self._loaded.onnxtrain_expect("\n".join(functions).encode())
            return tuple(self._loaded.onnxtrain_accepted().decode().splitlines())

    @contextmanager
    def registered(
        self, options: Any, functions: Sequence[str], *, is_shared: bool
    ) -> Iterator[None]:
        """Register the kernels in the options of the session that is made in this context.

        Options that serve several sessions are given the functions of one graph after the other;
        no other session is made from them meanwhile.
        """
        with self._lock:
            if is_shared:
                self._extend(options, functions)
                yield
            else:
                self.served(functions)
                options.register_custom_ops_library(self.path)
        if not is_shared:
            yield

    def _extend(self, options: Any, functions: Sequence[str]) -> None:
        shared = self._shared.get(options)
        names = self.served(functions)
        if shared is None:
            self._loaded.onnxtrain_last_domain()  # other options may have it, and this one grows
            options.register_custom_ops_library(self.path)
            shared = self._shared[options] = _Shared(self._loaded.onnxtrain_last_domain())
        else:
            new = [name for name in names if name not in shared.names]
            self._loaded.onnxtrain_extend(shared.domain, "\n".join(new).encode())
        shared.names.update(names)
        if shared.names & (set(functions) - set(names)):
            raise ArgumentError(
                "the graphs need different native kernels, which one SessionOptions for all graphs "
                "cannot have: give session_options as a function that makes new ones"
            )


@dataclass
class _Shared:
    """What options that serve several sessions were given."""

    domain: int
    names: set[str] = field(default_factory=set)


_lock = threading.Lock()
_found: dict[str, NativeStatus] = {}  # by the value of the variable


def native_status() -> NativeStatus:
    """Return the library, which is loaded on the first call, or the reason why there is none."""
    wanted = os.environ.get(VARIABLE, "")
    with _lock:
        if wanted in _found:
            return _found[wanted]
        found = _found[wanted] = _find(wanted)
    if found.is_failure:
        warnings.warn(
            f"training runs without native kernels: {found.reason}", TrainingWarning, stacklevel=2
        )
    return found


def _find(wanted: str) -> NativeStatus:
    if wanted == "0":
        return NativeStatus(None, f"{VARIABLE}=0 turns it off")
    if wanted in ("", "1"):
        try:
            from onnxtrain_native import library as path_of
        except ImportError:
            return NativeStatus(None, f"the package onnxtrain-native is not installed: {INSTALL}")
        find = path_of
    else:
        find = lambda: str(Path(wanted).resolve(strict=True))  # noqa: E731
    try:
        return NativeStatus(Library(find()))
    except (OSError, AttributeError, ValueError) as error:
        return NativeStatus(None, f"the native library does not load: {error}", is_failure=True)

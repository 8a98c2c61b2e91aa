"""An allocator of onnxruntime that wastes little memory, which the sessions of a process share."""

from __future__ import annotations

import functools
import threading

import onnxruntime as ort

# A free piece of memory is cut unless less than this would be lost. By default onnxruntime loses
# up to 128 MB, or half of each piece: a third of what a lean step takes.
_LOSS = 1 << 18
_lock = threading.Lock()


def has_lean_arena() -> bool:
    """Register the allocator, once; graphs with a memory budget share it."""
    with _lock:
        return _is_registered()


@functools.cache
def _is_registered() -> bool:
    try:
        kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
        info = ort.OrtMemoryInfo("Cpu", kind, 0, ort.OrtMemType.DEFAULT)
        settings = ort.OrtArenaCfg({"max_dead_bytes_per_chunk": _LOSS})
        ort.create_and_register_allocator(info, settings)
    except Exception:  # the program has registered its own, or this build has none
        return False
    return True

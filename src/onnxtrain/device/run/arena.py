"""An allocator that wastes little, for artifacts that were made to fit into a memory budget."""

from __future__ import annotations

import threading
from typing import Any

import onnxruntime as ort

# A free piece of memory is cut unless less than this would be lost. By default onnxruntime loses
# up to 128 MB, or half of each piece: a third of what a lean step takes.
_LOSS = 1 << 18
_lock = threading.Lock()
_made: list[bool] = []


def use_lean_arena(options: Any) -> None:
    """Let a session take its memory from one allocator that all such sessions share."""
    if _is_made():
        options.add_session_config_entry("session.use_env_allocators", "1")


def _is_made() -> bool:
    """Register the allocator once; where that cannot be, onnxruntime's own does."""
    with _lock:
        if not _made:
            try:
                kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
                info = ort.OrtMemoryInfo("Cpu", kind, 0, ort.OrtMemType.DEFAULT)
                settings = ort.OrtArenaCfg({"max_dead_bytes_per_chunk": _LOSS})
                ort.create_and_register_allocator(info, settings)
                _made.append(True)
            except Exception:  # the program has registered its own, or this build has none
                _made.append(False)
        return _made[0]

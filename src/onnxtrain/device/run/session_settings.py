"""How onnxruntime's sessions are made: providers, options, batch size, native kernels."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort

from onnxtrain.device.run.native import Library, native_status
from onnxtrain.errors import ArgumentError

# The passes of onnxruntime's optimiser that look for quantized operators, by its names for them;
# each walks the whole graph, twice. They take a twentieth of the time to load a step.
_FOR_QUANTIZED = frozenset(
    "Avx2WeightS8ToU8Transformer ConstantFoldingDQ DQMatMulNBitsFusion DoubleQDQPairsRemover "
    "DynamicQuantizeMatMulFusion EnsureUniqueDQForNodeUnit MatMulIntegerToFloatFusion "
    "MatMulNBitsFusion MatMulNBitsMlpFusion MatMulNBitsQkvFusion QDQFinalCleanupTransformer "
    "QDQPropagationTransformer QDQS8ToU8Transformer QDQSelectorActionTransformer "
    "WeightBiasQuantization WhereDummyDq".split()
)
_QUANTIZED = (b"uantizeLinear", b"MatMulNBits", b"MatMulInteger")
# A free piece of memory is cut unless less than this would be lost. By default onnxruntime loses
# up to 128 MB, or half of each piece: a third of what a lean step takes.
_LOSS = 1 << 18
_lock = threading.Lock()


@dataclass
class Settings:
    """How sessions are made.

    `options` is the user's own SessionOptions, a function that makes one, or None. `batch` fixes
    the symbolic dimension that all inputs begin with; it may change if `automatic`. `native` lets
    the kernels of the native library run, if it is installed.
    """

    providers: Sequence[Any]
    options: Any = None
    batch: int | None = None
    automatic: bool = False
    native: bool = True
    _made: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.options is None or callable(self.options):
            return
        if not isinstance(self.options, ort.SessionOptions):
            raise ArgumentError(
                "session_options is an onnxruntime.SessionOptions, or a function that makes one, "
                f"not {type(self.options).__name__}"
            )
        if self.automatic:
            # onnxruntime keeps the first size that it is told for a dimension.
            raise ArgumentError(
                "with batch_size='auto', session_options has to be a function that makes new "
                "options for each session"
            )

    @property
    def library(self) -> Library | None:
        """The native library, if its kernels may run: they are for the CPU alone."""
        names = [given if isinstance(given, str) else given[0] for given in self.providers]
        if not self.native or names != ["CPUExecutionProvider"]:
            return None
        return native_status().library

    @property
    def shares_options(self) -> bool:
        """Whether all sessions are made from the same options."""
        return self.options is not None and not callable(self.options)

    def new_options(self) -> tuple[Any, bool]:
        """Return the options for a session, and whether they are this session's own."""
        if self.options is None:
            return default_options(), True
        if self.shares_options:
            return self.options, False
        made = self.options()
        new = isinstance(made, ort.SessionOptions)
        if not new or made is self._made:
            what = "the same options for two sessions" if new else type(made).__name__
            raise ArgumentError(
                f"the function session_options returned {what}: it has to make new "
                "onnxruntime.SessionOptions each time"
            )
        self._made = made
        return made, True


def default_options() -> Any:
    """Options for training: memory is used again as soon as it is free.

    A plan of the memory made beforehand (onnxruntime's memory pattern) takes up to twice as much,
    because shapes of several runs are kept apart in it. To plan which tensor follows another one of
    its size in the same place (memory reuse) holds such places even while nobody needs them, a
    tenth more in all, and no step is faster for it. The order of execution is onnxruntime's
    own: it begins with what is last in the file, and a step ends with the update of the last layer,
    so each gradient is used up before the next one is computed. In the order of the file
    (PRIORITY_BASED) nodes that onnxruntime has fused come late, and what they need piles up.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    return options


def needless_optimizers(source: str | bytes) -> set[str] | None:
    """Name the passes that cannot find anything in a graph; None where it is not looked at."""
    if isinstance(source, str) or any(word in source for word in _QUANTIZED):
        return None
    return set(_FOR_QUANTIZED)


def has_lean_arena() -> bool:
    """Register an allocator that wastes little memory; graphs with a memory budget share it."""
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

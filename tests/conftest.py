"""Random numbers that do not depend on the order of tests, and `--quick`.

`--quick` is what `make check` runs, without torch, other environments, or slow tests. A test that
touches torch is skipped, wherever it does: in a helper, a fixture, or when its file is imported.
Tests need no mark for that, and those beside them run.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TESTS = str(Path(__file__).parent)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="no torch, no slow tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        sys.meta_path.insert(0, _WithoutTorch())
        for name in [n for n in os.environ if n.startswith("ONNXTRAIN_")]:
            del os.environ[name]  # where other environments are


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        slow = [item for item in items if item.get_closest_marker("slow") or _elsewhere(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


# ---- random numbers ------------------------------------------------------------------------------

_initial: dict[np.random.Generator, Any] = {}


def pytest_collection_finish() -> None:
    """Remember the generators of all files, as they are when the files have been imported."""
    ours = [m for m in sys.modules.values() if str(getattr(m, "__file__", "")).startswith(TESTS)]
    found = [v for m in ours for v in vars(m).values() if isinstance(v, np.random.Generator)]
    _initial.update((generator, generator.bit_generator.state) for generator in found)


def pytest_runtest_setup() -> None:
    """Let each test draw the same numbers, whichever tests of its file this process ran before."""
    for generator, state in _initial.items():
        generator.bit_generator.state = state


# ---- quick tests ---------------------------------------------------------------------------------

# Files whose many short tests take long together.
_LONG = {
    f"test_{name}"
    for name in (
        "bad_input", "checkpoint_checksum", "checkpoint_store", "close", "compare", "counter_rng",
        "declared_shapes", "decoders", "expand", "feature_cache", "fit_head", "fit_resume", "fuzz",
        "given_integers", "grid", "int4_weights", "integer_kernels", "integer_kernels_torch",
        "late_expansion", "locks", "loop", "lora_forms", "lora_packed", "many_tensors",
        "merge_adapter", "mezo", "model_bounds", "node_cases", "nonfinite", "nonfinite_integers",
        "nonfinite_updates", "oldest_integers", "places", "power_loss", "proximal",
        "quantize_command", "quantize_training", "quantized_runs", "replay", "resize", "roi",
        "scan", "schedule_end", "second_derivatives", "sparse",
    )
}  # fmt: skip


def _elsewhere(item: pytest.Item) -> bool:
    """Whether a test needs another environment, a compiler or whole networks, or is one of many."""
    folders = ("capi", "interop", "lm", "models", "native")
    return item.path.parent.name in folders or item.path.stem in _LONG


class _WithoutTorch(MetaPathFinder, Loader):
    """Puts an empty module in the place of torch and of each module in it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        inside = name == "torch" or name.startswith("torch.")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Torch(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torch":  # for `from torch import nn`
            __import__("torch.nn")


class _Torch(ModuleType):
    """Ends the test that takes something out of it."""

    def __getattr__(self, name: str) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if name.startswith("__"):
            raise AttributeError(name)
        if caller.startswith(TESTS):
            pytest.skip("--quick does without torch", allow_module_level=True)
        return type(name, (), {})  # another package asks whether an array is one of torch's

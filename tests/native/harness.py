"""Runs graphs with functions twice: as plain operators, and with the native kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain.offline.gradient import write_gradient
from onnxtrain.offline.passes.batch_norm import BatchNormMode

Feeds = Mapping[str, np.ndarray[Any, Any]]


def library() -> Path:
    """The library that conftest.py has built."""
    given = os.environ.get("ONNXTRAIN_NATIVE", "")
    if not given:
        pytest.skip("the native library is built by cmake and a C++ compiler, which are not here")
    return Path(given)


def gradient_with_functions(
    model: onnx.ModelProto,
    wrt: Sequence[str],
    of: str | None = None,
    bn: BatchNormMode | None = None,
) -> onnx.ModelProto:
    """Differentiate a model as `onnxtrain.gradient` does, with calls of functions."""
    return write_gradient(model, wrt, of, (), bn, native=True)


def kinds_of(model: onnx.ModelProto) -> set[str]:
    """The kernels that can stand in for functions of a model."""
    return {function.name.partition("_")[0] for function in model.functions}


def session_of(model: onnx.ModelProto, *, native: bool, threads: int = 1) -> Any:
    """A session of the model, with kernels for all of its functions or with none."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if native:
        own = ctypes.CDLL(str(library()))
        names = [function.name for function in model.functions]
        known = own.onnxtrain_expect("\n".join(names).encode())
        assert known == len(names), f"there is no kernel for some of {names}"
        options.register_custom_ops_library(str(library()))
    providers = ["CPUExecutionProvider"]
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)


def run(model: onnx.ModelProto, feeds: Feeds, *, native: bool, threads: int = 1) -> list[Any]:
    return list(session_of(model, native=native, threads=threads).run(None, dict(feeds)))


def run_both(model: onnx.ModelProto, feeds: Feeds) -> tuple[list[Any], list[Any]]:
    """Return what the plain operators compute, and what the kernels do."""
    return run(model, feeds, native=False), run(model, feeds, native=True)


def assert_near(
    plain: Sequence[Any], native: Sequence[Any], ulps: float = 16, usual: float = 1e-30
) -> None:
    """Compare within some units in the last place of the largest element of each result.

    A result of few elements may have none of the `usual` size: that size counts then.
    """
    assert len(plain) == len(native)
    for expected, found in zip(plain, native, strict=True):
        assert expected.shape == found.shape
        assert expected.dtype == found.dtype
        if expected.size == 0:
            continue
        scale = float(np.max(np.abs(expected[np.isfinite(expected)]), initial=usual))
        np.testing.assert_allclose(found, expected, rtol=0, atol=ulps * scale * 2.0**-23)

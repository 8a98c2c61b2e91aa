"""The examples that onnx keeps of every operator: raised, or stamped lower, they mean the same.

This is the check that no table was written for: it has a node of almost every operator, with the
attributes and types that the authors of the standard thought worth an example.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.errors import ShapeInferenceError
from onnxtrain.offline.frontend.canonicalize import make_range_scalar
from onnxtrain.offline.frontend.upgrade import upgrade_to_floor
from onnxtrain.offline.graph.infer import infer_shapes
from onnxtrain.offline.graph.versions import FLOOR_OPSET
from onnxtrain.offline.writer.opset_stamp import stamp

pytestmark = pytest.mark.slow

Feeds = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def examples() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the examples divide by zero, on purpose
        from onnx.backend.test.case.node import collect_testcases

        return [case for case in collect_testcases(None) if case.model is not None]


def runnable(examples: list[Any], low: int, high: int) -> Iterator[tuple[str, Any, Feeds, Any]]:
    """Yield the examples of some opsets that onnxruntime runs, with what it computes."""
    for case in examples:
        opsets = {o.domain: o.version for o in case.model.opset_import}
        arrays = case.data_sets[0][0]
        if opsets.keys() != {""} or not low <= opsets[""] <= high:
            continue
        if not all(isinstance(array, np.ndarray) for array in arrays):
            continue
        names = [value.name for value in case.model.graph.input]
        feeds = dict(zip(names, arrays, strict=True))
        try:
            results = run(case.model, feeds)
        except Exception:  # no kernel for the type, or an opset that is too new
            continue
        yield case.name, case.model, feeds, results


def check(examples: list[Any], low: int, high: int, change: Callable[[ir.Model], None]) -> int:
    count, differing = 0, []
    for name, proto, feeds, before in runnable(examples, low, high):
        model = ir.from_proto(proto)
        change(model)
        changed = ir.to_proto(model)
        onnx.checker.check_model(changed)
        count += 1
        if not all(map(same, before, run(changed, feeds))):
            differing.append(name)
    assert not differing
    return count


def test_raised_examples_compute_the_same(examples: list[Any]) -> None:
    assert check(examples, 7, FLOOR_OPSET - 1, upgrade_to_floor) > 400


def test_lowered_examples_compute_the_same(examples: list[Any]) -> None:
    lowered = []

    def infer_and_stamp(model: ir.Model) -> None:
        make_range_scalar(model)
        try:
            infer_shapes(model)
        except ShapeInferenceError:
            return
        before = model.opset_imports[""]
        stamp(model)
        lowered.append(model.opset_imports[""] < before)

    assert check(examples, FLOOR_OPSET + 1, onnx.defs.onnx_opset_version(), infer_and_stamp) > 400
    assert sum(lowered) > 300


def same(before: Any, after: Any) -> bool:
    if isinstance(before, list):  # a sequence
        return len(before) == len(after) and all(map(same, before, after))
    if not isinstance(before, np.ndarray) or before.dtype.kind not in "fc":
        return bool(np.array_equal(before, after))
    return bool(np.allclose(before, after, rtol=1e-5, atol=1e-6, equal_nan=True))


def run(model: onnx.ModelProto, feeds: Feeds) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
    return list(session.run(None, feeds))

"""The cases that onnx keeps of every operator, expanded ones too, as gradient checks.

Each float output is differentiated with respect to each float input, and compared with finite
differences in a random direction, on onnxruntime, or on onnx's reference evaluator where that has
no kernel. No gradient may be wrong or NaN. None may be refused without need: where the output does
not change with an input, or where `REFUSED` names the mathematical cause.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_scan

import onnxtrain
from gradcheck import NEWEST_RUNNABLE_OPSET, all_nodes
from onnxtrain.errors import NotDifferentiableError, OnnxTrainError

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Any]
FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
STEPS = (1e-2, 1e-3, 1e-1, 1e-4, 1.0)  # curvature asks for small ones, rounding for large ones
HALF_STEPS = (1e-1, 3e-2, 0.3, 1e-2)
SAMPLE = 12  # one case in so many runs in the quick tests

# By case and input: why there is no derivative, although the output changes with the input.
REFUSED = {
    ("test_bernoulli*", "x"): "drawn at random: the draw jumps from 0 to 1 with the probability",
    ("test_training_dropout*", "r"): "drawn at random: the ratio is the threshold of the draw",
    ("test_resize*", "scales"): "the size of the result jumps with the scales",
    ("test_upsample*", "scales"): "the size of the result jumps with the scales",
    ("test_onehot*", "depth"): "an integer: the size of the result",
    ("test_range*", "limit"): "the size of the result jumps with the limit",
    ("test_castlike*", "like"): "only its type is read",
    ("test_ai_onnx_ml_tree_ensemble*", "X"): "piecewise constant: the leaf jumps with the input",
}

# Neither engine runs these as the standard says.
NOT_RUN = {
    "test_range_bfloat16_type_positive_delta_expanded": "the Loop of the reference evaluator makes "
    "rows of the scalars that it stacks, and onnxruntime adds no bfloat16",
}


@cache
def _cases() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases divide by zero, on purpose
        from onnx.backend.test.case.node import collect_testcases

        found = [case for case in collect_testcases(None) if case.model is not None]
    return {case.name: case for case in found if _is_float_path(case.model)}


def _is_float_path(model: onnx.ModelProto) -> bool:
    return all(
        any(_element(value) in FLOATS for value in values)
        for values in (model.graph.input, model.graph.output)
    )


def _element(value: onnx.ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % SAMPLE == 0 else pytest.mark.slow)
        for number, name in enumerate(_cases())
    ],
)
@pytest.mark.filterwarnings("ignore")  # of numpy, where the evaluator divides by zero
def test_case(name: str) -> None:
    if name in NOT_RUN:
        pytest.skip(NOT_RUN[name])
    case = _cases()[name]
    arrays = [_as_array(value) for value in case.data_sets[0][0]]
    names = [value.name for value in case.model.graph.input]
    check(name, case.model, dict(zip(names, arrays, strict=True)))


def test_there_are_cases_of_most_operators() -> None:
    assert len(_cases()) > 1200
    assert len({node.op_type for case in _cases().values() for node in case.model.graph.node}) > 150


def _as_array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, list | tuple):
        return [_as_array(each) for each in value]
    return np.asarray(value)


# ---- the check -----------------------------------------------------------------------------------


def check(name: str, model: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    """Check the gradient of every float output with respect to every float input."""
    run = _engine(model, feeds)
    inputs = [value.name for value in model.graph.input if _element(value) in FLOATS]
    for output in [value.name for value in model.graph.output if _element(value) in FLOATS]:
        reached = [x for x in inputs if _has_gradient(name, model, feeds, run, output, x)]
        if reached:
            _check_output(name, model, feeds, run, output, reached)


def _has_gradient(
    name: str, model: onnx.ModelProto, feeds: Feeds, run: Engine, of: str, wrt: str
) -> bool:
    """Tell whether there is a gradient; where it is refused, that has to be right."""
    refused = any(fnmatch(name, cases) and wrt == x for cases, x in REFUSED)
    try:
        onnxtrain.gradient(model, [wrt], of=of)
        return not refused
    except OnnxTrainError as error:
        if refused:
            return False
        assert isinstance(error, NotDifferentiableError), f"{of} by {wrt} is refused: {error}"
        assert "does not depend on" in str(error), f"{of} by {wrt} is refused: {error}"
    y = run(feeds, of)
    zero = _error(run, feeds, of, wrt, np.ones(y.shape), np.zeros(np.shape(feeds[wrt])), y)
    assert zero == 0, f"{of} changes with {wrt}, but is said not to depend on it"
    return False


def _check_output(
    name: str, model: onnx.ModelProto, feeds: Feeds, run: Engine, of: str, inputs: list[str]
) -> None:
    extended = onnxtrain.gradient(model, inputs, of=of)
    seeds = [v.name for v in extended.graph.input if v.name not in feeds]
    gradients = [v.name for v in extended.graph.output][len(model.graph.output) :]
    run_gradient = _engine(extended, {**feeds, **{seed: run(feeds, of) for seed in seeds}})
    for x, gradient in zip(inputs, gradients, strict=True):
        errors, shape = [], run(feeds, of).shape
        for point in _points(name, feeds[x]):
            at = {**feeds, x: point}
            try:
                y = run(at, of)
            except Exception:  # an index, or a size, that is not there beside the given point
                continue
            if y.shape != shape:
                continue
            ct = _cotangent(name, y) if seeds else np.ones_like(y)
            computed = run_gradient({**at, **dict.fromkeys(seeds, ct)}, gradient)
            assert computed.shape == np.shape(point), f"{of} by {x}"
            assert not np.isnan(_wide(computed)).any(), f"{of} by {x} is NaN"
            errors.append(_error(run, at, of, x, ct, computed, y))
            if errors[-1] <= 1:
                break
        assert min(errors) <= 1, f"{of} by {x} is wrong: {errors} times what is tolerated"


def _cotangent(name: str, y: Array) -> Array:
    """Return a random cotangent, zero where the output is not finite: nobody asks for that."""
    ct = _rng(name).standard_normal(y.shape)
    return np.asarray(np.where(np.isfinite(_wide(y)), ct, 0.0)).astype(y.dtype)


def _points(name: str, x: Any) -> Iterator[Array]:
    """Yield the given point, and some beside it: many lie on a kink, or at the end of a domain."""
    given = np.asarray(x)
    yield given
    rng = _rng(name)
    noise, sign = rng.uniform(0.01, 0.05, given.shape), rng.choice([-1, 1], given.shape)
    for step in (noise * sign, noise, -noise, noise * sign * 10):
        yield np.asarray(_wide(given) + step).astype(given.dtype)


def _error(
    run: Engine, feeds: Feeds, of: str, wrt: str, ct: Array, computed: Array, y: Array
) -> float:
    """Return by how much a gradient misses finite differences, over what is tolerated."""
    x, rng, least = _wide(feeds[wrt]), _rng(wrt), np.inf
    kind = np.asarray(feeds[wrt]).dtype
    half = min(kind.itemsize, y.dtype.itemsize) <= 2
    used = np.asarray(ct, np.float64) != 0
    for step in (HALF_STEPS if half else STEPS) * 2:
        t = _wide(np.asarray(rng.standard_normal(x.shape)).astype(kind))
        try:
            ahead, behind = (
                _wide(run({**feeds, wrt: np.asarray(x + sign * step * t).astype(kind)}, of))
                for sign in (1, -1)
            )
        except Exception:  # as in _check_output
            continue
        if ahead.shape != y.shape or behind.shape != y.shape:
            continue
        slope = np.where(used & (ahead != behind), (ahead - behind) / (2 * step), 0.0)
        expected = np.sum(_wide(ct) * slope)
        actual = np.sum(np.where(np.isfinite(x), _wide(computed), 0) * t)
        scale = np.linalg.norm(_wide(ct)) * np.linalg.norm(slope) + 1e-6
        rounding = 1e-5 * np.linalg.norm(_wide(ct)) * np.linalg.norm(_wide(y)[used])
        tolerance = (8e-2 if half else 1e-2) * scale + (rounding if actual else 0.0)
        least = min(least, abs(expected - actual) / tolerance)
        if least <= 1:
            break
    return float(least)


def _wide(array: Any) -> Array:
    return np.asarray(array).astype(np.float64)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


# ---- engines -------------------------------------------------------------------------------------

Engine = Callable[[Feeds, str], Array]


def _engine(model: onnx.ModelProto, feeds: Feeds) -> Engine:
    """Return onnxruntime as the engine, or the reference evaluator where that has no kernel."""
    names = [value.name for value in model.graph.output]
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(
            _at_runnable_opset(model).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        wanted = {value.name for value in session.get_inputs()}
        session.run(None, {k: v for k, v in feeds.items() if k in wanted})
    except Exception:  # no kernel for the type, or an opset that is too new
        evaluator = ReferenceEvaluator(model, new_ops=[Scan, Pad])
        return lambda feeds, name: np.asarray(evaluator.run(None, dict(feeds))[names.index(name)])
    return lambda feeds, name: session.run([name], {k: v for k, v in feeds.items() if k in wanted})[
        0
    ]


def _at_runnable_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model at an opset that onnxruntime accepts, if its operators are that old."""
    opset = max(entry.version for entry in model.opset_import)
    versions = [
        onnx.defs.get_schema(node.op_type, opset, "").since_version
        for node in all_nodes(model.graph)
        if node.domain == ""
    ]
    if max(versions, default=1) > NEWEST_RUNNABLE_OPSET:
        return model
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    for entry in lowered.opset_import:
        if entry.domain == "":
            entry.version = min(entry.version, NEWEST_RUNNABLE_OPSET)
    return lowered


class Scan(op_scan.Scan):  # type: ignore[misc]
    """Scan in both directions; the one of the evaluator knows only one."""

    op_domain = ""

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        node = onnx.NodeProto()
        node.CopyFrom(onnx_node)
        kept = [a for a in node.attribute if not a.name.endswith("_directions")]
        given = {a.name: list(a.ints) for a in node.attribute if a not in kept}
        del node.attribute[:]
        node.attribute.extend(kept)
        super().__init__(node, run_params)
        self._inputs = given.get("scan_input_directions", [])
        self._outputs = given.get("scan_output_directions", [])

    def _run(self, *args: Any, **attributes: Any) -> Any:
        states = len(args) - attributes["num_scan_inputs"]
        flipped = [_flip(a, self._inputs, i - states) for i, a in enumerate(args)]
        results = super()._run(*flipped, **attributes)
        return tuple(_flip(r, self._outputs, i - states) for i, r in enumerate(results))


def _flip(array: Array, directions: list[int], number: int) -> Array:
    return array[::-1] if number >= 0 and directions and directions[number] else array


class Pad(OpRun):  # type: ignore[misc]
    """Pad with zeros that also crops, where pads are negative; the one of the evaluator fails."""

    op_domain = ""

    def _run(
        self, x: Array, pads: Array, value: Any = None, axes: Any = None, mode: Any = None
    ) -> tuple[Array]:
        along = np.arange(x.ndim) if axes is None else np.asarray(axes) % x.ndim
        widths = np.zeros((x.ndim, 2), np.int64)
        widths[along] = np.asarray(pads).reshape(2, -1).T
        kept = tuple(
            slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, x.shape, strict=True)
        )
        kind = (mode or b"constant").decode() if isinstance(mode, bytes) else mode or "constant"
        given = {"constant_values": value if value is not None else 0} if kind == "constant" else {}
        return (np.pad(x[kept], np.maximum(widths, 0), mode=kind, **given).astype(x.dtype),)

"""The cases that onnx keeps of every operator, expanded ones too, as gradient checks.

Each float output is differentiated with respect to each float input, and compared with finite
differences in a random direction, on onnxruntime, or on onnx's reference evaluator where that has
no kernel. No gradient may be wrong or NaN. None may be refused without need: where the output does
not change with an input, or where `REFUSED` names the mathematical cause.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import onnxtrain
from finite_differences import Array, Engine, Feeds, engine, miss, rng_of, wide
from onnxtrain.errors import NotDifferentiableError, OnnxTrainError

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
SAMPLE = 30  # one case in so many runs in the quick tests

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
    run = engine(model, feeds)
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
    zero = miss(run, feeds, of, {wrt: np.zeros(np.shape(feeds[wrt]))}, np.ones(y.shape), y)
    assert zero == 0, f"{of} changes with {wrt}, but is said not to depend on it"
    return False


def _check_output(
    name: str, model: onnx.ModelProto, feeds: Feeds, run: Engine, of: str, inputs: list[str]
) -> None:
    extended = onnxtrain.gradient(model, inputs, of=of)
    seeds = [v.name for v in extended.graph.input if v.name not in feeds]
    gradients = [v.name for v in extended.graph.output][len(model.graph.output) :]
    run_gradient = engine(extended, {**feeds, **{seed: run(feeds, of) for seed in seeds}})
    for x, gradient in zip(inputs, gradients, strict=True):
        errors, shape = [], run(feeds, of).shape
        for point in _points(name, feeds[x]):
            at = {**feeds, x: point}
            try:
                y = run(at, of)
            except Exception:  # an index, or a size, that is not there beside the given point
                continue
            ct = _cotangent(name, y) if seeds else np.ones_like(y)
            try:
                computed = run_gradient({**at, **dict.fromkeys(seeds, ct)}, gradient)
            except Exception:  # a shape that the case declares otherwise
                assert y.shape != shape
                continue
            assert computed.shape == np.shape(point), f"{of} by {x}"
            assert not np.isnan(wide(computed)).any(), f"{of} by {x} is NaN"
            errors.append(miss(run, at, of, {x: computed}, ct, y))
            if errors[-1] <= 1:
                break
        assert min(errors) <= 1, f"{of} by {x} is wrong: {errors} times what is tolerated"


def _cotangent(name: str, y: Array) -> Array:
    """Return a random cotangent, zero where the output is not finite: nobody asks for that."""
    ct = rng_of(name).standard_normal(y.shape)
    return np.asarray(np.where(np.isfinite(wide(y)), ct, 0.0)).astype(y.dtype)


def _points(name: str, x: Any) -> Iterator[Array]:
    """Yield the given point, and some beside it: many lie on a kink, or at the end of a domain."""
    given = np.asarray(x)
    yield given
    rng = rng_of(name)
    noise, sign = rng.uniform(0.01, 0.05, given.shape), rng.choice([-1, 1], given.shape)
    for step in (noise * sign, noise, -noise, noise * sign * 10):
        yield np.asarray(wide(given) + step).astype(given.dtype)

"""Second derivatives: the gradient of every Spec is differentiated again.

With random vectors v, the scalar Σ <v, gradient> is a function of the inputs and of the cotangent;
its gradient, a Hessian-vector product, is compared with finite differences.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from finite_differences import Engine, engine, miss, rng_of, wide
from gradcheck import Spec, _checked_inputs, _feeds, _one_node_model, _sample
from onnxtrain.errors import NotDifferentiableError

SAMPLE = 20  # one Spec in so many runs in the quick tests
NO_SECOND_DERIVATIVE = {
    "CumProd-zeros*": "the rule picks the products without one factor by which factors are zero; "
    "at a zero, its own derivative would need those without two",
    "Min": "two operands tie",
    "Pow-negative-base": "a negative number has real powers for whole exponents only, so none "
    "beside them",
}


def _specs() -> list[Spec]:
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    found: list[Spec] = []
    for file in files:
        if file.stem != __name__:
            with suppress(pytest.skip.Exception):  # it needs torch, and the quick tests have none
                found += getattr(importlib.import_module(file.stem), "SPECS", ())
    return found


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=spec.name, marks=() if number % SAMPLE == 0 else pytest.mark.slow)
        for number, spec in enumerate(_specs())
    ],
)
@pytest.mark.filterwarnings("ignore")  # of numpy, where the reference evaluator overflows
def test_second_derivative(spec: Spec) -> None:
    for pattern, reason in NO_SECOND_DERIVATIVE.items():
        if fnmatch(spec.name, pattern):
            pytest.skip(reason)
    arrays = _sample(spec)
    feeds: dict[str, Any] = _feeds(spec, arrays)
    model = _one_node_model(spec, arrays, False, np.float32)
    of = f"y{spec.of}"
    wrt = [f"x{i}" for i in _checked_inputs(spec, arrays)]
    first = onnxtrain.gradient(model, wrt, of=of)
    if any(value.name == f"{of}_grad" for value in first.graph.input):
        y = engine(model, feeds)(feeds, of)
        feeds[f"{of}_grad"] = np.asarray(rng_of(spec.name).standard_normal(y.shape)).astype(y.dtype)
        wrt.append(f"{of}_grad")
    combined = with_product(spec.name, first, feeds)
    run = engine(combined, feeds)
    reached = wrt if _reaches(combined, wrt) else [x for x in wrt if _reaches(combined, [x])]
    still = {x: np.zeros(np.shape(feeds[x])) for x in wrt if x not in reached}
    product = run(feeds, "product")
    if still:
        assert miss(run, feeds, "product", still, np.ones(()), product) <= 1, list(still)
    if reached:  # the gradient of a linear loss is a constant
        _compare(combined, feeds, run, reached)


def _compare(
    combined: onnx.ModelProto, feeds: dict[str, Any], run: Engine, reached: list[str]
) -> None:
    second = onnxtrain.gradient(combined, reached, of="product")
    names = [value.name for value in second.graph.output][len(combined.graph.output) :]
    run_second = engine(second, feeds)
    found = {x: run_second(feeds, name) for x, name in zip(reached, names, strict=True)}
    for x, gradient in found.items():
        assert np.isfinite(wide(gradient)).all(), f"by {x}"
    error = miss(run, feeds, "product", found, np.ones(()), run(feeds, "product"))
    assert error <= 1, f"wrong by {error} times what is tolerated"


def _reaches(model: onnx.ModelProto, wrt: list[str]) -> bool:
    """Tell whether there is a gradient; a piecewise linear function has none of its gradient."""
    try:
        onnxtrain.gradient(model, wrt, of="product")
    except NotDifferentiableError as error:
        assert "does not depend on" in str(error), str(error)
        return False
    return True


def with_product(name: str, first: onnx.ModelProto, feeds: dict[str, Any]) -> onnx.ModelProto:
    """Return a gradient model whose one output is Σ <v, gradient>."""
    combined = onnx.ModelProto()
    combined.CopyFrom(first)
    run = engine(first, feeds)
    gradients = [v.name for v in first.graph.output if v.name.endswith("_grad")]
    sums = []
    for gradient in gradients:
        value = run(feeds, gradient)
        vector = np.asarray(rng_of(name).standard_normal(value.shape)).astype(value.dtype)
        combined.graph.initializer.append(numpy_helper.from_array(vector, f"{gradient}_v"))
        combined.graph.node.extend([
            helper.make_node("Mul", [gradient, f"{gradient}_v"], [f"{gradient}_w"]),
            helper.make_node("ReduceSum", [f"{gradient}_w"], [f"{gradient}_s"], keepdims=0),
        ])  # fmt: skip
        sums.append(f"{gradient}_s")
    combined.graph.node.append(helper.make_node("Sum", sums, ["product"]))
    kind = helper.np_dtype_to_tensor_dtype(run(feeds, gradients[0]).dtype)
    del combined.graph.output[:]
    combined.graph.output.append(helper.make_tensor_value_info("product", kind, []))
    return combined

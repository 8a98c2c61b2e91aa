"""BatchNormalization folded into the layer before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from by_hand import Builder, feeds
from deploying import outputs_of

from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.passes.fold_batch_norm import fold_batch_norm


def folded(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    canonical = canonical_model(model)
    notes = fold_batch_norm(canonical)
    return ir.to_proto(canonical), notes


def norms(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "BatchNormalization" for node in model.graph.node)


def conv(b: Builder, bias: bool) -> Any:
    given = [b.random(6, 3, 3, 3), *([b.random(6)] if bias else [])]
    return b.norm(b("Conv", "x", *given), 6), ["N", 3, 8, 8], ["N", 6, 6, 6]


def transposed(b: Builder, bias: bool) -> Any:
    given = [b.random(4, 3, 2, 2), *([b.random(6)] if bias else [])]
    y = b("ConvTranspose", "x", *given, group=2, strides=[2, 2])
    return b.norm(y, 6), ["N", 4, 5, 5], ["N", 6, 10, 10]


def gemm(b: Builder, bias: bool) -> Any:
    return b.norm(b.gemm("x", 5, 6, bias), 6), ["N", 5], ["N", 6]


def plain_gemm(b: Builder, bias: bool) -> Any:
    given = [b.random(5, 6), *([b.random(6)] if bias else [])]
    return b.norm(b("Gemm", "x", *given), 6), ["N", 5], ["N", 6]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("write", [conv, transposed, gemm, plain_gemm])
def test_the_result_is_the_same(write: Any, bias: bool) -> None:
    b = Builder()
    y, given, made = write(b, bias)
    model = b.model({"x": given}, {y: made})
    result, notes = folded(model)
    assert norms(result) == 0 and not notes
    x = feeds(model)
    np.testing.assert_allclose(outputs_of(result, x)[0], outputs_of(model, x)[0], atol=1e-5)


def test_a_norm_in_training_mode_is_folded_with_its_statistics() -> None:
    b = Builder()
    y = b.norm(b.conv("x", 3, 6), 6)
    model = b.model({"x": ["N", 3, 8, 8]}, {y: ["N", 6, 8, 8]})
    expected = outputs_of(model, feeds(model))[0]
    norm = model.graph.node[-1]
    norm.attribute.append(onnx.helper.make_attribute("training_mode", 1))
    norm.output.extend(["mean", "variance"])
    result, _ = folded(model)
    assert norms(result) == 0
    np.testing.assert_allclose(outputs_of(result, feeds(model))[0], expected, atol=1e-5)


def test_others_stay_and_say_why() -> None:
    b = Builder()
    shared = b.random(6, 6, 1, 1)
    x = b.norm("x", 6)
    x = b("Relu", b.norm(b("Conv", x, shared), 6))
    x = b.norm(b("Add", b.norm(b("Conv", x, shared), 6), x), 6)
    model = b.model({"x": ["N", 6, 4, 4]}, {x: ["N", 6, 4, 4]})
    result, notes = folded(model)
    assert norms(result) == 4
    text = " ".join(notes)
    for reason in ("input of the model", "belong to several layers", "behind Add"):
        assert reason in text
    given = feeds(model)
    np.testing.assert_allclose(outputs_of(result, given)[0], outputs_of(model, given)[0], atol=1e-5)


def test_a_norm_beside_another_reader_stays() -> None:
    b = Builder()
    x = b.conv("x", 3, 6)
    y = b("Add", b.norm(x, 6), x)
    result, notes = folded(b.model({"x": ["N", 3, 8, 8]}, {y: ["N", 6, 8, 8]}))
    assert norms(result) == 1 and "something else reads" in notes[0]

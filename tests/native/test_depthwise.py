"""Convolutions of one input channel for each group: against their functions, and against torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both

Array = np.ndarray[Any, Any]
Ints = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A convolution; axes have the same kernel, stride, dilation and padding unless told."""

    space: Ints
    kernel: Ints
    channels: int = 3
    multiplier: int = 1
    batch: int = 2
    stride: Ints = ()
    dilation: Ints = ()
    pads: Ints = ()
    bias: bool = False

    def axes(self, given: Ints, otherwise: int) -> list[int]:
        return list(given or (otherwise,) * len(self.space))

    @property
    def attributes(self) -> dict[str, Any]:
        rank = len(self.space)
        return {
            "kernel_shape": list(self.kernel),
            "strides": self.axes(self.stride, 1),
            "dilations": self.axes(self.dilation, 1),
            "pads": list(self.pads or (0,) * 2 * rank),
            "group": self.channels,
        }

    def model(self) -> onnx.ModelProto:
        filters = self.channels * self.multiplier
        shapes: dict[str, Any] = {
            "x": (self.batch, self.channels, *self.space),
            "w": (filters, 1, *self.kernel),
            "b": (filters,),
        }
        names = ["x", "w", "b"] if self.bias else ["x", "w"]
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shapes[n]) for n in names]
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        node = helper.make_node("Conv", names, ["y"], **self.attributes)
        graph = helper.make_graph([node], "graph", inputs, [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)

    def feeds(self) -> dict[str, Array]:
        model = self.model()
        random = np.random.default_rng(0)
        found = {}
        for value in (*model.graph.input, *model.graph.output):
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            name = "y_grad" if value.name == "y" else value.name
            found[name] = random.normal(size=shape).astype(np.float32)
        return found


SAME, WIDE = (1, 1, 1, 1), (2, 2, 2, 2)
CASES = {
    "same": Case((9, 11), (3, 3), pads=SAME),
    "same_7": Case((7, 7), (3, 3), pads=SAME, channels=5),
    "same_14": Case((14, 14), (3, 3), pads=SAME),
    "same_56": Case((56, 56), (3, 3), pads=SAME, channels=2),
    "several_tiles": Case((113, 112), (3, 3), pads=SAME, channels=2, batch=1),
    "five": Case((13, 17), (5, 5), pads=WIDE),
    "five_stride": Case((28, 28), (5, 5), pads=WIDE, stride=(2, 2)),
    "stride": Case((14, 14), (3, 3), pads=SAME, stride=(2, 2)),
    "stride_odd": Case((23, 33), (3, 3), pads=SAME, stride=(2, 2)),
    "stride_end": Case((14, 14), (3, 3), pads=(0, 0, 1, 1), stride=(2, 2)),
    "stride_beyond": Case((15, 16), (2, 2), stride=(3, 4)),
    "uneven": Case((9, 20), (3, 5), pads=(0, 1, 2, 3), stride=(1, 3), dilation=(2, 1)),
    "dilated": Case((20, 21), (3, 3), pads=WIDE, dilation=(2, 2)),
    "far": Case((9, 900), (2, 3), dilation=(1, 400)),
    "much_padding": Case((3, 3), (3, 3), pads=(6, 7, 8, 9)),
    "single": Case((1, 1), (1, 1), channels=2, batch=1),
    "single_padded": Case((1, 1), (3, 3), pads=SAME, channels=2, batch=1),
    "multiplier": Case((9, 9), (3, 3), pads=SAME, multiplier=3),
    "multiplier_stride": Case((9, 9), (3, 3), pads=SAME, multiplier=2, stride=(2, 2)),
    "bias": Case((9, 9), (3, 3), pads=SAME, bias=True),
    "bias_stride": Case((9, 9), (3, 3), pads=SAME, bias=True, stride=(2, 1)),
    "one_axis": Case((200,), (9,), pads=(4, 4), channels=4),
    "one_long_axis": Case((3000,), (4,), stride=(2,), channels=2),
    "three_axes": Case((5, 9, 8), (3, 3, 3), pads=(1,) * 6),
    "three_axes_stride": Case((5, 9, 8), (2, 3, 2), stride=(2, 1, 3), pads=(1, 0, 0, 0, 1, 1)),
    "no_batch": Case((9, 9), (3, 3), pads=SAME, batch=0),
    "many_images": Case((16, 24), (3, 3), pads=SAME, batch=40, channels=2),
}


def gradient_of(case: Case) -> onnx.ModelProto:
    names = ["x", "w", "b"] if case.bias else ["x", "w"]
    return gradient_with_functions(case.model(), names)


@pytest.mark.parametrize("name", CASES)
def test_like_the_function(name: str) -> None:
    case = CASES[name]
    model = gradient_of(case)
    assert kinds_of(model) >= {"Conv", "ConvGradInput", "ConvGradWeight"}
    assert_near(*run_both(model, case.feeds()))


@pytest.mark.parametrize("name", [n for n in CASES if n != "no_batch"])
def test_like_torch(name: str) -> None:
    case, feeds = CASES[name], CASES[name].feeds()
    rank = len(case.space)
    given = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in feeds.items()}
    dy = given.pop("y_grad")
    pads = case.attributes["pads"]
    around = [p for axis in reversed(range(rank)) for p in (pads[axis], pads[rank + axis])]
    convolve = getattr(torch.nn.functional, f"conv{rank}d")
    y = convolve(
        torch.nn.functional.pad(given["x"], around), given["w"], given.get("b"),
        stride=case.attributes["strides"], dilation=case.attributes["dilations"],
        groups=case.channels,
    )  # fmt: skip
    y.backward(dy)
    expected = [y.detach(), *(v.grad for v in given.values())]
    found = run(gradient_of(case), feeds, native=True)
    assert_near([e.numpy().astype(np.float32) for e in expected if e is not None], found)


def test_same_numbers_with_any_number_of_threads() -> None:
    for name in ("several_tiles", "five", "stride_odd", "many_images"):
        model, feeds = gradient_of(CASES[name]), CASES[name].feeds()
        first = run(model, feeds, native=True)
        for threads in (1, 2, 3):
            for a, b in zip(first, run(model, feeds, native=True, threads=threads), strict=True):
                np.testing.assert_array_equal(a, b)


def test_weights_of_many_elements_keep_their_digits() -> None:
    case = Case((112, 112), (3, 3), pads=SAME, channels=2, batch=16)
    feeds = case.feeds()
    feeds["x"], feeds["y_grad"] = np.abs(feeds["x"]), np.abs(feeds["y_grad"])
    x, dy = (torch.tensor(feeds[n], dtype=torch.float64) for n in ("x", "y_grad"))
    expected = torch.nn.grad.conv2d_weight(x, (2, 1, 3, 3), dy, padding=1, groups=2).numpy()
    found = run(gradient_of(case), feeds, native=True)[2]
    np.testing.assert_allclose(found, expected, rtol=4 * 2.0**-23)


def test_infinity_stays_in_its_place() -> None:
    case = CASES["same_56"]
    feeds = case.feeds()
    feeds["x"][0, 0, 5, 5] = np.inf
    plain, native = run_both(gradient_of(case), feeds)
    np.testing.assert_array_equal(np.isfinite(plain[0]), np.isfinite(native[0]))

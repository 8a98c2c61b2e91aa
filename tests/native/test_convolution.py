"""Convolutions of many channels: against their functions, against torch, and with wrong inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both
from native.kernel_calls import call

Array = np.ndarray[Any, Any]
Ints = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A convolution, or its transpose, from `inputs` to `outputs` channels for each group."""

    space: Ints
    kernel: Ints
    inputs: int = 3
    outputs: int = 5
    batch: int = 2
    stride: Ints = ()
    dilation: Ints = ()
    pads: Ints = ()
    groups: int = 1
    bias: bool = False
    transposed: bool = False
    extra: Ints = ()  # output padding

    def axes(self, given: Ints, otherwise: int) -> list[int]:
        return list(given or (otherwise,) * len(self.space))

    @property
    def attributes(self) -> dict[str, Any]:
        made = {
            "kernel_shape": list(self.kernel),
            "strides": self.axes(self.stride, 1),
            "dilations": self.axes(self.dilation, 1),
            "pads": list(self.pads or (0,) * 2 * len(self.space)),
            "group": self.groups,
        }
        if self.transposed:
            made["output_padding"] = self.axes(self.extra, 0)
        return made

    @property
    def names(self) -> list[str]:
        return ["x", "w", "b"] if self.bias else ["x", "w"]

    def model(self) -> onnx.ModelProto:
        wide, narrow = self.inputs * self.groups, self.outputs * self.groups
        weight = (wide, self.outputs) if self.transposed else (narrow, self.inputs)
        shapes: dict[str, Any] = {
            "x": (self.batch, wide, *self.space),
            "w": (*weight, *self.kernel),
            "b": (narrow,),
        }
        given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shapes[n]) for n in self.names]
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        kind = "ConvTranspose" if self.transposed else "Conv"
        node = helper.make_node(kind, self.names, ["y"], **self.attributes)
        graph = helper.make_graph([node], "graph", given, [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)

    def gradient(self) -> onnx.ModelProto:
        return gradient_with_functions(self.model(), self.names)

    def feeds(self) -> dict[str, Array]:
        model = self.model()
        random = np.random.default_rng(0)
        found = {}
        for value in (*model.graph.input, *model.graph.output):
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            name = "y_grad" if value.name == "y" else value.name
            found[name] = random.normal(size=shape).astype(np.float32)
        return found


SAME = (1, 1, 1, 1)
CASES = {
    # Kernels of 3 × 3 taps and enough channels for Winograd's maps.
    "three": Case((8, 8), (3, 3), 16, 16, pads=SAME),
    "three_odd": Case((7, 9), (3, 3), 17, 33, pads=SAME, bias=True),
    "three_unpadded": Case((12, 5), (3, 3), 20, 18),
    "three_much_padding": Case((3, 2), (3, 3), 16, 16, pads=(3, 4, 2, 3)),
    "three_uneven": Case((5, 6), (3, 3), 16, 40, pads=(0, 1, 2, 0)),
    "three_wide": Case((3, 300), (3, 3), 16, 16, pads=SAME, batch=1),
    "three_high": Case((301, 2), (3, 3), 16, 16, pads=SAME, batch=1),
    "three_small": Case((1, 1), (3, 3), 16, 16, pads=SAME, batch=1),
    "three_groups": Case((6, 6), (3, 3), 16, 24, pads=SAME, groups=2, bias=True),
    "three_deep": Case((4, 4), (3, 3), 300, 140, pads=SAME, batch=3),
    # Lines of channels.
    "stride": Case((12, 11), (3, 3), 16, 20, pads=SAME, stride=(2, 2), bias=True),
    "stride_uneven": Case((9, 20), (3, 4), 33, 16, pads=(0, 1, 2, 3), stride=(3, 2)),
    "stride_beyond": Case((15, 16), (2, 2), 18, 17, stride=(3, 4)),
    "stride_one_pixel": Case((1, 5), (2, 3), 16, 16, stride=(2, 3), pads=SAME),
    "dilated": Case((12, 13), (3, 3), 16, 16, dilation=(2, 3), pads=(2, 3, 2, 3)),
    "five": Case((9, 9), (5, 5), 16, 32, pads=(2,) * 4),
    "grouped_stride": Case((9, 8), (3, 3), 16, 16, groups=3, stride=(2, 2), pads=SAME),
    "one_axis": Case((100,), (5,), 24, 16, stride=(2,), pads=(2, 2)),
    "three_axes": Case((5, 6, 7), (3, 2, 3), 16, 16, stride=(2, 1, 2), pads=(1, 0, 1, 1, 1, 0)),
    "three_axes_dense": Case((4, 5, 6), (3, 3, 3), 17, 16, pads=(1,) * 6),
    # Single taps.
    "point": Case((7, 7), (1, 1), 20, 70, batch=4, bias=True),
    "point_groups": Case((5, 6), (1, 1), 6, 4, groups=3),
    "point_long": Case((60, 60), (1, 1), 24, 9),
    "point_stride": Case((9, 8), (1, 1), 18, 40, stride=(2, 2), bias=True),
    "point_padded": Case((4, 5), (1, 1), 4, 4, pads=(1, 0, 2, 1), stride=(1, 2)),
    "point_one_axis": Case((1,), (1,), 1, 1, batch=1),
    # Few channels: patches.
    "few": Case((28, 27), (3, 3), 1, 32, bias=True),
    "few_stride": Case((31, 30), (3, 3), 3, 20, stride=(2, 2), pads=SAME),
    "few_stride_four": Case((31, 30), (7, 5), 3, 8, stride=(4, 3), pads=(3, 2, 3, 2)),
    "few_dilated": Case((14, 15), (3, 2), 2, 3, dilation=(2, 4), pads=(0, 2, 1, 3)),
    "few_groups": Case((8, 9), (3, 3), 2, 3, groups=4, pads=SAME),
    "few_one_axis": Case((200,), (9,), 2, 3, stride=(3,), pads=(4, 1)),
    "few_three_axes": Case((4, 5, 6), (2, 3, 2), 2, 3, stride=(1, 2, 3), pads=(1, 0, 1, 0, 1, 1)),
    "few_results": Case((20, 21), (3, 3), 200, 3, pads=SAME, bias=True),
    "few_lines": Case((40, 300), (5, 3), 12, 6, stride=(2, 1), pads=(2, 1, 2, 1), batch=1),
    "few_long": Case((9000,), (80,), 1, 32, stride=(4,), pads=(40, 40), bias=True),
    "few_dilated_line": Case((3000,), (3,), 8, 8, dilation=(512,), pads=(1024, 0)),
    "few_planes": Case((20, 19, 18), (3, 3, 3), 4, 15, pads=(1,) * 6, batch=1),
    "few_patches": Case((64, 48), (16, 16), 3, 40, stride=(16, 16), batch=3),
    "few_in_many_groups": Case((7, 7), (3, 3), 4, 4, groups=32, pads=SAME, stride=(2, 2), batch=9),
    "multiplied_groups": Case((12, 12), (3, 3), 1, 3, groups=5, pads=SAME),
    "few_and_one_pixel": Case((1, 1), (3, 3), 2, 5, pads=SAME),
    "few_and_gaps": Case((17, 16), (2, 2), 3, 4, stride=(3, 5)),
    "few_far": Case((6, 5), (3, 3), 2, 3, dilation=(90, 100), pads=(90, 100, 90, 100)),
    "few_gaps_and_far": Case((60, 70), (2, 2), 2, 3, dilation=(30, 20), stride=(25, 17)),
    "many_images": Case((3, 3), (2, 2), 3, 4, batch=70),
    "no_batch": Case((6, 6), (3, 3), 16, 16, pads=SAME, batch=0),
    "no_batch_few": Case((6, 6), (2, 3), 3, 4, batch=0, bias=True),
    # Transposes.
    "transposed": Case((5, 6), (3, 3), 16, 18, pads=SAME, transposed=True, bias=True),
    "transposed_stride": Case(
        (5, 6), (4, 3), 18, 16, stride=(2, 3), pads=SAME, extra=(1, 2), transposed=True
    ),
    "transposed_few": Case((7,), (4,), 2, 3, stride=(3,), extra=(1,), transposed=True, bias=True),
    "transposed_groups": Case((4, 5), (2, 2), 3, 2, groups=2, stride=(2, 2), transposed=True),
}


@pytest.mark.parametrize("name", CASES)
def test_like_the_function(name: str) -> None:
    case = CASES[name]
    model = case.gradient()
    expected = {"Conv", "ConvGradInput", "ConvGradWeight"} | ({"ConvGradBias"} & kinds_of(model))
    assert kinds_of(model) == expected
    assert case.bias == ("ConvGradBias" in expected)
    assert_near(*run_both(model, case.feeds()), ulps=24)


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("no_batch")])
def test_like_torch(name: str) -> None:
    case, feeds = CASES[name], CASES[name].feeds()
    given = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in feeds.items()}
    dy = given.pop("y_grad")
    y = _with_torch(case, given)
    y.backward(dy)
    expected = [y.detach(), *(v.grad for v in given.values())]
    found = run(case.gradient(), feeds, native=True)
    assert_near([e.numpy().astype(np.float32) for e in expected if e is not None], found)


def _with_torch(case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    rank, attributes = len(case.space), case.attributes
    before, after = attributes["pads"][:rank], attributes["pads"][rank:]
    strides, dilations = attributes["strides"], attributes["dilations"]
    if case.transposed:
        assert before == after
        convolve = getattr(torch.nn.functional, f"conv_transpose{rank}d")
        return convolve(
            given["x"], given["w"], given.get("b"), strides, before,
            attributes["output_padding"], case.groups, dilations,
        )  # fmt: skip
    around = [p for ends in zip(reversed(before), reversed(after), strict=True) for p in ends]
    padded = torch.nn.functional.pad(given["x"], around)
    convolve = getattr(torch.nn.functional, f"conv{rank}d")
    return convolve(padded, given["w"], given.get("b"), strides, 0, dilations, case.groups)


def test_same_numbers_with_any_number_of_threads() -> None:
    large = Case((33, 34), (3, 3), 64, 64, pads=SAME, batch=3)
    names = ("three_deep", "stride", "point_long", "few", "few_lines", "few_planes")
    cases = [large, *(CASES[n] for n in names)]
    for case in cases:
        model, feeds = case.gradient(), case.feeds()
        first = run(model, feeds, native=True)
        for threads in (1, 2, 3):
            for a, b in zip(first, run(model, feeds, native=True, threads=threads), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("inputs", [4, 16])
def test_weights_of_many_elements_keep_their_digits(inputs: int) -> None:
    case = Case((64, 64), (3, 3), inputs, 16, pads=SAME, batch=8)
    feeds = case.feeds()
    feeds["x"], feeds["y_grad"] = np.abs(feeds["x"]), np.abs(feeds["y_grad"])
    x, dy = (torch.tensor(feeds[n], dtype=torch.float64) for n in ("x", "y_grad"))
    expected = torch.nn.grad.conv2d_weight(x, (16, inputs, 3, 3), dy, padding=1).numpy()
    found = run(case.gradient(), feeds, native=True)[2]
    np.testing.assert_allclose(found, expected, rtol=8 * 2.0**-23)


def test_symbolic_sizes() -> None:
    case = CASES["stride"]
    model, feeds = case.model(), case.feeds()
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim, "nchw", strict=True):
        if name != "c":
            dim.dim_param = name
    del model.graph.value_info[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    gradient = gradient_with_functions(onnx.shape_inference.infer_shapes(model), case.names)
    assert "ConvGradInput" in kinds_of(gradient)
    assert_near(*run_both(gradient, feeds))


def test_padding_at_run_time_stays_plain() -> None:
    case = CASES["stride"]
    model = case.model()
    node = model.graph.node[0]
    for attribute in [a for a in node.attribute if a.name == "pads"]:
        node.attribute.remove(attribute)
    node.attribute.append(helper.make_attribute("auto_pad", "SAME_UPPER"))
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim, "nchw", strict=True):
        if name in "hw":
            dim.dim_param = name
    model.graph.output[0].type.tensor_type.ClearField("shape")
    gradient = gradient_with_functions(onnx.shape_inference.infer_shapes(model), case.names)
    assert kinds_of(gradient) == {"ConvGradBias"}


def test_other_types_stay_plain() -> None:
    model = CASES["stride"].model()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    assert not gradient_with_functions(model, ["x", "w"]).functions


def floats(*shape: int) -> Array:
    return np.ones(shape, np.float32)


LINE, POINT = floats(1, 1, 2), floats(1, 1, 1)
# A kernel, its inputs and attributes, and a word of what it says to them.
WRONG: dict[str, tuple[str, list[Array], dict[str, Any], str]] = {
    "channels": ("Conv", [floats(1, 3, 4, 4), floats(2, 4, 3, 3)], {}, "channels"),
    "groups": ("Conv", [floats(1, 4, 4, 4), floats(3, 2, 1, 1)], {"group": 2}, "groups"),
    "no_groups": ("Conv", [floats(1, 4, 4), floats(3, 4, 1)], {"group": 0}, "groups"),
    "ranks": ("Conv", [floats(1, 4, 4, 4), floats(3, 4, 1)], {}, "axes"),
    "axes": ("Conv", [floats(1, 1, 2, 2, 2, 2), floats(1, 1, 1, 1, 1, 1)], {}, "axes"),
    "flat": ("Conv", [floats(4, 4), floats(4, 4)], {}, "axes"),
    "large_kernel": ("Conv", [LINE, floats(1, 1, 3)], {}, "larger"),
    "stride": ("Conv", [LINE, POINT], {"strides": [0]}, "positive"),
    "pads": ("Conv", [LINE, POINT], {"pads": [-1, 0]}, "negative"),
    "huge_pads": ("Conv", [LINE, POINT], {"pads": [2**40, 0]}, "too large"),
    "huge_pads_behind": ("Conv", [LINE, POINT], {"pads": [0, 2**62]}, "out of range"),
    "short_pads": ("Conv", [LINE, POINT], {"pads": [1]}, "pads"),
    "type": ("Conv", [LINE.astype(np.int64), POINT], {}, "type float"),
    "bias": ("Conv", [LINE, floats(2, 1, 1), floats(3)], {"has_bias": 1}, "bias"),
    "filters": ("ConvGradInput", [floats(1, 2, 3), floats(3, 1, 2)], {"sizes": [4]}, "gradient"),
    "negative": ("ConvGradInput", [floats(1, 2, 3), floats(2, 1, 2)], {"sizes": [-4]}, "negative"),
    "huge": ("ConvGradInput", [floats(1, 2, 3), floats(2, 1, 2)], {"sizes": [2**40]}, "large"),
    "shape": ("ConvGradInput", [floats(1, 2, 3), floats(2, 1, 2), floats(3)], {}, "int64"),
    "short_shape": (
        "ConvGradInput", [floats(1, 2, 3), floats(2, 1, 2), np.array([1, 1], np.int64)], {}, "axes"
    ),
    "no_kernel": ("ConvGradWeight", [floats(1, 2, 3), POINT], {}, "axes"),
    "kernel": ("ConvGradWeight", [floats(1, 2, 3), POINT], {"kernel_shape": [0]}, "positive"),
    "batch": ("ConvGradWeight", [LINE, floats(2, 1, 2)], {"kernel_shape": [2]}, "fit"),
    "no_channels": ("ConvGradBias", [floats(3)], {}, "channels"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str) -> None:
    kind, inputs, attributes, sentence = WRONG[name]
    with pytest.raises(Exception, match=sentence):
        call(kind, inputs, **attributes)


def test_more_windows_than_the_image_has() -> None:
    """How many windows there are is the size of the gradient; what they read outside is zero."""
    dy, w = floats(1, 16, 5, 9), floats(16, 16, 3, 3)
    found = call("ConvGradInput", [dy, w], sizes=[2, 2], pads=[1, 1, 1, 1])[0]
    assert found.shape == (1, 16, 2, 2)
    np.testing.assert_array_equal(found[0, 3], [[4 * 16, 6 * 16], [6 * 16, 9 * 16]])
    dw = call("ConvGradWeight", [floats(1, 16, 2, 2), dy], kernel_shape=[3, 3], strides=[2, 2])[0]
    assert dw.shape == (16, 16, 3, 3)
    assert dw[0, 0, 0, 0] == 1


def test_bfloat16_with_sizes_of_all_kinds() -> None:
    """Panels and tiles with a rest in each direction: results are near those of float32."""
    random = np.random.default_rng(7)
    for _ in range(24):
        batch, channels, maps = random.integers((1, 1, 1), (4, 70, 70))
        kernel, stride = random.choice([1, 3, 3, 5]), random.integers(1, 3)
        height, width = random.integers(kernel, 17, 2)
        x = random.standard_normal((batch, channels, height, width), np.float32)
        w = random.standard_normal((maps, channels, kernel, kernel), np.float32)
        more = {"strides": [stride] * 2, "pads": [kernel // 2] * 4}
        (y,) = call("Conv", [x, w], **more)
        dy = random.standard_normal(y.shape, np.float32)
        for kind, inputs, of_kind in (
            ("Conv", [x, w], {}),
            ("ConvGradInput", [dy, w], {"sizes": [height, width]}),
            ("ConvGradWeight", [x, dy], {"kernel_shape": [kernel, kernel]}),
        ):
            (exact,) = call(kind, inputs, **of_kind, **more)
            (found,) = call(kind, inputs, bf16=1, **of_kind, **more)
            scale = float(np.abs(exact).max())
            np.testing.assert_allclose(found, exact, rtol=0, atol=scale * 2.0**-6)


ROUNDED = ("three", "three_odd", "three_deep", "stride", "point", "point_stride", "few", "one_axis")


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_loses_digits_and_nothing_else(name: str) -> None:
    """Where the processor has no such products, the kernels compute with float32."""
    case, feeds = CASES[name], CASES[name].feeds()
    x, w, dy = (torch.tensor(feeds[n], dtype=torch.float64) for n in ("x", "w", "y_grad"))
    x.requires_grad_()
    w.requires_grad_()
    y = _with_torch(case, {"x": x, "w": w})
    y.backward(dy)
    given = {k: v for k, v in case.attributes.items() if k != "kernel_shape"} | {"bf16": 1}
    found = [
        call("Conv", [feeds["x"], feeds["w"]], **given),
        call("ConvGradInput", [feeds["y_grad"], feeds["w"]], sizes=case.space, **given),
        call("ConvGradWeight", [feeds["x"], feeds["y_grad"]], kernel_shape=case.kernel, **given),
    ]
    assert x.grad is not None
    assert w.grad is not None
    for expected, (result,) in zip((y.detach(), x.grad, w.grad), found, strict=True):
        scale = float(expected.abs().max())
        np.testing.assert_allclose(result, expected.numpy(), rtol=0, atol=scale * 2.0**-6)

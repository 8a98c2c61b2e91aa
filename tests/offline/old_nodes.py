"""Single nodes as models of opset 7 to 17 had them, in every form that changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One node, at each of the opsets that it is written for.

    Floats are drawn where a shape is given; `constants` are the inputs that are initializers.
    """

    op: str
    opsets: Sequence[int]
    inputs: Sequence[tuple[int, ...] | Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    outputs: int = 1
    constants: Sequence[int] = ()


def vector(*numbers: float, dtype: Any = np.int64) -> Array:
    return np.array(numbers, dtype=dtype)


def floats(*numbers: float) -> Array:
    return vector(*numbers, dtype=np.float32)


IMAGE = np.arange(1, 33, dtype=np.float32).reshape(1, 2, 4, 4)
SPECIAL = floats(np.inf, -np.inf, np.nan, 3e38, 1.0, -1.0, 0.5)
ROIS = floats(0, 0, 7, 5, 1, 2, 6, 7).reshape(2, 4)
EMPTY = np.zeros(0, np.float32)
BEFORE_13 = (7, 8, 9, 10, 11, 12)
BEFORE_18 = (*BEFORE_13, 13, 14, 15, 16, 17)
REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare".split()

ADAPTED = [
    # attributes that became inputs
    Case("Slice", (7, 8, 9), [(4, 5)], {"starts": [1, -3], "ends": [3, 2**31 - 1]}, "all"),
    Case("Slice", (7, 8, 9), [(4, 5)], {"starts": [-99], "ends": [-1], "axes": [1]}, "axes"),
    Case("TopK", (7, 8, 9), [(3, 6)], {"k": 2, "axis": 0}, "first", 2),
    Case("TopK", (7, 8, 9), [(3, 6)], {"k": 4}, "last", 2),
    Case("TopK", (10,), [(3, 6), vector(2)], {}, "input", 2),
    Case("ReduceSum", BEFORE_13, [(2, 3, 4)], {"axes": [0, 2], "keepdims": 0}, "axes"),
    Case("ReduceSum", (11, 12), [(2, 3, 4)], {"axes": [-1]}, "negative"),
    Case("ReduceSum", BEFORE_13, [(2, 3, 4)], {"keepdims": 0}, "all"),
    Case("ReduceSum", (13, 17), [(2, 3), vector(1)], {}, "input"),
    *(Case(f"Reduce{k}", BEFORE_18, [(2, 3, 4)], {"axes": [1]}, "axes") for k in REDUCTIONS),
    *(Case(f"Reduce{k}", (7, 11, 13, 17), [(2, 3)], {"keepdims": 0}, "all") for k in REDUCTIONS),
    Case("Squeeze", BEFORE_13, [(1, 3, 1, 2)], {"axes": [2]}, "axes"),
    Case("Squeeze", BEFORE_13, [(1, 3, 1, 2)], {}, "all"),
    Case("Squeeze", (11, 12), [(1, 3, 1)], {"axes": [-1]}, "negative"),
    Case("Unsqueeze", BEFORE_13, [(2, 3)], {"axes": [0, 3]}),
    Case("Unsqueeze", (11, 12), [(2, 3)], {"axes": [-1]}, "negative"),
    Case("Split", BEFORE_13, [(6, 4)], {"split": [1, 5]}, "sizes", 2),
    Case("Split", (*BEFORE_13, 13, 17), [(6, 4)], {"axis": 1}, "even", 2),
    Case("Split", (13, 17), [(6, 4), vector(4, 2)], {}, "input", 2, constants=[1]),
    Case("Clip", (7, 8, 9, 10), [SPECIAL], {"min": -0.7, "max": 0.9}, "both"),
    Case("Clip", (7, 10), [SPECIAL], {"min": -0.7}, "min"),
    Case("Clip", (7, 10), [SPECIAL], {"max": 0.7}, "max"),
    Case("Clip", (7, 10, 11, 12), [SPECIAL], {}, "none"),
    Case("Clip", (11, 12, 13, 17), [SPECIAL, np.array(-0.5, np.float32)], {}, "input"),
    Case("Pad", (7, 8, 9, 10), [(2, 3)], {"pads": [0, 1, 2, 0], "value": 1.5}, "constant"),
    Case("Pad", (7, 10), [(2, 3)], {"pads": [0, 1, -1, 0]}, "zero"),
    Case("Pad", (7, 10), [(3, 3)], {"pads": [0, 2, 2, 0], "mode": "reflect"}, "reflect"),
    Case("Pad", (7, 10), [(3, 3)], {"pads": [0, 2, 2, 0], "mode": "edge"}, "edge"),
    Case("Pad", (11, 13, 17), [(2, 3), vector(0, 1, 2, 0)], {}, "input"),
    # meanings that changed
    *(
        case
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for case in (
            Case(op, BEFORE_13, [(2, 3)], {}, "matrix"),
            Case(op, BEFORE_13, [(2, 3, 4)], {}, "default"),
            Case(op, BEFORE_13, [(2, 3, 4)], {"axis": 0}, "whole"),
            Case(op, BEFORE_13, [(2, 3, 4)], {"axis": 2}, "last"),
            Case(op, BEFORE_13, [(2, 3, 1, 1)], {"axis": 1}, "one-long-axis"),
            Case(op, BEFORE_13, [(2, 1, 1, 3)], {"axis": 1}, "long-axis-behind"),
            Case(op, BEFORE_13, [(2, 1)], {"axis": 1}, "length-one"),
            Case(op, (11, 12), [(2, 3, 4)], {"axis": -2}, "negative"),
            Case(op, (13, 17), [(2, 3, 4)], {"axis": 1}, "kept"),
            Case(op, (13, 17), [(2, 3, 4)], {}, "kept-default"),
        )
    ),
    Case("BatchNormalization", (7, 8), [(2, 3, 4), *[(3,)] * 3, floats(1, 2, 3)], {"spatial": 1}),
    Case("BatchNormalization", (9, 13, 14, 17), [(2, 3, 4), *[(3,)] * 3, floats(1, 2, 3)], {}),
    Case(
        "BatchNormalization",
        (7, 8),
        [(2, 3, 4), *[(3, 4)] * 3, np.full((3, 4), 0.5, np.float32)],
        {"spatial": 0, "epsilon": 1e-3},
        "per-element",
    ),
    Case("Dropout", (7, 8, 9, 10, 11), [(2, 3)], {"ratio": 0.3}, "ratio"),
    Case("Dropout", (7, 8, 9, 10, 11, 12, 13, 17), [(2, 3)], {}, "default"),
    Case(
        "RoiAlign",
        (10, 11, 15, 16, 17),
        [np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8), ROIS, vector(0, 0)],
        {"output_height": 2, "output_width": 3, "sampling_ratio": 2, "spatial_scale": 0.5},
    ),
    # resizing
    *(
        Case("Upsample", (7, 8), [IMAGE], {"scales": [1, 1, *scales], "mode": mode}, f"{mode}{i}")
        for mode in ("nearest", "linear")
        for i, scales in enumerate([(2.0, 2.0), (1.0, 1.6)])
    ),
    *(
        Case("Upsample", (9,), [IMAGE, floats(1, 1, 2, 1.6)], {"mode": mode}, f"input-{mode}-{c}",
             constants=constants)
        for mode in ("nearest", "linear")
        for c, constants in (("fixed", [1]), ("open", []))
    ),
    *(
        Case("Resize", (10,), [IMAGE, floats(1, 1, *scales)], {"mode": mode}, f"{mode}{i}-{c}",
             constants=constants)
        for mode in ("nearest", "linear")
        for i, scales in enumerate([(2.0, 1.6), (0.6, 0.75), (2.0, 0.6), (0.55, 1.3)])
        for c, constants in (("fixed", [1]), ("open", []))
    ),
    *(
        Case("Resize", (11, 12), [IMAGE, EMPTY, floats(1, 1, 1.6, 0.6)],
             {"coordinate_transformation_mode": "tf_half_pixel_for_nn", **rounding},
             f"tf-half-pixel-{i}", constants=[1, 2])
        for i, rounding in enumerate([{}, {"nearest_mode": "floor"}])
    ),
    *(
        Case("Resize", (11, 12, 13, 17), [IMAGE, EMPTY, floats(1, 1, 1.6, 0.6)],
             {"mode": mode, "coordinate_transformation_mode": coordinates},
             f"{mode}-{coordinates}", constants=[1, 2])
        for mode in ("nearest", "linear", "cubic")
        for coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
    ),
    Case("Resize", (11, 12), [IMAGE, EMPTY, EMPTY, vector(1, 2, 6, 3)], {"mode": "linear"}, "sizes",
         constants=[1, 2, 3]),
    Case("Resize", (13, 17), [IMAGE, None, None, vector(1, 2, 6, 3)], {}, "sizes-alone",
         constants=[3]),
    # operators that are gone
    Case("Scatter", (9, 10), [(3, 4), vector(1, 0, 2, 1).reshape(1, 4), (1, 4)], {"axis": 0}),
    Case("Scatter", (9,), [(3, 4), vector(-1).reshape(1, 1), (1, 1)], {"axis": 1}, "negative"),
    Case("Erf", (9, 10, 11, 12, 13), [(2, 3)]),
]  # fmt: skip

# Operators that changed without consequence: the same node before and after.
COMPATIBLE = [
    Case("Max", (7, 8, 12, 13), [(2, 3), (2, 3)]),
    Case("Mean", (7, 8), [(2, 3), (2, 3)]),
    Case("Sum", (7, 8, 13), [(2, 3), (2, 3)]),
    Case("Gemm", (7, 9, 11, 13), [(2, 3), (3, 4), (4,)], {"alpha": 0.5}),
    Case("PRelu", (7, 9, 16), [(2, 3), (3,)]),
    Case("Pow", (7, 12, 13, 15), [floats(1, 2, 3), floats(2, 0.5, 1)]),
    Case("Equal", (7, 11, 13), [vector(1, 2), vector(1, 3)]),
    Case("Mod", (10, 13), [vector(-7, 7), vector(3, -3)]),
    Case("ArgMax", (7, 11, 12, 13), [floats(1, 3, 3).reshape(1, 3)], {"axis": 1}),
    Case("OneHot", (9, 11), [vector(-1, 0, 5), np.array(3), floats(0, 1)]),
    Case("CumSum", (11, 14), [(3,), np.array(0)], {"reverse": 1}),
    Case("GatherND", (11, 12, 13), [(2, 3), vector(0, 1, 1, 2).reshape(2, 2)]),
    Case("ScatterElements", (11, 13, 16), [(3, 2), vector(1, 0).reshape(1, 2), (1, 2)]),
    Case("Reshape", (7, 13, 14), [(2, 3), vector(0, -1)], constants=[1]),
    Case("Shape", (7, 13, 15), [(2, 3)]),
    Case("Flatten", (7, 9, 11, 13), [(2, 3, 4)], {"axis": 2}),
    Case("DepthToSpace", (7, 11, 13), [(1, 8, 2, 2)], {"blocksize": 2}),
    Case("LRN", (7, 13), [(1, 5, 2, 2)], {"size": 3}),
    Case("MaxPool", (7, 8, 10, 11, 12), [(1, 1, 5, 5)],
         {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    Case("MaxPool", (8, 10, 11, 12), [(1, 2, 5, 5)],
         {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "storage_order": 1}, "indices", 2),
    Case("AveragePool", (7, 10, 11), [(1, 1, 5, 5)],
         {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    Case("AveragePool", (10, 11), [(1, 1, 5, 5)],
         {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, "ceil"),
    Case("LpPool", (7, 11, 17), [(1, 1, 5, 5)], {"kernel_shape": [2, 2], "p": 3}),
    Case("Conv", (7, 11), [(1, 2, 5, 5), (3, 2, 3, 3)], {"auto_pad": "SAME_UPPER"}),
    Case("ConvTranspose", (7, 11), [(1, 2, 3, 3), (2, 3, 3, 3)],
         {"strides": [2, 2], "output_shape": [6, 6]}),
    Case("QuantizeLinear", (10, 13), [(2, 3), np.array(0.1, np.float32), np.array(3, np.uint8)]),
    Case("DequantizeLinear", (10, 13),
         [vector(0, 9, dtype=np.uint8), np.array(0.1, np.float32), np.array(3, np.uint8)]),
    Case("LSTM", (7, 14), [(3, 2, 4), (1, 20, 4), (1, 20, 5)], {"hidden_size": 5}, "", 3),
    Case("GRU", (7, 14), [(3, 2, 4), (1, 15, 4), (1, 15, 5)], {"hidden_size": 5}, "", 2),
    Case("NonMaxSuppression", (10, 11),
         [floats(0, 0, 1, 1, 0, 0, 1, 0.9).reshape(1, 2, 4), floats(0.9, 0.8).reshape(1, 1, 2),
          vector(2), floats(0.5)]),
]  # fmt: skip


def one_node(case: Case, opset: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    rng = np.random.default_rng(0)
    inputs, initializers, feeds, names = [], [], {}, []
    for index, entry in enumerate(case.inputs):
        if entry is None:
            names.append("")
            continue
        array = entry if isinstance(entry, np.ndarray) else rng.uniform(0.1, 2, entry)
        array = array if isinstance(entry, np.ndarray) else array.astype(np.float32)
        name = f"x{index}"
        names.append(name)
        if index in case.constants:
            initializers.append(numpy_helper.from_array(array, name))
        else:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, array.shape))
            feeds[name] = array
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, "node", **case.attrs)
    graph = helper.make_graph(
        [node], "g", inputs, [onnx.ValueInfoProto(name=name) for name in outputs], initializers
    )
    opset_import = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opset_import, ir_version=7), feeds

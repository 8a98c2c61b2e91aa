"""What changed in the operators between opset 1 and 7, and how a node follows the change.

Models of that time come from CNTK, Caffe2, MXNet and the first exporters of PyTorch and CoreML. At
opset 7 operators began to broadcast as numpy does; before, an attribute said where.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.frontend.upgrade.rewrite import Adapter, Rewriter, adapter, set_attributes
from onnxtrain.offline.graph.shapes import dims_of


def without(*names: str) -> Adapter:
    """Return an adapter that removes attributes which say nothing any more."""

    def remove(rewriter: Rewriter, node: ir.Node) -> None:
        for name in names:
            node.attributes.pop(name, None)

    return remove


# Which inputs a kernel may overwrite: the business of runtimes since opset 6.
adapter(6, *(
    "Abs Add BatchNormalization Ceil Clip Div Dropout Elu Exp Floor HardSigmoid "
    "InstanceNormalization LeakyRelu Log Max Mean Min Mul Neg PRelu Reciprocal Relu Sigmoid Sqrt "
    "Sub Sum Tanh"
).split())(without("consumed_inputs"))  # fmt: skip
# Whether the model trains: who runs it knows, or a later attribute says.
adapter(7, "BatchNormalization", "Dropout")(without("is_test"))
adapter(7, "GRU", "LSTM", "RNN")(without("output_sequence"))
adapter(7, "Gemm")(without("broadcast"))


# ---- attributes that have another name or type ---------------------------------------------------


@adapter(2, "Pad")
def pads_by_another_name(rewriter: Rewriter, node: ir.Node) -> None:
    """The attribute paddings was renamed."""
    widths = node.attributes.pop("paddings", None)
    if widths is not None:
        set_attributes(node, pads=list(widths.value))


@adapter(2, "GlobalLpPool", "LpPool")
def whole_exponent(rewriter: Rewriter, node: ir.Node) -> None:
    """The exponent of the norm is an integer."""
    p = node.attributes.get_float("p", 2.0)
    if not float(p).is_integer():
        rewriter.refuse(node, f"its exponent {p} is no integer", "export the model again")
    set_attributes(node, p=int(p))


@adapter(4, "Concat")
def concat_axis(rewriter: Rewriter, node: ir.Node) -> None:
    """The axis was 1 if none was given."""
    set_attributes(node, axis=node.attributes.get_int("axis", 1))


@adapter(5, "Reshape")
def reshape_to_input(rewriter: Rewriter, node: ir.Node) -> None:
    """The shape became an input."""
    node.attributes.pop("consumed_inputs", None)
    rewriter.move_to_input(node, "shape", 1)


@adapter(6, "Cast")
def cast_to_number(rewriter: Rewriter, node: ir.Node) -> None:
    """The type was named by a text."""
    to = node.attributes["to"].value
    if isinstance(to, str):
        node.attributes.pop("to")
        set_attributes(node, to=int(ir.DataType[to.upper()]))


@adapter(6, "Selu")
def selu_constants(rewriter: Rewriter, node: ir.Node) -> None:
    """The defaults have more digits."""
    node.attributes.pop("consumed_inputs", None)
    defaults = {"alpha": 1.6732, "gamma": 1.0507}
    set_attributes(node, **{n: node.attributes.get_float(n, v) for n, v in defaults.items()})


@adapter(6, "Tile")
def tile_every_axis(rewriter: Rewriter, node: ir.Node) -> None:
    """Tile repeated along one axis, which was an input, as many times as another input says."""
    x, tiles, axis = node.inputs
    rank = rewriter.rank_of(node, x)
    axes = rewriter.constant(node, "axes", np.arange(rank, dtype=np.int64))
    one = rewriter.constant(node, "one", np.ones(1, np.int64))
    counts = [
        rewriter.insert(node, "Cast", [value], to=int(ir.DataType.INT64)) for value in (tiles, axis)
    ]
    here = rewriter.insert(node, "Equal", [axes, counts[1]])
    repeats = rewriter.insert(node, "Where", [here, counts[0], one])
    rewriter.become(node, "Tile", [x, repeats])


@adapter(7, "Upsample")
def upsample_scales(rewriter: Rewriter, node: ir.Node) -> None:
    """The scales of height and width became those of all axes."""
    found = [node.attributes.pop(f"{side}_scale", None) for side in ("height", "width")]
    if all(found):
        set_attributes(node, scales=[1.0, 1.0, *(scale.value for scale in found if scale)])


# ---- broadcasting --------------------------------------------------------------------------------


@adapter(7, *"Add And Div Equal Greater Less Mul Or Pow Sub Xor".split())
def broadcast_from_an_axis(rewriter: Rewriter, node: ir.Node) -> None:
    """The second operand stood for the axes of the first from `axis` on; the last ones if none."""
    broadcast = node.attributes.pop("broadcast", None)
    axis = node.attributes.pop("axis", None)
    a, b = node.inputs
    if broadcast is None or not broadcast.value or axis is None:
        return
    shape = dims_of(b) if b is not None else None
    if shape is not None and all(dim == 1 for dim in shape):
        return
    ranks = [rewriter.rank_of(node, value) for value in (a, b)]
    _append_axes(rewriter, node, ranks[0] - axis.value % max(ranks[0], 1) - ranks[1])


@adapter(7, "PRelu")
def slope_of_channels(rewriter: Rewriter, node: ir.Node) -> None:
    """A slope for each channel belonged to axis 1; it broadcasts now, from the last axis."""
    x, slope = node.inputs
    dims = dims_of(slope) if slope is not None else None
    if dims is not None and (len(dims) != 1 or dims[0] == 1):
        return
    _append_axes(rewriter, node, rewriter.rank_of(node, x) - 2)


def _append_axes(rewriter: Rewriter, node: ir.Node, count: int) -> None:
    """Let the second operand have so many axes of size one at its end."""
    second = node.inputs[1]
    if count <= 0:
        return
    places = rewriter.constant(node, "axes", np.arange(-count, 0, dtype=np.int64))
    node.replace_input_with(1, rewriter.insert(node, "Unsqueeze", [second, places]))

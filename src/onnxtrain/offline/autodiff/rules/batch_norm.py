"""The rule for BatchNormalization, and how its training mode is written.

Stock onnxruntime cannot be trusted with `training_mode=1`: the kernel crashes where the optional
outputs are left out, and constant sharing can make it write its running statistics into a tensor
that others read. So such a node never reaches a session: `rewrite_training_batch_norm` computes the
statistics of the batch with ordinary operators and hands them to the same operator in inference
mode. The rule recognises that form and writes the gradient of the whole at once.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.autodiff.definitions import Definition, wanted, write_definition
from onnxtrain.offline.autodiff.registry import Cotangents, optional, required, rule
from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, dims_of, working_type

# ---- gradient ----------------------------------------------------------------------------------


@rule("BatchNormalization", notes="training mode through batch statistics in plain operators")
def batch_normalization(op: Ops, node: ir.Node, dy: ir.Value) -> Cotangents:
    """With c = x - mean, r = 1/√(var + ε) and sums over all axes but the channels.

    dscale = r Σ dy c, dbias = Σ dy. For given statistics dx = dy scale r, dmean = -scale r Σ dy
    and dvar = -scale r³ Σ dy c / 2. Where they are those of the n numbers of the batch itself,
    dx = scale r (dy - Σ dy / n - c r² Σ dy c / n) has all of it.
    """
    if node.attributes.get_int("training_mode", 0) == 1:
        raise OnnxTrainError(
            "a BatchNormalization in training mode was not rewritten before differentiation"
        )
    x, scale, bias, mean, var = required(node, 5)
    of_batch = _deviation_from_batch_mean(op, node)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    rest: list[ir.Value | None] = []  # of given statistics, which hardly anyone reads

    def write() -> list[ir.Value]:
        made = _gradients(op, node, dy, of_batch)
        rest.extend(made[3:])
        return [v for v in made[:3] if v is not None]

    saved = [] if of_batch is None else [of_batch]
    made = op.kernel(
        "BatchNormGrad", [dy, x, scale, bias, mean, var, *saved], write,
        saved=saved, epsilon=epsilon, frozen=int(of_batch is None),
    )  # fmt: skip
    return *made, *rest


def _gradients(
    op: Ops, node: ir.Node, dy: ir.Value, of_batch: ir.Value | None
) -> list[ir.Value | None]:
    x, scale, bias, mean, var = required(node, 5)
    wide = working_type(x, scale, mean)
    axes = _all_but_channels(op, x)
    seed = op.cast(dy, wide)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    inv_std = op.Reciprocal(op.Sqrt(op.cast(var, wide) + epsilon))
    gain = op.cast(scale, wide) * inv_std
    if of_batch is None:
        deviation = op.cast(x, wide) - _by_channel(op, op.cast(mean, wide), x)
    else:
        deviation = op.cast(of_batch, wide)
    sums, dots = op.sum(seed, axes), op.sum(seed * deviation, axes)
    dscale = dots * inv_std
    dmean = dvar = None
    if of_batch is None:
        dx = seed * _by_channel(op, gain, x)
        dmean = op.cast(-(sums * gain), mean.dtype)
        dvar = op.cast(dscale * gain * inv_std * -0.5, var.dtype)
    else:
        count = op.count(deviation, axes)
        slope = _by_channel(op, dscale * inv_std / count, x)
        inner = seed - deviation * slope - _by_channel(op, sums / count, x)
        dx = inner * _by_channel(op, gain, x)
    return [
        op.cast(dx, x.dtype),
        op.cast(dscale, scale.dtype),
        op.cast(sums, bias.dtype),
        dmean,
        dvar,
    ]


def _all_but_channels(op: Ops, x: ir.Value) -> list[int]:
    return [axis for axis in range(op.rank(x)) if axis != 1]


def _by_channel(op: Ops, vector: ir.Value, x: ir.Value) -> ir.Value:
    """Give a vector of one number per channel the axes to broadcast against x."""
    spatial = op.rank(x) - 2
    return op.Reshape(vector, [-1] + [1] * spatial) if spatial else vector


def _deviation_from_batch_mean(op: Ops, node: ir.Node) -> ir.Value | None:
    """Return x - mean if the node normalizes by mean and variance of its own input, else None.

    That is told by the form which `rewrite_training_batch_norm` writes, so that it is found again
    in a model that has been stored in between.
    """
    x, _, _, mean_input, var_input = required(node, 5)
    mean, var = _origin(mean_input, "ReduceMean"), _origin(var_input, "ReduceMean")
    square = None if var is None else _origin(var.inputs[0], "Mul")
    minus = None if square is None else _origin(square.inputs[0], "Sub")
    if mean is None or var is None or square is None or minus is None:
        return None
    deviation = minus.outputs[0]
    reduced = _all_but_channels(op, x)
    same = (
        list(square.inputs) == [deviation, deviation]
        and list(minus.inputs) == [mean.inputs[0], mean.outputs[0]]
        and _before(mean.inputs[0], "Cast") is _before(x, "Cast")
        and all(_reduced_axes(n, op.rank(x)) == reduced for n in (mean, var))
    )
    return deviation if same else None


def _origin(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that made a value, before changes of type and shape, if it is of a kind."""
    source = _before(value, "Cast", "Reshape")
    producer = None if source is None else source.producer()
    if producer is None or producer.op_type != op_type or producer.domain != "":
        return None
    return producer


def _before(value: ir.Value | None, *op_types: str) -> ir.Value | None:
    """Follow a value back through operators of some kinds."""
    while value and (producer := value.producer()) and producer.op_type in op_types:
        value = producer.inputs[0]
    return value


def _reduced_axes(node: ir.Node, rank: int) -> list[int] | None:
    axes = constant_array(optional(node, 1))
    return None if axes is None else sorted(int(a) % rank for a in axes.reshape(-1))


# ---- training mode -----------------------------------------------------------------------------


def rewrite_training_batch_norm(model: ir.Model) -> None:
    """Replace every BatchNormalization in training mode, in place; names of values survive."""
    complete_outputs(model)
    op = Ops(model.graph, model.opset_imports[""])
    with op.arithmetic():
        for node in _in_training_mode(model):
            write_definition(op, node, _BATCH_STATISTICS)
    for node in model.graph.all_nodes():
        if node.op_type == "BatchNormalization" and node.domain == "":
            _mark(op, node)


def _mark(op: Ops, node: ir.Node) -> None:
    """Mark a node and what computes its statistics as one kernel, if they are of its own input."""
    x, scale, bias, mean, var = required(node, 5)
    deviation = None if dims_of(x) is None else _deviation_from_batch_mean(op, node)
    if deviation is None:
        return
    nodes: dict[ir.Node, None] = {}
    pending = [node]
    while pending:
        found = pending.pop()
        nodes[found] = None
        makers = (v.producer() for v in found.inputs if v is not None and v is not x)
        pending += [maker for maker in makers if maker is not None and maker not in nodes]
    if {each.op_type for each in nodes} <= _OF_STATISTICS:
        # Where memory is on a budget, the statistics are kept in either shape.
        kept = [_before(v, "Reshape") for v in (mean, var)]
        mark_kernel(
            [each for each in node.graph or () if each in nodes], "BatchNorm", [x, scale, bias],
            [node.outputs[0], mean, var, deviation, *kept],
            saved=[deviation], epsilon=node.attributes.get_float("epsilon", 1e-5),
        )  # fmt: skip


_OF_STATISTICS = {"BatchNormalization", "ReduceMean", "Sub", "Mul", "Reshape"}


def complete_outputs(model: ir.Model) -> None:
    """Give nodes in training mode all three outputs: onnx's shape inference insists on them."""
    found = _in_training_mode(model)
    names = Names.of(model.graph) if found else Names(())
    for node in found:
        node.resize_outputs(3)
        for output in node.outputs:
            output.name = output.name or names.fresh(f"{node.outputs[0].name}_statistic")


def _in_training_mode(model: ir.Model) -> list[ir.Node]:
    return [
        node
        for node in model.graph.all_nodes()
        if node.op_type == "BatchNormalization"
        and node.domain == ""
        and node.attributes.get_int("training_mode", 0) == 1
    ]


def _with_batch_statistics(
    op: Ops,
    node: ir.Node,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    mean: ir.Value,
    var: ir.Value,
) -> list[ir.Value]:
    """Write Y, and running_mean and running_var where someone reads them."""
    axes = _all_but_channels(op, x)
    xw = op.cast(x, working_type(x, scale, mean))
    batch_mean = op.mean(xw, axes)
    deviation = xw - batch_mean
    # ONNX takes the population variance for both uses. torch normalizes by it as well, but lets
    # n/(n-1) of it enter the running one.
    batch_var = op.mean(deviation * deviation, axes)
    mean_now, var_now = (op.cast(op.Reshape(v, [-1]), mean.dtype) for v in (batch_mean, batch_var))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    y = op.BatchNormalization(x, scale, bias, mean_now, var_now, epsilon=epsilon)
    made = [op.type_as(y, x)]
    if wanted(node, 1) or wanted(node, 2):
        keep = node.attributes.get_float("momentum", 0.9)
        made.append(mean * keep + mean_now * (1.0 - keep))
        made.append(var * keep + var_now * (1.0 - keep))
    return made


_BATCH_STATISTICS = Definition(_with_batch_statistics, ranks=(0,))

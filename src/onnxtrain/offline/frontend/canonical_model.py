"""One canonical model from whatever a user brings: the graph that gradient rules are written for.

`canonical_model` is the recipe. It never copies weights: they stay in the caller's proto, or mapped
from disk, so models over 2 GB pass through.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.rules.batch_norm import complete_outputs
from onnxtrain.offline.frontend.branches import take_known_branches
from onnxtrain.offline.frontend.canonicalize import (
    check_enum_attributes,
    fix_batch_of_states,
    make_range_scalar,
    make_step_number_scalar,
    release_initializers,
    settle_shapes,
    sort_nodes,
    trim,
    unwrap_optionals,
)
from onnxtrain.offline.frontend.fused import expand_fused
from onnxtrain.offline.frontend.inline import inline_functions
from onnxtrain.offline.frontend.load import ModelLike, check_opset, load
from onnxtrain.offline.frontend.sequences import dissolve_sequences, drop_unit_splits
from onnxtrain.offline.frontend.split_shared_initializers import split_shared_initializers
from onnxtrain.offline.frontend.torch_forms import settle_torch_forms
from onnxtrain.offline.frontend.unofficial import adopt_unofficial
from onnxtrain.offline.frontend.upgrade import upgrade_to_floor
from onnxtrain.offline.graph.error_context import model_error_context
from onnxtrain.offline.graph.infer import check_structure, infer_shapes
from onnxtrain.offline.graph.initializers import (
    FROM_CONSTANT,
    rename_initializer,
    replace_by_initializer,
)
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, is_float
from onnxtrain.offline.graph.subgraphs import values_of


def canonical_model(model: ModelLike, *, located: bool = False) -> ir.Model:
    """Return a model of plain operators at opset 18 or later, with every shape inferred.

    `located` is for a model in which `blocks.values.locate` has written full paths of files.
    BatchNormalization keeps the mode that the model gives it: `set_batch_norm_mode` decides.
    """
    with model_error_context("preparing"):
        loaded = load(model, located=located)
        check_opset(loaded)
        release_initializers(loaded)
        adopt_unofficial(loaded)
        sort_nodes(loaded)
        check_structure(loaded)
        inline_functions(loaded)
        trim(loaded)
        check_enum_attributes(loaded)
        lift_constants(loaded.graph)
        loaded.graph.sort()
        settle_shapes(loaded)
        split_shared_initializers(loaded.graph)
        unwrap_optionals(loaded)
        make_range_scalar(loaded)
        make_step_number_scalar(loaded)
        upgrade_to_floor(loaded)
        state_defaults(loaded)
        expand_fused(loaded)
        complete_outputs(loaded)
        drop_unit_splits(loaded)
        infer_shapes(loaded)
        if fix_batch_of_states(loaded):
            infer_shapes(loaded)
        take_known_branches(loaded)
        if dissolve_sequences(loaded):
            infer_shapes(loaded)
            take_known_branches(loaded)
        spell_out_pads(loaded)
        settle_torch_forms(loaded)
        return loaded


def lift_constants(graph: ir.Graph) -> None:
    """Turn Constant nodes into initializers, so that weights look alike however they came.

    Floats inside the bodies of If, Loop and Scan are lifted out of them, where they can be trained.
    Integers stay there: they are what shape inference of a body reads.
    """
    names = Names.of(graph)
    graphs = (graph, *graph.subgraphs())
    defined = Counter(v.name for g in graphs for v in values_of(g))
    for body in graphs:
        for node in [n for n in body if _is_constant(n)]:
            tensor = _constant_of(node)
            if body is graph or is_float(node.outputs[0]):
                lifted = replace_by_initializer(body, node, tensor)
                lifted.meta[FROM_CONSTANT] = True
        for name, value in list(body.initializers.items() if body is not graph else ()):
            if is_float(value) and not value.is_graph_output() and not value.is_graph_input():
                del body.initializers[name]
                if defined[name] > 1:
                    rename_initializer(value, names.fresh(name))
                graph.register_initializer(value)


def _is_constant(node: ir.Node) -> bool:
    if node.op_type != "Constant" or node.domain != "" or node.outputs[0].is_graph_output():
        return False
    return len(node.attributes) == 1 and "sparse_value" not in node.attributes


def _constant_of(node: ir.Node) -> ir.TensorProtocol:
    # get_const_tensor renames the tensor in a `value` attribute, which may be the caller's.
    tensor = node.attributes.get_tensor("value")
    if tensor is None:
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
    assert tensor is not None
    node.outputs[0].dtype = tensor.dtype
    return tensor


# Defaults that onnx's shape inference gets wrong: it takes STFT for two-sided, and fails on
# MeanVarianceNormalization without axes.
_STATED_DEFAULTS = {
    "STFT": ir.AttrInt64("onesided", 1),
    "MeanVarianceNormalization": ir.AttrInt64s("axes", [0, 2, 3]),
}


def state_defaults(model: ir.Model) -> None:
    """Write out defaults that onnx's shape inference does not know."""
    for node in model.graph.all_nodes():
        default = _STATED_DEFAULTS.get(node.op_type) if node.domain == "" else None
        if default is not None and default.name not in node.attributes:
            node.attributes.add(default)


def spell_out_pads(model: ir.Model) -> None:
    """Give every Pad its pads for all axes.

    onnxruntime 1.31 moves Transpose nodes past a Pad as if it had no `axes` input, and then pads
    the wrong ones; the gradient may bring such a Transpose.
    """
    op = Ops(model.graph, model.opset_imports[""])
    for node in model.graph.all_nodes():
        if node.op_type != "Pad" or node.domain != "" or len(node.inputs) < 4:
            continue
        x, pads, axes = node.inputs[0], node.inputs[1], constant_array(node.inputs[3])
        if x is None or x.shape is None or axes is None or pads is None:
            continue
        rank = len(x.shape)
        # Position i of the full vector is taken from the given one, or from a zero behind it.
        source = np.full(2 * rank, 2 * axes.size, dtype=np.int64)
        source[axes % rank] = np.arange(axes.size)
        source[axes % rank + rank] = np.arange(axes.size) + axes.size
        known = constant_array(pads)
        if known is not None:
            full = op.const(np.append(known, 0)[source].astype(np.int64))
        else:
            longer = ir.node("Concat", [pads, op.int64([0])], {"axis": 0})
            picked = ir.node("Gather", [longer.outputs[0], op.const(source)], {"axis": 0})
            longer.outputs[0].name = op.names.fresh(f"{pads.name}_and_zero")
            picked.outputs[0].name = op.names.fresh(f"{pads.name}_of_all_axes")
            node.prepend((longer, picked))
            full = picked.outputs[0]
        node.replace_input_with(1, full)
        node.resize_inputs(3)

"""The pass over a model that replaces fused operators."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Definition, definition_of, write_definition
from onnxtrain.offline.autodiff.registry import optional
from onnxtrain.offline.frontend.unofficial import adopt_unofficial
from onnxtrain.offline.graph.equal_nodes import merge_equal_nodes
from onnxtrain.offline.graph.infer import infer_shapes
from onnxtrain.offline.graph.initializers import FIXED_TABLE
from onnxtrain.offline.graph.integer_operators import (
    IntegerForm,
    float_attributes,
    integer_form,
)
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.quantized_operators import (
    MICROSOFT,
    form_of,
    scales_of,
    type_outputs,
)
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.graph.subgraphs import subgraphs_of

_LARGE = 64  # elements; axes and shapes are shorter
# Where operators of onnxruntime read tables of angles, which are computed and never learned.
_TABLES = {"GroupQueryAttention": (7, 8), "RotaryEmbedding": (2, 3)}


def expand_fused(model: ir.Model) -> None:
    """Replace operators of other domains that have a definition by plain ones, in place.

    Names of values survive. Ranks and types are inferred on the way, as the models that
    onnxruntime saves carry none. Products with constant quantized weights stay, see
    `quantized_operators.py`.
    """
    adopt_unofficial(model)
    if any(_fused(node) or form_of(node) or integer_form(node) for node in model.graph.all_nodes()):
        _note_tables(model)
        op = Ops(model.graph, model.opset_imports[""])
        written: set[ir.Node] = set()
        with op.arithmetic():
            while True:
                infer_shapes(model)
                expanded, postponed = _walk(op, model.graph, written)
                if not postponed or not expanded:
                    break
        merge_equal_nodes(model.graph, written)
    _drop_unused_domains(model)


def _note_tables(model: ir.Model) -> None:
    """Remember which initializers are tables of angles: written out, they look like embeddings."""
    for node in model.graph.all_nodes():
        places = _TABLES.get(node.op_type, ()) if node.domain == MICROSOFT else ()
        for place in places:
            if (table := optional(node, place)) is not None and table.is_initializer():
                table.meta[FIXED_TABLE] = f"angles of {node.op_type}"


def _fused(node: ir.Node) -> Definition | None:
    return definition_of(node) if node.domain else None


def _walk(op: Ops, graph: ir.Graph, inner: set[ir.Node]) -> tuple[int, int]:
    """Expand what can be expanded in one pass; count that, and what waits for its types.

    `inner` gets the nodes that are written, but for those whose results the model names.
    """
    expanded = postponed = 0
    for node in list(graph):
        for body in subgraphs_of(node):
            done, waiting = _walk(op, body, inner)
            expanded, postponed = expanded + done, postponed + waiting
        found = _fused(node)
        form = form_of(node)
        if form is not None:
            type_outputs(node, form)
        elif (integers := integer_form(node)) is not None:
            _infer_integers(node, integers, op.opset)
        elif found is None:
            _infer_node(node, op.opset)
        elif not found.is_ready(node):
            postponed += 1
        else:
            results = set(node.outputs)
            written = write_definition(op, node, found)
            expanded += written is not None
            for new in written or ():
                _infer_node(new, op.opset)
            inner.update(n for n in written or () if results.isdisjoint(n.outputs))
    return expanded, postponed


def expand_trained(model: ir.Model, names: Collection[str]) -> None:
    """Expand the products whose scales or zero points train, in place.

    onnxruntime takes these for constants of the operator. Written out, they are factors like any
    other; the quantized weights beside them are integers and do not train.
    """
    trained = set(names)
    nodes = [
        node
        for node in model.graph.all_nodes()
        if (form := form_of(node)) and any(v.name in trained for v in scales_of(node, form))
    ]
    op = Ops(model.graph, model.opset_imports[""])
    with op.arithmetic():
        for node in nodes:
            found = definition_of(node)
            for new in (found and write_definition(op, node, found)) or ():
                _infer_node(new, op.opset)
    _drop_unused_domains(model)


def _drop_unused_domains(model: ir.Model) -> None:
    """Forget the opset imports that onnxruntime writes for every domain it knows."""
    used = {node.domain for node in model.graph.all_nodes()} | {""}
    for domain in [d for d in model.opset_imports if d not in used]:
        del model.opset_imports[domain]


def _infer_node(node: ir.Node, opset: int) -> None:
    """Infer the outputs of a plain node where their type or rank is still unknown.

    Inference of the whole model after each expansion would say the same, at a cost that grows with
    the square of the depth.
    """
    unknown = [v for v in node.outputs if v.name and (v.dtype is None or v.shape is None)]
    if not unknown or node.domain != "":
        return
    if node.op_type == "If":
        _take_from_branch(node)
        return
    given = [v for v in node.inputs if v is not None]
    if any(v.type is None for v in given) or subgraphs_of(node):
        return
    found = _infer(node, given, opset)
    for value in unknown:
        proto = found.get(value.name or "")
        if proto is not None:
            value.type = value.type or ir.serde.deserialize_type_proto_for_type(proto)
            value.shape = value.shape or ir.serde.deserialize_type_proto_for_shape(proto)


def _infer_integers(node: ir.Node, form: IntegerForm, opset: int) -> None:
    """Infer the result of an operator of integers by the operator of floats that it stands for."""
    operands = [node.inputs[operand.integer] for operand in form.operands]
    output, (scale, zero) = node.outputs[0], (optional(node, i) for i in form.result)
    typed = operands[0] if zero is None else zero
    if scale is None:
        output.dtype = ir.DataType.FLOAT
    elif output.dtype is None and typed is not None and typed.dtype is not None:
        output.dtype = typed.dtype
    if output.shape is not None or any(v is None or v.shape is None for v in operands):
        return
    given = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=v.shape)
        for i, v in enumerate(operands)
        if v is not None
    ]
    attributes = float_attributes(node)
    if "axes" in attributes:
        axes = ir.tensor(np.array(attributes.pop("axes"), np.int64), name="axes")
        given.append(ir.Value(name="axes", const_value=axes))
        given[-1].dtype, given[-1].shape = axes.dtype, ir.Shape([axes.size])
    twin = ir.node(form.float_op, given, attributes)
    twin.outputs[0].name = "y"
    found = _infer(twin, given, opset)
    for detached in range(len(given)):
        twin.replace_input_with(detached, None)
    if "y" in found:
        output.shape = ir.serde.deserialize_type_proto_for_shape(found["y"])


def _infer(node: ir.Node, given: list[ir.Value], opset: int) -> dict[str, onnx.TypeProto]:
    types = {v.name: ir.serde.serialize_value(v).type for v in given if v.name}
    small = [v for v in given if v.const_value is not None and v.const_value.size <= _LARGE]
    arrays = {v.name: constant_array(v) for v in small if v.name}
    data = {n: onnx.numpy_helper.from_array(a, n) for n, a in arrays.items() if a is not None}
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        return onnx.shape_inference.infer_node_outputs(
            schema, ir.serde.serialize_node(node), types, data,
            opset_imports=[onnx.helper.make_opsetid("", opset)],
        )  # fmt: skip
    except Exception:  # kinds differ with what is wrong
        return {}  # the strict inference of the whole model, which follows, tells what is wrong


def _take_from_branch(node: ir.Node) -> None:
    inner = node.attributes["then_branch"].value.outputs
    other = node.attributes["else_branch"].value.outputs
    for value, a, b in zip(node.outputs, inner, other, strict=True):
        value.type = value.type or a.type
        same_rank = a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape)
        if value.shape is None and same_rank:
            value.shape = ir.Shape([None] * len(a.shape))

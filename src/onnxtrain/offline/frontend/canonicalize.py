"""Models that runtimes tolerate, brought into the form that the standard asks for."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.declared import settled
from onnxtrain.offline.graph.infer import skeleton
from onnxtrain.offline.graph.onnx_inference import infer_shapes
from onnxtrain.offline.graph.op_facts import SHAPE_INPUTS
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of
from onnxtrain.offline.graph.subgraphs import sources, values_of

DEFAULTS_AS_INPUTS_UNTIL = 4  # IR version from which an initializer need not be an input


def release_initializers(model: ir.Model) -> None:
    """Take initializers that are meant as constants out of the inputs.

    Up to IR version 3 every initializer was an input as well. Since then, an input with an
    initializer is one that the caller may override. Most are listed out of habit, though, and one
    that decides a shape (a target of Reshape, the axes of a sum) would hide what gradients have to
    know: it is no input of the result, and a runtime refuses a value for it.
    """
    old = model.ir_version < DEFAULTS_AS_INPUTS_UNTIL
    inputs = model.graph.inputs
    inputs[:] = [v for v in inputs if not v.is_initializer() or not (old or _decides_shapes(v))]
    model.ir_version = max(model.ir_version, DEFAULTS_AS_INPUTS_UNTIL)


def _decides_shapes(value: ir.Value) -> bool:
    """Tell whether nodes use a value for nothing but the shape of their result."""
    return bool(value.uses()) and all(
        node.domain == "" and index in SHAPE_INPUTS.get(node.op_type, ())
        for node, index in value.uses()
    )


def sort_nodes(model: ir.Model) -> None:
    """Sort nodes topologically; a cycle is an error.

    The standard asks for that order, but onnxruntime does not.
    """
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        try:
            graph.sort()
        except ValueError:
            raise ModelError(
                f"the graph {graph.name!r} has a cycle: there is no order in which its nodes can "
                f"be computed ({_in_cycle(graph)})"
            ) from None


def _in_cycle(graph: ir.Graph) -> str:
    """Name some nodes that wait for each other."""
    stuck: list[ir.Node] = []
    for body in (graph, *graph.subgraphs()):
        waiting = {node: set(sources(node)) for node in body}
        while ready := [n for n, needed in waiting.items() if waiting.keys().isdisjoint(needed)]:
            for node in ready:
                del waiting[node]
        stuck.extend(waiting)
    names = [repr(node.name or node.op_type) for node in stuck]
    return f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}"


def trim(model: ir.Model) -> None:
    """Drop the empty names after the last input or output of each node.

    Nodes without any output go too: nothing can depend on them. An operator that takes any number
    of outputs counts the empty ones, as Split does.
    """
    opset = model.opset_imports.get("", 1)
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            needed, allowed = 0, len(node.outputs)
            if node.domain == "" and onnx.defs.has(node.op_type, opset, ""):
                schema = onnx.defs.get_schema(node.op_type, opset, "")
                needed, allowed = schema.min_input, schema.max_output
            while len(node.inputs) > needed and node.inputs[-1] is None:
                node.resize_inputs(len(node.inputs) - 1)
            while len(node.outputs) > allowed and not node.outputs[-1].name:
                node.resize_outputs(len(node.outputs) - 1)
            if not node.outputs:
                graph.remove(node, safe=True)


def unwrap_optionals(model: ir.Model) -> None:
    """Replace OptionalGetElement by Identity, where what it reads is certainly there."""
    for node in model.graph.all_nodes():
        if node.op_type != "OptionalGetElement" or node.domain or node.inputs[0] is None:
            continue
        maker = node.inputs[0].producer()
        if maker is not None and maker.op_type == "Optional" and maker.inputs:
            node.replace_input_with(0, maker.inputs[0])
        if not isinstance(node.inputs[0].type, ir.OptionalType):
            node.op_type = "Identity"


def make_range_scalar(model: ir.Model) -> None:
    """Give every Range scalars, where a model feeds it vectors of one element.

    onnxruntime takes both, and so do the standard's own function bodies; shape inference does not.
    """
    if not any(n.op_type == "Range" and n.domain == "" for n in model.graph.all_nodes()):
        return
    try:
        inferred = infer_shapes(skeleton(model), data_prop=True)
    except Exception:  # the strict inference that follows tells what is wrong
        return
    vectors = {info.name for info in _typed(inferred.graph) if _rank(info) == 1}
    op = Ops(model.graph, model.opset_imports[""])
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Range" and node.domain == "":
            for index, value in enumerate(node.inputs):
                if value is not None and value.name in vectors:
                    scalar = ir.node("Reshape", [value, op.int64([])])
                    scalar.outputs[0].name = op.names.fresh(f"{value.name}_scalar")
                    node.prepend(scalar)
                    node.replace_input_with(index, scalar.outputs[0])


def make_step_number_scalar(model: ir.Model) -> None:
    """Let bodies of Loop take the number of the step as a scalar, where they declare a vector.

    onnxruntime gives what is declared; the standard says a scalar, and gradients count on it.
    """
    op = Ops(model.graph, model.opset_imports[""])
    for node in model.graph.all_nodes():
        if node.op_type != "Loop" or node.domain:
            continue
        body = node.attributes["body"].as_graph()
        number = body.inputs[0]
        if number.shape is not None and len(number.shape) == 1:
            number.shape = ir.Shape([])
            vector = ir.node("Reshape", [number, op.int64([1])])
            vector.outputs[0].name = op.names.fresh(f"{number.name}_vector")
            for user, index in tuple(number.uses()):
                if user is not vector:
                    user.replace_input_with(index, vector.outputs[0])
            body.insert_before(body[0], vector)


def _typed(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.value_info, *graph.output)
    for tensor in graph.initializer:
        yield onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _typed(attribute.g)


def _rank(info: onnx.ValueInfoProto) -> int | None:
    known = info.type.HasField("tensor_type") and info.type.tensor_type.HasField("shape")
    return len(info.type.tensor_type.shape.dim) if known else None


_WORDS = {
    ("AveragePool Conv ConvTranspose LpPool MaxPool", "auto_pad"): "NOTSET SAME_UPPER SAME_LOWER "
    "VALID",
    ("DepthToSpace", "mode"): "DCR CRD",
    ("Gelu", "approximate"): "none tanh",
    ("GridSample", "mode"): "bilinear nearest bicubic linear cubic",
    ("GridSample", "padding_mode"): "zeros border reflection",
    ("GRU LSTM RNN", "direction"): "forward reverse bidirectional",
    ("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", "reduction"): "none sum mean",
    ("Pad", "mode"): "constant reflect edge wrap",
    ("Resize", "mode"): "nearest linear cubic",
    ("Resize", "coordinate_transformation_mode"): "half_pixel half_pixel_symmetric "
    "pytorch_half_pixel align_corners asymmetric tf_crop_and_resize tf_half_pixel_for_nn",
    ("Resize", "nearest_mode"): "round_prefer_floor round_prefer_ceil floor ceil",
    ("Resize", "keep_aspect_ratio_policy"): "stretch not_larger not_smaller",
    ("RoiAlign", "mode"): "avg max",
    ("RoiAlign", "coordinate_transformation_mode"): "half_pixel output_half_pixel",
    ("ScatterElements ScatterND", "reduction"): "none add mul max min",
}
_ENUMS = {(op, name): w.split() for (ops, name), w in _WORDS.items() for op in ops.split()}


def check_enum_attributes(model: ir.Model) -> None:
    """Raise a ModelError for an attribute that has none of its values.

    onnx does not check them. A gradient rule would take its last branch for an unknown value, and
    the mistake would show only when a runtime loads the result.
    """
    for node in model.graph.all_nodes():
        for name, attribute in node.attributes.items():
            words = _ENUMS.get((node.op_type, name)) if node.domain == "" else None
            if words is not None and attribute.value not in words:
                raise ModelError(
                    f"{node.op_type} (node {node.name!r}) has {name}={attribute.value!r}, which is "
                    f"none of {', '.join(words)}"
                )


def fix_batch_of_states(model: ir.Model) -> bool:
    """Give a symbolic batch the size that the initial state of a recurrent layer has, everywhere.

    No other batch runs, though the inputs of some speech models declare any. Inference would take
    the name for a size that varies, and would not know what a Squeeze behind the layer removes.
    """
    sizes: dict[str | None, int] = {}
    for node in model.graph:
        if node.op_type in ("GRU", "LSTM", "RNN") and node.domain == "":
            axis = 1 - node.attributes.get_int("layout", 0)
            x, *states = (dims_of(v) if v is not None else None for v in node.inputs[::5])
            for state in states:
                if x is None or state is None or len(x) != 3 or len(state) != 3:
                    continue
                batch, fixed = x[axis], state[axis]
                if isinstance(batch, ir.SymbolicDim) and batch.value and isinstance(fixed, int):
                    sizes[batch.value] = fixed
    for value in values_of(model.graph) if sizes else ():
        if value.shape is not None and value.const_value is None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) else sizes.get(d.value, d) for d in value.shape]
            )
    return bool(sizes)


def settle_shapes(model: ir.Model) -> None:
    """Give each result the shape that inference finds, and what it was declared only beyond that.

    Declared shapes are often wrong: sizes of the example that was traced, a batch that was renamed
    in the input alone, an output that has another rank. onnxruntime runs such models with a
    warning, while gradients would divide by the wrong count.
    """
    proto = skeleton(model)
    shapes = {
        info.name: ir.serde.deserialize_type_proto_for_shape(info.type) for info in settled(proto)
    }
    for node in model.graph:
        for value in node.outputs if node.domain == "" else ():
            if value.name in shapes and (value.uses() or shapes[value.name] is not None):
                value.shape = shapes[value.name]  # nothing but its declaration tells of a loss

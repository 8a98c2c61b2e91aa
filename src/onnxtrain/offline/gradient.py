"""The public function: a model with the gradients that were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import onnx
import onnx_ir as ir

import onnxtrain.offline.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.errors import ArgumentError, NotDifferentiableError, UnknownNameError
from onnxtrain.offline.autodiff.engine import ActivePath, differentiate, operator_name
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.external_data import restore_locations
from onnxtrain.offline.frontend.fused import expand_trained
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.limits import Limits, limited
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of, is_float, may_be_same
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.passes.attention import join_attention
from onnxtrain.offline.passes.batch_norm import BatchNormMode, set_batch_norm_mode
from onnxtrain.offline.passes.formulas import join_formulas
from onnxtrain.offline.passes.native_kernels import fit_to_kernels
from onnxtrain.offline.selection import output_named, some_of
from onnxtrain.offline.writer.functions import write_functions
from onnxtrain.offline.writer.opset_stamp import stamp

_PROTO_LIMIT = 2**31 - 2**26  # 2 GB, less what the graph itself may take


@limited("differentiating")
def gradient(
    model: ModelLike,
    wrt: str | Iterable[str],
    of: str | None = None,
    *,
    straight_through: Iterable[str] = (),
    bn: Literal["batch", "frozen"] | None = None,
    limits: Limits | None = None,
) -> onnx.ModelProto:
    """Return the model extended by the gradient of one of its outputs.

    Args:
        model: the model, or the path to its file. It is not changed.
        wrt: what to differentiate with respect to: names of graph inputs, of initializers (they
            stay initializers) or of values in between.
        of: the output to differentiate; the first one by default. Where it is not a scalar, the
            result has a further input `<of>_grad`, the cotangent that the derivative is contracted
            with (ones, for the gradient of the sum).
        straight_through: operators to treat as the identity in the backward pass, such as
            `["Round"]`.
        bn: "batch" makes every BatchNormalization use the statistics of the batch, "frozen" the
            stored ones; by default each does what the model says.
        limits: how much the model may ask for, where the defaults of `Limits` are too low.

    Returns:
        A model of ordinary ONNX operators: the outputs of the given model, followed by one output
        `<name>_grad` for each name in `wrt` (`<name>_grad_1` where an input or output of the given
        model has that name already, as when a gradient is differentiated again). Weights that the
        model kept in external files are in the result, unless it would exceed the 2 GB that
        protobuf can hold: then they stay where they are, and the result is to be saved beside the
        given model.

    Raises:
        OnnxTrainError: the model cannot be read or is inconsistent (`ModelError`), a name is not in
            it (`UnknownNameError`), there is no gradient (`NotDifferentiableError`), or operators
            on the way have none (`MissingGradientError`, which lists all of them).

    Examples:
        >>> forces = onnxtrain.gradient("energy.onnx", wrt="positions")
        >>> session = onnxruntime.InferenceSession(forces.SerializeToString())
        >>> energy, denergy = session.run(None, {"positions": positions})

    """
    names = _names_in(wrt, "wrt")
    operators = _names_in(straight_through, "straight_through")
    if not (of is None or isinstance(of, str)):
        raise ArgumentError(f"of is the name of an output, or None, not {type(of).__name__}")
    return write_gradient(model, names, of, operators, bn)


def write_gradient(
    model: ModelLike,
    wrt: Sequence[str],
    of: str | None,
    straight_through: Sequence[str],
    bn: BatchNormMode | None,
    *,
    native: bool = False,
) -> onnx.ModelProto:
    """Differentiate a model; with `native`, native kernels can stand in for parts of the result."""
    prepared = canonical_model(model)
    expand_trained(prepared, wrt)
    set_batch_norm_mode(prepared, bn)
    graph = prepared.graph
    output = output_named(graph, of)
    if not is_float(output):
        raise NotDifferentiableError(
            f"the output {output.name!r} is of type {output.dtype}; only floats have a gradient"
        )
    targets = _values_named(graph, wrt)
    through = _straight_through(graph, straight_through)
    if output in targets and dims_of(output) != ():
        raise NotDifferentiableError(
            f"the gradient of {output.name!r} with respect to itself is the cotangent that you "
            "give: leave it out of wrt"
        )

    def path() -> ActivePath:
        return ActivePath(list(graph), targets, [output], prepared.opset_imports[""], through)

    expand_by_definition(prepared, path)
    lost = path().lost()
    if lost:
        raise NotDifferentiableError(
            f"{output.name!r} does not depend on {some_of(v.name for v in lost)} in a way that has "
            "a gradient: integers, shapes and operators such as ArgMax let none through. Leave the "
            "name out, or differentiate another output (of=...)"
        )
    gradient_names = _reserve_names(graph, [output, *targets])
    op = Ops(graph, prepared.opset_imports[""])
    seed = _seed(op, graph, output, gradient_names[output])
    rules = join_formulas(graph, [*targets, output])
    rules.update(join_attention(op, graph, [output], targets))
    found = differentiate(op, list(graph), {output: seed}, targets, through, rules=rules)
    results = {value: _result(op, value, found[value]) for value in targets}
    _give_names(op, graph, {results[value]: gradient_names[value] for value in targets})
    graph.outputs.extend(results.values())
    sweep(graph)
    stamp(prepared)  # before nodes disappear in functions
    if native:
        fit_to_kernels(graph)
    functions = write_functions(prepared, native)
    proto = _to_proto(prepared)
    proto.functions.extend(functions)
    return proto


def _names_in(names: str | Iterable[str], argument: str) -> list[str]:
    """Return one name or several as a list; a set, which has no order, in that of the alphabet."""
    if isinstance(names, str):
        return [names]
    wrong = type(names).__name__
    if isinstance(names, Iterable) and not isinstance(names, (bytes, bytearray)):
        found = list(names)
        wrong = next((type(name).__name__ for name in found if not isinstance(name, str)), "")
        if not wrong:
            return sorted(found) if isinstance(names, (set, frozenset)) else found
        wrong = f"{type(names).__name__} of {wrong}"
    raise ArgumentError(f"{argument} is a name or a sequence of names (str), not {wrong}")


def _values_named(graph: ir.Graph, names: Iterable[str]) -> list[ir.Value]:
    """Find the values to differentiate with respect to, each once."""
    interface = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    values = interface | {v.name: v for node in graph for v in node.outputs if v.name}
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise UnknownNameError("wrt is empty: name what to differentiate with respect to")
    unknown = [name for name in wanted if name not in values]
    if unknown:
        raise UnknownNameError(
            f"the model has no value {some_of(unknown)} to differentiate with respect to; its "
            f"inputs and initializers are {some_of(interface)}"
        )
    for name in wanted:
        if not is_float(values[name]):
            raise NotDifferentiableError(
                f"{name!r} is of type {values[name].dtype}; only floats have a gradient"
            )
    return [values[name] for name in wanted]


def _straight_through(graph: ir.Graph, names: Iterable[str]) -> frozenset[str]:
    """Check that the named operators exist and can pass a gradient on unchanged."""
    wanted = frozenset(names)
    nodes = [node for node in graph.all_nodes() if operator_name(node) in wanted]
    unknown = wanted - {operator_name(node) for node in nodes}
    if unknown:
        raise UnknownNameError(
            f"straight_through names {some_of(sorted(unknown))}, but the model has no such "
            "operator (operators of other domains are written 'domain.Op')"
        )
    for node in nodes:
        x, y = node.inputs[0] if node.inputs else None, node.outputs[0]
        if x is None or x.dtype != y.dtype or not may_be_same(dims_of(x), dims_of(y)):
            raise NotDifferentiableError(
                f"{operator_name(node)} (node {node.name!r}) cannot be passed straight through: "
                "its output differs from its first input in shape or type"
            )
    return wanted


def _reserve_names(graph: ir.Graph, values: Sequence[ir.Value]) -> dict[ir.Value, str]:
    """Choose `<name>_grad` for each value, so that nothing else in the model is called that.

    Values inside the model make way. Inputs, outputs and initializers keep their names (a model
    that is differentiated a second time has such outputs), and the new one is `<name>_grad_1`.
    """
    interface = {v.name for v in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    free = Names(name for name in interface if name)
    chosen = {value: free.fresh(f"{value.name}_grad") for value in dict.fromkeys(values)}
    wanted, names = set(chosen.values()), Names.of(graph)
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in wanted:
                value.name = names.fresh(value.name)
    return chosen


def _seed(op: Ops, graph: ir.Graph, output: ir.Value, name: str) -> ir.Value:
    """Return the cotangent of the output: one for a scalar, else a new input of the model."""
    if dims_of(output) == ():
        return op.const(1.0, output.dtype)
    seed = op.type_as(ir.Value(name=op.names.fresh(name)), output)
    graph.inputs.append(seed)
    return seed


def _result(op: Ops, value: ir.Value, cotangent: ir.Value | None) -> ir.Value:
    """Return the cotangent as a value that can be an output of its own."""
    result = op.zeros_like(value) if cotangent is None else cotangent
    producer = result.producer()
    own = producer is not None and result.name == f"{value.name}_grad"
    return op.type_as(result if own else op.Identity(result), value)


def _give_names(op: Ops, graph: ir.Graph, wanted: Mapping[ir.Value, str]) -> None:
    """Name outputs; values inside that have such a name, as parts of a sum may, make way."""
    taken = set(wanted.values())
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in taken and value not in wanted:
                value.name = op.names.fresh(value.name)
    for value, name in wanted.items():
        value.name = name


def _to_proto(model: ir.Model) -> onnx.ModelProto:
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    if size < _PROTO_LIMIT:
        ir.external_data.load_to_model(model)
    else:
        restore_locations(model)
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto

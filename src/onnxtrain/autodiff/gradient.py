"""The public function: a model with the gradients that were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

import onnxtrain.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.autodiff.emit import stamp, sweep
from onnxtrain.autodiff.engine import ActivePath, differentiate
from onnxtrain.autodiff.expand import expand_by_definition
from onnxtrain.autodiff.ops import Names, Ops
from onnxtrain.autodiff.prepare import ModelLike, prepare
from onnxtrain.autodiff.shapes import dims_of, is_float
from onnxtrain.errors import ModelError, NotDifferentiableError, UnknownNameError


def gradient(
    model: ModelLike,
    wrt: str | Sequence[str],
    of: str | None = None,
    *,
    straight_through: Iterable[str] = (),
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

    Returns:
        A model of ordinary ONNX operators: the outputs of the given model, followed by one output
        `<name>_grad` for each name in `wrt`.

    Example:
        >>> forces = onnxtrain.gradient("energy.onnx", wrt="positions")
        >>> session = onnxruntime.InferenceSession(forces.SerializeToString())
        >>> energy, denergy = session.run(None, {"positions": positions})

    """
    names = [wrt] if isinstance(wrt, str) else list(wrt)
    prepared = prepare(model)
    graph = prepared.graph
    output = _output_named(graph, of)
    targets = [_value_named(graph, name) for name in dict.fromkeys(names)]
    through = frozenset(straight_through)
    expand_by_definition(prepared, lambda: _path(prepared, targets, output, through))
    _require_reachable(_path(prepared, targets, output, through), targets, output)
    _reserve_names(graph, [output, *targets])
    op = Ops(graph, prepared.opset_imports[""])
    seed = _seed(op, graph, output)
    found = differentiate(op, list(graph), {output: seed}, targets, through)
    for value in targets:
        graph.outputs.append(_as_output(op, value, found[value]))
    sweep(graph)
    stamp(prepared)
    return _to_proto(prepared)


def _path(
    model: ir.Model, targets: Sequence[ir.Value], output: ir.Value, through: frozenset[str]
) -> ActivePath:
    return ActivePath(list(model.graph), targets, [output], model.opset_imports[""], through)


def _output_named(graph: ir.Graph, name: str | None) -> ir.Value:
    if name is None:
        output = graph.outputs[0]
    else:
        by_name = {v.name: v for v in graph.outputs}
        if name not in by_name:
            raise UnknownNameError(
                f"the model has no output {name!r}; its outputs are {_listing(by_name)}"
            )
        output = by_name[name]
    if not is_float(output):
        raise NotDifferentiableError(
            f"the output {output.name!r} is of type {output.dtype}; only floats have a gradient"
        )
    return output


def _value_named(graph: ir.Graph, name: str) -> ir.Value:
    values = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    interface = list(values)
    values.update((v.name, v) for node in graph for v in node.outputs)
    if name not in values:
        raise UnknownNameError(
            f"the model has no value {name!r} to differentiate with respect to; its inputs and "
            f"initializers are {_listing(interface)}"
        )
    value = values[name]
    if not is_float(value):
        raise NotDifferentiableError(
            f"{name!r} is of type {value.dtype}; only floats have a gradient"
        )
    return value


def _listing(names: Iterable[str | None], most: int = 20) -> str:
    known = [repr(n) for n in names if n]
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + rest


def _require_reachable(path: ActivePath, targets: Sequence[ir.Value], output: ir.Value) -> None:
    lost = [v.name for v in targets if v not in path.matters]
    if lost:
        raise NotDifferentiableError(
            f"{output.name!r} does not depend on {_listing(lost)} in a way that has a gradient: "
            "there is no path of differentiable operators between them (integers, shapes and "
            "operators such as ArgMax let no gradient through). Leave the name out, or "
            "differentiate another output (of=...)"
        )


def _reserve_names(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Rename values inside the model whose name one of the new inputs or outputs is to have."""
    wanted = {f"{v.name}_grad" for v in values}
    interface = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    taken = sorted(wanted & {v.name for v in interface if v.name})
    if taken:
        raise ModelError(
            f"the model already has an input, output or initializer called {_listing(taken)}, "
            "which is what the gradient would be called: rename it"
        )
    names = Names.of(graph)
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in wanted:
                value.name = names.fresh(value.name)


def _seed(op: Ops, graph: ir.Graph, output: ir.Value) -> ir.Value:
    """Return the cotangent of the output: one for a scalar, else a new input of the model."""
    if dims_of(output) == ():
        return op.const(1.0, output.dtype)
    seed = op.type_as(ir.Value(name=op.names.fresh(f"{output.name}_grad")), output)
    graph.inputs.append(seed)
    return seed


def _as_output(op: Ops, value: ir.Value, cotangent: ir.Value | None) -> ir.Value:
    """Return the cotangent as a value of its own that is called `<name>_grad`."""
    name = f"{value.name}_grad"
    result = op.zeros_like(value) if cotangent is None else cotangent
    final = result if result.name == name and result.producer() is not None else op.Identity(result)
    final.name = name
    return op.type_as(final, value)


def _to_proto(model: ir.Model) -> onnx.ModelProto:
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto

"""Replace the last layer of a model, to train it for other classes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ArgumentError, ModelError, UnknownNameError
from onnxtrain.offline.frontend.canonicalize import release_initializers, sort_nodes
from onnxtrain.offline.frontend.inline import inline_functions
from onnxtrain.offline.frontend.load import ModelLike, check_opset, load
from onnxtrain.offline.graph.folding import fold_constants
from onnxtrain.offline.graph.infer import skeleton, without_declared_shapes
from onnxtrain.offline.graph.initializers import initializer
from onnxtrain.offline.graph.limits import Limits, limited
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.shapes import (
    Dims,
    constant_array,
    dims_of,
    is_float,
    may_be_same,
    static_dims,
)
from onnxtrain.offline.graph.subgraphs import ancestors, captured_values, values_of
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.passes.feature_values import feature_values
from onnxtrain.offline.selection import output_named

# What may follow the last layer. A loss wants scores, so what turns them into probabilities goes,
# and so does what quantizes them.
_REMOVED = frozenset("Softmax LogSoftmax Sigmoid QuantizeLinear DequantizeLinear".split())
_KEPT = frozenset(
    "Identity Cast Dropout Relu LeakyRelu GlobalAveragePool GlobalMaxPool AveragePool MaxPool "
    "ReduceMean ReduceMax ReduceSum Flatten Squeeze Unsqueeze Reshape Transpose Resize".split()
)
_ARITHMETIC = ("Add", "Sub", "Mul", "Div")  # with a constant
_LINEAR = ("Gemm", "MatMul", "Conv")
_TARGET_SHAPE = {"Reshape": 1, "Resize": 3}  # the input that may state the number of classes
_WAY_OUT = "Name the value that a new layer is to read: after='...'."
_PRIMES = (104729, 104723, 104717, 104711)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ReplacedClassifier:
    """A model with a new last layer, and the names in it."""

    model: onnx.ModelProto
    weight: str
    bias: str
    output: str  # scores, without a softmax
    removed_outputs: tuple[str, ...] = ()  # which were computed from the old layer

    @property
    def parameters(self) -> list[str]:
        """The names of the new weight and bias, as a list to train."""
        return [self.weight, self.bias]


@limited("replacing the last layer of")
def replace_classifier(
    model: ModelLike,
    classes: int,
    *,
    of: str | None = None,
    after: str | None = None,
    seed: int = 0,
    limits: Limits | None = None,
) -> ReplacedClassifier:
    """Replace the last Gemm, MatMul or Conv of a model by a new one with `classes` outputs.

    Pooling, reshaping and the like behind the layer stay. A final softmax or sigmoid is removed,
    because losses take scores. The new parameters are called `head.weight` and `head.bias`, and the
    output `scores`, unless the model has these names already. Other outputs do not change, except
    that those computed from the old layer are removed.

    Args:
        model: the model, or the path to its file. It is not changed.
        classes: the number of classes.
        of: the output whose layer is replaced; the first one by default.
        after: the value that the new layer reads, instead of the input of the old layer. Earlier
            features often suit a task better that differs from the original one.
        seed: the seed of the new weight.
        limits: how much the model may ask for, where the defaults of `Limits` are too low.

    Raises:
        ModelError: the output does not come from such a layer; `after` is the way out.

    Examples:
        >>> replaced = replace_classifier("mobilenet.onnx", 5)
        >>> replaced.parameters
        ['head.weight', 'head.bias']

    """
    if classes < 1:
        raise ArgumentError(f"classes must be at least 1, not {classes}")
    loaded = load(model)
    ir.external_data.load_to_model(loaded)
    check_opset(loaded)
    release_initializers(loaded)
    sort_nodes(loaded)
    inline_functions(loaded)
    position = loaded.graph.outputs.index(output_named(loaded.graph, of))
    rng = np.random.default_rng(seed)
    if after is None:
        return _replace(loaded, position, classes, rng)
    return _append(loaded, position, after, classes, rng)


def new_head(model: ModelLike, classes: int, **options: Any) -> onnx.ModelProto:
    """Return the model of `replace_classifier` with only its new output (deprecated)."""
    advice = "new_head is deprecated: use replace_classifier(...).model"
    warnings.warn(advice, DeprecationWarning, stacklevel=2)
    replaced = replace_classifier(model, classes, **options)
    alone = ir.from_proto(replaced.model)
    alone.graph.outputs[:] = [v for v in alone.graph.outputs if v.name == replaced.output]
    sweep(alone.graph)
    return ir.to_proto(alone)


# ---- in the place of the old layer ---------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """A linear layer: its node, which input is the weight, and how the weight is laid out."""

    node: ir.Node
    index: int  # of the weight among the inputs
    weight: tuple[int, ...]
    class_axis: int
    fan_in: int
    bias_axes: int  # how many axes of size 1 follow that of the classes in the bias

    @property
    def classes(self) -> int:
        return self.weight[self.class_axis]


def _replace(
    model: ir.Model, position: int, classes: int, rng: np.random.Generator
) -> ReplacedClassifier:
    graph = model.graph
    output = graph.outputs[position]
    values = _inferred(model)
    old_shape = dims_of(values[output.name or ""])
    layer, behind = _find_layer(graph, output, values)
    node, old_weight = layer.node, layer.node.inputs[layer.index]
    group = node.attributes.get_int("group", 1)
    if group < 1 or classes % group:
        why = f"with {group} groups, which do not divide {classes} classes"
        raise _no_layer(output, node, why, values)
    kept = [
        v
        for v in graph.outputs
        if v is output or (p := v.producer()) is None or node not in ancestors([p])
    ]
    removed = tuple(v.name or "" for v in graph.outputs if v not in kept)
    graph.outputs[:], position = kept, kept.index(output)
    node.outputs[0].shape = None
    for each, data in behind:
        each.outputs[0].shape = None
        _adapt(each, data, layer, output, classes, values)
    node.resize_inputs(2)
    node.replace_input_with(layer.index, None)
    _sweep(graph)
    assert old_weight is not None
    head = _Head(graph, values[old_weight.name or ""].dtype)
    shape = [classes if i == layer.class_axis else size for i, size in enumerate(layer.weight)]
    node.replace_input_with(layer.index, head.weight(shape, layer.fan_in, rng))
    bias = head.bias([classes, *[1] * layer.bias_axes])
    if node.op_type == "MatMul":
        addition = ir.Node("", "Add", [None, bias], num_outputs=1, name=f"{head.prefix}.Add")
        addition.outputs[0].name = f"{head.prefix}.biased"
        _bypass(node, addition.outputs[0])
        addition.replace_input_with(0, node.outputs[0])
        node.append(addition)
    else:
        node.resize_inputs(3)
        node.replace_input_with(2, bias)
    for factor in ("alpha", "beta"):
        node.attributes.pop(factor, None)
    scores = head.name_scores(graph.outputs[position])
    _declare(model, scores, old_shape, layer.classes, classes)
    return ReplacedClassifier(ir.to_proto(model), *head.names, scores.name or "", removed)


def _find_layer(
    graph: ir.Graph, output: ir.Value, values: Mapping[str, ir.Value]
) -> tuple[_Layer, list[tuple[ir.Node, ir.Value]]]:
    """Return the layer behind an output, and the nodes on the way to it with what they read."""
    varying = {v for v in graph.inputs if not v.is_initializer()}
    for node in graph:
        if any(v in varying for v in (*node.inputs, *captured_values(node))):
            varying.update(node.outputs)
    path: list[tuple[ir.Node, ir.Value]] = []
    value = output
    while (producer := value.producer()) is not None:
        op = producer.op_type if producer.domain == "" else ""
        computed = [i for i, v in enumerate(producer.inputs) if v in varying]
        if op in _LINEAR:
            return _layer(producer, computed, output, values), path
        known = op in _KEPT | _REMOVED or (op in _ARITHMETIC and len(computed) == 1)
        data = producer.inputs[computed[0]] if known and computed else None
        if data is None or value is not producer.outputs[0]:
            raise _no_layer(output, producer, "which cannot stay behind a new layer", values)
        path.append((producer, data))
        value = data
    raise _no_layer(output, None, "", values)


def _layer(
    node: ir.Node, computed: Sequence[int], output: ir.Value, values: Mapping[str, ir.Value]
) -> _Layer:
    if len(computed) != 1 or computed[0] > 1 or (node.op_type == "Conv" and computed[0] == 1):
        why = "whose weight or bias is computed from the model's inputs"
        raise _no_layer(output, node, why, values)
    index = 1 - computed[0]
    x, weight = (values[v.name or ""] for i in (1 - index, index) if (v := node.inputs[i]))
    shape = static_dims(weight)
    if shape is None or len(shape) < 2:
        raise _no_layer(output, node, "whose weight is not known to be a matrix", values)
    if 0 in shape:
        raise _no_layer(output, node, "whose weight has no elements", values)
    if node.op_type == "Conv":
        return _Layer(node, index, shape, 0, math.prod(shape[1:]), 0)
    last = len(shape) - 1
    transposed = bool(node.attributes.get_int("transB" if index else "transA", 0))
    class_axis, summed = (last - 1, last) if transposed == bool(index) else (last, last - 1)
    of_columns = index == 0 and (x.shape is None or len(x.shape) > 1)
    return _Layer(node, index, shape, class_axis, shape[summed], int(of_columns))


def _adapt(
    node: ir.Node, data: ir.Value, layer: _Layer, output: ir.Value, classes: int,
    values: Mapping[str, ir.Value],
) -> None:  # fmt: skip
    """Let a node behind the layer take the new number of classes, or remove it."""
    if node.op_type in _REMOVED:
        _bypass(node, data)
    elif node.op_type in _ARITHMETIC:
        (constant,) = (v for v in node.inputs if v is not None and v is not data)
        shape = static_dims(values[constant.name or ""])
        elements = None if shape is None else math.prod(shape)
        if node.op_type in ("Add", "Sub") and elements in (1, layer.classes):
            _bypass(node, data)  # the new bias takes its place
        elif elements != 1:
            raise _no_layer(output, node, "with a constant for each of the old classes", values)
    elif node.op_type in _TARGET_SHAPE and len(node.inputs) > _TARGET_SHAPE[node.op_type]:
        found = list(_find_number(layer.classes, node, _TARGET_SHAPE[node.op_type]))
        if len(found) > 1:
            why = f"whose shape has {layer.classes} more than once"
            raise _no_layer(output, node, why, values)
        for user, index, array in found:
            assert user.graph is not None
            changed = np.where(array == layer.classes, classes, array).astype(array.dtype)
            name = Names.of(user.graph).fresh(f"{label_of(user)}.shape")
            constant = initializer(name, ir.tensor(changed))
            user.graph.register_initializer(constant)
            user.replace_input_with(index, constant)


def _bypass(node: ir.Node, value: ir.Value) -> None:
    ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)


def _find_number(number: int, node: ir.Node, index: int) -> Iterator[tuple[ir.Node, int, Array]]:
    """Yield the inputs that contribute a number to a shape, once for each time that they do."""
    value = node.inputs[index]
    array = constant_array(value)
    producer = None if value is None else value.producer()
    if array is not None:
        yield from [(node, index, array)] * int(np.count_nonzero(array == number))
    elif producer is not None and producer.op_type in ("Concat", "Unsqueeze", "Cast", "Identity"):
        for i in range(len(producer.inputs) if producer.op_type == "Concat" else 1):
            yield from _find_number(number, producer, i)


# ---- behind any value ----------------------------------------------------------------------------


def _append(
    model: ir.Model, position: int, after: str, classes: int, rng: np.random.Generator
) -> ReplacedClassifier:
    graph = model.graph
    here = {value.name or "": value for value in values_of(graph)}
    if after not in here:
        near = " or ".join(map(repr, get_close_matches(after, here, n=3)))
        hint = f"; did you mean {near}?" if near else ""
        raise UnknownNameError(f"the model has no value {after!r}{hint}")
    found = _inferred(model)[after]
    batch, *sizes = dims_of(found) or (None,)
    width = math.prod(size if isinstance(size, int) else 0 for size in sizes)
    if not sizes or not width or not is_float(found):
        raise ModelError(
            f"a layer cannot read {after!r}, of type {found.dtype} and shape {found.shape}: it "
            "takes floats whose sizes are known, except for the batch. Choose another value, such "
            "as the output of a global pool."
        )
    features = here[after]
    graph.outputs[position] = features
    _sweep(graph)
    head = _Head(graph, found.dtype)
    if len(sizes) > 1:
        features = head.node("Flatten", features)
    product = head.node("MatMul", features, head.weight([width, classes], width, rng))
    scores = head.name_scores(head.node("Add", product, head.bias([classes])))
    scores.type, scores.shape = found.type, ir.Shape([batch, classes])
    graph.outputs[position] = scores
    return ReplacedClassifier(ir.to_proto(model), *head.names, scores.name or "")


class _Head:
    """Adds the new layer to a graph, under a prefix that the model does not use."""

    def __init__(self, graph: ir.Graph, dtype: ir.DataType | None) -> None:
        self.graph, self.dtype = graph, dtype or ir.DataType.FLOAT
        taken = {v.name or "" for g in (graph, *graph.subgraphs()) for v in values_of(g)}
        used = {name.split(".")[0] for name in taken if "." in name}
        self.prefix = next(
            p for p in ("head", *(f"head{i}" for i in range(1, len(used) + 2))) if p not in used
        )
        self.names = (f"{self.prefix}.weight", f"{self.prefix}.bias")
        self._scores = f"{self.prefix}.scores" if "scores" in taken else "scores"

    def weight(self, shape: Sequence[int], fan_in: int, rng: np.random.Generator) -> ir.Value:
        bound = 1 / math.sqrt(fan_in)
        return self._parameter(self.names[0], rng.uniform(-bound, bound, shape))

    def bias(self, shape: Sequence[int]) -> ir.Value:
        return self._parameter(self.names[1], np.zeros(shape))

    def _parameter(self, name: str, array: Array) -> ir.Value:
        value = initializer(name, ir.Tensor(array.astype(self.dtype.numpy()), dtype=self.dtype))
        self.graph.register_initializer(value)
        return value

    def node(self, op: str, *inputs: ir.Value) -> ir.Value:
        node = ir.Node("", op, inputs, num_outputs=1, name=f"{self.prefix}.{op}")
        node.outputs[0].name = f"{self.prefix}.{op.lower()}"
        self.graph.append(node)
        return node.outputs[0]

    def name_scores(self, value: ir.Value) -> ir.Value:
        if value.name != "scores":
            value.name = self._scores
        return value


def _sweep(graph: ir.Graph) -> None:
    """Remove what no output needs, and weights that are inputs too."""
    sweep(graph)
    for value in [v for v in graph.inputs if v.is_initializer() and not v.uses()]:
        graph.inputs.remove(value)
        del graph.initializers[value.name or ""]


# ---- shapes and errors ---------------------------------------------------------------------------


def _inferred(model: ir.Model) -> dict[str, ir.Value]:
    """Return copies of a model's values by name, with types and shapes.

    A prime number stands for each symbolic batch, because onnx infers more from numbers.
    """
    clone = model.clone()
    primes: dict[str, int] = {}
    for value in clone.graph.inputs:
        first = value.shape[0] if value.shape else None
        if isinstance(first, ir.SymbolicDim) and first.value and len(primes) < len(_PRIMES):
            primes.setdefault(first.value, _PRIMES[len(primes)])
    for value in clone.graph.inputs:
        if value.shape:
            value.shape = ir.Shape([primes.get(str(d), d) for d in value.shape])
    folded = ir.from_proto(fold_constants(without_declared_shapes(skeleton(clone))))
    batches = {number: symbol for symbol, number in primes.items()}
    values = {value.name or "": value for value in values_of(folded.graph)}
    for value in values.values():
        if value.shape is not None:
            value.shape = ir.Shape([_symbolic(d, batches) for d in value.shape])
    return values


def _symbolic(dim: int | ir.SymbolicDim, batches: Mapping[int, str]) -> int | str | None:
    if not isinstance(dim, int):
        return None if dim.value is None or dim.value.startswith("unk__") else dim.value
    return batches.get(dim) if any(dim and dim % prime == 0 for prime in batches) else dim


def _declare(
    model: ir.Model, scores: ir.Value, old: Dims | None, before: int, classes: int
) -> None:
    """Give the scores their type and shape, which is the old one but for the classes."""
    found = _inferred(model)[scores.name or ""]
    scores.type, scores.shape = found.type, found.shape
    new = dims_of(found)
    if new is None and old is None:
        return
    for axis, (was, size) in enumerate(zip(old or (), new or (), strict=False)):
        others = [(*dims[:axis], *dims[axis + 1 :]) for dims in (old or (), new or ())]
        if (was, size) == (before, classes) and may_be_same(*others):
            return
    raise ModelError(
        f"with {classes} classes instead of {before}, the output would change from the shape "
        f"{old and ir.Shape(old)} to {new and ir.Shape(new)}: a node behind the last layer depends "
        f"on the number of classes. {_WAY_OUT}"
    )


def _no_layer(
    output: ir.Value, node: ir.Node | None, why: str, values: Mapping[str, ir.Value]
) -> ModelError:
    found = f"{node.op_type} (node {label_of(node)!r}), {why}" if node else "an input or constant"
    near = ", ".join(repr(v.name) for v in feature_values(output, values))
    return ModelError(
        f"the last layer of output {output.name!r} cannot be replaced: that takes a Gemm, MatMul "
        f"or Conv with weights of its own, and the model has {found}. {_WAY_OUT}"
        f"{f' It can read {near}.' if near else ''}"
    )

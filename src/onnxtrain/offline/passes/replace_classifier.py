"""A new last layer: a model for other classes than those it was trained for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.errors import ArgumentError, ModelError, UnknownNameError

Array = np.ndarray[Any, Any]

# What may stand between the last layer and the output of a model.
_BEHIND = frozenset("Softmax LogSoftmax Sigmoid Identity Flatten Squeeze Cast Add".split())
_LINEAR = ("Gemm", "MatMul", "Conv")


def new_head(
    model: str | onnx.ModelProto,
    classes: int,
    *,
    of: str | None = None,
    after: str | None = None,
    seed: int = 0,
) -> onnx.ModelProto:
    """Return a model whose last linear layer is replaced by a fresh one.

    The new layer has the weights `head.weight` and `head.bias` and gives out scores without a
    softmax, as a loss wants them, under the name `scores`, or `head.scores` where that is taken.

    Args:
        model: the model, or the path to its file. It is not changed.
        classes: how many classes the new layer tells apart.
        of: the output whose layer is replaced; the first one by default. The others go.
        after: a value in the model to put the new layer behind, instead of what the last layer
            reads: features from before are often better for what is unlike the first purpose.
        seed: what the random first weights follow from.

    Examples:
        >>> personal = new_head("mobilenet.onnx", 5)

    """
    if classes < 1:
        raise ArgumentError(f"classes is a positive number, not {classes}")
    changed = onnx.ModelProto()
    changed.CopyFrom(_load(model))
    graph = changed.graph
    output = _output(graph, of)
    if after is not None:
        features, width, flatten = after, _width_of(changed, after), True
    else:
        layer = _last_layer(graph, output)
        features, width = _features(layer, _constants(graph))
        flatten = layer.op_type == "Conv"
    element_type = _element_type(graph)
    del graph.output[:]
    _sweep(graph, features)
    _append(graph, flatten, features, (width, classes), element_type, seed)
    _declare_shape(changed, classes)
    return changed


def _append(
    graph: onnx.GraphProto,
    flatten: bool,
    features: str,
    shape: tuple[int, int],
    element_type: int,
    seed: int,
) -> None:
    """Add the new layer behind the features, and its scores as the output."""
    taken = {v for n in graph.node for v in n.output} | {t.name for t in graph.initializer}
    prefixes = ("head", *(f"head{i}" for i in range(1, len(taken) + 2)))
    prefix = next(p for p in prefixes if not any(name.startswith(f"{p}.") for name in taken))
    scores = "scores" if "scores" not in taken else f"{prefix}.scores"
    bound = 1 / math.sqrt(shape[0])
    weight = np.random.default_rng(seed).uniform(-bound, bound, shape)
    for name, value in (("weight", weight), ("bias", np.zeros(shape[1]))):
        array = value.astype(helper.tensor_dtype_to_np_dtype(element_type))
        graph.initializer.append(numpy_helper.from_array(array, f"{prefix}.{name}"))
    if flatten:
        graph.node.append(helper.make_node("Flatten", [features], [f"{prefix}.features"]))
        features = f"{prefix}.features"
    product = f"{prefix}.product"
    graph.node.append(helper.make_node("MatMul", [features, f"{prefix}.weight"], [product]))
    graph.node.append(helper.make_node("Add", [product, f"{prefix}.bias"], [scores]))
    graph.output.append(helper.make_tensor_value_info(scores, element_type, None))


def _declare_shape(model: onnx.ModelProto, classes: int) -> None:
    """Say how many axes the scores have: two, unless the features are known to have more."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    found = inferred.graph.output[0].type.tensor_type
    declared = model.graph.output[0].type.tensor_type.shape
    if found.HasField("shape"):
        declared.CopyFrom(found.shape)
        return
    batch = model.graph.input[0].type.tensor_type.shape.dim
    declared.dim.add().CopyFrom(batch[0] if batch else onnx.TensorShapeProto.Dimension())
    declared.dim.add().dim_value = classes


def _load(model: str | onnx.ModelProto) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        return onnx.load(model)
    except FileNotFoundError:
        raise ModelError(f"there is no model file at {str(model)!r}") from None
    except OSError as error:
        raise ModelError(f"{str(model)!r} cannot be read: {error}") from None
    except Exception:  # each of the formats that onnx reads has its own errors
        raise ModelError(f"{str(model)!r} is not an ONNX model, or it is truncated") from None


def _output(graph: onnx.GraphProto, of: str | None) -> str:
    names: list[str] = [value.name for value in graph.output]
    if of is None:
        return names[0]
    if of not in names:
        raise UnknownNameError(f"the model has no output {of!r}; it has {', '.join(names)}")
    return of


def _constants(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights, wherever they are kept."""
    found = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found[node.output[0]] = tuple(node.attribute[0].t.dims)
    return found


def _last_layer(graph: onnx.GraphProto, output: str) -> onnx.NodeProto:
    producers: dict[str, onnx.NodeProto] = {
        name: node for node in graph.node for name in node.output
    }
    constants = _constants(graph)
    name = output
    while name in producers:
        node = producers[name]
        computed = [i for i in node.input if i and i not in constants]
        if node.op_type in _LINEAR and len(computed) == 1:
            return node
        if node.op_type == "Reshape" and node.input[0] in producers:
            computed = [node.input[0]]
        elif node.op_type not in _BEHIND:
            break
        if len(computed) != 1:
            break
        name = computed[0]
    raise ModelError(
        f"the output {output!r} is not made by a linear layer with weights of its own, so there is "
        "nothing to replace: cut the model at its features and add a layer there"
    )


def _features(layer: onnx.NodeProto, constants: Mapping[str, tuple[int, ...]]) -> tuple[str, int]:
    """Return what a linear layer reads, and how many numbers these are for a sample."""
    shape = constants[layer.input[1]]
    if layer.op_type == "Conv":
        return layer.input[0], math.prod(shape[1:])
    turned = any(a.name == "transB" and a.i for a in layer.attribute)
    return layer.input[0], shape[1] if turned else shape[0]


def _width_of(model: onnx.ModelProto, name: str) -> int:
    """Return how many numbers a value has for a sample."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    known = {v.name: v for v in (*inferred.value_info, *inferred.output)}
    made = {name for node in inferred.node for name in node.output}
    if name not in made:
        raise UnknownNameError(f"nothing in the model computes a value {name!r}")
    dims = known[name].type.tensor_type.shape.dim[1:] if name in known else ()
    if not dims or not all(dim.dim_value for dim in dims):
        raise ModelError(
            f"how many numbers {name!r} has for a sample is not known before the model runs: "
            "choose a value whose axes but the first have fixed sizes, as a global pool has"
        )
    return math.prod(dim.dim_value for dim in dims)


def _element_type(graph: onnx.GraphProto) -> int:
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
    declared = graph.output[0].type.tensor_type.elem_type
    return declared if declared in kinds else TensorProto.FLOAT


def _sweep(graph: onnx.GraphProto, wanted: str) -> None:
    """Remove what a value does not need."""
    needed = {wanted}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
            needed.update(_read_inside(node))
    del graph.node[:]
    graph.node.extend(reversed(kept))
    for field in (graph.initializer, graph.value_info):
        made = {name for node in kept for name in node.output}
        stay = [item for item in field if item.name in needed | made]
        del field[:]
        field.extend(stay)


def _read_inside(node: onnx.NodeProto) -> set[str]:
    """What the subgraphs of a node read."""
    return {
        name
        for attribute in node.attribute
        for graph in (attribute.g, *attribute.graphs)
        for inner in graph.node
        for name in (*inner.input, *_read_inside(inner))
    }

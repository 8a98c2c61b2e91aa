"""Finds the layers of a model that low-rank factors can be put beside, whatever their form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

import onnx

from onnxtrain.offline.blocks.values import all_graphs
from onnxtrain.offline.graph.op_facts import LINEAR as LINEAR_OPS
from onnxtrain.offline.graph.op_facts import NORMS
from onnxtrain.offline.passes.lora.graph_index import GraphIndex, attribute, captured, operator_of
from onnxtrain.offline.passes.lora.packed import parts_behind
from onnxtrain.offline.passes.lora.paths import layer_path

LINEAR, LEFT, CONV, INSIDE = "linear", "left", "conv", "inside"


@dataclass(frozen=True)
class Part:
    """A projection among several that one product computes."""

    name: str
    width: int
    is_chosen: bool = True


@dataclass(frozen=True)
class Layer:
    """A layer, and how a low-rank update of it is computed."""

    path: str
    node: onnx.NodeProto
    weight: str  # the tensor of its weights: layers that share it share their factors
    x: str  # the value that the first factor multiplies
    y: str  # the value that the update is added to
    depth: int  # features of x
    width: int  # of y
    element_type: int
    form: str = LINEAR  # "conv"; "left" for W·x; "inside" for an operator with more than a product
    kernel: tuple[int, ...] = ()  # sizes of the window of a convolution
    is_transposed: bool = False  # x has its features on the first of two axes
    parts: tuple[Part, ...] = ()  # the projections that y packs
    # Scale and zero point of a y that is integers: it is expanded, updated, and quantized again.
    quantized_by: tuple[str, ...] = ()

    @property
    def updates_weights(self) -> bool:
        """Whether the update is added to the weights, which are y then, and not to the result."""
        return self.form in (LEFT, INSIDE)

    @property
    def is_conv(self) -> bool:
        """Whether the factors are kernels of convolutions."""
        return self.form == CONV


@dataclass
class LayerSearch:
    """The layers of a graph, and how many nodes were left out for which reason."""

    layers: list[Layer] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def find_layers(
    graph: onnx.GraphProto, functions: Sequence[onnx.FunctionProto] = ()
) -> LayerSearch:
    """Find the layers of a graph in the order of its nodes; paths are unique for each weight.

    Those in bodies of nodes, and in functions of the model, are counted and left out.
    """
    index, search = GraphIndex(graph), LayerSearch()
    _, *bodies = all_graphs(graph)
    for where, places in (("If, Loop or Scan", bodies), ("functions", functions)):
        count = sum(node.op_type in LINEAR_OPS for place in places for node in place.node)
        if count:
            search.left_out[f"layers inside {where}"] = count
    for node in graph.node:
        find = _FORMS.get(operator_of(node))
        found = find(index, node) if find is not None else None
        if isinstance(found, str):
            search.left_out[found] += 1
        elif found is not None:
            search.layers.append(_attached(index, found))
    search.layers = list(_with_own_paths(search.layers, index.names))
    return search


def layers_before(
    graph: onnx.GraphProto, layers: Sequence[Layer], outputs: Sequence[str]
) -> list[Layer]:
    """Return the layers that some values of a graph are computed from."""
    index = GraphIndex(graph)
    waiting = [name for name in outputs if name in index.makers]
    reached = set(waiting)
    while waiting:
        node = index.makers[waiting.pop()]
        found = {v for v in (*node.input, *captured(node)) if v in index.makers} - reached
        reached |= found
        waiting += found
    return [layer for layer in layers if layer.node.output[0] in reached]


def heads_of(graph: onnx.GraphProto, layers: Sequence[Layer], outputs: Sequence[str]) -> set[str]:
    """Return the y of the layers that make an output with nothing but views behind them.

    A layer before a normalization or a residual connection is no head.
    """
    index, found = GraphIndex(graph), set[str]()
    ends = {layer.y: layer for layer in layers} | {layer.node.output[0]: layer for layer in layers}
    for name in outputs:
        value = name
        while value not in ends and value in index.makers:
            node = index.makers[value]
            data = [v for v in node.input if v and index.source(v) is None]
            if len(data) != 1 or node.op_type in NORMS:
                break
            value = data[0]
        if value in ends:
            found.add(ends[value].y)
    return found


# ---- forms ---------------------------------------------------------------------------------------

Found = Layer | str | None  # a reason where the layer cannot be updated


def _layer(
    index: GraphIndex, node: onnx.NodeProto, x: str, weight: str, dims: Sequence[int], type_: int
) -> Layer:
    source = index.source(weight)
    name = weight if source is None else source.name or weight
    return Layer("", node, name, x, node.output[0], dims[0], dims[1], type_)


def _matmul(index: GraphIndex, node: onnx.NodeProto) -> Found:
    left, right = node.input[:2]
    weights = [v for v in (right, left) if index.source(v) is not None]
    if len(weights) != 1:
        return None  # a product of two values, as in attention, or a constant
    weight = weights[0]
    dims, type_ = index.dims(weight), index.float_type(weight)
    if dims is None or len(dims) != 2 or not type_ or dims[0] < 2:
        return None
    if weight == right:
        return _layer(index, node, left, weight, dims, type_)
    # onnxruntime gets products of two matrices of rank 0 wrong where the second has more axes.
    return replace(_layer(index, node, right, weight, dims[::-1], type_), form=LEFT, y=weight)


def _fused_matmul(index: GraphIndex, node: onnx.NodeProto) -> Found:
    if any(attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return "FusedMatMul of a transposed input"
    return _gemm(index, node)


def _gemm(index: GraphIndex, node: onnx.NodeProto) -> Found:
    x, weight = node.input[:2]
    dims, type_ = index.dims(weight), index.float_type(weight)
    is_weight = index.source(weight) is not None and index.source(x) is None
    if not is_weight or dims is None or len(dims) != 2 or not type_:
        return None
    if attribute(node, "transB", 0):
        dims = dims[::-1]
    made = _layer(index, node, x, weight, dims, type_)
    return replace(made, is_transposed=bool(attribute(node, "transA", 0)))


def _matmul_nbits(index: GraphIndex, node: onnx.NodeProto) -> Found:
    dims = attribute(node, "K", 0), attribute(node, "N", 0)
    type_ = index.float_type(node.input[2])
    if len(node.input) > 4 and node.input[4]:
        return "MatMulNBits with a g_idx"
    if not type_ or index.source(node.input[1]) is None:
        return "MatMulNBits whose weights are computed"
    return _layer(index, node, node.input[0], node.input[1], dims, type_)


def _conv(index: GraphIndex, node: onnx.NodeProto) -> Found:
    dims, type_ = index.dims(node.input[1]), index.float_type(node.input[1])
    if index.source(node.input[1]) is None or dims is None or len(dims) < 3 or not type_:
        return None
    if attribute(node, "group", 1) != 1:
        return "Conv with groups"
    made = _layer(index, node, node.input[0], node.input[1], (dims[1], dims[0]), type_)
    return replace(made, form=CONV, kernel=dims[2:])


def _fused_conv(index: GraphIndex, node: onnx.NodeProto) -> Found:
    return "FusedConv, which has its activation inside"


def _conv_integer(index: GraphIndex, node: onnx.NodeProto) -> Found:
    return "ConvInteger"


def _matmul_integer(index: GraphIndex, node: onnx.NodeProto) -> Found:
    """MatMulInteger between DynamicQuantizeLinear and Cast, Mul, as quantize_dynamic writes it."""
    dims, x = index.dims(node.input[1]), _float_behind(index, node.input[0])
    cast = index.only_reader(node.output[0])
    scaled = index.only_reader(cast.output[0]) if operator_of(cast) == "Cast" and cast else None
    if dims is None or len(dims) != 2 or not x:
        return None
    if cast is None or scaled is None or operator_of(scaled) != "Mul":
        return "MatMulInteger without Cast and Mul behind it"
    made = _layer(index, node, x, node.input[1], dims, attribute(cast, "to", 1))
    return replace(made, y=scaled.output[0])


def _dynamic_matmul(index: GraphIndex, node: onnx.NodeProto) -> Found:
    """com.microsoft's DynamicQuantizeMatMul (x, W, scale, ...)."""
    dims, type_ = index.dims(node.input[1]), index.float_type(node.input[2])
    if dims is None or len(dims) != 2:
        return None
    return _layer(index, node, node.input[0], node.input[1], dims, type_ or 1)


def _integer_to_float(index: GraphIndex, node: onnx.NodeProto) -> Found:
    """com.microsoft's MatMulIntegerToFloat (x, W, scale of x, scale of W, ...)."""
    dims, x = index.dims(node.input[1]), _float_behind(index, node.input[0])
    if dims is None or len(dims) != 2:
        return None
    if not x:
        return "MatMulIntegerToFloat of integers that no quantizer made"
    return _layer(index, node, x, node.input[1], dims, index.float_type(node.input[3]) or 1)


def _qlinear_matmul(index: GraphIndex, node: onnx.NodeProto) -> Found:
    dims = index.dims(node.input[3])
    if dims is None or len(dims) != 2 or index.source(node.input[3]) is None:
        return None
    return _qlinear(index, node, dims)


def _qlinear_conv(index: GraphIndex, node: onnx.NodeProto) -> Found:
    dims = index.dims(node.input[3])
    if dims is None or len(dims) < 3:
        return None
    if attribute(node, "group", 1) != 1:
        return "Conv with groups"
    made = _qlinear(index, node, (dims[1], dims[0]))
    return replace(made, form=CONV, kernel=dims[2:]) if isinstance(made, Layer) else made


def _qlinear(index: GraphIndex, node: onnx.NodeProto, dims: Sequence[int]) -> Found:
    x, type_ = _float_behind(index, node.input[0]), index.float_type(node.input[1]) or 1
    if not x:
        return f"{node.op_type} of integers that no quantizer made"
    made = _layer(index, node, x, node.input[3], dims, type_)
    return replace(made, quantized_by=tuple(node.input[6:8]))


def _attention(index: GraphIndex, node: onnx.NodeProto) -> Found:
    """com.microsoft's Attention, which has the weights of q, k and v inside of one input."""
    dims, type_ = index.dims(node.input[1]), index.float_type(node.input[1])
    if dims is None or len(dims) != 2 or not type_:
        return "Attention whose weights are computed"
    widths = next((list(a.ints) for a in node.attribute if a.name == "qkv_hidden_sizes"), None)
    sizes = widths or [dims[1] // 3] * 3
    made = _layer(index, node, node.input[0], node.input[1], dims, type_)
    parts = map(Part, ("query", "key", "value"), sizes)
    return replace(made, form=INSIDE, y=node.input[1], parts=tuple(parts))


def _quantized_attention(index: GraphIndex, node: onnx.NodeProto) -> Found:
    return "QAttention, which has quantized weights inside"


_MICROSOFT = "com.microsoft."
_FORMS: dict[str, Callable[[GraphIndex, onnx.NodeProto], Found]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul,
    "QLinearConv": _qlinear_conv,
    _MICROSOFT + "MatMulNBits": _matmul_nbits,
    _MICROSOFT + "FusedMatMul": _fused_matmul,
    _MICROSOFT + "FusedConv": _fused_conv,
    _MICROSOFT + "DynamicQuantizeMatMul": _dynamic_matmul,
    _MICROSOFT + "MatMulIntegerToFloat": _integer_to_float,
    _MICROSOFT + "Attention": _attention,
    _MICROSOFT + "QAttention": _quantized_attention,
}


# ---- where an update is added --------------------------------------------------------------------


def _float_behind(index: GraphIndex, integers: str) -> str:
    """Return the floats that a value of integers was quantized from, or ""."""
    maker = index.makers.get(integers)
    is_quantizer = operator_of(maker) in ("QuantizeLinear", "DynamicQuantizeLinear")
    return str(maker.input[0]) if maker is not None and is_quantizer else ""


def _attached(index: GraphIndex, layer: Layer) -> Layer:
    """Return a layer with its path; its update is added behind its bias and its quantizer.

    There the product and its bias stay what onnxruntime has one kernel for.
    """
    if layer.updates_weights:
        path = layer_path(index, layer.node, layer.weight, "")
        return replace(layer, path=path)
    y, bias = layer.y, ""
    reader = index.only_reader(y)
    if reader is not None and operator_of(reader) == "Add":
        other = next((v for v in reader.input if v != y), "")
        source = index.source(other) if other else None
        if source is not None and index.dims(other) in ((layer.width,), (1, layer.width)):
            y, bias = reader.output[0], source.name
    reader = index.only_reader(y)
    parts = tuple(Part(*part) for part in parts_behind(index, y, layer.width))
    if reader is not None and operator_of(reader) == "QuantizeLinear":
        expander = index.only_reader(reader.output[0])
        if expander is not None and operator_of(expander) == "DequantizeLinear":
            y = expander.output[0]
    if layer.quantized_by and reader is not None and operator_of(reader) == "DequantizeLinear":
        return replace(
            layer, y=reader.output[0], quantized_by=(),
            path=layer_path(index, layer.node, layer.weight, bias),
        )  # fmt: skip
    path = layer_path(index, layer.node, layer.weight, bias)
    return replace(layer, path=path, y=y, parts=parts)


def _with_own_paths(layers: Sequence[Layer], taken: set[str]) -> Iterator[Layer]:
    """Give each weight a path of its own, which no tensor of an earlier adapter has."""
    known: dict[str, str] = {}  # the path of each weight
    used = set[str]()
    for layer in layers:
        if layer.weight not in known:
            path, number = layer.path, 1
            while path in used or any(name in taken for name in _names(layer, path)):
                number += 1
                path = f"{layer.path}_{number}"
            known[layer.weight] = path
            used.add(path)
        yield replace(layer, path=known[layer.weight])


def _names(layer: Layer, path: str) -> Iterator[str]:
    for slot, _ in slots_of(replace(layer, path=path)):
        yield from factor_names(slot)


def slots_of(layer: Layer) -> list[tuple[str, int]]:
    """Return paths and widths of the pairs of factors of a layer, several where it is packed."""
    if not layer.parts:
        return [(layer.path, layer.width)]
    return [(part_path(layer.path, p.name), p.width) for p in layer.parts if p.is_chosen]


def with_parts(layer: Layer, paths: Container[str]) -> Layer:
    """Return a packed layer of which some projections alone get factors."""
    parts = (replace(p, is_chosen=part_path(layer.path, p.name) in paths) for p in layer.parts)
    return replace(layer, parts=tuple(parts))


def part_path(path: str, part: str) -> str:
    """Return the path of a packed projection: `self_attn.qkv_proj` becomes `self_attn.q_proj`."""
    parent, _, last = path.rpartition(".")
    if "qkv" in last:
        own = last.replace("qkv", part[0])
        return f"{parent}.{own}" if parent else own
    return f"{path}.{part}"


def factor_names(path: str) -> tuple[str, str]:
    """Return the names of the factors beside a layer, as PEFT and Olive write them."""
    return f"{path}.lora_A.weight", f"{path}.lora_B.weight"

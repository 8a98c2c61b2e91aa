"""From `Sparse` to a model whose chosen channels are parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.add_loss import Loss, add_loss
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.graph.infer import skeleton
from onnxtrain.offline.graph.op_facts import ADDITIVE, NORMS
from onnxtrain.offline.memory import likely_sizes, megabytes, shapes_of
from onnxtrain.offline.optimizers import Optimizer
from onnxtrain.offline.passes.lora.graph_index import operator_of
from onnxtrain.offline.passes.sparse.add import add_rows
from onnxtrain.offline.passes.sparse.choose import Choice, Cost, choose_channels
from onnxtrain.offline.passes.sparse.gain import Batch, as_batches, channel_gains
from onnxtrain.offline.passes.sparse.layers import (
    Array,
    SparseLayer,
    array_of,
    find_sparse_layers,
)
from onnxtrain.offline.selection import Role, survey
from onnxtrain.offline.sparse import Sparse

_BATCH = 8  # samples, where no data says how many


@dataclass(frozen=True)
class SparseModel:
    """A model whose chosen channels are parameters, their names, and what there is to note."""

    proto: onnx.ModelProto
    rows: list[str]
    note: str


def add_sparse(
    proto: onnx.ModelProto,
    path: Path | None,
    sparse: Sparse,
    loss: Loss | None,
    of: Iterable[str] | None,
    optimizer: Optimizer | None,
    taken: Collection[str] = (),
) -> SparseModel:
    """Choose channels of a model and make them parameters; `taken` are weights that train anyway.

    The gain is measured on the data of `sparse`, with the loss that training will have.
    """
    proto = _without_constants(proto)
    with_loss, outputs, brought, *_ = add_loss(proto, path, loss, of, ())
    canonical = canonical_model(with_loss, located=True)
    found = survey(canonical, outputs[0], brought)
    weights = set(found.names(Role.WEIGHT)) - found.blocked - set(taken)
    layers = [layer for layer in find_sparse_layers(proto.graph) if layer.weight in weights]
    if not layers:
        raise OnnxTrainError(
            "sparse finds no Conv, Gemm or MatMul in this model whose channels could train: train "
            "something else (train='bias', or names)"
        )
    inputs = [str(v.name) for v in canonical.graph.inputs
              if v.name not in canonical.graph.initializers]  # fmt: skip
    batches: list[Batch] = []
    if sparse.data is not None:
        batches = as_batches(sparse.data, inputs, sparse.batches)
        gains = channel_gains(canonical, outputs[0], layers, batches)
    else:
        gains = {x.weight: _sizes_of_weights(array_of(proto.graph, x.weight, path), x.axis)
                 for x in layers}  # fmt: skip
    states = 0 if optimizer is None else len(optimizer.states(ir.DataType.FLOAT))
    sizes = _sizes(canonical.graph, batches)
    costs = _costs(canonical, layers, sizes, 2 + states)
    budget = int(sparse.size)
    choice = choose_channels(gains, costs, budget)
    if choice is None:
        least = min(cost.way + cost.layer + cost.channel for cost in costs.values())
        raise OnnxTrainError(
            f"sparse: {megabytes(budget)} are too little for any channel; the first one needs "
            f"{megabytes(least)} or more{_for(sizes)}"
        )
    made, rows = add_rows(proto, path, choice.channels, layers)
    return SparseModel(made, rows, _note(choice, layers, sizes, sparse))


def _without_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose Constant nodes of floats are initializers; some have no others."""
    found = {
        name: attribute.t
        for node in proto.graph.node
        if operator_of(node) == "Constant"
        for name in node.output
        for attribute in node.attribute
        if attribute.name == "value" and attribute.t.data_type == onnx.TensorProto.FLOAT
    }
    if not found:
        return proto
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    nodes = [node for node in made.graph.node if found.keys().isdisjoint(node.output)]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    for name, tensor in found.items():
        made.graph.initializer.add().CopyFrom(tensor)
        made.graph.initializer[-1].name = name
    return made


def _sizes_of_weights(weight: Array, axis: int) -> Array:
    """Return the sum of squares of the weights of each channel."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    squares: Array = np.square(weight.astype(np.float64)).sum(axis=others)
    return squares


def _sizes(graph: ir.Graph, batches: Sequence[Batch]) -> dict[str, int]:
    """Return numbers for the symbolic dimensions: those of the data, or likely ones."""
    found = likely_sizes(graph.inputs, None)
    for number, name in enumerate(found):
        if number == 0:
            found[name] = _BATCH
    for value in graph.inputs if batches else ():
        shape = value.shape
        given = batches[0].get(str(value.name))
        for dim, size in zip(shape or (), () if given is None else given.shape, strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value:
                found[dim.value] = int(size)
    return found


def _costs(
    model: ir.Model, layers: Sequence[SparseLayer], sizes: Mapping[str, int], copies: int
) -> dict[str, Cost]:
    """Return what layers need, with so many copies of each trained row."""
    known = shapes_of(skeleton(model), sizes)

    def bytes_of(name: str) -> int:
        return known[name].nbytes if name in known else 0

    readers = {layer.weight: layer for layer in layers}
    nodes = list(model.graph)
    found, kept = dict[str, Cost](), 0
    for node in reversed(nodes):
        weight = next((v.name for v in node.inputs if v is not None and v.name in readers), None)
        if weight is not None:
            layer = readers[weight]
            found[weight] = Cost(copies * 4 * layer.elements, bytes_of(layer.x), kept)
        turns_weight = weight is not None and node.op_type == "Transpose"
        if not turns_weight and (node.op_type not in ADDITIVE | NORMS or node.domain):
            kept += sum(bytes_of(v.name or "") for v in node.outputs)
    return {layer.weight: found[layer.weight] for layer in layers if layer.weight in found}


def _for(sizes: Mapping[str, int]) -> str:
    known = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    return f" for {known}" if known else ""


def _note(
    choice: Choice, layers: Sequence[SparseLayer], sizes: Mapping[str, int], sparse: Sparse
) -> str:
    elements = {layer.weight: layer.elements for layer in layers}
    count = sum(len(channels) for channels in choice.channels.values())
    total = sum(layer.channels for layer in layers)
    parameters = sum(len(c) * elements[name] for name, c in choice.channels.items())
    how = (
        "by the gradients of the data"
        if sparse.data is not None
        else "by the size of their weights; onnxtrain.Sparse(memory, data=...) measures their gain"
    )
    return (
        f"sparse trains {count:,} of {total:,} channels, in {len(choice.channels)} of "
        f"{len(layers)} layers ({parameters:,} parameters), chosen {how}. They take about "
        f"{megabytes(choice.taken)}{_for(sizes)}."
    )

"""Sequences of tensors whose elements are known become these elements.

torch's exporters write `split`, `chunk` and `unbind` as SplitToSequence with a SequenceAt for each
part, `stack` of a list as ConcatFromSequence, `vstack` as a SequenceMap. A sequence carries no
gradient, but here none is needed: what reads it can as well read the tensors in it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.frontend.loop_sequences import collect_appended
from onnxtrain.offline.frontend.upgrade.rewrite import Rewriter
from onnxtrain.offline.graph.initializers import replace_by_initializer
from onnxtrain.offline.graph.limits import require
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.shapes import constant_array, dims_of, same_dims
from onnxtrain.offline.graph.subgraphs import take_out

Elements = list[ir.Value]
_ZERO = np.array([0], np.int64)


def dissolve_sequences(model: ir.Model) -> bool:
    """Let what reads sequences of known elements read the elements, in place; tell if any did.

    Ranks have to be known. A sequence that a Loop builds becomes a stack of its elements where
    they have one shape.
    """
    readers = [
        node
        for graph in (model.graph, *model.graph.subgraphs())
        for node in graph
        if node.domain == "" and node.op_type in _READERS
    ]
    if not readers:
        return False
    known = _Known(Names.of(model.graph), model.opset_imports[""])
    collected = collect_appended(model, known.write, known.elements, _READERS)
    left = [node for node in readers if node.op_type in _READERS]
    return any([collected, *(_READERS[node.op_type](known, node) for node in left)])


def drop_unit_splits(model: ir.Model) -> None:
    """Split into single elements by leaving out how many.

    onnxruntime drops the axis of SplitToSequence with keepdims=0 if the parts are given as the
    number 1, and torch counts on it. The standard, and inference with it, does so only where
    nothing is given.
    """
    for node in model.graph.all_nodes():
        if node.op_type != "SplitToSequence" or node.domain or len(node.inputs) < 2:
            continue
        width = constant_array(node.inputs[1])
        if width is not None and width.shape == () and not node.attributes.get_int("keepdims", 1):
            node.resize_inputs(1)


class _Known:
    """The elements of each sequence, as far as they are known, written where they are asked for."""

    def __init__(self, names: Names, opset: int) -> None:
        self.write = Rewriter(names, opset)
        self._names = names
        self._found: dict[ir.Value, Elements | None] = {}

    def elements(self, sequence: ir.Value | None) -> Elements | None:
        """Return the tensors in a sequence, or None where their number is not known."""
        if sequence is None:
            return None
        if sequence not in self._found:
            node = sequence.producer()
            self._found[sequence] = None if node is None else self._elements(node)
            if node is not None and node.op_type == "SequenceMap":
                self._map(node)
        return self._found[sequence]

    def _elements(self, node: ir.Node) -> Elements | None:
        if node.domain != "":
            return None
        if node.op_type == "SplitToSequence":
            return self._parts(node)
        if node.op_type == "SequenceConstruct":
            return [v for v in node.inputs if v is not None]
        if node.op_type == "SequenceEmpty":
            return []
        if node.op_type == "SequenceInsert":
            return self._inserted(node)
        return self.elements(node.inputs[0]) if node.op_type == "Identity" else None

    def _map(self, node: ir.Node) -> None:
        """Write the body of a SequenceMap once for each element."""
        first = self.elements(node.inputs[0])
        given = [
            self.elements(v) if v is not None and isinstance(v.type, ir.SequenceType) else v
            for v in node.inputs
        ]
        if first is None or any(v is None for v in given):
            return
        rows = []
        inside = sum(1 for _ in node.attributes["body"].as_graph().all_nodes())
        _require_few(node, len(first) * inside)
        for index in range(len(first)):
            row = [v if isinstance(v, ir.Value) else v[index] for v in given if v is not None]
            rows.append(self._body(node, row))
        for sequence, made in zip(node.outputs, zip(*rows, strict=True), strict=True):
            self._found[sequence] = list(made)

    def _body(self, node: ir.Node, inputs: Elements) -> Elements:
        """Write a copy of the body before its node, and return the results."""
        assert isinstance(node.graph, ir.Graph)
        copy = node.attributes["body"].as_graph().clone(allow_outer_scope_values=True)
        for parameter, given in zip(copy.inputs, inputs, strict=True):
            ir.convenience.replace_all_uses_with(parameter, given, replace_graph_outputs=True)
        for inner in copy.all_nodes():
            inner.name = self._names.fresh(f"{node.name}/{inner.name or inner.op_type}")
        results, nodes = take_out(copy)
        for value in [v for n in nodes for v in n.outputs if v.name]:
            value.name = self._names.fresh(f"{node.name}/{value.name}")
        for name, value in list(copy.initializers.items()):
            del copy.initializers[name]
            value.name = self._names.fresh(f"{node.name}/{name}")
            node.graph.register_initializer(value)
        node.graph.insert_before(node, nodes)
        return results

    def _inserted(self, node: ir.Node) -> Elements | None:
        before, new = self.elements(node.inputs[0]), node.inputs[1]
        place = node.inputs[2] if len(node.inputs) > 2 else None
        index = constant_array(place)
        if before is None or new is None or (place is not None and index is None):
            return None
        at = len(before) if index is None else int(index)
        at += len(before) if at < 0 else 0
        return [*before[:at], new, *before[at:]]

    def _parts(self, node: ir.Node) -> Elements | None:
        """Write a SplitToSequence as Split, if it is known into how many parts."""
        x, sizes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        dims = None if x is None else dims_of(x)
        if x is None or dims is None or node.graph is None:
            return None
        axis = node.attributes.get_int("axis", 0) % len(dims)
        shape = () if sizes is None else dims_of(sizes)
        if shape is None:
            return None
        if sizes is not None and len(shape) == 1:
            count = shape[0]
        else:
            width, whole = np.array(1) if sizes is None else constant_array(sizes), dims[axis]
            if width is None or not isinstance(whole, int):
                return None
            if int(width) < 1:
                return None
            _require_few(node, whole // int(width))
            given = [min(int(width), whole - start) for start in range(0, whole, int(width))]
            sizes, count = self.write.constant(node, "split", np.array(given, np.int64)), len(given)
        if not isinstance(count, int) or count == 0:
            return None
        _require_few(node, count)
        split = self.write.insert_many(node, "Split", [x, sizes], count, axis=axis)
        if not _drops_axis(node):
            return split
        axes = self.write.constant(node, "axes", np.array([axis], np.int64))
        return [self.write.insert(node, "Squeeze", [part, axes]) for part in split]


def _require_few(node: ir.Node, count: int) -> None:
    what = f"{node.op_type} (node {node.name!r}) would be written out as a number of nodes of"
    require("inlined_nodes", count, what)


def _drops_axis(node: ir.Node) -> bool:
    """Tell whether the parts of a SplitToSequence lack the axis that it splits."""
    given = len(node.inputs) > 1 and node.inputs[1] is not None
    return not given and node.attributes.get_int("keepdims", 1) == 0


def _sequence_at(known: _Known, node: ir.Node) -> bool:
    place = constant_array(node.inputs[1])
    source = None if node.inputs[0] is None else node.inputs[0].producer()
    is_split = source is not None and source.op_type == "SplitToSequence" and source.domain == ""
    elements = None if is_split and place is None else known.elements(node.inputs[0])
    if elements is None and is_split and source is not None:
        return _part_of_many(known.write, node, source)
    if elements is None or place is None:
        return elements is not None and _any_of(known.write, node, elements)
    if not -len(elements) <= place < len(elements):
        return False
    known.write.become(node, "Identity", [elements[int(place)]])
    return True


def _any_of(write: Rewriter, node: ir.Node, elements: Elements) -> bool:
    """Pick one of several tensors of one shape, by an index that only run time tells."""
    first = dims_of(elements[0]) if elements else None
    if first is None or not all(same_dims(first, dims_of(v)) for v in elements):
        return False
    axes = write.constant(node, "axes", np.array([0], np.int64))
    rows = [write.insert(node, "Unsqueeze", [v, axes]) for v in elements]
    stack = write.insert(node, "Concat", rows, axis=0)
    write.become(node, "Gather", [stack, node.inputs[1]], axis=0)
    return True


def _part_of_many(write: Rewriter, node: ir.Node, split: ir.Node) -> bool:
    """Write one part of a SplitToSequence, where only run time tells how many there are."""
    x, width = split.inputs[0], split.inputs[1] if len(split.inputs) > 1 else None
    place, axis = node.inputs[1], split.attributes.get_int("axis", 0)
    if _drops_axis(split):
        write.become(node, "Gather", [x, place], axis=axis)
        return True
    one = write.constant(node, "one", np.array([1], np.int64))
    wide = write.insert(node, "Cast", [place], to=ir.DataType.INT64)
    index = write.insert(node, "Reshape", [wide, one])
    shape = () if width is None else dims_of(width)
    if width is None:
        write.become(node, "Gather", [x, index], axis=axis)
        return True
    if shape is None:
        return False
    sizes = write.insert(node, "Cast", [width], to=ir.DataType.INT64)
    if len(shape) == 0:  # all of one width, but for the last
        count = _count_of_parts(write, node, split, sizes)
        negative = write.insert(node, "Less", [index, write.constant(node, "zero", _ZERO)])
        from_end = write.insert(node, "Add", [index, count])
        index = write.insert(node, "Where", [negative, from_end, index])
        start = write.insert(node, "Mul", [index, sizes])
        end = write.insert(node, "Add", [start, sizes])
    else:
        zero = write.constant(node, "zero", np.array(0, np.int64))
        ends = write.insert(node, "CumSum", [sizes, zero])
        end, size = (write.insert(node, "Gather", [v, index], axis=0) for v in (ends, sizes))
        start = write.insert(node, "Sub", [end, size])
    axes = write.constant(node, "axes", np.array([axis], np.int64))
    write.become(node, "Slice", [x, start, end, axes])
    return True


def _count_of_parts(
    write: Rewriter, node: ir.Node, split: ir.Node, width: ir.Value | None
) -> ir.Value:
    """Return into how many parts of one width a tensor is split, as a vector of length one."""
    axis = split.attributes.get_int("axis", 0)
    place = write.constant(node, "axis", np.array([axis], np.int64))
    shape = write.insert(node, "Shape", [split.inputs[0]])
    size = write.insert(node, "Gather", [shape, place], axis=0)
    if width is None:
        return size
    more = write.insert(node, "Add", [size, width])
    one = write.constant(node, "one", np.array([1], np.int64))
    return write.insert(node, "Div", [write.insert(node, "Sub", [more, one]), width])


def _count_at_run_time(known: _Known, node: ir.Node) -> bool:
    """Write the length of a sequence that is a split tensor."""
    split = None if node.inputs[0] is None else node.inputs[0].producer()
    if split is None or split.op_type != "SplitToSequence" or split.domain:
        return False
    width = split.inputs[1] if len(split.inputs) > 1 else None
    shape = () if width is None else dims_of(width)
    if shape is None:
        return False
    if width is not None and len(shape) == 1:
        known.write.become(node, "Size", [width])
        return True
    if width is not None:
        width = known.write.insert(node, "Cast", [width], to=ir.DataType.INT64)
    count = _count_of_parts(known.write, node, split, width)
    known.write.become(node, "Squeeze", [count])
    return True


def _sequence_length(known: _Known, node: ir.Node) -> bool:
    elements = known.elements(node.inputs[0])
    if elements is None:
        return _count_at_run_time(known, node)
    if node.outputs[0].is_graph_output() or node.graph is None:
        return False
    length = ir.tensor(np.array(len(elements), np.int64))
    assert isinstance(node.graph, ir.Graph)
    replace_by_initializer(node.graph, node, length)
    return True


def _concat_from_sequence(known: _Known, node: ir.Node) -> bool:
    elements = known.elements(node.inputs[0])
    if not elements:
        return False
    axis = node.attributes.get_int("axis", 0)
    if node.attributes.get_int("new_axis", 0):
        axes = known.write.constant(node, "axes", np.array([axis], np.int64))
        elements = [known.write.insert(node, "Unsqueeze", [v, axes]) for v in elements]
    known.write.become(node, "Concat", elements, axis=axis)
    return True


_READERS = {
    "ConcatFromSequence": _concat_from_sequence,
    "SequenceAt": _sequence_at,
    "SequenceLength": _sequence_length,
}

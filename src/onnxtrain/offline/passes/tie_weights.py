"""Copies of one matrix train as one parameter, as in the network that was exported.

Exporters write a matrix that a network uses twice as several initializers: an embedding that is
also the output layer, transposed; a layer that is called again, once for each call. Matrices of
equal values are taken for one. Two kinds are not: values that a plain initialization gives to many
matrices (zeros, ones, an identity), and those of two layers of a list, `layers.0` and `layers.1`,
that are equal in all their matrices: a list is often filled with copies of one layer, which then
train apart. Where torch's exporters note which parameter a matrix was, that decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.frontend.torch_notes import folded_from, module_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.selection import Finding, Role, Survey

Array = np.ndarray[Any, np.dtype[Any]]
_CHUNK = 1 << 20  # elements that are compared at a time
_SAMPLE = 4096  # elements that tell whether values are a pattern
_FEWEST, _DISTINCT = 4, 128  # fewer different values are always one, so many never
_GENERATED = re.compile(r"^/|::|^val_\d+$|^[^.]*$")  # no name of a parameter in torch
_CALL = re.compile(r"_\d+(?=\.|$)")  # torchscript numbers the later calls of a module


@dataclass(frozen=True)
class Tied:
    """Initializers that hold one matrix: the one that stays, and its copies."""

    kept: str
    copies: dict[str, bool]  # by name: whether it is transposed

    @property
    def names(self) -> set[str]:
        """All of them."""
        return {self.kept, *self.copies}

    def __str__(self) -> str:
        """Return them as an equation, and count those beyond the first copies."""
        copies = [f"{n} (transposed)" if t else n for n, t in self.copies.items()]
        more = [f"{len(copies) - 3} more"] if len(copies) > 4 else []
        return " = ".join([self.kept, *(copies[:3] if more else copies), *more])


def tie_trained(
    model: ir.Model, trains: Sequence[str], tied: Iterable[Tied]
) -> tuple[list[str], tuple[Tied, ...]]:
    """Let every use of a copy that trains read the matrix that stays.

    Returns:
        What trains without the copies, and what has been tied.

    """
    initializers, op = model.graph.initializers, Ops(model.graph, model.opset_imports[""])
    done = tuple(group for group in tied if group.kept in trains)
    for group in done:
        for name, transposed in group.copies.items():
            copy = initializers.pop(name)
            source = _in_the_form_of(op, initializers[group.kept], copy, transposed)
            ir.convenience.replace_all_uses_with(copy, source)
    return [n for n in trains if not any(n in group.copies for group in done)], done


def with_tied(names: Iterable[str], tied: Iterable[Tied]) -> set[str]:
    """Return the names, and those of all that is tied to them."""
    found = set(names)
    return found.union(*(group.names for group in tied if group.names & found))


def _in_the_form_of(op: Ops, kept: ir.Value, copy: ir.Value, transposed: bool) -> ir.Value:
    """Turn and reshape a matrix at the start of the graph, under the name of the copy.

    A constant is turned once, when onnxruntime loads the model, and what trains is turned by the
    product that reads it.
    """
    assert copy.shape is not None and kept.shape is not None
    dims, wanted = kept.shape.numpy(), copy.shape.numpy()
    nodes, value = [], kept
    if transposed:
        nodes.append(ir.node("Transpose", [kept], {"perm": list(range(len(dims)))[::-1]}))
        value, dims = nodes[-1].outputs[0], dims[::-1]
        value.shape = ir.Shape(dims)
    if dims != wanted:
        nodes.append(ir.node("Reshape", [value, op.int64(wanted)]))
        value = nodes[-1].outputs[0]
        value.shape = copy.shape
    for node in nodes:
        node.name = op.names.fresh(f"{copy.name}_tied")
        node.outputs[0].name, node.outputs[0].type = op.names.fresh(node.name), kept.type
    if nodes:
        value.name = copy.name
        op.target.insert_before(op.target[0], nodes)
    return value


# ---- which are equal -----------------------------------------------------------------------------


class _Matrix:
    """An initializer, read without its axes of size one."""

    def __init__(self, value: ir.Value, finding: Finding) -> None:
        assert value.shape is not None
        self.name = str(value.name)
        self.sizes = tuple(size for size in value.shape.numpy() if size != 1)
        self.transposed = False  # relative to the first of its group
        self.trains = finding.role is Role.WEIGHT
        self._value = value
        self.parameter = _parameter(value, finding)
        user = next((module_of(node) for node, _ in value.uses()), "")
        owner = "" if _GENERATED.search(self.name) else self.name.rpartition(".")[0]
        self.module = (self.parameter or "").rpartition(".")[0] or owner or _CALL.sub("", user)

    def elements(self) -> Array:
        """Return the elements as integers, so that equal means to the last bit."""
        assert self._value.const_value is not None
        array = np.ascontiguousarray(self._value.const_value.numpy())
        return array.view(f"u{array.itemsize}").reshape(self.sizes)

    def key(self) -> bytes:
        """Return what a transposed copy has in common with this, from a few elements."""
        elements = self.elements()
        size = min(self.sizes, default=1)
        places = np.arange(0, size, max(1, size // 64))
        return elements[(places,) * elements.ndim].tobytes()

    def is_pattern(self) -> bool:
        """Whether so few values are different that other matrices may have them by themselves."""
        elements = self.elements().reshape(-1)
        sample = elements[:: max(1, elements.size // _SAMPLE)]
        different = np.unique(sample).size
        return different < _FEWEST or different <= min(sample.size // 2, _DISTINCT)


def find_tied(found: Survey) -> tuple[Tied, ...]:
    """Return the groups of equal matrices among the weights, with or without a gradient.

    A few elements tell most matrices apart, so that a large model is not read as a whole.
    """
    by_size: dict[Any, list[_Matrix]] = {}
    for name in found.weight_forms():
        value, finding = found.model.graph.initializers[name], found.findings[name]
        is_matrix = value.shape is not None and len(value.shape) > 1
        if is_matrix and finding.elements >= _FEWEST and not value.is_graph_output():
            matrix = _Matrix(value, finding)
            by_size.setdefault((value.dtype, *sorted(matrix.sizes)), []).append(matrix)
    groups: list[list[_Matrix]] = []
    for matrices in by_size.values():
        alike: dict[bytes, list[list[_Matrix]]] = {}
        for matrix in matrices:
            _add(alike.setdefault(matrix.key() if len(matrices) > 1 else b"", []), matrix)
        groups += (group for equal in alike.values() for group in equal)
    copied = _copied_layers(groups)
    parts = [part for group in groups for part in _parted(group, copied)]
    return tuple(_named(part) for part in parts if len(part) > 1 and not part[0].is_pattern())


def _add(groups: list[list[_Matrix]], matrix: _Matrix) -> None:
    """Put a matrix into the group of its equals, or into one of its own."""
    for group in groups:
        transposed = _compare(group[0].elements(), matrix.elements())
        if transposed is not None:
            matrix.transposed = transposed
            group.append(matrix)
            return
    groups.append([matrix])


def _compare(a: Array, b: Array) -> bool | None:
    """Return whether b is a transposed, or None if it is something else."""
    if a.shape == b.shape and _equal(a, b):
        return False
    return True if a.ndim == 2 and a.shape[::-1] == b.shape and _equal(a.T, b) else None


def _equal(a: Array, b: Array) -> bool:
    rows = max(1, _CHUNK * len(a) // a.size)
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


# ---- which are one parameter ---------------------------------------------------------------------


def _parameter(value: ir.Value, finding: Finding) -> str | None:
    """Return the name that a matrix certainly has in torch, or None.

    Neither exporter writes one parameter under two such names.
    """
    if folded_from(value):
        return finding.modules[0] if len(finding.modules) == 1 else None
    is_from_torch = any(module_of(node) for node, _ in value.uses())
    return value.name if is_from_torch and not _GENERATED.search(value.name or "") else None


def _parted(group: Sequence[_Matrix], copied: Collection[frozenset[str]]) -> list[list[_Matrix]]:
    """Divide a group so that no part has matrices of two parameters."""
    parts: list[list[_Matrix]] = []
    for matrix in group:
        for part in parts:
            if not any(_are_two(matrix, other, copied) for other in part):
                part.append(matrix)
                break
        else:
            parts.append([matrix])
    return parts


def _are_two(a: _Matrix, b: _Matrix, copied: Collection[frozenset[str]]) -> bool:
    if a.parameter and b.parameter:
        return a.parameter != b.parameter
    return _layers(a, b) in copied


def _copied_layers(groups: Sequence[Sequence[_Matrix]]) -> set[frozenset[str]]:
    """Return the pairs of layers of a list that are equal in all matrices.

    Where others differ, a matrix that is equal in both is one that they share.
    """
    copied = {_layers(a, b) for group in groups for a, b in combinations(group, 2)}
    copied.discard(frozenset())
    for pair in sorted(copied, key=sorted):
        for group in groups:
            own = [m for m in group if any(f"{m.module}.".startswith(f"{p}.") for p in pair)]
            if any(all(_layers(m, other) != pair for other in own) for m in own):
                copied.discard(pair)
    return copied


def _layers(a: _Matrix, b: _Matrix) -> frozenset[str]:
    """Return the layers of a list that two matrices are of, if they have the same place in both.

    For `layers.0.fc` and `layers.1.fc` they are `layers.0` and `layers.1`.
    """
    path, other = a.module.split("."), b.module.split(".")
    different = [i for i, (p, o) in enumerate(zip(path, other, strict=False)) if p != o]
    if len(path) != len(other) or not different:
        return frozenset()
    if not all(path[i].isdigit() and other[i].isdigit() for i in different):
        return frozenset()
    end = different[-1] + 1
    return frozenset((".".join(path[:end]), ".".join(other[:end])))


def _named(group: Sequence[_Matrix]) -> Tied:
    """Keep one that receives a gradient, with the name of a parameter if there is one."""
    kept = min(group, key=lambda m: (not m.trains, bool(_GENERATED.search(m.name))))
    return Tied(
        kept.name, {m.name: m.transposed != kept.transposed for m in group if m is not kept}
    )

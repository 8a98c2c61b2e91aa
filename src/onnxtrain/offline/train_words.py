"""The words that say what trains: "lora", "bias", "norm", "head", "last:3", "sparse:200MB".

A word that is also the name of an initializer or input means that tensor. Everything else is a name
or a pattern (`patterns.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches

import onnx_ir as ir

from onnxtrain.errors import ArgumentError, ArgumentTypeError, OnnxTrainError
from onnxtrain.offline.graph.op_facts import PRODUCTS, RECURRENT
from onnxtrain.offline.lora import Lora
from onnxtrain.offline.named import make_named
from onnxtrain.offline.selection import Finding, Role, Survey, some_of
from onnxtrain.offline.sparse import Sparse
from onnxtrain.offline.tensor_uses import TensorUses

Item = str | Lora | Sparse
Train = Item | Iterable[Item]
WORDS = ("lora", "bias", "norm", "head", "last", "sparse")
_NORM = re.compile(r"\b(scale|bias) of (\w*Normalization|normalization)\b")


def items_of(train: Train | None) -> list[Item] | None:
    """Return what trains as a list; None stays None."""
    if train is None or isinstance(train, Item):
        return None if train is None else [train]
    given = list(train)
    for item in given:
        if not isinstance(item, Item):
            raise ArgumentTypeError(
                f"train takes words, names, patterns, onnxtrain.Lora and Sparse, not {item!r}"
            )
    return given


def split_sparse(
    items: Sequence[Item] | None, names: Collection[str]
) -> tuple[Sparse | None, list[str | Lora] | None]:
    """Tell "sparse:200MB" and `Sparse` from the rest; what is among `names` is a name."""
    if items is None:
        return None, None
    found, rest = list[Sparse](), list[str | Lora]()
    for item in items:
        if isinstance(item, Sparse):
            found.append(item)
        elif isinstance(item, str) and _word(item) == "sparse" and item not in names:
            found.append(Sparse(item.partition(":")[2].strip()))
        else:
            rest.append(item)
    if len(found) > 1:
        raise ArgumentError("train has sparse more than once: give one memory for all layers")
    return (found[0] if found else None), rest


def split_lora(
    items: Iterable[str | Lora] | None, names: Collection[str]
) -> tuple[list[Lora], list[str] | None]:
    """Tell "lora" and `Lora` from the rest; what is among `names` is a name."""
    if items is None:
        return [], None
    loras, rest = list[Lora](), list[str]()
    for item in items:
        if isinstance(item, Lora):
            loras.append(item)
        elif _word(item) == "lora" and item not in names:
            loras.append(make_named(item, {"lora": Lora}, "train"))
        else:
            rest.append(item)
    return loras, rest


def names_by_word(text: str, found: Survey) -> list[str] | None:
    """Return the weights that a word means; None where it is no word."""
    word, count = _word(text), text.partition(":")[2]
    if word == "last":
        return _last(found, text, count)
    if word not in WORDS or count:
        return None
    if word in ("lora", "sparse"):
        raise ArgumentError(
            f"train={word!r} is for prepare: here, train takes the names of tensors of the model"
        )
    chosen = {"bias": _biases, "norm": _norms, "head": _heads}[word](found)
    if not chosen:
        raise OnnxTrainError(
            f"train={text!r}: nothing in this model is a {_MEANING[word]} that the loss depends "
            f"on. Its weights are {some_of(found.names(Role.WEIGHT), 5)}"
        )
    return chosen


def near_word(text: str) -> str:
    """Return a sentence where a text looks like a word that was misspelt, else ""."""
    near = get_close_matches(_word(text), WORDS, 1, 0.7)
    if not near or "." in text or "*" in text:
        return ""
    meant = {"last": "last:3", "sparse": "sparse:200MB"}.get(near[0], near[0])
    return f"Did you mean the word {meant!r}?"


_MEANING = {"bias": "bias", "norm": "scale or bias of a normalization", "head": "layer"}


def _word(text: str) -> str:
    return text.partition(":")[0].strip().lower()


def _weights(found: Survey) -> Iterator[Finding]:
    return (f for f in found.findings.values() if f.role is Role.WEIGHT)


def _biases(found: Survey) -> list[str]:
    return [f.name for f in _weights(found) if "bias of " in f.kind]


def _norms(found: Survey) -> list[str]:
    return [f.name for f in _weights(found) if _NORM.search(f.kind)]


# ---- layers from the end -------------------------------------------------------------------------


def _last(found: Survey, text: str, count: str) -> list[str]:
    """Return the weights from the n-th last layer on."""
    if not count.isdecimal() or not 0 < int(count) < 10**9:
        raise ArgumentError(
            f"train={text!r}: how many layers train is a whole number from 1 on, as in 'last:3'"
        )
    uses = _uses(found)
    layers = sorted({index for each in uses.values() for index, is_layer in each if is_layer})
    if int(count) > len(layers):
        raise OnnxTrainError(
            f"train={text!r}: the model has {len(layers)} layers with weights that train"
        )
    first = layers[-int(count)]
    return [name for name, each in uses.items() if max(index for index, _ in each) >= first]


def _heads(found: Survey) -> list[str]:
    """Return the weights of the layers that have no other layer behind them."""
    uses = _uses(found)
    nodes = list(found.model.graph)
    layers = {index for each in uses.values() for index, is_layer in each if is_layer}
    before: set[ir.Value] = set()  # what a layer that was met already is computed from
    heads = set[int]()
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        is_before = any(v in before for v in node.outputs)
        if index in layers and not is_before:
            heads.add(index)
        if is_before or index in layers:
            before.update(v for v in node.inputs if v is not None)
    behind = _reached_from(nodes, heads)
    return [name for name, each in uses.items() if any(index in behind for index, _ in each)]


def _reached_from(nodes: list[ir.Node], heads: Collection[int]) -> set[int]:
    """Return the indices of some nodes, and of all that come behind them."""
    reached, values = set(heads), {v for i in heads for v in nodes[i].outputs}
    for index, node in enumerate(nodes):
        if any(v in values for v in node.inputs):
            reached.add(index)
            values.update(node.outputs)
    return reached


def _uses(found: Survey) -> dict[str, list[tuple[int, bool]]]:
    """Return where weights are used: the index of the node, and whether it is a layer there."""
    graph = found.model.graph
    position = {node: index for index, node in enumerate(graph)}
    uses, made = TensorUses(found.model), dict[str, list[tuple[int, bool]]]()
    for finding in _weights(found):
        each = [
            (position[use.node], _is_layer(use.node, use.text))
            for use in uses.of(graph.initializers[finding.name])
            if use.node in position
        ]
        if each:
            made[finding.name] = each
    return made


def _is_layer(node: ir.Node, text: str) -> bool:
    is_product = node.domain != "" or node.op_type in PRODUCTS | RECURRENT
    return is_product and "weight" in text

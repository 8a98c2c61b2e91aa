"""Loss: what all losses have in common.

A loss is used in two ways. As a block it is called with names inside `onnxblock.base(model)`:
`MSELoss()("output", "target")`. And it writes into a graph of onnx_ir: `MSELoss().write(op, x)`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import ArgumentTypeError, BlockError
from onnxtrain.format.names import SAMPLE_WEIGHT
from onnxtrain.offline.blocks.accessor import current
from onnxtrain.offline.blocks.append_graph import append_graph
from onnxtrain.offline.blocks.block import Block
from onnxtrain.offline.blocks.values import defined_names
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import Dim, Dims, dims_of, is_float, is_known, working_type
from onnxtrain.offline.graph.subgraphs import values_of

Array = np.ndarray[Any, Any] | Sequence[float]


class Loss(Block):
    """A loss of what the model computes and of what it should have computed.

    A subclass has a `formula`, and says what labels it takes (`label_type`).

    Args:
        reduction: "mean" and "sum" make one number; "none" leaves one for each element or label.

    """

    default_labels = "labels"  # the name of the labels, where the caller gives none
    reductions: tuple[str, ...] = ("mean", "sum", "none")
    least_opset = 1
    takes_weights = False  # of samples, as an input; see `with_sample_weights`

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in self.reductions:
            raise BlockError(f"reduction is one of {', '.join(self.reductions)}, not {reduction!r}")
        self.reduction = reduction

    @abstractmethod
    def formula(self, op: Ops, scores: ir.Value, labels: ir.Value) -> ir.Value:
        """Write the reduced loss. The scores are float32 or float64; `op.arithmetic` is on."""

    @abstractmethod
    def label_type(self, scores: ir.Value) -> tuple[ir.DataType, Dims | None]:
        """Return element type and shape of the labels that are added for some scores."""

    def write(
        self,
        op: Ops,
        scores: ir.Value,
        labels: ir.Value | None = None,
        labels_name: str | None = None,
    ) -> ir.Value:
        """Write the loss of the scores at the end of the graph of `op`, and return it.

        Without `labels`, the value of the graph that is called `labels_name` ("labels" or "target"
        by default) is taken, or an input of that name added. The loss has the element type of the
        scores; half types are computed with in float32.
        """
        name = type(self).__name__
        if op.opset < self.least_opset:
            raise BlockError(
                f"{name} needs opset {self.least_opset}, but the model has opset {op.opset}: "
                "convert the model"
            )
        if not is_float(scores):
            raise BlockError(
                f"{name} takes floats, but {scores.name!r} is of type {scores.dtype}: name another "
                "output of the model"
            )
        outer, op.scope, dtype = op.scope, "loss", scores.dtype
        if labels is None:
            scores, labels = self._add_labels(op, scores, labels_name or self.default_labels)
        try:
            with op.arithmetic():
                loss = self.formula(op, op.cast(scores, working_type(scores)), labels)
                loss = op.cast(loss, dtype)
        finally:
            op.scope = outer
        loss.name = op.names.fresh("loss")
        return loss

    def _add_labels(self, op: Ops, scores: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        """Return the scores and the labels; labels that the graph does not have are added."""
        graph = op.target
        found = next((value for value in values_of(graph) if value.name == name), None)
        if found is None:
            found = ir.Value(name=op.names.fresh(name))
            dtype, dims = self.label_type(scores)
            found.dtype, found.shape = dtype, None if dims is None else ir.Shape(dims)
            graph.inputs.append(found)
            return self.fitted(op, scores, found)
        return scores, found

    def fitted(self, op: Ops, scores: ir.Value, labels: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return scores and labels that were added, in the shapes that the formula needs."""
        return scores, labels

    def weigh(self, op: Ops, terms: ir.Value, batch: Dim) -> ir.Value:
        """Multiply the terms of each sample by its weight, if the loss takes weights."""
        if not self.takes_weights:
            return terms
        weight = ir.Value(name=SAMPLE_WEIGHT)
        weight.dtype, weight.shape = ir.DataType.FLOAT, ir.Shape([batch])
        op.target.inputs.append(weight)
        others = [1] * (op.rank(terms) - 1)
        return terms * op.cast(op.Reshape(weight, [-1, *others]), terms.dtype)

    def _append(self, scores_name: str, labels_name: str) -> str:
        """Append the loss of named values to the model of the context; return its name."""
        names = [scores_name, labels_name] if current().has(labels_name) else [scores_name]

        def write(op: Ops, scores: ir.Value, labels: ir.Value | None = None) -> list[ir.Value]:
            return [self.write(op, scores, labels, labels_name)]

        return append_graph(names, write, "loss", least_opset=self.least_opset)[0]


class ElementwiseLoss(Loss):
    """A loss that compares each element with one of a target of the same shape."""

    default_labels = "target"

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss, and the target as an input if the model has no value of that name."""
        return self._append(loss_input_name, target_name)

    def label_type(self, scores: ir.Value) -> tuple[ir.DataType, Dims | None]:
        """A target is like the scores."""
        assert scores.dtype is not None
        return scores.dtype, None if _is_open(scores) else dims_of(scores)

    def fitted(self, op: Ops, scores: ir.Value, labels: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A target of a shape that only run time tells takes that of the scores."""
        if _is_open(scores) and self.reduction in ("mean", "sum") and not self.takes_weights:
            scores = op.reshape(scores, op.int64([-1]))
        return scores, op.reshape_like(labels, scores)

    @abstractmethod
    def terms(self, op: Ops, x: ir.Value, target: ir.Value) -> ir.Value:
        """Write the loss of each element."""

    def formula(self, op: Ops, scores: ir.Value, labels: ir.Value) -> ir.Value:
        """Reduce the terms."""
        terms = self.terms(op, scores, op.cast(labels, scores.dtype))
        if self.takes_weights:
            dims = dims_of(scores)
            if not dims:
                raise BlockError("weights of samples need scores of a known shape, (batch, ...)")
            terms = self.weigh(op, terms, dims[0])
        if self.reduction == "none":
            return terms
        if self.reduction == "mean":
            return op.ReduceMean(terms, keepdims=0)
        total = op.ReduceSum(terms, keepdims=0)
        if self.reduction == "sum":
            return total
        batch = op.Gather(op.Shape(terms), 0, axis=0)
        return total / op.cast(batch, terms.dtype)


def _is_open(scores: ir.Value) -> bool:
    """Tell whether only run time tells a shape; a rank without sizes may have been declared."""
    dims = dims_of(scores)
    return dims is None or (bool(dims) and not any(map(is_known, dims)))


def with_sample_weights(loss: Block, model: onnx.GraphProto) -> Block:
    """Return a loss that multiplies the terms of each sample by the input `sample_weight`.

    What the terms are divided by stays: with weights of 1 it is the same loss.
    """
    if not isinstance(loss, Loss) or loss.reduction == "none":
        raise ArgumentTypeError(
            "sample_weight=True needs a loss of onnxtrain.losses, which reduces its terms to one "
            f"number, not {type(loss).__name__}. A loss of your own can take weights as a label"
        )
    if SAMPLE_WEIGHT in defined_names(model):
        raise ArgumentTypeError(
            f"sample_weight=True adds an input, but the model has a value {SAMPLE_WEIGHT!r} already"
        )
    made = copy.copy(loss)
    made.takes_weights = True
    return made


def weights(op: Ops, numbers: Array, like: ir.Value, name: str = "weight") -> ir.Value:
    """Return the weights of terms as a constant of the element type of another value."""
    assert like.dtype is not None
    return op.const(np.asarray(numbers).astype(like.dtype.numpy()), name=f"loss/{name}")

"""What a model holds, as training sees it, before anything is written.

`inspect` answers what would train, what stands in the way, and how much memory a step takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.autodiff.engine import ActivePath, differentiate
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.infer import skeleton
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.memory import Activations, estimate
from onnxtrain.offline.passes.batch_norm import BatchNormMode, set_batch_norm_mode
from onnxtrain.offline.passes.gelu import join_gelu
from onnxtrain.offline.passes.tie_weights import tie
from onnxtrain.offline.selection import Role, output_named, survey


@dataclass(frozen=True)
class Report:
    """What `inspect` found. Initializers are listed with their numbers of elements."""

    outputs: tuple[str, ...]
    weights: dict[str, int]  # what would train
    tied: tuple[str, ...]  # "a = b (transposed)": copies of a matrix that would be one of them
    statistics: dict[str, int]  # mean and variance of each BatchNormalization
    constants: dict[str, int]  # all other initializers
    unreached: tuple[str, ...]  # those of the constants that look like weights without a gradient
    without_gradient: tuple[str, ...]  # the operators that stand in the way of training
    parameter_bytes: int  # of the weights
    activations: Activations | None  # what a step takes beside them; None without a gradient
    opset: int  # of the operators, after old ones have been upgraded

    @property
    def parameter_count(self) -> int:
        """The number of parameters that would train."""
        return sum(self.weights.values())

    @property
    def activation_bytes_per_sample(self) -> int | None:
        """The memory of each sample of a batch at the peak, as far as can be told."""
        return None if self.activations is None else self.activations.bytes_per_sample

    @property
    def can_train(self) -> bool:
        """Whether every operator between the weights and the output has a gradient."""
        return bool(self.weights) and not self.without_gradient

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        lines = [
            f"outputs       {', '.join(self.outputs)} (opset {self.opset})",
            f"weights       {len(self.weights)} tensors, {self.parameter_count:,} parameters, "
            f"{self.parameter_bytes / 2**20:,.1f} MB",
            f"statistics    {len(self.statistics)} tensors (BatchNormalization)",
            f"constants     {len(self.constants)} tensors",
            f"activations   {self.activations or 'not known: there is no gradient'}",
        ]
        if self.tied:
            lines.append(f"tied          {'; '.join(self.tied)}")
        if self.unreached:
            lines.append(f"not reached   {', '.join(self.unreached)}")
        if self.without_gradient:
            lines.append(f"no gradient   {'; '.join(self.without_gradient)}")
        return "\n".join(lines)


def inspect(
    model: ModelLike,
    of: str | None = None,
    *,
    bn: BatchNormMode | None = None,
    tie_weights: bool = True,
    sizes: Mapping[str, int] | None = None,
) -> Report:
    """Tell what of a model would train, and what stands in the way.

    Args:
        model: the model, or the path to its file.
        of: the output that the loss will be computed from; the first one by default.
        bn: the mode of BatchNormalization, as for training.
        tie_weights: whether matrices of equal values train as one parameter, as for training.
        sizes: numbers for symbolic dimensions, by name, for the estimate of memory. The report
            says what was assumed for others.

    Examples:
        >>> print(onnxtrain.inspect("mobilenet.onnx"))

    """
    canonical = canonical_model(model)
    graph = canonical.graph
    for value in [v for v in graph.inputs if v.name in graph.initializers]:
        graph.inputs.remove(value)  # a weight is trained, not fed
    found = survey(canonical, output_named(graph, of))
    without_gradient = found.without_gradient()
    tied = found.tied() if tie_weights else ()
    if tied:
        tie(canonical, tied)
        found = survey(canonical, output_named(graph, of))
    weights = [graph.initializers[n] for n in found.names(Role.WEIGHT)]
    counts = {role: found.counts(found.names(role)) for role in Role}
    can_train = bool(weights) and not without_gradient
    return Report(
        outputs=tuple(value.name or "" for value in graph.outputs),
        weights=counts[Role.WEIGHT],
        tied=tuple(map(str, tied)),
        statistics=counts[Role.STATISTIC],
        constants=counts[Role.CONSTANT],
        unreached=found.unreached,
        without_gradient=without_gradient,
        parameter_bytes=sum(v.const_value.nbytes for v in weights if v.const_value is not None),
        opset=canonical.opset_imports[""],
        activations=_activations(canonical, of, weights, bn, sizes) if can_train else None,
    )


def _activations(
    model: ir.Model,
    of: str | None,
    weights: Sequence[ir.Value],
    bn: BatchNormMode | None,
    sizes: Mapping[str, int] | None,
) -> Activations:
    """Differentiate a canonical model, which is changed, and estimate what the result takes."""
    set_batch_norm_mode(model, bn)
    graph, opset = model.graph, model.opset_imports[""]
    output = output_named(graph, of)
    expand_by_definition(model, lambda: ActivePath(list(graph), weights, [output], opset))
    op = Ops(graph, opset)
    with op.arithmetic():
        seed = op.zeros_like(output)
    rules = join_gelu(graph, [*weights, output])
    gradients = differentiate(op, list(graph), {output: seed}, weights, rules=rules)
    graph.outputs.clear()
    graph.outputs.extend(value for value in gradients.values() if value is not None)
    sweep(graph)
    return estimate(skeleton(model), sizes)

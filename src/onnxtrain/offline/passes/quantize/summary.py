"""Which operators of a model would run on integers, and why the others would not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onnxtrain.offline.autodiff.engine import operator_name
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.passes.quantize.places import Places
from onnxtrain.offline.passes.quantize.stages import choose_places, make_ready
from onnxtrain.offline.quantize import Quantize

_SHOWN = 3  # names of nodes for each reason


@dataclass(frozen=True)
class IntegerOperators:
    """What `quantize` makes of a model. Products are Conv, Gemm, MatMul and the like."""

    products: int  # that run on integers, or with integer weights
    floats: dict[str, tuple[str, ...]]  # products that stay floats: the reason, and the nodes
    others: dict[str, int] = field(default_factory=dict)  # what runs on integers between them
    weights_only: bool = False  # whether the weights alone are integers

    @staticmethod
    def of(places: Places, settings: Quantize) -> IntegerOperators:
        """Count what was found in a model."""
        floats: dict[str, tuple[str, ...]] = {}
        for node, reason in places.floats.items():
            key = f"{operator_name(node)}: {reason}"
            floats[key] = (*floats.get(key, ()), label_of(node))
        others = Counter(node.op_type for node in places.others)
        return IntegerOperators(
            len(places.layers), floats, dict(others), not settings.has_integer_activations
        )

    @property
    def total(self) -> int:
        """The number of products in the model."""
        return self.products + sum(map(len, self.floats.values()))

    def __str__(self) -> str:
        """Say how many operators will run on integers, which will not, and why."""
        does = "have integer weights" if self.weights_only else "run on integers"
        text = f"{self.products} of {self.total} products {does}"
        if self.others:
            text += f", and {sum(self.others.values())} operators between them"
        for reason, nodes in self.floats.items():
            some = ", ".join(map(repr, nodes[:_SHOWN])) + (" ..." if len(nodes) > _SHOWN else "")
            text += f". In floats: {len(nodes)} {reason} ({some})"
        return f"{text}."


def find_integer_operators(model: ModelLike, settings: Quantize) -> IntegerOperators:
    """Tell what `prepare` would quantize in a model."""
    canonical = canonical_model(model)
    graph = canonical.graph
    for value in [v for v in graph.inputs if v.name in graph.initializers]:
        graph.inputs.remove(value)
    lifted, _ = make_ready(canonical, settings)
    outputs = [str(value.name) for value in graph.outputs]
    places = choose_places(canonical, outputs, settings, lifted)
    return IntegerOperators.of(places, settings)

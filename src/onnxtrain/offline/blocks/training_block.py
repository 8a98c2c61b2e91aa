"""TrainingBlock: from a loss that is written with blocks to the models that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.accessor import current
from onnxtrain.offline.blocks.block import Block, names_of, set_outputs
from onnxtrain.offline.blocks.values import locate, name_as_before
from onnxtrain.offline.training_graph import TrainingGraphs, build_training_graphs


class TrainingBlock(Block):
    """A block that returns a loss, and makes the training and the evaluation model of it.

    The first (or only) name that `build` returns is the loss; the others are further outputs.
    Only parameters named with `requires_grad` train.
    """

    _requires_grad: dict[str, bool] | None = None
    _graphs: TrainingGraphs | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Make a parameter trainable or, with False, a frozen one that the checkpoint has too."""
        if self._requires_grad is None:
            self._requires_grad = {}
        self._requires_grad[argument_name] = value

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """Return the trainable and the frozen parameters, each in the order of the model."""
        graphs = self._built_graphs("parameters")
        return _protos(graphs.trainable), _protos(graphs.frozen)

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return the training and the evaluation model."""
        graphs = self._built_graphs("models")
        return graphs.training, graphs.evaluation

    def _built_graphs(self, what: str) -> TrainingGraphs:
        if self._graphs is None:
            raise BlockError(
                f"Please build the training model first before trying to retrieve the {what}."
            )
        return self._graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the block, and differentiate the loss that it returns."""
        accessor = current()
        output, typed = self._built(*args, **kwargs)
        names = names_of(output)
        set_outputs(accessor.model, names, typed or accessor.inferred())
        chosen = self._requires_grad or {}
        declared = locate(accessor.model, accessor.path) if accessor.has_path else {}
        self._graphs = build_training_graphs(
            accessor.model,
            names,
            [name for name, trains in chosen.items() if trains],
            [name for name, trains in chosen.items() if not trains],
        )
        name_as_before((self._graphs.training, self._graphs.evaluation), declared)
        accessor.model = self._graphs.training
        return output


def _protos(tensors: Mapping[str, ir.TensorProtocol]) -> list[onnx.TensorProto]:
    protos = []
    for name, tensor in tensors.items():
        protos.append(ir.to_proto(tensor))
        protos[-1].name = name
    return protos

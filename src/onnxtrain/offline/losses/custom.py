"""Custom losses: a Python function that calls blocks, or an ONNX model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx

from onnxtrain.errors import BlockError, ModelError, OnnxTrainError
from onnxtrain.offline.blocks.accessor import ModelAccessor, current
from onnxtrain.offline.blocks.block import Block, names_of
from onnxtrain.offline.blocks.merge import merge
from onnxtrain.offline.frontend.external_data import read_external_data
from onnxtrain.offline.frontend.load import read_model


class FunctionLoss(Block):
    """A loss written as a function of names, with blocks.

    The function gets the names that the loss is called with (in `generate_artifacts`, the outputs
    of the model) and returns the name of the loss, or a tuple that begins with it. Its further
    parameters without default are labels, whose values are their own names. For a label that the
    model does not have when the function returns, an input like the first output is added.

    Examples:
        >>> def loss(prediction, target):
        ...     distance = blocks.Abs()(blocks.Sub()(prediction, target))
        ...     return blocks.ReduceMean(keepdims=False)(distance)
        >>> onnxblock.loss.FunctionLoss(loss)("output")

    """

    def __init__(self, function: Callable[..., str | Sequence[str]]) -> None:
        super().__init__()
        if not callable(function):
            raise BlockError(f"a loss is a function, not {function!r}")
        self._function = function

    def build(self, *output_names: str) -> Any:
        """Call the function, and add the inputs for its labels."""
        labels = self._labels(output_names)
        accessor = current()
        # Before the function adds nodes that read labels which are not there yet.
        like = accessor.type_of(output_names[0]) if labels else None
        result = self._called(output_names, labels)
        names_of(result)
        for label in labels:
            if like is not None and not accessor.has(label):
                accessor.add_input(label, like)
        return result

    def _called(self, output_names: Sequence[str], labels: Sequence[str]) -> Any:
        try:
            return self._function(*output_names, **{label: label for label in labels})
        except OnnxTrainError:
            raise
        except Exception as error:
            raise BlockError(
                f"the loss {self._function!r} failed with {type(error).__name__}: {error}. A loss "
                "is a name, such as 'cross_entropy', or a function that is called with names of "
                "values and returns the name of what blocks (onnxtrain.onnxblock) make of them; "
                "functions of arrays or tensors cannot become a graph"
            ) from error

    def _labels(self, given: Sequence[str]) -> list[str]:
        """Return the names of the parameters that are labels."""
        try:
            signature = inspect.signature(self._function)
        except ValueError:  # some builtin functions have no signature
            return []
        parameters = signature.parameters.values()
        by_position = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        takes_any = any(p.kind == p.VAR_POSITIONAL for p in parameters)
        name = getattr(self._function, "__name__", "the loss")
        if len(given) > len(by_position) and not takes_any:
            raise BlockError(
                f"{name}() takes {len(by_position)} name(s), but there are {len(given)}: "
                f"{', '.join(map(repr, given))}. Choose with loss_input_names, or take *others"
            )
        rest = [*by_position[len(given) :], *(p for p in parameters if p.kind == p.KEYWORD_ONLY)]
        labels = [p for p in rest if p.default is p.empty]
        for parameter in labels:
            if parameter.kind == parameter.POSITIONAL_ONLY:
                raise BlockError(
                    f"{name}() takes {parameter.name!r} by position only, but labels are passed by "
                    "keyword: remove the '/' from its signature"
                )
        if labels and not given:
            raise BlockError(f"{name}() is called without names: give the outputs of the model")
        return [p.name for p in labels]


class ModelLoss(Block):
    """A loss that is an ONNX model, whose inputs are values of the base model and labels.

    Each input of the loss model is bound to the first of these that there is: what `inputs` maps it
    to; the value of the base model with its name; for the first input, the only name that the loss
    is called with, if no input has that name. Any other input is a label, and becomes an input of
    the base model. `by_position` binds inputs by their order instead.

    The first output of the loss model is the loss; the others are further outputs. Its values keep
    their names unless the base model has them already.

    Args:
        model: the loss model, or the path to its file.
        inputs: maps inputs of the loss model to values of the base model, by their names.

    """

    def __init__(
        self,
        model: onnx.ModelProto | str | os.PathLike[str],
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, (str, os.PathLike)):
            try:
                model, path = read_model(model)
                read_external_data(model, path or "")
            except ModelError as error:
                raise BlockError(f"this cannot be read as a loss model: {error}") from None
        if not isinstance(model, onnx.ModelProto):
            raise BlockError(f"a loss model is an onnx.ModelProto or a path, not {model!r}")
        if not model.graph.output:
            raise BlockError("the loss model has no outputs: its first output has to be the loss")
        self._loss, self._inputs = model, dict(inputs or {})
        self._labels: dict[str, str] = {}

    def by_position(self, names: Sequence[str]) -> ModelLoss:
        """Return the loss with its first inputs bound to names, in their order.

        A name that the base model does not have becomes a label.
        """
        inputs = self._input_names()
        if len(names) > len(inputs):
            raise BlockError(
                f"the loss model has {len(inputs)} input(s), {', '.join(map(repr, inputs))}, but "
                f"{len(names)} names are given: {', '.join(map(repr, names))}"
            )
        given = ModelLoss(self._loss, self._inputs)
        given._labels = dict(zip(inputs, names, strict=False))
        return given

    def build(self, *output_names: str) -> str | tuple[str, ...]:
        """Add the nodes of the loss model, and inputs for its labels."""
        accessor = current()
        bound = self._bindings(accessor, output_names)
        types = {info.name: info.type for info in self._loss.graph.input}
        for name in self._input_names():
            if name not in bound:
                bound[name] = accessor.add_input(self._labels.get(name, name), types[name])
        outputs = tuple(merge(accessor, self._loss, bound))
        return outputs[0] if len(outputs) == 1 else outputs

    def _input_names(self) -> list[str]:
        initializers = {tensor.name for tensor in self._loss.graph.initializer}
        return [i.name for i in self._loss.graph.input if i.name not in initializers]

    def _bindings(self, base: ModelAccessor, given: Sequence[str]) -> dict[str, str]:
        inputs = self._input_names()
        if self._labels:
            by_position = {n: v for n, v in self._labels.items() if base.has(v)}
            if not by_position:
                names = ", ".join(map(repr, self._labels.values()))
                raise BlockError(f"the model has none of the values {names}: name its outputs")
            return {**self._inputs, **by_position}
        unknown = [name for name in self._inputs if name not in inputs]
        if unknown:
            raise BlockError(f"the loss model has no input {', '.join(map(repr, unknown))}")
        bound = dict(self._inputs)
        for name in bound.values():
            base.type_of(name)  # an error where there is no such value
        for name in inputs:
            if name not in bound and base.has(name):
                bound[name] = name
        if not set(given) & set(bound.values()) and given and inputs:
            if len(given) > 1 or inputs[0] in bound:
                raise BlockError(
                    f"the inputs {', '.join(map(repr, inputs))} of the loss model match none of "
                    f"{', '.join(map(repr, given))}: say which is which, as in "
                    f"ModelLoss(model, inputs={{{inputs[0]!r}: {given[0]!r}}})"
                )
            bound[inputs[0]] = given[0]
        return bound

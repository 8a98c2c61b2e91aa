"""Block, and ForwardBlock, which makes a model."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import onnx

from onnxtrain.errors import BlockError, UnknownNameError
from onnxtrain.offline.blocks import values
from onnxtrain.offline.blocks.accessor import current, model_or_none


class Block(ABC):
    """A part of a model, written in Python: `build` adds nodes and returns names of values.

    Blocks are called inside `onnxblock.base(model)` or `onnxblock.empty_base()`. `build` takes the
    names of its inputs, adds to `self.base` (an onnx.ModelProto) by hand or by calling blocks, and
    returns the name of its output, or a tuple of names. A subclass with an `__init__` of its own
    need not call that of Block.

    Examples:
        >>> class Scaled(onnxblock.Block):
        ...     def __init__(self, factor):
        ...         self.factor = onnxblock.blocks.Constant(factor)
        ...         self.mul = onnxblock.blocks.Mul()
        ...     def build(self, x):
        ...         return self.mul(x, self.factor())

    """

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        # Nothing is written to that file; existing scripts pass the argument.
        if os.path.isabs(temp_file_name):
            raise BlockError(f"temp_file_name is a file name, not the path {temp_file_name!r}")

    @property
    def base(self) -> Any:
        """The onnx.ModelProto of the current context; None outside of contexts."""
        return model_or_none()

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add to the model, and return the name of the output or a tuple of names."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the block into the model of the context, and check the model."""
        output, _ = self._built(*args, **kwargs)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Add the types and shapes of all values to the model of the context, and return it."""
        accessor = current()
        _adopt(accessor.model, accessor.inferred())
        return accessor.model

    def _built(self, *args: Any, **kwargs: Any) -> tuple[Any, onnx.ModelProto | None]:
        """Return what `build` returned, and the model with types unless this call is nested.

        A nested block is checked together with the block that called it: until that one is done,
        the model may be incomplete.
        """
        accessor = current()
        accessor.depth += 1
        try:
            output = self.build(*args, **kwargs)
        finally:
            accessor.depth -= 1
        return output, accessor.inferred(check=True) if accessor.depth == 0 else None


class ForwardBlock(Block):
    """A block whose outputs become the only outputs of the model."""

    _model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the block, and make its results the outputs of the model."""
        output, typed = self._built(*args, **kwargs)
        model, typed = current().model, typed or current().inferred()
        _adopt(model, typed)
        set_outputs(model, names_of(output), typed)
        self._model = copy.deepcopy(model)
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the model as it was when the block had been built."""
        if self._model is None:
            raise BlockError("Please build the model first, by calling the block.")
        return self._model


def names_of(output: Any) -> list[str]:
    """Return what `build` returned as a list of names."""
    names = [output] if isinstance(output, str) else output
    if (
        not isinstance(names, (list, tuple))
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise BlockError(
            f"build() has to return the name of its output or a tuple of names, not {output!r}"
        )
    return list(names)


def set_outputs(model: onnx.ModelProto, names: Sequence[str], typed: onnx.ModelProto) -> None:
    """Make the named values the only outputs of the model."""
    infos = []
    for name in names:
        type_ = values.known_type(typed, name) or values.known_type(model, name)
        if type_ is None:
            raise UnknownNameError(values.unknown(model, name))
        infos.append(onnx.ValueInfoProto(name=name, type=type_))
    del model.graph.output[:]
    model.graph.output.extend(infos)


def _adopt(model: onnx.ModelProto, typed: onnx.ModelProto) -> None:
    del model.graph.value_info[:]
    model.graph.value_info.extend(typed.graph.value_info)

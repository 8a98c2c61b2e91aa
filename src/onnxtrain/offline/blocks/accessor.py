"""The model that blocks add to: that of the `base` or `empty_base` context around their calls.

A context belongs to the thread (or task) that entered it, so several threads can build at once.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import onnx
from onnx import helper

from onnxtrain.errors import BlockError, UnknownNameError
from onnxtrain.offline.blocks.values import (
    all_graphs,
    defined_names,
    drop_default_inputs,
    forget_names,
    is_large,
    known_type,
    unknown,
    without_weights,
)
from onnxtrain.offline.frontend.external_data import read_external_tensor, tensors_of
from onnxtrain.offline.frontend.unofficial import adopt_unofficial_in
from onnxtrain.offline.graph.declared import name_open_dims, settled, state
from onnxtrain.offline.graph.infer import check_proto, infer_proto
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.versions import FLOOR_IR_VERSION, FLOOR_OPSET


class ModelAccessor:
    """The model in a `base` or `empty_base` context, and the file that it came from."""

    def __init__(
        self, model: onnx.ModelProto | None, model_path: str | os.PathLike[str] | None = None
    ) -> None:
        self._model = model
        self._path = model_path
        self.depth = 0  # of calls of blocks by blocks
        self._given = set() if model is None else {t.name for t in model.graph.initializer}
        self._names: Names | None = None
        self._inferred: tuple[bytes, onnx.ModelProto] | None = None
        # Each model has its own numbers, so that the same blocks make the same model again.
        self._numbers = itertools.count(1)

    @property
    def model(self) -> onnx.ModelProto:
        """The model as it is now."""
        if self._model is None:
            raise BlockError(
                "there is no model: enter onnxblock.base(model) or onnxblock.empty_base() first"
            )
        return self._model

    @model.setter
    def model(self, model: onnx.ModelProto) -> None:
        self._model, self._names = model, None

    @property
    def path(self) -> str | os.PathLike[str]:
        """The file that the model came from."""
        if self._path is None:
            raise BlockError("the path of the model is not known: give it to base(model, path)")
        return self._path

    @property
    def has_path(self) -> bool:
        """Whether the file that the model came from is known."""
        return self._path is not None

    @property
    def added_initializers(self) -> list[str]:
        """The names of the initializers that blocks added: constants of a loss, for example."""
        return [t.name for t in self.model.graph.initializer if t.name not in self._given]

    # ---- names ---------------------------------------------------------------------------------

    @property
    def names(self) -> Names:
        """The names that the model had when the first block asked, and those that blocks took."""
        if self._names is None:
            graphs = list(all_graphs(self.model.graph))
            values = (name for graph in graphs for name in defined_names(graph))
            self._names = Names({*values, *(node.name for graph in graphs for node in graph.node)})
        return self._names

    def fresh_name(self, token: str) -> str:
        """Return a name that no value of the model has, such as `onnx::loss::7`."""
        while (name := f"onnx::{token}::{next(self._numbers)}") in self.names:
            pass  # the model was built by blocks before
        return name

    def has(self, name: str) -> bool:
        """Tell whether the model has a value of this name."""
        return name in defined_names(self.model.graph)

    # ---- types ---------------------------------------------------------------------------------

    def type_of(self, name: str) -> onnx.TypeProto:
        """Return type and shape of a value; the shape need not be known."""
        graph = self.model.graph
        is_computed = all(item.name != name for item in (*graph.input, *graph.initializer))
        # Inference may know more than is declared, and notices shapes that are declared wrongly.
        found = known_type(self.inferred() if is_computed else self.model, name)
        if found is None:
            raise UnknownNameError(unknown(self.model, name))
        if is_computed:
            forget_names(found, graph)
        return found

    def inferred(self, *, check: bool = False, shape_arithmetic: bool = True) -> onnx.ModelProto:
        """Return the model without its weights, with every type that can be inferred.

        Inference runs again only if the model has changed. With `check`, a model that is not valid
        ONNX is an error.
        """
        bare = without_weights(self.model)
        adopt_unofficial_in(bare, (n for g in all_graphs(bare.graph) for n in g.node))
        content = bare.SerializeToString(deterministic=True)
        if check:
            check_proto(onnx.ModelProto.FromString(content))
        if self._inferred is None or self._inferred[0] != content:
            name_open_dims(bare)
            if shape_arithmetic:
                state(bare, settled(bare))
            self._inferred = content, infer_proto(bare, shape_arithmetic=shape_arithmetic)
        return self._inferred[1]

    def add_input(self, name: str, type_: onnx.TypeProto) -> str:
        """Add an input behind those that the model has."""
        self.model.graph.input.append(onnx.ValueInfoProto(name=name, type=type_))
        return name


_accessor: ContextVar[ModelAccessor | None] = ContextVar("onnxtrain model accessor", default=None)
_library: ContextVar[str | os.PathLike[str] | None] = ContextVar(
    "onnxtrain custom operators", default=None
)


def current() -> ModelAccessor:
    """Return the accessor of the context that the caller is in."""
    accessor = _accessor.get()
    if accessor is None:
        raise BlockError(
            "a block adds nodes to a model: call it inside 'with onnxblock.base(model):' or "
            "'with onnxblock.empty_base():'"
        )
    return accessor


def model_or_none() -> onnx.ModelProto | None:
    """Return the model of the context that the caller is in, None outside of contexts."""
    accessor = _accessor.get()
    return None if accessor is None else accessor.model


@contextmanager
def base(
    model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None
) -> Iterator[ModelAccessor]:
    """Let the blocks called inside add to a copy of the model.

    `model_path` is the file that the model came from. With it, the tensors of the model may be in
    files beside it (`onnx.load(path, load_external_data=False)`), as they are above 2 GB.
    """
    if not isinstance(model, onnx.ModelProto):
        raise BlockError(f"base() takes an onnx.ModelProto, not {type(model).__name__}")
    own = copy.deepcopy(model)
    drop_default_inputs(own)
    if model_path is not None:
        _read_small_tensors(own, model_path)
    with _entered(ModelAccessor(own, model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Let the blocks called inside build a model from nothing.

    The opset is 18 by default, the lowest that onnxtrain writes, so that older runtimes can run the
    model.
    """
    opset = helper.make_opsetid("", opset_version or FLOOR_OPSET)
    least_ir_version = helper.find_min_ir_version_for([opset], ignore_unknown=True)
    model = onnx.ModelProto(
        ir_version=max(FLOOR_IR_VERSION, least_ir_version),
        producer_name="onnxtrain",
        opset_import=[opset],
        graph=onnx.GraphProto(name="graph"),
    )
    with _entered(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def _entered(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    if _accessor.get() is not None:
        raise BlockError("there is a base model already: base() and empty_base() cannot be nested")
    token = _accessor.set(accessor)
    try:
        yield accessor
    finally:
        _accessor.reset(token)


@contextmanager
def custom_op_library(
    custom_op_library_path: str | os.PathLike[str],
) -> Iterator[str | os.PathLike[str]]:
    """Set the shared library that has the custom operators of the model."""
    if _library.get() is not None:
        raise BlockError(
            "there is a custom operator library already: custom_op_library() cannot be nested"
        )
    if not Path(custom_op_library_path).exists():
        raise BlockError(f"there is no custom operator library at {str(custom_op_library_path)!r}")
    token = _library.set(custom_op_library_path)
    try:
        yield custom_op_library_path
    finally:
        _library.reset(token)


def current_library() -> str | os.PathLike[str] | None:
    """Return the library of the context `custom_op_library` that the caller is in, or None."""
    return _library.get()


def _read_small_tensors(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Read what shape inference may need, and all outside of the graph's own initializers.

    onnx would look for those in the working directory. The rest stays beside the model.
    """
    stay = {tensor.name for tensor in model.graph.initializer if is_large(tensor)}
    own = len(model.graph.initializer)
    for place, tensor in enumerate(tensors_of(model)):
        if place >= own or tensor.name not in stay:
            read_external_tensor(tensor, path)

"""The base of low-rank factors: a file that graphs share, which onnxruntime maps into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import ModelError
from onnxtrain.format.checkpoint.content import RawTensor, Tensor
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.model.source import ExternalFiles

FOLDER_OF_DATA = "session.model_external_initializers_file_folder_path"
# Before, onnxruntime looks for the files of a graph in memory in the working directory.
FINDS_FILES = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 21)


def folder_of_base(model: ModelFile) -> Path:
    """Return the folder that the base of a graph is in."""
    if model.base is None:
        raise ModelError(
            f"{model.source_name} was given as bytes, and takes its base from the file "
            f"{model.metadata.base!r} beside it: give the path of the graph"
        )
    return model.base.parent.absolute()


def read_base(model: ModelFile) -> dict[str, Tensor]:
    """Read the tensors of the base that a graph takes, for an onnxruntime that cannot find them."""
    files = ExternalFiles(folder_of_base(model) / "graph")
    found: dict[str, Tensor] = {}
    for name in model.in_base:
        tensor = model.external[name]
        data = np.frombuffer(files.read(tensor), np.uint8)
        dtype = ELEMENT_TYPES[tensor.element_type].dtype
        found[name] = (
            RawTensor(tensor.element_type, tensor.dims, data)
            if dtype is None
            else data.view(dtype).reshape(tensor.dims)
        )
    return found

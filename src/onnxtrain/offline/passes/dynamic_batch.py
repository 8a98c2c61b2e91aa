"""Make the batch of a model dynamic that was exported for one size.

The first dimension of the inputs gets a name, and Reshape nodes that contain its size let
onnxruntime find it. Whether that is enough, only running the model tells: samples that run together
have to give what they give apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.external_data import read_external_data
from onnxtrain.offline.frontend.load import ModelLike, read_model

Array = npt.NDArray[Any]
BATCH = "batch"
_RUNS = 3  # apart, and then together


def with_dynamic_batch(model: ModelLike) -> onnx.ModelProto:
    """Return a model that takes batches of any size; a ModelError says why there is none."""
    given, path = read_model(model)
    original = onnx.ModelProto()
    original.CopyFrom(given)
    if path is not None:
        read_external_data(original, path)
    stored = {tensor.name for tensor in original.graph.initializer}
    inputs = [info for info in original.graph.input if info.name not in stored]
    size = _first_dim(inputs[0]) if inputs else 0
    if not size:
        raise ModelError(
            "the first input does not begin with a fixed size: there is no batch to make dynamic"
        )
    try:
        targets = _constant_targets(original)
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise _impossible(size, _reason(error)) from None
    samples = [info.name for info in inputs if _first_dim(info) == size]
    failure: ModelError | None = None
    # In a Reshape, 0 takes the size of the input, and -1 what is left of all elements. The first
    # keeps the name of the dimension; the second serves where batch and another axis were one.
    for found in (0, -1):
        made = onnx.ModelProto()
        made.CopyFrom(original)
        for info in (*made.graph.input, *made.graph.output):
            if info.name in samples or (info in made.graph.output and _first_dim(info) == size):
                info.type.tensor_type.shape.dim[0].dim_param = BATCH
        del made.graph.value_info[:]
        _open_reshapes(made.graph, targets, size, found)
        try:
            _require_same_results(original, made, inputs, samples, size)
            return made
        except ModelError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _first_dim(info: onnx.ValueInfoProto) -> int:
    """Return the first dimension of an input; 0 where it is not a number."""
    dims = info.type.tensor_type.shape.dim
    return dims[0].dim_value if dims else 0


def _open_reshapes(
    graph: onnx.GraphProto, targets: Mapping[str, Array], size: int, found: int
) -> None:
    """Let Reshape nodes find the batch where they state it as the first of the new sizes."""
    for node in graph.node:
        if node.op_type != "Reshape" or len(node.input) < 2 or node.input[1] not in targets:
            continue
        sizes = targets[node.input[1]].copy()
        if sizes.ndim != 1 or not sizes.size or sizes[0] != size:
            continue
        sizes[0] = 0 if -1 in sizes else found
        del node.attribute[:]  # allowzero, which would give 0 another meaning
        name = f"{node.output[0]}/{BATCH}_shape"
        graph.initializer.append(numpy_helper.from_array(sizes, name))
        node.input[1] = name


def _constant_targets(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the new sizes of Reshape nodes that do not depend on the inputs of the model."""
    constants = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if all(not name or name in constants for name in node.input):
            constants.update(node.output)
    reshapes = [n for n in model.graph.node if n.op_type == "Reshape" and len(n.input) == 2]
    # A constant in a new shape, such as a weight, has nothing to do with the batch.
    names = sorted({n.input[1] for n in reshapes if n.input[0] not in constants} & constants)
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    del alone.graph.input[:], alone.graph.output[:]
    inner = [n for n in model.graph.node if all(not i or i in constants for i in n.input)]
    del alone.graph.node[:]
    alone.graph.node.extend(inner)
    for name in names:
        alone.graph.output.add(name=name)
    return dict(zip(names, _session(alone).run(None, {}), strict=True)) if names else {}


def _require_same_results(
    original: onnx.ModelProto,
    made: onnx.ModelProto,
    inputs: list[onnx.ValueInfoProto],
    samples: list[str],
    size: int,
) -> None:
    """Compare runs of one batch with a run of all samples together."""
    rng = np.random.default_rng(0)
    batches = [{info.name: _random(info, rng) for info in inputs} for _ in range(_RUNS)]
    for feeds in batches:  # what is not of samples is the same for all
        feeds.update({n: a for n, a in batches[0].items() if n not in samples})
    together = {
        name: np.concatenate([feeds[name] for feeds in batches]) if name in samples else array
        for name, array in batches[0].items()
    }
    try:
        apart = _session(original)
        expected = [apart.run(None, feeds) for feeds in batches]
        found = _session(made).run(None, together)
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise _impossible(size, _reason(error)) from None
    for index, output in enumerate(made.graph.output):
        joined = [result[index] for result in expected]
        is_joined = np.ndim(joined[0]) > 0 and np.shape(found[index])[0] == sum(map(len, joined))
        if not is_joined or not np.allclose(
            np.concatenate(joined), found[index], rtol=1e-3, atol=1e-4, equal_nan=True
        ):
            raise _impossible(size, f"{output.name!r} depends on which samples run together")


def _session(model: onnx.ModelProto) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    content = model.SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _random(info: onnx.ValueInfoProto, rng: np.random.Generator) -> Array:
    """Return values for an input; sizes without a number are 4."""
    tensor = info.type.tensor_type
    shape = [dim.dim_value or 4 for dim in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)  # as indices, these are valid nearly everywhere


def _reason(error: Exception) -> str:
    """Return which node stands in the way, from an error of onnxruntime."""
    found = re.search(r"running (\w+) node\. Name:'([^']*)'", str(error))
    if found:
        return f"the {found[1]} node {found[2]!r} works for this size alone"
    return re.sub(r"\s+", " ", str(error))[:300]


def _impossible(size: int, reason: str) -> ModelError:
    return ModelError(
        f"the batch of {size} cannot be made dynamic: {reason}. Export the model with a symbolic "
        f"batch, or train it with batch_size={size}, accumulate={max(1, 32 // size)}"
    )

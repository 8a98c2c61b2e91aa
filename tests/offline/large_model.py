"""A model of more than 2 GB, most of it a hole in a sparse file, and its artifacts.

`python large_model.py <folder> <what trains>` generates the artifacts in a process that may not
have more than 1 GB of memory of its own.
"""

import resource
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, CLASSES = 1024, 10
WORDS, PLACES = 560_000, 65_536  # rows: 2.29 GB and 0.27 GB
# The last rows lie beyond 2**31 bytes of the file.
TOKENS = np.array([0, 1, 279_999, WORDS - 2, WORDS - 1])
POSITIONS = np.array([0, 7, 65_535, 9, 1])
OWN_MEMORY = 1 << 30


def rows() -> dict[str, np.ndarray]:
    """The rows that the tokens and positions pick, and the head; all other rows are zero."""
    rng = np.random.default_rng(0)
    return {
        "words": rng.standard_normal((len(TOKENS), WIDTH)).astype(np.float32),
        "places": rng.standard_normal((len(POSITIONS), WIDTH)).astype(np.float32),
        "head": (rng.standard_normal((WIDTH, CLASSES)) / 32).astype(np.float32),
    }


def save(folder: Path) -> Path:
    """Write the model and its external data."""
    values, row = rows(), WIDTH * 4
    with open(folder / "model.data", "wb") as file:
        file.truncate((WORDS + PLACES) * row)
        for name, start, picked in (("words", 0, TOKENS), ("places", WORDS, POSITIONS)):
            for place, value in zip(picked, values[name], strict=True):
                file.seek((start + int(place)) * row)
                file.write(value.tobytes())
    nodes = [
        helper.make_node("Gather", ["words", "tokens"], ["word"], "word"),
        helper.make_node("Gather", ["places", "positions"], ["place"], "place"),
        helper.make_node("Add", ["word", "place"], ["hidden"], "add"),
        helper.make_node("MatMul", ["hidden", "head"], ["scores"], "head"),
    ]
    numbers = [helper.make_tensor_value_info(n, 7, ["n"]) for n in ("tokens", "positions")]
    tensors = [
        _external("words", WORDS, 0),
        _external("places", PLACES, WORDS * row),
        numpy_helper.from_array(values["head"], "head"),
    ]
    scores = helper.make_tensor_value_info("scores", 1, ["n", CLASSES])
    graph = helper.make_graph(nodes, "large", numbers, [scores], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def _external(name: str, count: int, offset: int) -> TensorProto:
    tensor = TensorProto(
        name=name, dims=[count, WIDTH], data_type=1, data_location=TensorProto.EXTERNAL
    )
    entries = {"location": "model.data", "offset": offset, "length": count * WIDTH * 4}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


if __name__ == "__main__":
    from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

    resource.setrlimit(resource.RLIMIT_DATA, (OWN_MEMORY, OWN_MEMORY))
    generate_artifacts(
        Path(sys.argv[1]) / "model.onnx",
        requires_grad=sys.argv[2:],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.SGD,
        artifact_directory=Path(sys.argv[1]) / "artifacts",
    )

"""Write a model of one node for each operator and element type: `webgpu_models.py OUT OPSET...`.

`webgpu-kernels.mjs` opens each of them in a browser to learn for which there are WebGPU kernels.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

TYPES = {
    name: getattr(TensorProto, name.upper())
    for name in ("float", "float16", "int32", "uint32", "int64", "bool", "double", "uint8")
}
INDICES = ("Tind", "T1", "M", "I", "Tshape", "tensor(int64)")
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Concat": {"axis": 0}, "ConcatFromSequence": {"axis": 0}, "Einsum": {"equation": "ij,jk->ik"},
    "LSTM": {"hidden_size": 2}, "GRU": {"hidden_size": 2}, "RNN": {"hidden_size": 2},
    "AveragePool": {"kernel_shape": [2, 2]}, "MaxPool": {"kernel_shape": [2, 2]},
    "LpPool": {"kernel_shape": [2, 2]}, "MaxUnpool": {"kernel_shape": [2, 2]},
    "DepthToSpace": {"blocksize": 2}, "SpaceToDepth": {"blocksize": 2}, "Split": {"num_outputs": 2},
    "BitShift": {"direction": "RIGHT"}, "LRN": {"size": 3}, "GroupNormalization": {"num_groups": 2},
}  # fmt: skip
OUTPUTS = {"Split": 2, "TopK": 2}
CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap", "Constant", "CastLike"}


def choose(parameter: str, main: str, wanted: str, allowed: set[str]) -> str | None:
    """Return the type of an input: the one in question, or what is usual for an index."""
    if parameter == main:
        return wanted
    preferred = ["tensor(int64)"] if parameter in INDICES else [wanted]
    preferred += ["tensor(int64)", "tensor(float)", "tensor(int32)", "tensor(bool)"]
    return next((p for p in preferred if p in allowed), None)


def model_of(schema: Any, name: str, opset: int) -> onnx.ModelProto | None:
    """Return a model of one node whose first input is of the type, if the operator takes it."""
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    main = (schema.inputs or schema.outputs)[0].type_str
    wanted = f"tensor({name})"
    if wanted not in constraints.get(main, {main}):
        return None
    values = []
    for index, formal in enumerate(schema.inputs):
        kind = str(formal.option)
        if "Optional" in kind and schema.name != "Clip":
            continue
        parameter = formal.type_str
        found = choose(parameter, main, wanted, constraints.get(parameter, {parameter}))
        if found is None:
            return None
        for part in range(2 if "Variadic" in kind else 1):
            value = onnx.ValueInfoProto(name=f"input{index}_{part}")
            value.type.tensor_type.elem_type = TYPES[found[7:-1]]
            values.append(value)
    attributes = dict(ATTRIBUTES.get(schema.name, {}))
    if schema.name == "Cast":
        attributes["to"] = TensorProto.INT32 if name == "float" else TensorProto.FLOAT
    outputs = [f"output{k}" for k in range(OUTPUTS.get(schema.name, 1))]
    node = helper.make_node(schema.name, [v.name for v in values], outputs, **attributes)
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name=o) for o in outputs])
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def models(opset: int) -> Iterator[dict[str, Any]]:
    """Yield every model of an opset."""
    names = sorted({s.name for s in onnx.defs.get_all_schemas() if not s.domain} - CONTROL_FLOW)
    for op in names:
        try:
            schema = onnx.defs.get_schema(op, opset, "")
        except onnx.defs.SchemaError:  # it came later
            continue
        for name in TYPES:
            made = None if schema.deprecated else model_of(schema, name, opset)
            if made is not None:
                data = base64.b64encode(made.SerializeToString()).decode()
                yield {"op": op, "type": name, "opset": opset, "model": data}


if __name__ == "__main__":
    found = [item for opset in sys.argv[2:] for item in models(int(opset))]
    Path(sys.argv[1]).write_text(json.dumps(found))

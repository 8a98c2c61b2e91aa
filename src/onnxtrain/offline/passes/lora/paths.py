"""The paths of layers: what PEFT calls a layer, as far as the model tells."""

from __future__ import annotations

import re

import onnx
import onnx_ir as ir

from onnxtrain.offline.frontend.torch_notes import module_of
from onnxtrain.offline.passes.lora.graph_index import GraphIndex

# What ONNX Runtime GenAI's builder writes: "model.layers.0.attn.q_proj.MatMul.weight_Q4".
_BUILDER = re.compile(r"(?P<path>.+)\.MatMul(\.\w+)?")
# What exporters and quantizers put behind the path: "fc1.weight_quantized", "fc1_weight_Q4".
_ENDING = re.compile(r"[._](weight|kernel|W)(_\w+)?(:\d+)?$|_(quantized|Q4|Q8|q4|q8)\w*$")


def layer_path(index: GraphIndex, node: onnx.NodeProto, weight: str, bias: str) -> str:
    """Return the path of a layer: from its weight, its torch module, its bias, or its node."""
    built = _BUILDER.fullmatch(weight)
    if built:
        # Hugging Face calls it self_attn, and so do PEFT and Olive.
        return re.sub(r"(layers\.\d+)\.attn\b", r"\1.self_attn", built["path"])
    if _is_path(weight):
        return _ENDING.sub("", weight)
    noted = {entry.key: entry.value for entry in node.metadata_props}
    module = module_of(ir.Node("", node.op_type, [], name=node.name, metadata_props=noted))
    if module:
        return module
    if _is_path(bias):
        return re.sub(r"[._]bias(_\w+)?$", "", bias)
    if weight and _ENDING.search(weight) and not weight.startswith(("/", "onnx::")):
        return _ENDING.sub("", weight)
    return node.name.strip("/").replace("/", ".") or node.output[0]


def _is_path(name: str) -> bool:
    """Whether a name is that of a parameter in torch, and not one that an exporter made."""
    return "." in name and not name.startswith(("/", "onnx::"))

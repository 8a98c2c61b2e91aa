"""The modules of the source network, as torch's exporters note them at nodes and in names."""

from __future__ import annotations

import ast
import re

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
_GENERATED = re.compile(r"::|^/|^val_\d+$")
_CALL = re.compile(r"_\d+$")


def module_of(node: ir.Node) -> str | None:
    """Return the path of the module that a node came from, or None where no exporter noted it.

    The torchscript exporter writes it into the name, `/encoder/layers.0/layers.0.1_2/MatMul`, with
    a number for the second and later calls of a module.
    """
    if _SCOPES in node.metadata_props:
        return dynamo_module_of(node)
    if not (node.name or "").startswith("/"):
        return None
    path: list[str] = []
    for part in str(node.name).split("/")[1:-1]:
        name = _CALL.sub("", part)
        if path and name.startswith(f"{path[-1]}."):
            path.pop()  # a module in a list has the name of the list before its own
        path.append(name)
    return ".".join(path)


def dynamo_module_of(node: ir.Node) -> str | None:
    """Return what the dynamo exporter notes: parents, the module, the operator."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, ""))
    except (SyntaxError, ValueError):
        return None
    known = isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str)
    return scopes[-2] if known else None


def is_generated(name: str) -> bool:
    """Whether an exporter made up a name, such as `onnx::MatMul_721` or `val_65`."""
    return _GENERATED.search(name) is not None


def siblings(path: str, other: str) -> frozenset[str]:
    """Return the two layers of a list that hold these modules, if nothing else is different.

    For `layers.0.fc` and `layers.1.fc` they are `layers.0` and `layers.1`.
    """
    parts, others = path.split("."), other.split(".")
    if path == other or len(parts) != len(others):
        return frozenset()
    different = [i for i, (a, b) in enumerate(zip(parts, others, strict=True)) if a != b]
    if not all(parts[i].isdigit() and others[i].isdigit() for i in different):
        return frozenset()
    end = different[-1] + 1
    return frozenset((".".join(parts[:end]), ".".join(others[:end])))

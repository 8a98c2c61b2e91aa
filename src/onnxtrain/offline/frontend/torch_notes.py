"""What torch's exporters note beside a model: parameter or buffer, and the module of each node.

The dynamo exporter writes metadata on values and nodes. The torchscript exporter puts the module
into the names of nodes: `/encoder/layer.5/attention/query/MatMul`. Both rename matrices that they
transpose or fold (`onnx::MatMul_721`, `val_65`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.offline.graph.torch_calls import call_of

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_SCOPES = "pkg.torch.onnx.name_scopes"
_STATE = re.compile(r"%([pb])_(\w+)")
_NUMBERED = re.compile(r"val_\d+")  # computed by what a torch operator was decomposed into
_OPERATORS = frozenset(s.name for s in onnx.defs.get_all_schemas_with_history())


class TorchNotes:
    """The notes of a model, as far as there are any."""

    def __init__(self, model: ir.Model) -> None:
        self._kinds: dict[str, str] = {}  # of the names in calls, which have _ in place of dots
        for node in model.graph.all_nodes():
            for kind, name in _STATE.findall(call_of(node)):
                self._kinds[name] = "PARAMETER" if kind == "p" else "BUFFER"

    def kind_of(self, value: ir.Value) -> str | None:
        """Return "PARAMETER", "BUFFER" or "CONSTANT"; None where nothing is noted.

        What the exporter computed from a parameter is a parameter too.
        """
        noted = value.metadata_props.get(_KIND)
        if noted is not None:
            return noted if noted in ("PARAMETER", "BUFFER") else "CONSTANT"
        if _FOLDED not in value.metadata_props:
            return None
        names = [n for n in folded_from(value) if not _NUMBERED.fullmatch(n)]
        kinds = {self._kind_called(name) for name in names}
        if "PARAMETER" in kinds or None in kinds:  # the call may have been folded as well
            return "PARAMETER" if "PARAMETER" in kinds else None
        return "BUFFER" if kinds else "CONSTANT"

    def _kind_called(self, name: str) -> str | None:
        """Return the kind of a state; modules call parameters weight or bias, but not buffers."""
        usual = "PARAMETER" if name.endswith((".weight", ".bias")) else None
        return self._kinds.get(mangled(name), usual)

    def folded_names(self, value: ir.Value) -> Iterator[str]:
        """Yield the names of the parameters that a tensor was computed from."""
        for name in folded_from(value):
            kind = self._kinds.get(mangled(name), "PARAMETER" if "." in name else "CONSTANT")
            if kind == "PARAMETER":
                yield name


def folded_from(value: ir.Value) -> list[str]:
    """Return the names of the values that the exporter computed a constant from."""
    return _listed(value.metadata_props.get(_FOLDED))


def states_called(node: ir.Node) -> list[str]:
    """Return the parameters and buffers that the call reads, in order, with _ for dots."""
    return [name for _, name in _STATE.findall(call_of(node))]


def parameters_called(node: ir.Node) -> set[str]:
    """Return the parameters that the call reads which a node was made for, with _ for dots."""
    calls = call_of(node)
    return {name for kind, name in _STATE.findall(calls) if kind == "p"}


def module_of(node: ir.Node) -> str:
    """Return the torch module that a node came from, as `named_modules` calls it, or ""."""
    name = node.name or ""
    if noted_module(node) or not name.startswith("/"):
        return noted_module(node)
    path: list[str] = []
    for part in name.split("/")[1:-1]:
        if path and part.startswith(f"{path[-1]}."):  # a Sequential: /features/features.0
            path.pop()
        path.append(part)
    while path and re.sub(r"_\d+$", "", path[-1]) in _OPERATORS:
        path.pop()  # what a fused operator was expanded into
    return ".".join(path)


def noted_module(node: ir.Node) -> str:
    """Return the module that the dynamo exporter noted, or ""."""
    scopes = _listed(node.metadata_props.get(_SCOPES))  # parents, the module, the operator
    return scopes[-2] if len(scopes) > 1 else ""


def dotted(name: str, modules: Iterable[str], merged_with: str) -> str:
    """Return what torch calls a parameter that calls name with _ for dots.

    The longest module that fits tells where its own name begins. A module that all nodes leave out
    (`self_attn.out_proj`) may be known from the parameter that it was merged with.
    """
    fitting = [m for m in modules if m and name.startswith(f"{mangled(m)}_")]
    module = f"{max(fitting, key=len)}." if fitting else ""
    own = name[len(module) :]
    alike = merged_with[-len(own) :]
    return module + (alike if mangled(alike) == own else own)


def mangled(name: str) -> str:
    """Return the name of a parameter as calls have it."""
    return re.sub(r"\W", "_", name)


def _listed(noted: str | None) -> list[str]:
    """Return a list of strings that was noted as Python text."""
    if noted is None:
        return []
    try:
        found: Any = ast.literal_eval(noted)
    except (SyntaxError, ValueError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

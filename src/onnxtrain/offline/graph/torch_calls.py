"""Where torch stops a gradient: the dynamo exporter notes the call that a node was made for.

ONNX has no operator for `detach`, and Gather knows no `padding_idx`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

CALL = "pkg.torch.onnx.fx_node"  # "%y : [...](args = (%add, %p_head_weight, %b_mean), ...)"
_DETACH = "torch.ops.aten.detach.default]"
_DETACHED = re.compile(r"%(detach(?:_\d+)?)(?!\w)")
_EMBEDDING = re.compile(r"torch\.ops\.aten\.embedding\.default\]\(args = \(%\w+, %\w+, (\d+)[,)]")


def call_of(node: ir.Node) -> str:
    """Return the call that a node was made for, as text, or ""."""
    return node.metadata_props.get(CALL, "")


def is_detach(node: ir.Node) -> bool:
    """Whether a node is a `detach`, through which no gradient flows."""
    return node.op_type == "Identity" and node.domain == "" and _DETACH in call_of(node)


def lost_detach(nodes: Iterable[ir.Node], active: Iterable[ir.Node]) -> ir.Node | None:
    """Return an active node that reads a detached value in torch, but not in the model any more.

    The exporter's optimizer removes each Identity, and leaves the name in the calls that read it.
    """
    kept = {own for n in nodes if is_detach(n) for own in _DETACHED.findall(call_of(n))[:1]}
    return next((n for n in active if not kept.issuperset(_DETACHED.findall(call_of(n)))), None)


def padding_row(node: ir.Node) -> int | None:
    """Return the `padding_idx` of an embedding: the row that takes no gradient from it."""
    found = _EMBEDDING.search(call_of(node))
    return None if found is None or node.op_type != "Gather" else int(found[1])

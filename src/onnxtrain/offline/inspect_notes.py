"""What to know of a model before training, in sentences: for the report of `inspect`."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import NORMS, PROBABILITIES, REORDERS
from onnxtrain.offline.selection import Survey, holders_of_integers

_FUSED_BY = "pkg.onnxscript.rewriter.rule_name"


def notes_on(graph: ir.Graph, output: ir.Value, found: Survey) -> Iterator[str]:
    """Yield what a user should know before a loss is put behind an output."""
    yield from _on_batch(graph)
    yield from _on_probabilities(output)
    yield from _on_batch_norm(graph)
    yield from notes_on_integers(found)
    yield from _on_obstacles(found)


def _on_batch(graph: ir.Graph) -> Iterator[str]:
    sizes = {v.shape[0] for v in graph.inputs if v.shape is not None and len(v.shape) > 1}
    if sizes == {1}:
        yield (
            "The batch is fixed at 1: train with batch_size=1, accumulate=32, or export the model "
            "with a dynamic batch."
        )
    elif len(sizes) == 1 and isinstance(size := sizes.pop(), int):
        yield f"The batch is fixed at {size}: every batch needs exactly {size} samples."


def activation_before(output: ir.Value) -> ir.Node | None:
    """Return the Softmax or Sigmoid that an output comes out of, views in between left aside."""
    node = output.producer()
    while node is not None and node.domain == "" and node.op_type in REORDERS:
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    known = node is not None and node.domain == "" and node.op_type in PROBABILITIES
    return node if known else None


def _on_probabilities(output: ir.Value) -> Iterator[str]:
    node = activation_before(output)
    if node is None:
        return
    scores = node.inputs[0].name if node.inputs[0] is not None else ""
    loss = "bce" if node.op_type == "Sigmoid" else "cross_entropy"
    known = output.producer() is node and node.op_type != "LogSoftmax"
    by_name = f" prepare(loss={loss!r}) does so by itself." if known else ""
    yield (
        f"{output.name!r} comes out of {node.op_type}, which {loss} contains: compute that loss "
        f"from the scores before it (of={scores!r}).{by_name}"
    )


def _on_batch_norm(graph: ir.Graph) -> Iterator[str]:
    nodes = [n for n in graph.all_nodes() if n.domain == ""]
    norms = [n for n in nodes if n.op_type == "BatchNormalization"]
    trained = sum(n.attributes.get_int("training_mode", 0) for n in norms)
    if norms and trained:
        yield (
            f"{trained} of {len(norms)} BatchNormalization use the statistics of the batch "
            "(training mode); bn='frozen' uses the stored ones."
        )
    elif norms:
        yield (
            f"{len(norms)} BatchNormalization use stored statistics (inference mode); bn='batch' "
            "uses those of the batch, as torch does in training."
        )
    convs = [n for n in nodes if n.op_type == "Conv"]
    with_bias = [n for n in convs if len(n.inputs) > 2 and n.inputs[2] is not None]
    fused = any("BatchNorm" in n.metadata_props.get(_FUSED_BY, "") for n in nodes)
    # TensorFlow's scopes stay in names: "block1/bn/batchnorm/mul", "model/batch_normalization".
    names = [*graph.initializers, *(n.name or "" for n in nodes)]
    fused |= any("batchnorm" in name.lower().replace("_", "") for name in names)
    no_norm = not any(n.op_type in NORMS for n in nodes)
    if not norms and (fused or (no_norm and len(with_bias) > 1 and len(with_bias) == len(convs))):
        yield (
            "No BatchNormalization left: folded into Conv? Trained from scratch, such a model "
            "loses accuracy: export it unfolded (torch: optimize=False, in training mode)."
        )


def _on_obstacles(found: Survey) -> Iterator[str]:
    """Say what trains weights that receive no gradient."""
    if found.blocked or (found.unreached and found.cut_by):
        yield (
            "What receives no gradient can train with optimizer='mezo', by two forward passes a "
            "step; that takes 10 to 100 times as many steps."
        )


def notes_on_integers(found: Survey) -> Iterator[str]:
    """Say that quantized weights do not train."""
    if holders := holders_of_integers(found.findings.values()):
        yield (
            f"{sum(holders.values())} weights of {', '.join(holders)} are integers (quantized), "
            "which cannot train: take the float model to train them."
        )

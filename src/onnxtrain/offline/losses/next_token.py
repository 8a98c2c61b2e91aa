"""The loss of language models: each token predicts the one that follows it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.accessor import current
from onnxtrain.offline.blocks.append_graph import append_graph
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.losses.classes import CrossEntropyLoss

_RANK = 3  # (batch, tokens, vocabulary)


class NextTokenLoss(CrossEntropyLoss):
    """Cross entropy of the scores of each token with the token behind it.

    The scores are (batch, tokens, vocabulary). Labels are the tokens themselves, (batch, tokens),
    not shifted: the loss does that. Where a label is `ignore_index`, nothing is predicted, so that
    only answers count, or no padding does.

    Labels are an input of their own, unless the loss is called with a value of the model:
    `of=["logits", "input_ids"]` takes the tokens that were fed. A third name, `"attention_mask"`,
    leaves out padding (0), and a token whose predecessor has another number: sequences in one row
    are numbered 1, 2, and so on.

    Args:
        reduction: "mean" (over the labels that count), "sum" or "none".
        ignore_index: a label that does not count.
        label_smoothing: how much of the target is spread over all tokens, from 0 to 1.

    """

    def __init__(
        self,
        reduction: str = "mean",
        ignore_index: int = -100,
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            None, reduction, ignore_index, label_smoothing=label_smoothing, class_axis=-1
        )
        self._ignored = ignore_index

    def build(
        self,
        scores_input_name: str,
        labels_name: str = "labels",
        mask_name: str | None = None,
    ) -> str:
        """Add the loss, and the labels as an input if the model has no value of that name."""
        if mask_name is None:
            return self._append(scores_input_name, labels_name)
        if not current().has(labels_name):
            raise BlockError(
                f"a mask of labels needs labels of the model, but it has no value {labels_name!r}: "
                "leave the mask out, and mark labels that do not count as "
                f"{self._ignored} where you feed them"
            )

        def write(op: Ops, scores: ir.Value, tokens: ir.Value, mask: ir.Value) -> list[ir.Value]:
            with op.arithmetic():
                labels = self._masked(op, tokens, mask)
            return [self.write(op, scores, labels)]

        names = [scores_input_name, labels_name, mask_name]
        return append_graph(names, write, "loss", least_opset=self.least_opset)[0]

    def formula(self, op: Ops, scores: ir.Value, labels: ir.Value) -> ir.Value:
        """Give each token the label of its successor; the last one has none."""
        if op.rank(scores) != _RANK:
            raise BlockError(
                f"NextTokenLoss takes scores of (batch, tokens, vocabulary), but {scores.name!r} "
                f"has the shape {scores.shape}: name the logits of the model in of=..."
            )
        following = op.slice(labels, 1, 1, 2**62)
        last = op.Add(op.Mul(op.slice(labels, 1, -1, 2**62), 0), self._ignored)
        shifted = op.shape_as(op.Concat(following, last, axis=1), labels)
        return super().formula(op, scores, shifted)

    def _masked(self, op: Ops, tokens: ir.Value, mask: ir.Value) -> ir.Value:
        """Ignore padding, and the first token of each sequence: nothing predicts it."""
        before = op.Concat(op.Mul(op.slice(mask, 1, 0, 1), 0), op.slice(mask, 1, 0, -1), axis=1)
        counts = op.And(op.Equal(mask, before), op.Not(op.Equal(mask, op.const(0, mask.dtype))))
        return op.type_as(op.Where(counts, tokens, op.const(self._ignored, tokens.dtype)), tokens)

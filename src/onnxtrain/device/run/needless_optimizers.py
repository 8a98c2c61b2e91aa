"""Passes of onnxruntime's optimiser that have nothing to do in most graphs."""

from __future__ import annotations

# The passes of onnxruntime's optimiser that look for quantized operators, by its names for them;
# each walks the whole graph, twice. They take a twentieth of the time to load a step.
_FOR_QUANTIZED = frozenset(
    "Avx2WeightS8ToU8Transformer ConstantFoldingDQ DQMatMulNBitsFusion DoubleQDQPairsRemover "
    "DynamicQuantizeMatMulFusion EnsureUniqueDQForNodeUnit MatMulIntegerToFloatFusion "
    "MatMulNBitsFusion MatMulNBitsMlpFusion MatMulNBitsQkvFusion QDQFinalCleanupTransformer "
    "QDQPropagationTransformer QDQS8ToU8Transformer QDQSelectorActionTransformer "
    "WeightBiasQuantization WhereDummyDq".split()
)
_QUANTIZED = (b"uantizeLinear", b"MatMulNBits", b"MatMulInteger")


def needless_optimizers(source: str | bytes) -> set[str] | None:
    """Name the passes that cannot find anything in a graph; None where it is not looked at."""
    if isinstance(source, str) or any(word in source for word in _QUANTIZED):
        return None
    return set(_FOR_QUANTIZED)

"""The domain of onnxruntime's own operators: how they are defined, and which are refused, and why.

The reason is shown where a node that was not expanded lies on the path of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxtrain.offline.autodiff.definitions import F, definition
from onnxtrain.offline.autodiff.registry import refuse
from onnxtrain.offline.graph.quantized_operators import MICROSOFT

_ALWAYS = (
    "it is expanded only where the element types and the ranks of its inputs can be inferred: give "
    "the inputs of the model a shape"
)


def fused(*op_types: str, ranks: Sequence[int] = (), lacking: str = "") -> Callable[[F], F]:
    """Register a function as the definition of operators of com.microsoft.

    `lacking` says which forms it does not cover, for the error that names a node left in place.
    """
    reason = f"it is not expanded with {lacking}; and {_ALWAYS}" if lacking else _ALWAYS
    refuse(*op_types, domain=MICROSOFT, reason=reason)
    return definition(*op_types, domain=MICROSOFT, ranks=ranks)


_SAVE_LOWER = (
    "the model was saved at the optimization level 'all', with a layout made for one processor; "
    "save it with ORT_ENABLE_EXTENDED or lower, or give the model as it was exported"
)
_QUANTIZED = (
    "it computes with integers, through which no gradient flows; give the model as it was before "
    "quantization, or with QuantizeLinear and DequantizeLinear around plain operators"
)
_DECODING = "it generates text step by step, which has no derivative"
_RUN_TIME = "it exists for inference with a cache that is shared in place, not for training"

refuse(
    "AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReorderInput",
    "ReorderOutput", "Upsample",
    domain="com.microsoft.nchwc", reason=_SAVE_LOWER,
)  # fmt: skip
refuse(
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace",
    "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "GridSample", "InstanceNormalization",
    "LRN", "LpPool", "MaxPool", "MaxUnpool", "Resize", "SpaceToDepth",
    domain="com.ms.internal.nhwc", reason=_SAVE_LOWER,
)  # fmt: skip
refuse("NhwcMaxPool", domain=MICROSOFT, reason=_SAVE_LOWER)
refuse(
    "DynamicQuantizeLSTM", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger16", "MulInteger",
    "QAttention", "QEmbedLayerNormalization", "QGemm",
    "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv", "QLinearGlobalAveragePool",
    "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax",
    "QLinearWhere", "QMoE", "QOrderedAttention", "QOrderedGelu", "QOrderedLayerNormalization",
    "QOrderedLongformerAttention", "QOrderedMatMul",
    domain=MICROSOFT, reason=_QUANTIZED,
)  # fmt: skip
refuse(
    "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
    domain=MICROSOFT, reason="it is differentiated only where its weights and scales are constants",
)  # fmt: skip
refuse(
    "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch",
    domain=MICROSOFT, reason=_DECODING,
)  # fmt: skip
refuse(
    "DecoderAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention",
    "PackedAttention", "PackedMultiHeadAttention", "PagedAttention", "SparseAttention",
    "SparsePagedAttention",
    domain=MICROSOFT, reason=_RUN_TIME,
)  # fmt: skip

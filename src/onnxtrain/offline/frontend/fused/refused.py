"""Why a fused operator that was not expanded has no gradient.

The text is shown where such a node lies on the path of a gradient. Operators that have a definition
state beside it which forms it lacks.
"""

from __future__ import annotations

from onnxtrain.offline.autodiff.registry import refuse
from onnxtrain.offline.frontend.fused.domain import MICROSOFT

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
    "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger16",
    "MatMulIntegerToFloat", "MulInteger", "QAttention", "QEmbedLayerNormalization", "QGemm",
    "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv", "QLinearGlobalAveragePool",
    "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax",
    "QLinearWhere", "QMoE", "QOrderedAttention", "QOrderedGelu", "QOrderedLayerNormalization",
    "QOrderedLongformerAttention", "QOrderedMatMul",
    domain=MICROSOFT, reason=_QUANTIZED,
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

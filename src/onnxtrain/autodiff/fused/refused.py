"""Why a fused operator that was not expanded has no gradient.

The text is shown where such a node lies on the path of a gradient. For an operator that has an
definition it says which forms are not covered.
"""

from __future__ import annotations

from onnxtrain.autodiff.definitions import defined
from onnxtrain.autodiff.fused.domain import MICROSOFT
from onnxtrain.autodiff.registry import refuse

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
_UNKNOWN_TYPES = (
    "it is expanded only where the element types and the ranks of its inputs can be inferred: "
    "give the inputs of the model a shape"
)

_NOT_COVERED = {
    "Attention": "it is not expanded with do_rotary or past_present_share_buffer",
    "MultiHeadAttention": "it is not expanded with past_sequence_length or cache_indirection",
    "GroupQueryAttention": (
        "it is not expanded with a quantized or windowed cache, normalized queries and keys, or "
        "the scores as an output"
    ),
    "RotaryEmbedding": "it is not expanded with is_packed_batching",
    "MatMulNBits": "it is not expanded with group indices, prepacked weights, or 3, 5, 6 or 7 bits",
    "BiasSoftmax": "it is expanded only for the last axis and a bias of the rank of the data",
    "NhwcConv": "it is expanded only where the shapes tell the layout of the weights",
    "TorchEmbedding": "it is not expanded with padding_idx or scale_grad_by_freq",
}

for _op_type in sorted(defined(MICROSOFT)):
    _form = _NOT_COVERED.get(_op_type)
    refuse(
        _op_type,
        domain=MICROSOFT,
        reason=_UNKNOWN_TYPES if _form is None else f"{_form}; and {_UNKNOWN_TYPES}",
    )

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

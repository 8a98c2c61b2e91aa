"""Changes of operators between opset 1 and 18 that a node follows by staying as it is, and why.

It records that each change was reviewed. A test compares it, together with the adapters, with the
history of the operators in onnx itself.
"""

from __future__ import annotations

_BFLOAT16_AT_13 = (
    "Abs Add ArgMax ArgMin Ceil Clip Concat Constant DepthToSpace Div Dropout Equal Exp Expand "
    "Flatten Floor Gather GatherElements GatherND Gemm Greater IsNaN Less Log LRN MatMul Max Mean "
    "MeanVarianceNormalization Min Mul Neg NonZero Pow Reciprocal ReduceL1 ReduceL2 ReduceLogSum "
    "ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare Relu Reshape "
    "ScatterElements ScatterND Shape Sigmoid Sign Size Slice SoftmaxCrossEntropyLoss SpaceToDepth "
    "Sqrt Sub Sum Tanh Tile Transpose Identity"
)

_REASONS: dict[str, dict[int, str]] = {
    "more element types are accepted": {
        9: "Constant Flatten Gemm Greater Less MatMul PRelu",
        11: "Equal",
        12: "Clip Max MaxPool Min Pow ReduceMax ReduceMin",
        13: _BFLOAT16_AT_13,
        14: "Add CumSum Div Mul Relu Sub",
        15: "Pow",
        16: "GreaterOrEqual LeakyRelu LessOrEqual PRelu Scan Where",
    },
    "sequences and optional values are accepted as well as tensors": {
        13: "If Loop",
        14: "Identity",
        16: "Identity If Loop",
        18: "OptionalGetElement OptionalHasElement",
    },
    "strings are accepted; the conversion of numbers is described, not changed": {9: "Cast"},
    "rules for numbers out of range are described, and bfloat16 is accepted": {13: "Cast Mod"},
    "booleans and strings are accepted": {13: "Pad"},
    "operands broadcast; those of one shape mean what they meant": {8: "Max Mean Min Sum"},
    "negative axes are accepted, which were not allowed before": {
        11: "ArgMax ArgMin Compress Concat Flatten Gather Hardmax LogSoftmax ReduceL1 ReduceL2 "
        "ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare Scan Slice Softmax Split Squeeze Unsqueeze",
    },
    "negative indices are accepted, which were not allowed before": {11: "OneHot"},
    "the default of a new attribute is the old behaviour": {
        8: "MaxPool",
        10: "AveragePool MaxPool",
        11: "DepthToSpace TopK",
        12: "ArgMax ArgMin GatherND",
        14: "GRU LSTM Reshape RNN",
        15: "Shape",
        16: "ScatterElements ScatterND",
        18: "LpPool Resize",
    },
    "sizes may be an input, which they are again at opset 13": {2: "Split"},
    "the default of a new attribute is the old behaviour, as was the default that had a typo": {
        3: "GRU",
    },
    "integers are accepted": {6: "Gemm"},
    "the default of count_include_pad is the old behaviour": {7: "AveragePool"},
    "there are further attributes to state the value with": {11: "Constant", 12: "Constant"},
    "scales were scalars before, and the new attribute axis does not concern those": {
        13: "DequantizeLinear QuantizeLinear",
    },
    "the default of strides and dilations, always one, is written down": {
        11: "AveragePool Conv LpPool MaxPool MaxUnpool",
    },
    "how pads are found from output_shape was described the wrong way round; runtimes did, and do, "
    "as the new text says": {11: "ConvTranspose"},
    "the branches may differ in shape": {11: "If"},
    "the loop needs no carried value": {11: "Loop"},
    "C may be left out": {11: "Gemm"},
    "the comparison with the threshold, strictly greater, is described": {11: "NonMaxSuppression"},
    "only the text was set in another way": {13: "NegativeLogLikelihoodLoss"},
    "scale and statistics may be of other types than the data": {15: "BatchNormalization"},
    "reductions max and min are accepted": {18: "ScatterElements ScatterND"},
    "axes may be given; without them all are meant, as before": {18: "Pad"},
}

UNCHANGED: dict[tuple[str, int], str] = {
    (op_type, version): reason
    for reason, versions in _REASONS.items()
    for version, op_types in versions.items()
    for op_type in op_types.split()
}

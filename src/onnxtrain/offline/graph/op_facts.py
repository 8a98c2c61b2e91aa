"""What the operators of ai.onnx are: one table, which every pass reads.

A node of another domain may have the name of one of these operators, so ask for its domain as well.
What a gradient rule, an adapter or a kernel does with an operator is not here, but beside it.
"""

from __future__ import annotations


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


# ---- families ------------------------------------------------------------------------------------

ARITHMETIC = _ops("Add Div Mul Sub")
COMPARISONS = _ops("Equal Greater GreaterOrEqual Less LessOrEqual")
LOGIC = _ops("And Not Or Xor")
REDUCTIONS = _ops(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare"
)
LINEAR = _ops("Conv ConvTranspose Gemm MatMul")  # a product that sums over many elements
RECURRENT = _ops("GRU LSTM RNN")
NORMS = _ops(
    "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization "
    "LpNormalization MeanVarianceNormalization RMSNormalization"
)
CONVOLUTIONS = _ops("Conv ConvInteger ConvTranspose DeformConv QLinearConv")
PRODUCTS = CONVOLUTIONS | LINEAR | _ops("Einsum MatMulInteger QLinearMatMul")
INVERTS = _ops("Div Pow Reciprocal")  # may compute 1 / x
PROBABILITIES = _ops("LogSoftmax Sigmoid Softmax")  # made of scores
JOINS = ARITHMETIC | _ops("Concat Sum Where")
# What a last layer does to its scores beside the product: scales, caps and casts.
ON_SCORES = ARITHMETIC | _ops("Cast Identity Tanh")
ACTIVATIONS = _ops(
    "Celu Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Relu Selu Softplus Softsign Swish "
    "Tanh ThresholdedRelu"
)
POOLS = _ops("AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool")
CONTROL = _ops("If Loop Scan")
RANDOM = _ops(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"
)

# ---- memory and time -----------------------------------------------------------------------------

# The output is the input under another shape, in the same memory.
VIEWS = _ops("Flatten Identity Reshape Squeeze Unsqueeze")
# The output only rearranges the input, so a runtime may fuse it into what reads it.
REARRANGES = VIEWS | _ops("Cast Expand Gather Slice Transpose")
# onnxruntime may put nodes of its own in their place.
WRITTEN_ANEW = _ops("MatMul Reshape Transpose")
# The output has the elements of the input, in another order or several times.
REORDERS = VIEWS | _ops("Cast CastLike Expand Pad Tile Transpose")
# What makes probabilities of probabilities.
KEEPS_PROBABILITIES = REORDERS | _ops("DequantizeLinear Identity QuantizeLinear ReduceMean")
TAKES_PARTS = _ops("Gather Slice Split")  # the output has some of the elements
# The output has the channels of the input.
KEEPS_CHANNELS = REORDERS | TAKES_PARTS | ACTIVATIONS | POOLS | REDUCTIONS | _ops(
    "Abs Clip DequantizeLinear Dropout Erf Exp Log Neg Pow QuantizeLinear Resize Sigmoid Softmax "
    "Sqrt Upsample"
)  # fmt: skip
# Nearly all of the time of a network is spent here.
COSTLY = LINEAR | RECURRENT | _ops(
    "Attention ConvInteger DeformConv Einsum If Loop MatMulInteger QLinearConv QLinearMatMul Scan"
)  # fmt: skip
# Time for each element, relative to an addition; 1 for the others.
ELEMENT_COST = {
    "Erf": 3, "Exp": 3, "Gelu": 4, "Log": 3, "Pow": 4, "Sigmoid": 3, "Softmax": 4, "Tanh": 3,
}  # fmt: skip

# ---- shapes and types of the first output --------------------------------------------------------

KEEPS_SHAPE = _ops(  # of the first input
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Clip Cos Cosh CumSum Erf Exp Floor "
    "Identity IsInf IsNaN LeakyRelu Log LogSoftmax Neg Not Reciprocal Relu ReverseSequence Round "
    "ScatterElements ScatterND Sigmoid Sign Sin Sinh Softmax Softplus Sqrt Tan Tanh Trilu"
)
KEEPS_RANK = _ops(  # of the first input
    "AveragePool BatchNormalization CenterCropPad CumProd CumSum DFT Dropout GlobalAveragePool "
    "GlobalMaxPool GroupNormalization InstanceNormalization LayerNormalization LpPool MaxPool Pad "
    "Resize Slice Split Tile TopK Trilu"
)
BROADCASTS = COMPARISONS | _ops(
    "Add And BitShift BitwiseAnd BitwiseXor Div Max Mean Min Mod Mul Or Pow Sub Sum Where Xor"
)
READS_SHAPE = _ops("ConstantOfShape EyeLike Shape Size")  # and not the elements
RETURNS_BOOL = COMPARISONS | LOGIC | _ops("IsInf IsNaN")
RETURNS_INT64 = _ops("ArgMax ArgMin NonZero Shape Size")
# The input whose element type the output has, where that is not the first.
DTYPE_INPUT = {"If": None, "Loop": None, "OneHot": 2, "Where": 1}
# The rank of the first input, where the operator takes no other.
INPUT_RANK = {"Gemm": 2, "GRU": 3, "LSTM": 3, "RNN": 3, "RoiAlign": 4}

# ---- what inputs are for -------------------------------------------------------------------------

# Positions that hold weights and nothing else, and what these are: even a single number there is a
# weight.
_layer = {1: "weight", 2: "bias"}
_norm = {1: "scale", 2: "bias"}
_recurrent = {1: "input weight", 2: "recurrent weight", 3: "bias"}
PARAMETER_INPUTS: dict[str, dict[int, str]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm"), _layer),
    "MatMul": {1: "weight"}, "DeformConv": {1: "weight", 3: "bias"}, "PRelu": {1: "slope"},
    **dict.fromkeys(
        ("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
        _norm,
    ),
    "RMSNormalization": {1: "scale"},
    "GRU": _recurrent, "RNN": _recurrent, "LSTM": {**_recurrent, 7: "peephole"},
}  # fmt: skip
# Positions of floats that set up an operator, and what these are: no weights.
SETTING_INPUTS: dict[str, dict[int, str]] = {
    "Clip": {1: "bound", 2: "bound"}, "Min": {0: "bound", 1: "bound"},
    "Max": {0: "bound", 1: "bound"}, "Pow": {1: "exponent"}, "Dropout": {1: "ratio"},
    "QuantizeLinear": {1: "quantization scale"}, "DequantizeLinear": {1: "quantization scale"},
    "QLinearConv": {1: "quantization scale", 4: "quantization scale", 6: "quantization scale"},
    "QLinearMatMul": {1: "quantization scale", 4: "quantization scale", 6: "quantization scale"},
    "Resize": {1: "region", 2: "factor"}, "Upsample": {1: "factor"}, "Pad": {2: "filling"},
    "OneHot": {2: "values"}, "Range": {0: "limit", 1: "limit", 2: "step"},
    "GRU": {5: "initial state"}, "RNN": {5: "initial state"},
    "LSTM": {5: "initial state", 6: "initial state"}, "Attention": {3: "mask"},
    "RotaryEmbedding": {1: "cosine table", 2: "sine table"},
    "SoftmaxCrossEntropyLoss": {2: "class weights"},
    "NegativeLogLikelihoodLoss": {2: "class weights"},
}  # fmt: skip
# Positions that decide the shape of the output.
SHAPE_INPUTS = {
    "ConstantOfShape": (0,), "Col2Im": (1, 2), "MaxUnpool": (2,), "Pad": (1, 3),
    "Resize": (1, 2, 3), "Slice": (1, 2, 3, 4),
    **dict.fromkeys(
        REDUCTIONS | _ops(
            "CenterCropPad CumSum Expand OneHot Reshape Split Squeeze Tile TopK Trilu Unsqueeze "
            "Upsample"
        ),
        (1,),
    ),
}  # fmt: skip

# ---- numbers -------------------------------------------------------------------------------------

# On integers, the result is no larger than the inputs: cheap to compute before run time.
FOLDS_INTEGERS = VIEWS | COMPARISONS | LOGIC | _ops(
    "Abs Add Cast Concat Div Gather Max Min Mod Mul Neg ReduceMax ReduceMin ReduceProd ReduceSum "
    "Shape Size Slice Sub Transpose Where"
)  # fmt: skip
# The gradient is at most a finite multiple of the cotangent.
BOUNDED_GRADIENT = VIEWS | _ops(
    "Add AveragePool BatchNormalization Cast Clip Concat DequantizeLinear Dropout Elu Expand "
    "Gather Gelu GlobalAveragePool HardSigmoid HardSwish LayerNormalization LeakyRelu LogSoftmax "
    "MaxPool Mean Mul Neg NegativeLogLikelihoodLoss Pad ReduceMean ReduceSum Relu Sigmoid Slice "
    "Softmax SoftmaxCrossEntropyLoss Softplus Split Sub Sum Tanh Transpose"
)
# The gradient only passes the cotangent on, and makes no element of it zero.
ADDITIVE = LINEAR | VIEWS | _ops(
    "Add Cast CastLike Concat Dropout Expand Mean Neg ReduceMean ReduceSum Sub Sum Tile Transpose"
)  # fmt: skip
# The gradient passes some elements of the cotangent on, and reads the values only to choose.
SELECTS = _ops(
    "CenterCropPad Clip Compress Gather GatherElements GatherND If Max MaxPool Min "
    "NegativeLogLikelihoodLoss Pad ReduceMax ReduceMin Relu ScatterElements ScatterND Slice Split "
    "TopK Trilu Where"
)
# The derivative, or the result, may be infinite or undefined for finite inputs.
UNBOUNDED_GRADIENT = _ops(
    "Acos Acosh Asin Atanh Cosh Div Exp Log Pow Reciprocal ReduceLogSum Sinh Sqrt Tan"
)
BOUNDED_IF_POSITIVE = _ops("Log Reciprocal Sqrt")  # all but that of numbers close to zero
# The sign of the result is that of the first input, or it is never negative.
KEEPS_SIGN = REARRANGES | _ops("ReduceMax ReduceMean ReduceMin")
NOT_NEGATIVE = _ops("Abs Exp ReduceL1 ReduceL2 ReduceSumSquare Relu Sigmoid Softmax Softplus Sqrt")

# ---- cost ----------------------------------------------------------------------------------------

# Takes no more time than its inputs and its result have elements.
READS_ONCE = _ops(
    "ArgMax ArgMin CastLike Compress ConstantOfShape Expand GatherElements GatherND NonZero Range "
    "Tile"
)
# onnx computes shapes with it, in some opset.
SHAPE_ARITHMETIC = _ops(
    "Abs Add And Cast CastLike Ceil Clip Concat ConstantOfShape Div Equal Expand Flatten Floor "
    "Gather GatherElements GatherND Greater Identity Less Max Min Mod Mul Neg Not OneHot Or Pow "
    "Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round ScatterElements ScatterND Shape "
    "Sign Size Slice Split Sqrt Squeeze Sub Sum Tile Transpose Trilu Unsqueeze Where"
)
# Numbers or sizes of the result are at most the product, or the sum, of those of the inputs.
MULTIPLIES = _ops("Div Einsum Gemm MatMul Mul Pow Resize Size Tile Upsample")
ADDS = _ops("Add Concat ConcatFromSequence CumSum Pad Range Sub Sum")
GROWS_STEEPLY = _ops("BitShift Exp MatMulInteger Pow ReduceProd")  # or by any amount

# ---- integers ------------------------------------------------------------------------------------

CONVERSIONS = _ops("DequantizeLinear DynamicQuantizeLinear QuantizeLinear")
# onnxruntime multiplies 8-bit integers with these.
INTEGER_PRODUCTS = _ops("Conv Gemm MatMul")
# onnxruntime computes these on 8-bit integers, each with a range of its own result.
INTEGER_ARITHMETIC = _ops("Add AveragePool Concat GlobalAveragePool LeakyRelu Mul Sigmoid")
# The result has elements of the first input and no others, so that it has the same range.
KEEPS_RANGE = _ops("Flatten Gather MaxPool Reshape Resize Slice Split Squeeze Transpose Unsqueeze")
# A bound of the range that comes behind a product, which quantizing the result does as well.
RANGE_BOUNDS = _ops("Clip Relu")
# onnxruntime makes one operator, of floats, of Gemm and one of these behind it.
JOINED_TO_GEMM = RANGE_BOUNDS | _ops(
    "Elu HardSigmoid LeakyRelu Selu Sigmoid Softplus Softsign Tanh ThresholdedRelu"
)
# Of finite numbers that are not huge, these make finite ones; others may not, as Log of 0.
KEEPS_FINITE = ACTIVATIONS | CONVERSIONS | INTEGER_ARITHMETIC | NORMS | POOLS | REORDERS | _ops(
    "Abs Clip Dropout Erf Gather Neg Resize Sigmoid Slice Softmax Split Sub Sum Where"
)  # fmt: skip
# What training reads of an activation, for its range.
EXTREMES = _ops("ReduceMax ReduceMin")

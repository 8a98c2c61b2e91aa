"""The operators that a gradient, and the random numbers of training, may consist of.

A rule runs on models of any opset from the floor on, and what it writes is stamped with the lowest
opset possible. So it may use an operator only if that is there from the floor on and has meant one
thing ever since. The list is written by hand, one reason for each group: a new operator in a rule
is a decision, not an accident. Tests compare it with what the rules write and the models they make.
"""

from __future__ import annotations

_GROUPS = {
    "arithmetic and comparison, which every runtime has": (
        "Abs Add Div Max Min Mod Mul Neg Pow Reciprocal Sign Sqrt Sub Sum "
        "And Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Not Where "
        "Ceil Clip Floor Round"
    ),
    "functions that are their own derivative, or a part of another's": (
        "Cos Cosh Elu Erf Exp LeakyRelu Log Relu Sigmoid Sin Sinh Softmax Softplus Softsign Tanh"
    ),
    "the adjoints of broadcasting and of reductions": (
        "CumSum Expand ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum"
    ),
    "rearranging, which is linear and whose adjoint rearranges back": (
        "CenterCropPad Concat Flatten Identity Pad Reshape ReverseSequence Slice Split Squeeze "
        "Tile Transpose Trilu Unsqueeze"
    ),
    "indexing: a gather where the forward scatters, and the other way round": (
        "ArgMax ArgMin Compress Gather GatherElements GatherND NonZero OneHot ScatterElements "
        "ScatterND Unique"
    ),
    "shapes that are known at run time only": (
        "Cast ConstantOfShape EyeLike Range Shape Size"
    ),
    "products of matrices and of images": (
        "AveragePool Conv ConvTranspose Det Einsum Gemm MatMul"
    ),
    "the forward operator once more, on other values": (
        "BatchNormalization DequantizeLinear MaxPool Resize"
    ),
    "control flow, backwards": (
        "If Loop Scan SequenceAt"
    ),
    "random numbers that follow from a seed": (
        "BitShift BitwiseXor"
    ),
    "integers that are packed into bytes": (
        "BitwiseAnd"
    ),
}  # fmt: skip

# Some gained a mode later (`wrap` of Pad), or a new `ceil_mode` (pooling): rules use neither.
EMITTED_OPS = frozenset(op for ops in _GROUPS.values() for op in ops.split())

# Operators that are newer than the floor, or changed their meaning since. They occur only in the
# gradient of themselves: where the model has one, its opset has it too, and the rule reads that.
REPEATED_OPS: dict[str, str] = {
    "AffineGrid": "came with opset 20; the gradient needs the grid of the identity",
    "CumProd": "came with opset 26; the derivative of a running product is made of such products",
    "DFT": "took its axis as an attribute before opset 20; the adjoint of a transform is one",
    "Dropout": "in the body of a Loop, on ones: what it draws is recorded",
    "TensorScatter": "came with opset 24; its adjoint scatters zeros",
}

"""Operators whose gradient is zero, and those that are refused, each with its reason.

"Zero" is a statement about the operator; a gradient that merely has not been written yet is never
declared zero.
"""

from __future__ import annotations

from onnxtrain.offline.autodiff.registry import refuse, zero_gradient

zero_gradient(
    "Ceil", "Floor", "Round", "Sign",
    reason="piecewise constant; straight_through=[...] passes the gradient instead",
)  # fmt: skip
zero_gradient("Hardmax", reason="piecewise constant")
zero_gradient(
    "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN",
    "And", "Or", "Not", "Xor",
    reason="the result is a truth value",
)  # fmt: skip
zero_gradient(
    "ArgMax", "ArgMin", "NonZero", "NonMaxSuppression", "Shape", "Size",
    reason="the result is an index or a size",
)  # fmt: skip
zero_gradient(
    "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "ConvInteger",
    "MatMulInteger",
    reason="works on integers",
)  # fmt: skip
zero_gradient(
    "Constant", "ConstantOfShape", "EyeLike",
    "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix",
    reason="the values do not depend on a float input",
)  # fmt: skip
zero_gradient(
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
    reason="draws at random; the inputs give shape or probability, which has no path derivative",
)  # fmt: skip
zero_gradient(
    "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer",
    reason="the input is text, bytes or integers",
)  # fmt: skip

refuse(
    "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence",
    reason="a sequence whose tensors only run time tells carries no gradient: export with tensors "
    "(Split, Concat) instead",
)  # fmt: skip
refuse(
    "Optional", "OptionalGetElement", "OptionalHasElement",
    reason="optional values carry no gradient: export the model without them",
)  # fmt: skip
refuse("BitCast", reason="reinterprets bits, which has no derivative")

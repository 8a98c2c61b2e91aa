"""At which opsets a node means what it means.

An operator gets a new version when anything about it changes, mostly to accept more types. A node
that uses none of what is new can be stamped with the older opset. Each change since the floor is in
one of three tables here: *widened*, where the schemas tell all; *guarded*, where a node has to be
looked at; and *closed*, where the same node means something else. A change in none of them (a newer
onnx brought it) is not crossed; a test asks for it to be classified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.offline.graph.shapes import dims_of, same_dim
from onnxtrain.offline.graph.versions import FLOOR_OPSET

_ANY_TENSOR = (
    "Cast CastLike Constant ConstantOfShape Flatten Identity If Loop Pad Reshape Scan Shape Size "
    "Squeeze Transpose Unsqueeze"
)
_WIDENED = {
    19: "AveragePool Cast CastLike Constant DequantizeLinear Equal Identity If Loop QuantizeLinear "
    "Reshape Scan Shape Size",
    20: "ConstantOfShape IsInf IsNaN ReduceMax ReduceMin",
    21: f"{_ANY_TENSOR} DequantizeLinear QLinearMatMul QuantizeLinear",
    22: "Acos Acosh Asin Asinh Atan Atanh Bernoulli Conv ConvTranspose Cos Cosh DeformConv Det "
    "Dropout Elu EyeLike GRU GlobalAveragePool GlobalLpPool GlobalMaxPool GridSample HardSigmoid "
    "HardSwish InstanceNormalization LSTM LpNormalization LpPool MaxRoiPool MaxUnpool Mish "
    "Multinomial NegativeLogLikelihoodLoss RNN RandomNormal RandomNormalLike RandomUniform "
    "RandomUniformLike RoiAlign Round Selu Sin Sinh Softplus Softsign Tan ThresholdedRelu",
    23: f"{_ANY_TENSOR} DequantizeLinear QuantizeLinear",
    24: "Constant ConstantOfShape DequantizeLinear Flatten Identity If Loop Pad QuantizeLinear "
    "Reshape Scan Shape Size SplitToSequence Squeeze TopK Transpose Unsqueeze",
    25: f"{_ANY_TENSOR} Attention DequantizeLinear QuantizeLinear",
    27: "Range",
    28: "BitShift Cast Celu Compress DepthToSpace DequantizeLinear Einsum OneHot Optional "
    "OptionalGetElement OptionalHasElement QuantizeLinear ReduceLogSum ReduceLogSumExp "
    "ReverseSequence SpaceToDepth Unique",
}
# Types, inputs and attributes were added, the defaults of which are the older behaviour (or, for
# ReduceLogSum and ReduceLogSumExp, integers taken away): a node that the older schema accepts, and
# whose further attributes have their default, is the same node.
WIDENED = frozenset((op, version) for version, ops in _WIDENED.items() for op in ops.split())

CLOSED: dict[tuple[str, int], str] = {
    ("DFT", 20): "the axis became an input, and its default another one",
    ("GroupNormalization", 21): "scale and bias became one per channel, from one per group",
}


def _has_no_ceil_mode(node: ir.Node) -> bool:
    return node.attributes.get_int("ceil_mode", 0) == 0


def _makes_no_unsigned_zero_float8(node: ir.Node) -> bool:
    dtype = node.outputs[0].dtype
    return dtype is not None and not dtype.name.endswith("FNUZ")


def _samples_images(node: ir.Node) -> bool:
    x = node.inputs[0]
    dims = None if x is None else dims_of(x)
    # onnxruntime samples images of doubles from opset 20 on only.
    return x is not None and dims is not None and len(dims) == 4 and x.dtype != ir.DataType.DOUBLE


def _mask_covers_every_key(node: ir.Node) -> bool:
    _, key, _, mask, past, *_ = (*node.inputs, None, None, None)
    if mask is None:
        return True
    key_dims, mask_dims = (None if v is None else dims_of(v) for v in (key, mask))
    if past is not None or not key_dims or not mask_dims:
        return False
    return same_dim(mask_dims[-1], key_dims[-2])


def _divides_as_before(node: ir.Node) -> bool:
    dtype = node.outputs[0].dtype or (node.inputs[0].dtype if node.inputs[0] else None)
    return node.attributes.get_int("fmod", 0) == 1 or (dtype is not None and dtype.is_integer())


def _without(attribute: str, value: str) -> Callable[[ir.Node], bool]:
    return lambda node: node.attributes.get_string(attribute, "") != value


# Changes that concern some nodes: where the function is true, a node means what it meant.
GUARDED: dict[tuple[str, int], Callable[[ir.Node], bool]] = {
    # a mask may be shorter than the keys
    ("Attention", 24): _mask_covers_every_key,
    # windows that would start in the padding are left out
    ("AveragePool", 22): _has_no_ceil_mode,
    ("MaxPool", 22): _has_no_ceil_mode,
    # infinity converts to another number in float8
    ("Cast", 24): _makes_no_unsigned_zero_float8,
    ("CastLike", 24): _makes_no_unsigned_zero_float8,
    # more than images can be sampled, and modes were renamed
    ("GridSample", 20): _samples_images,
    # floats may be divided with fmod=0
    ("Mod", 28): _divides_as_before,
    # a mode was added
    ("Pad", 19): _without("mode", "wrap"),
    ("Resize", 19): _without("coordinate_transformation_mode", "half_pixel_symmetric"),
}

_OLD_GRID_SAMPLE_MODES = {"linear": "bilinear", "cubic": "bicubic"}


def lowest_opset(node: ir.Node, opset: int) -> int:
    """Return the lowest opset, not below the floor, at which a node of `opset` means the same.

    It is higher than `opset` only where the node is not allowed there (its types came later).
    """
    versions = _versions(node.op_type)
    home = _at(versions, opset)
    if home is None:
        return opset
    if not _accepts(home, node, strict=False):
        return next(
            (
                v.since_version
                for v in _upwards(node, versions, home)
                if _accepts(v, node, strict=False)
            ),
            max(opset, FLOOR_OPSET),
        )
    current = home
    while current.since_version > FLOOR_OPSET:
        older = _at(versions, current.since_version - 1)
        if older is None or not _same_across(node, current.since_version):
            break
        if not _accepts(older, node, home):
            break
        current = older
    return max(current.since_version, FLOOR_OPSET)


def highest_opset(node: ir.Node, opset: int) -> int:
    """Return the highest opset at which a node of `opset` means the same."""
    versions = _versions(node.op_type)
    home = _at(versions, opset)
    newest: int = onnx.defs.onnx_opset_version()
    if home is None:
        return newest
    reached = {v.since_version for v in _upwards(node, versions, home)}
    return next(
        (
            v.since_version - 1
            for v in versions
            if v.since_version > opset and v.since_version not in reached
        ),
        newest,
    )


def move(node: ir.Node, opset: int, target: int) -> None:
    """Write a node of `opset` as `target` has it, which is between its lowest and its highest."""
    if node.op_type == "GridSample" and target < 20 <= opset:
        mode = node.attributes.get_string("mode", "linear")
        node.attributes.add(ir.AttrString("mode", _OLD_GRID_SAMPLE_MODES.get(mode, mode)))
    version = _at(_versions(node.op_type), target) if node.attributes else None
    if version is not None:
        for name in [n for n in node.attributes if n not in _attributes(version)]:
            del node.attributes[name]  # it has its default, or the node would not go here


def _same_across(node: ir.Node, version: int) -> bool:
    step = (node.op_type, version)
    return step in WIDENED or (step in GUARDED and GUARDED[step](node))


def _upwards(node: ir.Node, versions: Sequence[Schema], home: Schema) -> Iterator[Schema]:
    for version in versions:
        if version.since_version > home.since_version:
            renamed = (node.op_type, version.since_version) == ("GridSample", 20)
            if renamed or not _same_across(node, version.since_version):
                return
            yield version


# ---- what a version of an operator accepts -------------------------------------------------------


# For each value its type; None for one that is left out.
_Types = tuple["ir.DataType | str | None", ...]
_UNKNOWN = ""
Schema = onnx.defs.OpSchema


@cache
def _history() -> dict[str, tuple[Schema, ...]]:
    found: dict[str, list[Schema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            found.setdefault(schema.name, []).append(schema)
    return {name: tuple(sorted(vs, key=lambda v: v.since_version)) for name, vs in found.items()}


def _versions(op_type: str) -> tuple[Schema, ...]:
    return _history().get(op_type, ())


def _at(versions: Sequence[Schema], opset: int) -> Schema | None:
    return next((v for v in reversed(versions) if v.since_version <= opset), None)


@cache
def _attributes(version: Schema) -> dict[str, Any]:
    """Return the attributes of a version with their defaults, None where there is none."""
    return {
        name: ir.serde.deserialize_attribute(attribute.default_value).value
        if attribute.default_value.name
        else None
        for name, attribute in version.attributes.items()
    }


def _accepts(
    version: Schema, node: ir.Node, home: Schema | None = None, strict: bool = True
) -> bool:
    """Tell whether a version takes a node as it is, but for attributes that have their default.

    `home` is the version that the node was written for. With `strict`, an unknown type is taken for
    one that the version does not accept, unless it accepts all that `home` does.
    """
    home = home or version
    if node.attributes and not all(
        name in _attributes(version) or _is_default(attribute, _attributes(home).get(name))
        for name, attribute in node.attributes.items()
    ):
        return False
    outputs = _types([v if v.name else None for v in node.outputs])
    return _types_fit(version, home, _types(node.inputs), outputs, strict)


@cache
def _types_fit(
    version: Schema, home: Schema, inputs: _Types, outputs: _Types, strict: bool
) -> bool:
    """Tell whether a version accepts these numbers and types of inputs and outputs."""
    if not (
        version.min_input <= len(inputs) <= version.max_input
        and version.min_output <= len(outputs) <= version.max_output
    ):
        return False
    bound: dict[str, str] = {}
    open_ = []
    for kind, parameter, at_home in (
        *_with_parameters(inputs, version.inputs, home.inputs),
        *_with_parameters(outputs, version.outputs, home.outputs),
    ):
        name = f"tensor({kind.name.lower()})" if isinstance(kind, ir.DataType) else kind
        is_shared = parameter.is_homogeneous and "(" not in parameter.type_str
        variable = parameter.type_str if is_shared else ""
        if name == _UNKNOWN:
            open_.append((variable, at_home.types <= parameter.types))
            continue
        if name not in parameter.types:
            return False
        if is_shared and bound.setdefault(variable, name) != name:
            return False
    return not strict or all(fits or variable in bound for variable, fits in open_)


def _with_parameters(
    types: _Types, now: Sequence[Any], home: Sequence[Any]
) -> Iterator[tuple[ir.DataType | str, Any, Any]]:
    """Pair types with their parameters; the last parameter may stand for any number of them."""
    for index, kind in enumerate(types):
        if kind is not None:
            yield kind, now[min(index, len(now) - 1)], home[min(index, len(home) - 1)]


def _is_default(attribute: ir.Attr, default: Any) -> bool:
    if attribute.is_ref():
        return False
    if attribute.name == "dilations":  # the schema does not write it down: one along each axis
        return all(number == 1 for number in attribute.value)
    return default is not None and bool(attribute.value == default)


def _types(values: Sequence[ir.Value | None]) -> _Types:
    """Return the types of values, without those that are left out at the end."""
    kept = [None if v is None else _type_of(v.type) for v in values]
    while kept and kept[-1] is None:
        kept.pop()
    return tuple(kept)


def _type_of(kind: ir.TypeProtocol | None) -> ir.DataType | str:
    """Return the element type of a tensor, or another type as schemas call it."""
    if type(kind) is ir.TensorType:
        return _UNKNOWN if kind.dtype == ir.DataType.UNDEFINED else kind.dtype
    for cls, name in ((ir.SequenceType, "seq"), (ir.OptionalType, "optional")):
        if isinstance(kind, cls):
            inner = _type_of(kind.elem_type)
            inner = f"tensor({inner.name.lower()})" if isinstance(inner, ir.DataType) else inner
            return inner and f"{name}({inner})"
    return _UNKNOWN

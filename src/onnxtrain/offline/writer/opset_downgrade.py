"""At which opsets a node means what it means.

An operator gets a new version when anything about it changes, mostly to accept more types. A node
that uses none of what is new can be stamped with the older opset. Each change since the floor is in
one of three tables here: *widened*, where the schemas tell all; *guarded*, where a node has to be
looked at; and *closed*, where the same node means something else. A change in none of them (a newer
onnx brought it) is not crossed; a test asks for it to be classified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Guard:
    """A change that concerns some nodes: where `holds` is true, a node means what it meant."""

    holds: Callable[[ir.Node], bool]
    change: str


_WINDOWS = Guard(_has_no_ceil_mode, "windows that would start in the padding are left out")
_FLOAT8 = Guard(_makes_no_unsigned_zero_float8, "infinity converts to another number in float8")

GUARDED: dict[tuple[str, int], Guard] = {
    ("Attention", 24): Guard(_mask_covers_every_key, "a mask may be shorter than the keys"),
    ("AveragePool", 22): _WINDOWS,
    ("MaxPool", 22): _WINDOWS,
    ("Cast", 24): _FLOAT8,
    ("CastLike", 24): _FLOAT8,
    ("GridSample", 20): Guard(_samples_images, "other than images are sampled; modes were renamed"),
    ("Mod", 28): Guard(_divides_as_before, "floats may be divided with fmod=0"),
    ("Pad", 19): Guard(_without("mode", "wrap"), "the mode wrap was added"),
    ("Resize", 19): Guard(
        _without("coordinate_transformation_mode", "half_pixel_symmetric"),
        "the coordinates half_pixel_symmetric were added",
    ),
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
            (v.since for v in _upwards(node, versions, home) if _accepts(v, node, strict=False)),
            max(opset, FLOOR_OPSET),
        )
    current = home
    while current.since > FLOOR_OPSET:
        older = _at(versions, current.since - 1)
        if older is None or not _same_across(node, current.since):
            break
        if not _accepts(older, node, home):
            break
        current = older
    return max(current.since, FLOOR_OPSET)


def highest_opset(node: ir.Node, opset: int) -> int:
    """Return the highest opset at which a node of `opset` means the same."""
    versions = _versions(node.op_type)
    home = _at(versions, opset)
    newest: int = onnx.defs.onnx_opset_version()
    if home is None:
        return newest
    reached = {v.since for v in _upwards(node, versions, home)}
    return next(
        (v.since - 1 for v in versions if v.since > opset and v.since not in reached), newest
    )


def move(node: ir.Node, opset: int, target: int) -> None:
    """Write a node of `opset` as `target` has it, which is between its lowest and its highest."""
    if node.op_type == "GridSample" and target < 20 <= opset:
        mode = node.attributes.get_string("mode", "linear")
        node.attributes.add(ir.AttrString("mode", _OLD_GRID_SAMPLE_MODES.get(mode, mode)))
    version = _at(_versions(node.op_type), target) if node.attributes else None
    if version is not None:
        for name in [n for n in node.attributes if n not in version.attributes]:
            del node.attributes[name]  # it has its default, or the node would not go here


def _same_across(node: ir.Node, version: int) -> bool:
    step = (node.op_type, version)
    return step in WIDENED or (step in GUARDED and GUARDED[step].holds(node))


def _upwards(node: ir.Node, versions: Sequence[_Version], home: _Version) -> Iterator[_Version]:
    for version in versions:
        if version.since > home.since:
            renamed = (node.op_type, version.since) == ("GridSample", 20)
            if renamed or not _same_across(node, version.since):
                return
            yield version


# ---- what a version of an operator accepts -------------------------------------------------------


# For each value its type; None for one that is left out.
_Types = tuple["ir.DataType | str | None", ...]
_UNKNOWN = ""


@dataclass(frozen=True)
class _Parameter:
    variable: str | None  # the name of the type that it shares with others, if it does
    types: frozenset[str]


@dataclass(frozen=True)
class _Version:
    """One version of an operator, read once from onnx."""

    since: int
    inputs: tuple[_Parameter, ...]
    outputs: tuple[_Parameter, ...]
    input_count: tuple[int, int]
    output_count: tuple[int, int]
    attributes: dict[str, Any]  # with the default, or None

    @classmethod
    def read(cls, schema: onnx.defs.OpSchema) -> _Version:
        return cls(
            schema.since_version,
            tuple(_parameter(p) for p in schema.inputs),
            tuple(_parameter(p) for p in schema.outputs),
            (schema.min_input, schema.max_input),
            (schema.min_output, schema.max_output),
            {name: _default(a) for name, a in schema.attributes.items()},
        )

    def __hash__(self) -> int:
        return hash(self.since)


def _parameter(parameter: onnx.defs.OpSchema.FormalParameter) -> _Parameter:
    shared = parameter.is_homogeneous and "(" not in parameter.type_str
    return _Parameter(parameter.type_str if shared else None, frozenset(parameter.types))


def _default(attribute: onnx.defs.OpSchema.Attribute) -> Any:
    if not attribute.default_value.name:
        return None
    return ir.serde.deserialize_attribute(attribute.default_value).value


@cache
def _history() -> dict[str, tuple[_Version, ...]]:
    found: dict[str, list[_Version]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            found.setdefault(schema.name, []).append(_Version.read(schema))
    return {name: tuple(sorted(vs, key=lambda v: v.since)) for name, vs in found.items()}


def _versions(op_type: str) -> tuple[_Version, ...]:
    return _history().get(op_type, ())


def _at(versions: Sequence[_Version], opset: int) -> _Version | None:
    return next((v for v in reversed(versions) if v.since <= opset), None)


def _accepts(
    version: _Version, node: ir.Node, home: _Version | None = None, strict: bool = True
) -> bool:
    """Tell whether a version takes a node as it is, but for attributes that have their default.

    `home` is the version that the node was written for. With `strict`, an unknown type is taken for
    one that the version does not accept, unless it accepts all that `home` does.
    """
    home = home or version
    if node.attributes and not all(
        name in version.attributes or _is_default(attribute, home.attributes.get(name))
        for name, attribute in node.attributes.items()
    ):
        return False
    inputs = _types(node.inputs)
    outputs = _types([v if v.name else None for v in node.outputs])
    return _types_fit(node.op_type, version.since, home.since, inputs, outputs, strict)


@cache
def _types_fit(
    op_type: str, since: int, home_since: int, inputs: _Types, outputs: _Types, strict: bool
) -> bool:
    """Tell whether a version accepts these numbers and types of inputs and outputs."""
    versions = _versions(op_type)
    version, home = (next(v for v in versions if v.since == s) for s in (since, home_since))
    counts = ((inputs, version.input_count), (outputs, version.output_count))
    if not all(low <= len(types) <= high for types, (low, high) in counts):
        return False
    bound: dict[str | None, str] = {}
    open_ = []
    for kind, parameter, home_parameter in (
        *_with_parameters(inputs, version.inputs, home.inputs),
        *_with_parameters(outputs, version.outputs, home.outputs),
    ):
        name = f"tensor({kind.name.lower()})" if isinstance(kind, ir.DataType) else kind
        if name == _UNKNOWN:
            open_.append((parameter, home_parameter))
            continue
        if name not in parameter.types:
            return False
        if parameter.variable and bound.setdefault(parameter.variable, name) != name:
            return False
    return not strict or all(
        parameter.variable in bound or at_home.types <= parameter.types
        for parameter, at_home in open_
    )


def _with_parameters(
    types: _Types, now: Sequence[_Parameter], home: Sequence[_Parameter]
) -> Iterator[tuple[ir.DataType | str, _Parameter, _Parameter]]:
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

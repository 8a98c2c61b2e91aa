"""Checks a gradient rule against the operator that it belongs to: the only clever test file.

For one operator, a Spec gives input shapes, attributes and the range to sample from. The check
builds a model of that one node, differentiates it with `onnxtrain.gradient`, and compares, for one
random direction t and one random cotangent ct,

    <ct, (f(x + h t) - f(x - h t)) / 2h>   with   <J(x)^T ct, t>

for each differentiable input by itself. It runs twice: in float32 on the stock onnxruntime, which
is what we ship on, and in float64 with onnx's reference evaluator as a second opinion. Then the
gradient runs on onnxruntime in the other types that the operator runs in, and is compared with that
in float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxtrain
from allowed_ops import EMITTED_OPS, REPEATED_OPS
from onnxtrain.offline.graph.versions import FLOOR_OPSET

NEWEST_RUNNABLE_OPSET = 26  # what the installed onnxruntime accepts
OTHER_TYPES = {np.float64: 1e-4, np.float16: 3e-2}  # with the tolerance against float32
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spec:
    """One configuration of one operator.

    An input is a shape (a float tensor sampled from `domain`), an array (a constant: an integer
    array stays an integer input; a float array is used as the point at which to differentiate), or
    None for one that is left out. `wrt` picks the inputs to check; by default every float input.
    """

    op: str
    inputs: Sequence[tuple[int, ...] | Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    domain: tuple[float, float] = (-2.0, 2.0)
    id: str = ""
    outputs: int = 1
    of: int = 0  # which output is differentiated
    wrt: Sequence[int] | None = None
    opset: int = 18
    eps: float = 1e-2  # step of the float32 check; 1.0 is exact for linear and bilinear operators
    rtol: float = 1e-2  # float32, finite differences
    constants: Sequence[int] = ()  # inputs that are initializers (axes, shapes), not graph inputs
    symbolic: bool = True  # check also with every dimension symbolic
    expanded: bool = False  # the forward is rewritten too: it is equal up to rounding
    on_ort: bool = True  # False where the installed onnxruntime lacks the operator
    second_opinion: bool = True  # False where the reference evaluator is missing or wrong: say why
    output_type: Any = None  # where the output is not of the type of the inputs
    apart: float = 0.0  # least distance between any two sampled numbers (keeps away from ties)
    away_from: Sequence[float] = ()  # kinks that samples keep a distance of 0.1 from
    single: Sequence[int] = ()  # float inputs that are float32 whatever the others are

    @property
    def name(self) -> str:
        return f"{self.op}-{self.id}" if self.id else self.op


def ids(spec: Spec) -> str:
    return spec.name


def check_spec(spec: Spec, symbolic: bool = False, repeat_first_input: bool = False) -> None:
    """Check every differentiable input of a Spec, on both engines and in all types."""
    arrays = _sample(spec)
    model = _one_node_model(spec, arrays, symbolic, np.float32)
    if repeat_first_input:
        model.graph.node[0].input.append("x0")
    wrt = [f"x{i}" for i in _checked_inputs(spec, arrays)]
    extended = onnxtrain.gradient(model, wrt, of=f"y{spec.of}")
    check_emitted(extended, model)
    runner = _run_ort if spec.on_ort else _run_reference
    _compare(spec, model, extended, arrays, wrt, runner, spec.eps, spec.rtol)
    if spec.second_opinion and not symbolic and not repeat_first_input:
        doubles = [a if i in spec.single else _as_type(a, np.float64) for i, a in enumerate(arrays)]
        model = _one_node_model(spec, doubles, symbolic, np.float64)
        extended = onnxtrain.gradient(model, wrt, of=f"y{spec.of}")
        _compare(spec, model, extended, doubles, wrt, _run_reference, 1e-5, 1e-5)
    if spec.on_ort and not repeat_first_input:
        for dtype, rtol in OTHER_TYPES.items():
            _check_type(spec, arrays, wrt, symbolic, dtype, rtol)


def check_emitted(model: onnx.ModelProto, given: onnx.ModelProto | None = None) -> None:
    """What we emit is plain: domain "" alone, valid under strict inference, without known traps.

    With the model that was `given`, its opset bounds that of the result from above.
    """
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    for info in (*checked.graph.input, *checked.graph.output):
        info.type.tensor_type.shape.SetInParent()  # the checker wants a shape; runtimes do not
    onnx.checker.check_model(checked)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    for node in all_nodes(model.graph):
        assert node.domain == "", f"{node.op_type} is of domain {node.domain!r}"
        _check_node(node)
    opset = _opset(model)
    highest = onnx.defs.onnx_opset_version() if given is None else _opset(given)
    assert FLOOR_OPSET <= opset <= max(highest, FLOOR_OPSET), f"stamped with opset {opset}"


def _check_node(node: onnx.NodeProto) -> None:
    """Check that a node is on the written list, if differentiation wrote it, and is no trap."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert node.op_type != "BatchNormalization" or not attributes.get("training_mode"), (
        f"{node.name} is in training mode, in which onnxruntime may crash"
    )
    if "_grad/" not in node.name and not node.name.startswith("grad/"):
        return
    assert node.op_type in EMITTED_OPS | REPEATED_OPS.keys(), (
        f"{node.name} is not in allowed_ops.py"
    )
    assert node.op_type != "ScatterND" or attributes.get("reduction", b"none") == b"none", (
        f"{node.name}: onnxruntime loses updates of ScatterND with a reduction"
    )
    assert node.op_type != "Pad" or len(node.input) < 4, (
        f"{node.name}: onnxruntime moves Transpose past a Pad with axes, and pads others then"
    )


def _opset(model: onnx.ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain == "")


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Run a model on the stock onnxruntime."""
    return _run_ort(model, feeds)


def check_gradient(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    wrt: Sequence[str],
    of: str,
    eps: float = 1e-2,
    rtol: float = 1e-2,
    rounding: float = 0.0,
) -> onnx.ModelProto:
    """The same check for a whole model whose inputs are all fed; returns the gradient model.

    `rounding` is by how much the forward value may differ, where the forward is rewritten too.
    """
    extended = onnxtrain.gradient(model, wrt, of=of)
    check_emitted(extended, model)
    _compare_feeds(of, model, extended, feeds, wrt, of, _run_ort, eps, rtol, rounding)
    return extended


def vjp(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    wrt: Sequence[str],
    cotangent: Array,
    of: str | None = None,
) -> list[Array]:
    """Return the gradients of <cotangent, output>, computed by onnxruntime, one per name in wrt."""
    extended = onnxtrain.gradient(model, wrt, of=of)
    check_emitted(extended, model)
    seeds = {f"{o.name}_grad": cotangent for o in model.graph.output}
    wanted = {f"{name}_grad" for name in wrt}
    outputs = [o.name for o in extended.graph.output]
    results = zip(outputs, _run_ort(extended, {**feeds, **seeds}), strict=True)
    found = {name: result for name, result in results if name in wanted}
    return [found[f"{name}_grad"] for name in wrt]


def special_values(
    op: str,
    inputs: Sequence[Any],
    expected: Sequence[Any],
    constants: Sequence[int] = (),
    **attrs: Any,
) -> None:
    """Pin the gradient of the sum of the output at chosen points.

    `inputs` are arrays or nested lists of float32; `expected` gives the gradients of the first of
    them. Further inputs are fed but not differentiated.
    """
    arrays = [np.array(x, np.float32) for x in inputs]
    spec = Spec(op, arrays, attrs, constants=constants)
    model = _one_node_model(spec, arrays, False, np.float32)
    wrt = [f"x{i}" for i in range(len(expected))]
    extended = onnxtrain.gradient(model, wrt)
    feeds = _feeds(spec, arrays)
    y = _run_ort(model, feeds)[0]
    results = _run_ort(extended, {**feeds, "y0_grad": np.ones_like(y)})[1:]
    for name, actual, wanted in zip(wrt, results, expected, strict=True):
        np.testing.assert_allclose(actual, np.array(wanted, np.float32), rtol=1e-6, err_msg=name)


def all_nodes(graph: onnx.GraphProto) -> Sequence[onnx.NodeProto]:
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found.extend(all_nodes(attribute.g))
    return found


def _rng(spec: Spec) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(spec.name.encode()))


def _sample(spec: Spec) -> list[Array | None]:
    rng = _rng(spec)
    result: list[Array | None] = []
    for entry in spec.inputs:
        if entry is None or isinstance(entry, np.ndarray):
            result.append(None if entry is None else entry)
        else:
            result.append(_draw(spec, rng, entry))
    return result


def _draw(spec: Spec, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    low, high = spec.domain
    count = int(np.prod(shape))
    if spec.apart:
        assert (high - low) / max(count, 1) >= spec.apart, f"{spec.name}: domain too narrow"
        values = low + (np.arange(count) + 0.5) * (high - low) / max(count, 1)
        rng.shuffle(values)
    else:
        values = rng.uniform(low, high, size=count)
    for kink in spec.away_from:
        close = np.abs(values - kink) < 0.1
        values = np.where(close, kink + np.where(values >= kink, 0.1, -0.1) * 2, values)
    return values.reshape(shape).astype(np.float32)


def _checked_inputs(spec: Spec, arrays: Sequence[Array | None]) -> list[int]:
    if spec.wrt is not None:
        return list(spec.wrt)
    return [
        i
        for i, a in enumerate(arrays)
        if a is not None and a.dtype.kind == "f" and i not in spec.constants
    ]


def _as_type(array: Array | None, dtype: Any) -> Array | None:
    return array.astype(dtype) if array is not None and array.dtype.kind == "f" else array


def _feeds(spec: Spec, arrays: Sequence[Array | None]) -> dict[str, Array]:
    return {f"x{i}": a for i, a in enumerate(arrays) if a is not None and i not in spec.constants}


def _one_node_model(
    spec: Spec, arrays: Sequence[Array | None], symbolic: bool, dtype: Any
) -> onnx.ModelProto:
    names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
    node = helper.make_node(
        spec.op, names, [f"y{i}" for i in range(spec.outputs)], name="node", **spec.attrs
    )
    inputs, initializers = [], []
    for i, array in enumerate(arrays):
        if array is None:
            continue
        if i in spec.constants:
            initializers.append(numpy_helper.from_array(array, f"x{i}"))
            continue
        dims = [f"d{i}_{j}" if symbolic else d for j, d in enumerate(array.shape)]
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(helper.make_tensor_value_info(f"x{i}", kind, dims))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.output_type or dtype))
    outputs = [helper.make_tensor_value_info(f"y{spec.of}", kind, None)]
    graph = helper.make_graph([node], "spec", inputs, outputs, initializers)
    opset = helper.make_opsetid("", spec.opset)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def _compare(spec, model, extended, arrays, wrt, runner, eps, rtol) -> None:
    feeds = _feeds(spec, arrays)
    of, rounding = f"y{spec.of}", 1e-5 if spec.expanded else 0.0
    _compare_feeds(spec.name, model, extended, feeds, wrt, of, runner, eps, rtol, rounding)


def _compare_feeds(label, model, extended, feeds, wrt, of, runner, eps, rtol, rounding=0.0) -> None:
    rng = np.random.default_rng(zlib.crc32(label.encode()) + 1)
    forward = _only_output(model, of)
    y = runner(forward, feeds)[0]
    ct = np.asarray(rng.standard_normal(y.shape), y.dtype)
    extended_feeds = dict(feeds)
    if any(i.name == f"{of}_grad" for i in extended.graph.input):
        extended_feeds[f"{of}_grad"] = ct
    else:
        ct = np.ones_like(y)
    names = [o.name for o in extended.graph.output]
    results = dict(zip(names, runner(extended, extended_feeds), strict=True))
    np.testing.assert_allclose(
        results[of], y, rtol=rounding, atol=rounding,
        err_msg=f"{label}: the forward value changed",
    )  # fmt: skip
    for name in wrt:
        x = feeds[name]
        computed = results[f"{name}_grad"]
        assert computed.shape == x.shape, f"{label}: shape of d{name}"
        assert computed.dtype == x.dtype, f"{label}: type of d{name}"
        t = np.asarray(rng.standard_normal(x.shape), x.dtype)
        ahead = runner(forward, {**feeds, name: np.asarray(x + eps * t, x.dtype)})[0]
        behind = runner(forward, {**feeds, name: np.asarray(x - eps * t, x.dtype)})[0]
        difference = (ahead.astype(np.float64) - behind.astype(np.float64)) / (2 * eps)
        expected = float(np.sum(ct.astype(np.float64) * difference))
        actual = float(np.sum(computed.astype(np.float64) * t.astype(np.float64)))
        scale = float(np.linalg.norm(ct.astype(np.float64)) * np.linalg.norm(difference)) + 1e-6
        assert np.isfinite(actual), f"{label}: d{name} is not finite"
        assert abs(expected - actual) <= rtol * scale, (
            f"{label}: d{name}: finite differences say {expected}, the rule {actual}"
        )


def _only_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [o for o in copy.graph.output if o.name == name]
    del copy.graph.output[:]
    copy.graph.output.extend(kept)
    return copy


def _check_type(
    spec: Spec,
    arrays: Sequence[Array | None],
    wrt: Sequence[str],
    symbolic: bool,
    dtype: Any,
    rtol: float,
) -> None:
    """Where onnxruntime runs an operator in a type, it runs the gradient, to the same effect."""
    typed = [a if i in spec.single else _as_type(a, dtype) for i, a in enumerate(arrays)]
    forward = _behind_products(_one_node_model(spec, typed, symbolic, dtype), wrt)
    try:
        y = _run_ort(forward, _feeds(spec, typed), quiet=True)[0]
    except Exception:  # no kernel; onnxruntime raises many kinds
        return
    ct = np.random.default_rng(0).standard_normal(y.shape)
    results = []
    for values, kind in ((typed, dtype), ([_as_type(a, np.float32) for a in typed], np.float32)):
        model = _behind_products(_one_node_model(spec, values, symbolic, kind), wrt)
        extended = onnxtrain.gradient(model, wrt, of=f"y{spec.of}")
        seed = np.asarray(ct, y.dtype if spec.output_type else kind)
        outputs = _run_ort(extended, {**_feeds(spec, values), f"y{spec.of}_grad": seed})
        results.append(dict(zip((o.name for o in extended.graph.output), outputs, strict=True)))
    for name in wrt:
        other, single = (r[f"{name}_grad"].astype(np.float64) for r in results)
        error = np.linalg.norm(other - single) / (np.linalg.norm(single) + 1e-3)
        assert error <= rtol, f"{spec.name}: d{name} in {dtype.__name__} is off by {error:.1e}"


def _behind_products(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Multiply inputs with a number close to one before they are used.

    onnxruntime does that in float32 for half types, and does not always round the product: one
    operator then gets another number than the next.
    """
    (node,) = model.graph.node
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    for name in names:
        factor = np.array(np.float16(0.999), helper.tensor_dtype_to_np_dtype(kinds[name]))
        model.graph.initializer.append(numpy_helper.from_array(factor, f"{name}_factor"))
        model.graph.node.insert(
            0, helper.make_node("Mul", [name, f"{name}_factor"], [f"{name}_product"])
        )
    inputs = [f"{i}_product" if i in names else i for i in node.input]
    del model.graph.node[-1].input[:]
    model.graph.node[-1].input.extend(inputs)
    return model


def _run_ort(
    model: onnx.ModelProto, feeds: Mapping[str, Array], quiet: bool = False
) -> list[Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4 if quiet else 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = {i.name for i in session.get_inputs()}
    return session.run(None, {k: v for k, v in feeds.items() if k in wanted})


def _run_reference(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    wanted = {i.name for i in model.graph.input}
    evaluator = ReferenceEvaluator(model)
    return evaluator.run(None, {k: v for k, v in feeds.items() if k in wanted})

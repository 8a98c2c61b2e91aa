"""Gradients against finite differences, on whichever engine runs a model.

Cases from elsewhere come at points that nobody chose: this tries several steps and directions, and
a gradient is right if it agrees with one of them. A wrong one agrees with none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_scan

from gradcheck import NEWEST_RUNNABLE_OPSET, all_nodes

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Any]
Engine = Callable[[Feeds, str], Array]
STEPS = (1e-2, 1e-3, 1e-1, 1e-4, 1.0)  # curvature asks for small ones, rounding for large ones
HALF_STEPS = (1e-1, 3e-2, 0.3, 1e-2)


def miss(
    run: Engine, feeds: Feeds, of: str, gradients: Mapping[str, Array], ct: Array, y: Array
) -> float:
    """Return by how much gradients miss finite differences, over what is tolerated.

    They are those of <ct, output>, by input. All inputs move together, in a random direction.
    """
    rng, least = rng_of(" ".join(gradients)), np.inf
    kinds = {x: np.asarray(feeds[x]).dtype for x in gradients}
    half = min(kind.itemsize for kind in (*kinds.values(), y.dtype)) <= 2
    used = wide(ct) != 0
    for step in (HALF_STEPS if half else STEPS) * 2:
        towards = {
            x: wide(np.asarray(rng.standard_normal(np.shape(feeds[x]))).astype(kind))
            for x, kind in kinds.items()
        }
        try:
            ahead, behind = (
                wide(run({**feeds, **_moved(feeds, towards, sign * step)}, of)) for sign in (1, -1)
            )
        except Exception:  # an index, or a size, that is not there beside the given point
            continue
        if ahead.shape != y.shape or behind.shape != y.shape:
            continue
        slope = np.where(used & (ahead != behind), (ahead - behind) / (2 * step), 0.0)
        expected = np.sum(wide(ct) * slope)
        actual = sum(
            np.sum(np.where(np.isfinite(wide(feeds[x])), wide(gradient), 0) * towards[x])
            for x, gradient in gradients.items()
        )
        scale = np.linalg.norm(wide(ct)) * np.linalg.norm(slope) + 1e-6
        rounding = 1e-5 * np.linalg.norm(wide(ct)) * np.linalg.norm(wide(y)[used])
        tolerance = (8e-2 if half else 1e-2) * scale + (rounding if actual else 0.0)
        least = min(least, abs(expected - actual) / tolerance)
        if least <= 1:
            break
    return float(least)


def _moved(feeds: Feeds, towards: Mapping[str, Array], step: float) -> dict[str, Array]:
    return {
        x: np.asarray(wide(feeds[x]) + step * t).astype(np.asarray(feeds[x]).dtype)
        for x, t in towards.items()
    }


def wide(array: Any) -> Array:
    """Return an array in float64."""
    return np.asarray(array).astype(np.float64)


def rng_of(name: str) -> np.random.Generator:
    """Return random numbers that belong to a name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def engine(model: onnx.ModelProto, feeds: Feeds) -> Engine:
    """Return onnxruntime as the engine, or the reference evaluator where that has no kernel."""
    names = [value.name for value in model.graph.output]
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(
            _at_runnable_opset(model).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        wanted = {value.name for value in session.get_inputs()}
        session.run(None, {k: v for k, v in feeds.items() if k in wanted})
    except Exception:  # no kernel for the type, or an opset that is too new
        evaluator = ReferenceEvaluator(model, new_ops=[Scan, Pad])
        return lambda feeds, name: np.asarray(evaluator.run(None, dict(feeds))[names.index(name)])
    return lambda feeds, name: session.run([name], {k: v for k, v in feeds.items() if k in wanted})[
        0
    ]


def _at_runnable_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model at an opset that onnxruntime accepts, if its operators are that old."""
    opset = max(entry.version for entry in model.opset_import)
    versions = [
        onnx.defs.get_schema(node.op_type, opset, "").since_version
        for node in all_nodes(model.graph)
        if node.domain == ""
    ]
    if max(versions, default=1) > NEWEST_RUNNABLE_OPSET:
        return model
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    for entry in lowered.opset_import:
        if entry.domain == "":
            entry.version = min(entry.version, NEWEST_RUNNABLE_OPSET)
    return lowered


class Scan(op_scan.Scan):  # type: ignore[misc]
    """Scan in both directions; the one of the evaluator knows only one."""

    op_domain = ""

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        node = onnx.NodeProto()
        node.CopyFrom(onnx_node)
        kept = [a for a in node.attribute if not a.name.endswith("_directions")]
        given = {a.name: list(a.ints) for a in node.attribute if a not in kept}
        del node.attribute[:]
        node.attribute.extend(kept)
        super().__init__(node, run_params)
        self._inputs = given.get("scan_input_directions", [])
        self._outputs = given.get("scan_output_directions", [])

    def _run(self, *args: Any, **attributes: Any) -> Any:
        states = len(args) - attributes["num_scan_inputs"]
        flipped = [_flip(a, self._inputs, i - states) for i, a in enumerate(args)]
        results = super()._run(*flipped, **attributes)
        return tuple(_flip(r, self._outputs, i - states) for i, r in enumerate(results))


def _flip(array: Array, directions: list[int], number: int) -> Array:
    return array[::-1] if number >= 0 and directions and directions[number] else array


class Pad(OpRun):  # type: ignore[misc]
    """Pad with zeros that also crops, where pads are negative; the one of the evaluator fails."""

    op_domain = ""

    def _run(
        self, x: Array, pads: Array, value: Any = None, axes: Any = None, mode: Any = None
    ) -> tuple[Array]:
        along = np.arange(x.ndim) if axes is None else np.asarray(axes) % x.ndim
        widths = np.zeros((x.ndim, 2), np.int64)
        widths[along] = np.asarray(pads).reshape(2, -1).T
        kept = tuple(
            slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, x.shape, strict=True)
        )
        kind = (mode or b"constant").decode() if isinstance(mode, bytes) else mode or "constant"
        given = {"constant_values": value if value is not None else 0} if kind == "constant" else {}
        return (np.pad(x[kept], np.maximum(widths, 0), mode=kind, **given).astype(x.dtype),)

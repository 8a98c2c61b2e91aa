"""Calibration: ranges by each method, data in all forms, and data that are no good."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization.calibrate import (
    CalibrationDataReader,
    CalibrationMethod,
    create_calibrator,
)

from graphs import model, value
from onnxtrain import Quantize, prepare
from onnxtrain.errors import ArgumentError
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.graph.runs import in_runs
from onnxtrain.offline.passes.quantize import observe as module
from onnxtrain.offline.passes.quantize.histograms import METHODS, count
from onnxtrain.offline.passes.quantize.observe import observe

node = helper.make_node
RNG = np.random.default_rng(0)


def tokens_and_mask() -> onnx.ModelProto:
    """An embedding of integers, times a float mask: two inputs of different types."""
    return model(
        [
            node("Gather", ["table", "ids"], ["e"]),
            node("Mul", ["e", "mask"], ["m"]),
            node("MatMul", ["m", "w"], ["y"]),
        ],
        [value("ids", ["batch", 4], TensorProto.INT64), value("mask", ["batch", 4, 1])],
        [value("y", ["batch", 4, 3])],
        {
            "table": RNG.standard_normal((20, 6)).astype(np.float32),
            "w": RNG.standard_normal((6, 3)).astype(np.float32),
        },
    )


def linear(batch: int | str = "batch", factor: float = 1.0) -> onnx.ModelProto:
    return model(
        [node("Mul", ["x", "factor"], ["a"]), node("MatMul", ["a", "w"], ["y"])],
        [value("x", [batch, 6])],
        [value("y", [batch, 3])],
        {"w": RNG.standard_normal((6, 3)).astype(np.float32), "factor": np.float32(factor)},
    )


def ranges(given: onnx.ModelProto, data, names=("a",), **settings) -> list[tuple[float, float]]:
    canonical = canonical_model(given)
    values = {v.name: v for n in canonical.graph for v in n.outputs}
    values |= {v.name: v for v in canonical.graph.inputs}
    found = observe(canonical, [values[name] for name in names], data, Quantize(**settings))
    return list(found.values())


# ---- the forms of data ---------------------------------------------------------------------------

SAMPLES = RNG.standard_normal((70, 6)).astype(np.float32) + 0.5
LABELS = np.arange(70) % 3
WANTED = (float(SAMPLES.min()), float(SAMPLES.max()))
FORMS = {
    "array": SAMPLES,
    "list of arrays": [SAMPLES[:40], SAMPLES[40:]],
    "one batch": [SAMPLES],
    "arrays and labels": (SAMPLES, LABELS),
    "batches with labels": [(SAMPLES[:40], LABELS[:40]), (SAMPLES[40:], LABELS[40:])],
    "lists": [[SAMPLES[:40], LABELS[:40]], [SAMPLES[40:], LABELS[40:]]],
    "dictionary": {"x": SAMPLES, "labels": LABELS},
    "dictionaries": [{"x": SAMPLES[:40], "y": 1}, {"x": SAMPLES[40:]}],
    "float64": [SAMPLES.astype(np.float64)],
}


@pytest.mark.parametrize("method", ["minmax", "percentile"])
@pytest.mark.parametrize("form", FORMS)
def test_data_comes_in_many_forms(form, method) -> None:
    ((low, high),) = ranges(linear(), FORMS[form], method=method, percentile=100)
    assert (low, high) == pytest.approx(WANTED, rel=1e-6)


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_generators_and_functions(method) -> None:
    def make():
        yield from (SAMPLES[:40], SAMPLES[40:])

    wanted = ranges(linear(), [SAMPLES[:40], SAMPLES[40:]], method=method)
    assert ranges(linear(), make(), method=method) == wanted
    assert ranges(linear(), make, method=method) == wanted


def test_a_fixed_batch_gets_whole_batches() -> None:
    ((low, high),) = ranges(linear(batch=32), SAMPLES)
    assert (low, high) == pytest.approx((SAMPLES[:64].min(), SAMPLES[:64].max()))


def test_integers_are_converted_as_on_a_device() -> None:
    images = RNG.integers(0, 256, (8, 6)).astype(np.uint8)
    assert ranges(linear(), [images]) == [(0.0, float(images.max()))]


def test_several_inputs_and_tokens() -> None:
    ids, mask = RNG.integers(0, 20, (8, 4)), np.ones((8, 4, 1), np.float32)
    given = tokens_and_mask()
    for data in ([(ids, mask)], {"mask": mask, "ids": ids.astype(np.int32)}):
        ((low, high),) = ranges(given, data, ["m"])
        assert low < 0 < high
    with pytest.raises(ArgumentError, match=r"batch 0 .*'ids' has fractions.*int64"):
        ranges(given, [(ids + 0.5, mask)], ["m"])


def test_at_most_512_batches_are_read() -> None:
    def endless():
        while True:
            seen.append(1)
            yield SAMPLES[:2]

    seen: list[int] = []
    ranges(linear(), endless())
    assert len(seen) == 512


# ---- data that are no good -----------------------------------------------------------------------

BAD = {
    "no batch": ([], "have no batch: give some that are like those of training"),
    "no samples": (SAMPLES[:0], "have no batch"),
    "no elements": ([SAMPLES[:0]], "batch 0 .* has no elements of 'x'"),
    "text": ("images.npz", "calibration is a list of batches.* not str"),
    "a number": (3, "calibration is a list of batches.* not int"),
    "constant": ([np.ones((4, 6))], "all elements of 'x' in the calibration data are 1.0: give"),
    "NaN": ([SAMPLES, SAMPLES * np.nan], r"batch 1 .* elements of 'x' that are not finite"),
    "infinite": ([SAMPLES * np.inf], r"batch 0 .* not finite"),
    "rank": ([SAMPLES[0]], r"'x' has the shape \[6\], and the model takes \[batch, 6\]"),
    "width": ([SAMPLES[:, :5]], r"'x' has the shape \[70, 5\], and the model takes \[batch, 6\]"),
    "name": ([{"image": SAMPLES}], "batch 0 of the calibration data has no 'x': it needs x"),
    "words": ([np.array([["a"] * 6])], "'x' is <U1, not float32"),
    "ragged": ([[[1, 2], [3]]], "batch 0 of the calibration data"),
    "lengths": ((SAMPLES, LABELS[:3]), "different numbers of samples: 3, 70"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused(case, tmp_path) -> None:
    data, message = BAD[case]
    with pytest.raises(ArgumentError, match=message):
        prepare(linear(), tmp_path / "out", quantize="int8", calibration=data, loss="mse")
    assert not (tmp_path / "out").exists()


def test_a_model_that_overflows_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"with batch 0 .*'y' has elements that are not finite"):
        ranges(linear(factor=3e38), [SAMPLES], ["x", "y"])


def test_calibration_is_needed_and_is_for_quantize(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="need a range to begin with: give calibration="):
        prepare(linear(), tmp_path, quantize="int8", loss="mse")
    with pytest.raises(ArgumentError, match="calibration is for quantize"):
        prepare(linear(), tmp_path, calibration=[SAMPLES], loss="mse")


def test_an_activation_that_is_always_zero_has_a_range() -> None:
    assert ranges(linear(factor=0.0), [SAMPLES]) == [(0.0, 1.0)]


# ---- methods -------------------------------------------------------------------------------------


def with_outliers() -> np.ndarray:
    values = RNG.standard_normal(200_000)
    values[:20] = np.linspace(20, 40, 20)
    return values.astype(np.float32)


def error(values: np.ndarray, low: float, high: float) -> float:
    step = (high - low) / 255
    zero = np.rint(-low / step)
    levels = np.clip(np.rint(values / step) + zero, 0, 255)
    return float(np.square((levels - zero) * step - values).mean())


def test_histograms_are_those_of_numpy() -> None:
    values = RNG.standard_normal(3_000_000).astype(np.float32)
    wanted = np.histogram(values, 2048, (-6, 6))[0]
    found = count(values, -6, 6)
    assert found.sum() == wanted.sum()
    assert np.abs(found - wanted).sum() < 1e-3 * values.size  # at the edges of bins


def test_percentile_is_that_of_numpy() -> None:
    values = with_outliers()
    low, high = float(values.min()), float(values.max())
    bin_width = (high - low) / 2048
    for part in (99.0, 99.9, 99.99):
        settings = Quantize(method="percentile", percentile=part)
        found = METHODS["percentile"](count(values, low, high), low, high, settings)
        tail = (100 - part) / 2
        wanted = np.percentile(values, [tail, 100 - tail])
        np.testing.assert_allclose(found, wanted, atol=2 * bin_width)


@pytest.mark.parametrize("one_sided", [False, True])
def test_mse_is_as_good_as_trying_everything(one_sided) -> None:
    values = np.abs(with_outliers()) if one_sided else with_outliers()
    low, high = min(0.0, float(values.min())), float(values.max())
    found = METHODS["mse"](count(values, low, high), low, high, Quantize(method="mse"))
    lows = [0.0] if one_sided else low * np.linspace(1, 0.3, 8)
    best = min(error(values, a, b) for a in lows for b in high * np.linspace(1, 0.1, 40))
    assert error(values, *found) < 1.05 * best
    assert error(values, *found) < 0.9 * error(values, low, high)


def test_entropy_cuts_outliers_and_keeps_the_rest() -> None:
    values = with_outliers()
    low, high = float(values.min()), float(values.max())
    found = METHODS["entropy"](count(values, low, high), low, high, Quantize(method="entropy"))
    assert -6 < found[0] < -2 and 2 < found[1] < 15
    even = RNG.uniform(-1, 1, 100_000).astype(np.float32)
    whole = METHODS["entropy"](count(even, -1, 1), -1, 1, Quantize(method="entropy"))
    np.testing.assert_allclose(whole, (-1, 1), atol=0.05)


def test_entropy_is_not_misled_by_the_zeros_of_relu() -> None:
    values = np.maximum(RNG.standard_normal(200_000), 0).astype(np.float32)
    high = float(values.max())
    counts = count(values, 0.0, high)
    found = METHODS["entropy"](counts, 0.0, high, Quantize(method="entropy"))
    assert error(values, *found) < 2 * error(values, 0.0, high)


class Reader(CalibrationDataReader):
    """Batches as onnxruntime's own calibration takes them."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches = iter([{"x": batch} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


CALIBRATORS = {
    "minmax": (CalibrationMethod.MinMax, {}, ("x", "a", "r", "y"), 1e-6),
    "percentile": (CalibrationMethod.Percentile, {"percentile": 99.0}, ("r",), 5e-3),
}


@pytest.mark.parametrize("method", CALIBRATORS)
def test_ranges_are_those_of_onnxruntime(tmp_path, method) -> None:
    """Its percentiles are symmetric around zero: they are the same behind a Relu."""
    kind, options, names, tolerance = CALIBRATORS[method]
    given = linear()
    given.graph.node.insert(1, node("Relu", ["a"], ["r"]))
    given.graph.node[2].input[0] = "r"
    onnx.save(given, tmp_path / "model.onnx")
    batches = [SAMPLES[:35], SAMPLES[35:] * 1.5]
    theirs = create_calibrator(
        tmp_path / "model.onnx", calibrate_method=kind, extra_options={"num_bins": 2048, **options},
        augmented_model_path=str(tmp_path / "augmented.onnx"),
    )  # fmt: skip
    theirs.collect_data(Reader(batches))
    found = theirs.compute_data()
    ours = ranges(given, batches, names, method=method, percentile=99.0)
    for name, bounds in zip(names, ours, strict=True):
        wanted = [float(np.asarray(bound).reshape(-1)[0]) for bound in found[name].range_value]
        wanted = [min(wanted[0], 0.0), max(wanted[1], 0.0)]
        np.testing.assert_allclose(bounds, wanted, rtol=tolerance, err_msg=name)


def test_activations_of_a_batch_are_not_returned_together(monkeypatch) -> None:
    given = linear()
    wanted = ranges(given, [SAMPLES], ["x", "a", "y"], method="percentile")
    asked, run = [], module._run
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    monkeypatch.setattr(module, "_run", lambda session, names, *batch: (
        asked.append(names), run(session, names, *batch)
    )[1])  # fmt: skip
    assert ranges(given, [SAMPLES], ["x", "a", "y"], method="percentile") == wanted
    assert [names for names in asked if names is not None] == [["x"], ["a"], ["y"]]


def test_lists_are_cut_by_size_and_by_number() -> None:
    def cut(items, **limits):
        return list(in_runs(items, lambda size: size, 500, **limits))

    assert cut([400, 200, 50]) == [[400], [200, 50]]
    assert cut([1, 1, 1], most=2) == [[1, 1], [1]]
    assert cut([900, 1]) == [[900], [1]]
    assert cut([]) == []


def test_weights_in_other_files(tmp_path) -> None:
    given = linear()
    wanted = ranges(given, [SAMPLES], ["y"])
    onnx.save(
        given, tmp_path / "model.onnx", save_as_external_data=True, location="weights",
        size_threshold=0,
    )  # fmt: skip
    assert ranges(tmp_path / "model.onnx", [SAMPLES], ["y"]) == wanted
    made = prepare(
        tmp_path / "model.onnx",
        tmp_path / "out",
        quantize="int8",
        calibration=[SAMPLES],
        loss="mse",
    )
    assert "w" in made.trainable

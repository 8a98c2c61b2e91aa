"""Adapters of sessions in C: what Python writes and takes, byte for byte, and its sentences."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int32, c_int64
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from adapter_models import BASE, FACTORS, factors, lora_model, lora_session, pairs
from capi_calls import error_of
from onnx import helper, numpy_helper
from plain_tensors import plain_tensors
from small_runs import GOLDEN
from test_adapter_file import needs_adapters
from test_base_file import LABELS, network
from test_base_file import X as INPUTS
from test_capi_folders import in_ort_format
from test_capi_plain import Plain
from upstream_table import Host, OrtError

import onnxtrain
from onnxtrain import Adapter, TrainingSession
from onnxtrain.format.adapter.pairs import Pair

X = np.random.default_rng(5).normal(size=(4, 8)).astype("f4")
Y = np.random.default_rng(6).normal(size=(4, 3)).astype("f4")


def with_path(session: Plain, name: str, path: Path) -> None:
    session(name, c_char_p(str(path).encode()))


def saved(session: Plain, path: Path) -> bytes:
    session("save_checkpoint", c_char_p(str(path).encode()), c_int32(1))
    return path.read_bytes()


def saved_by_python(session: TrainingSession, path: Path) -> bytes:
    session.save_checkpoint(path, include_optimizer_state=True)
    return path.read_bytes()


def both(host: Host, folder: Path, checkpoint: Path | None = None) -> tuple[Plain, TrainingSession]:
    theirs = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    return Plain(host, folder, checkpoint, threads=1), theirs


def assert_same_adapter(host: Host, folder: Path, data: tuple[Any, ...], tmp_path: Path) -> Path:
    """Train in C, and take the adapter out of the same state in both languages."""
    trained = Plain(host, folder, threads=1)
    for _ in range(5):
        trained.run("step", *data)
    saved(trained, tmp_path / "trained")
    trained.close()
    ours, theirs = both(host, folder, tmp_path / "trained")
    with_path(ours, "export_adapter", tmp_path / "c.onnx_adapter")
    theirs.export_adapter(tmp_path / "python.onnx_adapter")
    found = (tmp_path / "c.onnx_adapter").read_bytes()
    assert found == (tmp_path / "python.onnx_adapter").read_bytes()
    with_path(ours, "export_adapter", tmp_path / "c.onnx_adapter")  # over the old file
    assert (tmp_path / "c.onnx_adapter").read_bytes() == found
    ours.close()
    return tmp_path / "c.onnx_adapter"


def test_graphs_in_the_ort_format(host, tmp_path) -> None:
    onnxtrain.prepare(network(), tmp_path / "lora", train="lora:rank=2")
    (tmp_path / "lora" / "inference_model.onnx").unlink()
    folder = in_ort_format(tmp_path / "lora", tmp_path / "ort")
    shutil.copy(tmp_path / "lora" / "base.data", folder)
    assert_same_adapter(host, folder, (INPUTS, LABELS), tmp_path)


@needs_adapters
def test_onnxruntime_runs_the_adapter_of_a_folder(host, tmp_path) -> None:
    folder = tmp_path / "lora"
    onnxtrain.prepare(network(), folder, train="lora:rank=3,alpha=5")
    path = assert_same_adapter(host, folder, (INPUTS, LABELS), tmp_path)
    adapter = Adapter.read(path)
    assert adapter.pairs[0].scale == 5 / 3 and adapter.base
    read = ort.AdapterFormat.read_adapter(str(path)).get_parameters()
    assert sorted(read) == sorted(adapter)
    for name in adapter:
        np.testing.assert_array_equal(read[name].numpy(), adapter[name])
    ours = Plain(host, folder, tmp_path / "trained")
    outputs = (c_char_p * 1)(b"y")
    target = c_char_p(str(tmp_path / "merged.onnx").encode())
    ours("export_model", target, byref(outputs), c_int64(1))
    ours.close()
    loaded, options = ort.LoraAdapter(), ort.RunOptions()
    loaded.Load(str(path))
    options.add_active_adapter(loaded)
    slotted = ort.InferenceSession(folder / "inference_model.onnx")
    merged = ort.InferenceSession(tmp_path / "merged.onnx")
    found = slotted.run(None, {"x": INPUTS}, options)[0]
    expected = merged.run(None, {"x": INPUTS})[0]
    assert np.abs(expected - slotted.run(None, {"x": INPUTS})[0]).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 4])
def test_what_else_trains_is_in_the_adapter(host, tmp_path, scale) -> None:
    trained = [*FACTORS, "fc2.bias"]
    folder = tmp_path / "artifacts"
    onnxtrain.prepare(lora_model(2), folder, train=trained, loss="mse", optimizer="sgd")
    session = TrainingSession.from_folder(folder)
    session.set_metadata(lora=pairs(2, scale), base=BASE)
    session.save_checkpoint(folder / "checkpoint")
    path = assert_same_adapter(host, folder, (X, Y), tmp_path)
    assert Adapter.read(path).whole == ("fc2.bias",)


RANK = 10_600  # so that a factor has all numbers of 16 bits


def numbers_of(dtype: str) -> np.ndarray[Any, Any]:
    """Finite numbers of a type: all of them, or random bits."""
    wide = np.random.default_rng(0).integers(0, 2**64, 2**16, np.uint64).view("f8")
    made = np.arange(2**16, dtype=np.uint16).view("f2") if dtype == "f2" else wide
    return np.resize(made[np.isfinite(made)], (RANK, 6))


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_factors_of_other_types(host, tmp_path, dtype) -> None:
    model, folder = lora_model(RANK), tmp_path / "artifacts"
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    onnxtrain.prepare(model, folder, train=FACTORS, loss="mse", optimizer="sgd")
    theirs = TrainingSession.from_folder(folder)
    theirs.set_metadata(lora=pairs(RANK, 1 / 3))
    numbers = numbers_of(dtype)
    theirs.update_parameter(FACTORS[1], numbers)
    theirs.save_checkpoint(folder / "checkpoint")
    ours, theirs = both(host, folder)
    with_path(ours, "export_adapter", tmp_path / "c.onnx_adapter")
    theirs.export_adapter(tmp_path / "python.onnx_adapter")
    made = (tmp_path / "c.onnx_adapter").read_bytes()
    assert made == (tmp_path / "python.onnx_adapter").read_bytes()
    with np.errstate(under="ignore"):
        small = numbers * np.array(0.25, dtype)  # three times that is finite
    tensors = {name: theirs.get_parameter(name) for name in FACTORS}
    Adapter(tensors | {FACTORS[1]: small}).save(tmp_path / "a.onnx_adapter")
    with_path(ours, "load_adapter", tmp_path / "a.onnx_adapter")
    theirs.load_adapter(tmp_path / "a.onnx_adapter")
    assert saved(ours, tmp_path / "c") == saved_by_python(theirs, tmp_path / "python")
    ours.close()


@pytest.fixture
def folder(host: Host, tmp_path: Path) -> Path:
    """A folder of factors whose scale is no power of 2."""
    made = tmp_path / "artifacts"
    lora_session(made, scale=0.3).save_checkpoint(made / "checkpoint")
    return made


def test_a_session_goes_on_from_an_adapter(host, folder, tmp_path) -> None:
    path = tmp_path / "a.onnx_adapter"
    Adapter(factors(2, seed=9), base=BASE).save(path)
    ours, theirs = both(host, folder)
    rate = float(np.float32(0.1))
    ours("register_linear_lr_scheduler", c_int64(2), c_int64(20), c_float(rate))
    theirs.register_linear_lr_scheduler(2, 20, rate)
    for session, step in ((ours, ours.run), (theirs, None)):
        for _ in range(3):
            step("step", X, Y) if step else session.step(X, Y)
        step("train_step", X, Y) if step else session.train_step(X, Y)
    with_path(ours, "load_adapter", path)
    theirs.load_adapter(path)
    assert saved(ours, tmp_path / "c") == saved_by_python(theirs, tmp_path / "python")
    for _ in range(3):
        assert abs(ours.run("train_step", X, Y) - theirs.train_step(X, Y)[0]) <= 1e-6
        ours("optimizer_step")
        theirs.optimizer_step()
        assert abs(ours.run("step", X, Y) - theirs.step(X, Y)[0]) <= 1e-6
    assert saved(ours, tmp_path / "c") == saved_by_python(theirs, tmp_path / "python")
    with_path(ours, "export_adapter", tmp_path / "c.onnx_adapter")
    theirs.load_adapter(tmp_path / "c.onnx_adapter")
    with_path(ours, "load_adapter", tmp_path / "c.onnx_adapter")
    assert saved(ours, tmp_path / "c") == saved_by_python(theirs, tmp_path / "python")
    ours.close()


def partial() -> Adapter:
    return Adapter({n: a for n, a in factors(2).items() if n.startswith("fc1")})


def of_another_width() -> Adapter:
    wide = np.ones((9, 2), "f4")
    return Adapter(factors(2) | {"fc1.lora_A.weight": wide})


def of_two_ranks() -> Adapter:
    return Adapter(factors(2) | {n: a for n, a in factors(3).items() if n.startswith("fc2")})


def of_four_axes() -> Adapter:
    a, b = np.ones((2, 8, 1, 1), "f4"), np.ones((6, 2, 1, 1), "f4")
    other = Pair("fc1", *FACTORS[:2], 2, 1.0, "conv")
    second = Pair("fc2", *FACTORS[2:], 2, 1.0, "linear")
    return Adapter(factors(2) | dict(zip(FACTORS, (a, b), strict=False)), pairs=[other, second])


WRONG: dict[str, Callable[[], Adapter]] = {
    "rank": lambda: Adapter(factors(3)),
    "one rank": of_two_ranks,
    "base": lambda: Adapter(factors(2), base="f" * 32),
    "missing": partial,
    "float64": lambda: Adapter(factors(2)).astype("float64"),
    "float16": lambda: Adapter(factors(2)).astype("float16"),
    "bfloat16": lambda: Adapter(factors(2)).astype("bfloat16"),
    "width": of_another_width,
    "axes": of_four_axes,
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_changes_nothing(host, folder, tmp_path, case) -> None:
    path = tmp_path / "wrong.onnx_adapter"
    WRONG[case]().save(path)
    ours, theirs = both(host, folder)
    before = saved(ours, tmp_path / "before")
    with pytest.raises(OrtError) as found:
        with_path(ours, "load_adapter", path)
    assert found.value.args[1] == error_of(theirs.load_adapter, path)
    assert saved(ours, tmp_path / "after") == before
    ours.close()


def test_other_names(host, folder, tmp_path) -> None:
    path = tmp_path / "wrong.onnx_adapter"
    Adapter(factors(2)).renamed(lambda layer: f"model.{layer}").save(path)
    ours, theirs = both(host, folder)
    expected = str(error_of(theirs.load_adapter, path))
    near = expected.index("Near it are")  # the names that are near are Python's
    with pytest.raises(OrtError) as found:
        with_path(ours, "load_adapter", path)
    assert found.value.args[1].startswith(expected[:near] + "Its slots are called 'fc1.lora_A")
    assert found.value.args[1].endswith(expected[expected.index("Rename") :])
    ours.close()


def test_what_is_no_adapter(host, folder, tmp_path) -> None:
    (tmp_path / "text").write_text("some text that is long enough")
    ours, theirs = both(host, folder)
    for path in (tmp_path / "text", tmp_path / "none", folder):
        with pytest.raises(OrtError) as found:
            with_path(ours, "load_adapter", path)
        assert found.value.args[1] == error_of(theirs.load_adapter, path)
    nowhere = tmp_path / "nowhere" / "x.onnx_adapter"
    with pytest.raises(OrtError) as found:
        with_path(ours, "export_adapter", nowhere)
    assert found.value.args[1] == error_of(theirs.export_adapter, nowhere)
    ours.close()


def test_factors_that_are_not_finite_are_not_exported(host, folder, tmp_path) -> None:
    path = tmp_path / "a.onnx_adapter"
    ours, theirs = both(host, folder)
    bad = np.full((8, 2), np.nan, "f4")
    ours("update_parameter", byref(plain_tensors(**{FACTORS[0]: bad})[0]))
    theirs.update_parameter(FACTORS[0], bad)
    with pytest.raises(OrtError) as found:
        with_path(ours, "export_adapter", path)
    assert found.value.args[1] == error_of(theirs.export_adapter, path)
    assert not path.exists()
    ours.close()


def test_a_session_without_factors(host, folder, tmp_path) -> None:
    path = tmp_path / "a.onnx_adapter"
    Adapter(factors(2)).save(path)
    ours, theirs = both(host, GOLDEN / "mlp")
    for name in ("export_adapter", "load_adapter"):
        with pytest.raises(OrtError) as found:
            with_path(ours, name, path)
        assert found.value.args[1] == error_of(getattr(theirs, name), path)
    ours.close()


@pytest.mark.parametrize("text", ["nonsense", "[]", '"base"'])
def test_damaged_metadata(host, folder, tmp_path, text) -> None:
    path = tmp_path / "a.onnx_adapter"
    for key in ("onnxtrain.lora", "onnxtrain.base"):
        ours, theirs = both(host, folder)
        ours("set_property", c_char_p(key.encode()), c_int32(2), c_char_p(text.encode()))
        theirs.add_property(key, text)
        with pytest.raises(OrtError) as found:
            with_path(ours, "export_adapter", path)
        assert found.value.args[1] == error_of(theirs.export_adapter, path)
        ours.close()

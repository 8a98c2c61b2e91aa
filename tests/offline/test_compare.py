"""`onnxtrain.compare`: each figure against one that is computed by hand."""

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import onnxtrain
from compare_models import network, quantized_by_onnxruntime, quantized_by_us, samples
from graphs import model, value
from onnxtrain.errors import ArgumentError, InputError, ModelError, NonFiniteError, RunError
from onnxtrain.offline.compare import latency
from onnxtrain.offline.compare.difference import Difference


@pytest.fixture(autouse=True)
def short_runs(monkeypatch) -> None:
    monkeypatch.setattr(latency, "_MOST", 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a network and its forms of integers."""
    folder = tmp_path_factory.mktemp("models")
    onnx.save(network(), folder / "float.onnx")
    for form in ("QDQ", "QOperator", "dynamic"):
        quantized_by_onnxruntime(folder / "float.onnx", folder / f"{form}.onnx", form)
    quantized_by_us(folder / "float.onnx", folder / "ours.onnx")
    return folder


def outputs(path: Path, images: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    parts = [images[i : i + 32] for i in range(0, len(images), 32)]
    return np.concatenate([session.run(None, {"image": part})[0] for part in parts])


# ---- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic", "ours"])
def test_the_figures_of_a_model_of_integers(models, form) -> None:
    images, labels = samples()
    first, second = models / "float.onnx", models / f"{form}.onnx"
    found = onnxtrain.compare(first, second, (images, labels), metrics=["accuracy", "top2"])
    a, b = outputs(first, images), outputs(second, images)
    assert found.samples == 96
    assert found.agreement == (a.argmax(1) == b.argmax(1)).mean()
    assert found.first.metrics["accuracy"] == (a.argmax(1) == labels).mean()
    assert found.second.metrics["accuracy"] == (b.argmax(1) == labels).mean()
    assert found.second.metrics["top2"] > found.second.metrics["accuracy"]
    errors, d = found.outputs["scores"], np.abs(b.astype(float) - a)
    assert errors.largest == pytest.approx(d.max(), abs=1e-5)
    assert errors.mean == pytest.approx(d.mean(), rel=1e-3)
    relative = np.linalg.norm(d) / np.linalg.norm(a)
    assert errors.relative == pytest.approx(relative, rel=1e-3)
    assert errors.snr == pytest.approx(-20 * math.log10(relative), rel=1e-3)
    assert 15 < errors.snr < 80
    assert found.first.bytes == first.stat().st_size > found.second.bytes - 4000
    assert list(found.first.latency) == list(found.second.latency) == [32, 1]
    assert all(t > 0 for t in found.second.latency.values())
    assert found.notes == ()


@pytest.mark.parametrize(
    ("form", "products", "floats"),
    [
        ("QDQ", {"QLinearConv": 1, "QGemm": 1}, 1),  # the other is before BatchNormalization
        ("QOperator", {"QLinearConv": 2, "QGemm": 1}, 0),
        ("ours", {"QLinearConv": 2, "QGemm": 1}, 0),
        ("dynamic", {}, 2),
    ],
)
def test_operators_on_integers_are_counted_as_onnxruntime_runs_them(
    models, form, products, floats
) -> None:
    found = onnxtrain.compare(
        models / "float.onnx", models / f"{form}.onnx", samples(8), layers=False, latency=False
    )
    before, after = found.first.operators, found.second.operators
    assert before.integers == {}
    assert before.conversions == 0
    assert sum(len(names) for names in before.float_products.values()) == 3
    assert products.items() <= after.integers.items()
    assert after.integers
    assert sum(len(names) for names in after.float_products.values()) == floats
    assert after.conversions >= (form != "dynamic")
    assert found.layers == ()
    assert found.first.latency == {}


@pytest.mark.parametrize("form", ["QDQ", "QOperator", "ours"])
def test_layers_are_found_by_name_and_sorted_by_their_error(models, form) -> None:
    images, _ = samples()
    found = onnxtrain.compare(models / "float.onnx", models / f"{form}.onnx", images, latency=False)
    ratios = [layer.errors.snr for layer in found.layers]
    assert ratios == sorted(ratios)
    layers = {layer.name: layer for layer in found.layers}
    assert layers["scores"].snr_before == layers["mean"].errors.snr > layers["s"].errors.snr
    # BatchNormalization is folded: its output is there, and what it reads is not.
    assert {"r", "s", "scores"} <= layers.keys()
    assert layers["scores"].operator == "Gemm"
    assert layers["scores"].weight == "head.weight"
    assert layers["r"].weight == "one.weight"  # with what is fused to it
    assert all(5 < layer.errors.snr < 80 for layer in found.layers), found
    whole = onnx.load(models / "float.onnx")
    whole.graph.output.append(onnx.ValueInfoProto(name="r"))
    session = ort.InferenceSession(whole.SerializeToString())
    r = session.run(["r"], {"image": images})[0]
    # Rounding 8 bits of the range alone leaves this much.
    step = (r.max() - r.min()) / 255
    assert step / 4 < layers["r"].errors.largest < 30 * step


def test_a_layer_that_is_wrong_comes_first(tmp_path) -> None:
    broken = network()
    tensor = next(t for t in broken.graph.initializer if t.name == "two.weight")
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[3] *= 1.5
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    found = onnxtrain.compare(network(), broken, samples()[0], latency=False)
    assert found.layers[0].name == "c"
    assert found.layers[0].weight == "two.weight"
    assert found.layers[0].snr_before == math.inf  # the error comes from here
    after = next(layer for layer in found.layers if layer.name == "s")
    assert after.snr_before == found.layers[0].errors.snr
    same = {layer.name: layer.errors for layer in found.layers if layer.name in ("before", "r")}
    assert all(errors.relative == 0 and errors.snr == math.inf for errors in same.values())
    lines = [line.split() for line in str(found).splitlines()]
    assert ["c", "Conv", "two.weight"] in [line[:3] for line in lines]


def test_a_model_is_the_same_as_itself(models) -> None:
    found = onnxtrain.compare(
        models / "float.onnx", models / "float.onnx", samples(), latency=False
    )
    assert found.agreement == 1
    assert found.outputs["scores"].snr == math.inf
    assert found.outputs["scores"].largest == 0
    assert "SNR inf dB" in str(found)
    assert "layer" not in str(found)  # nothing to exclude


def test_external_data_counts(tmp_path, models) -> None:
    beside = tmp_path / "beside.onnx"
    onnx.save(
        onnx.load(models / "float.onnx"), beside, save_as_external_data=True,
        location="tensors.data", size_threshold=0,
    )  # fmt: skip
    found = onnxtrain.compare(models / "float.onnx", beside, samples(8), latency=False)
    assert found.second.bytes == beside.stat().st_size + (tmp_path / "tensors.data").stat().st_size
    assert {layer.errors.relative for layer in found.layers} == {0.0}


def test_a_model_with_an_adapter_in_it(models, tmp_path) -> None:
    rng = np.random.default_rng(3)
    shapes = {"head.lora_A.weight": (8, 2), "head.lora_B.weight": (2, 4)}
    factors = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    merged = tmp_path / "merged.onnx"
    onnxtrain.merge_adapter(models / "float.onnx", onnxtrain.Adapter(factors), merged)
    found = onnxtrain.compare(models / "float.onnx", merged, samples(8), latency=False)
    differing = [layer for layer in found.layers if layer.errors.relative]
    assert [layer.name for layer in differing] == ["scores"]
    assert differing[0].snr_before == math.inf


def test_differences_of_numbers_that_are_not_finite() -> None:
    difference = Difference()
    a = np.array([1.0, -np.inf, np.nan, 2.0, np.inf])
    difference.add(a, np.array([1.0, -np.inf, np.nan, 1.0, 3.0]))
    errors = difference.errors()
    assert errors.nonfinite == 2
    assert errors.largest == 1
    assert errors.relative == pytest.approx(1 / math.sqrt(5))
    zero = Difference()
    zero.add(np.zeros(3), np.ones(3))
    assert zero.errors().relative == math.inf
    assert zero.errors().snr == -math.inf


# ---- data ----------------------------------------------------------------------------------------


def test_data_in_every_form(models) -> None:
    images, labels = samples(40)
    pair = models / "float.onnx", models / "QDQ.onnx"
    forms = [
        (images, labels),
        {"image": images, "anything": labels},
        [(images[:25], labels[:25]), (images[25:], labels[25:])],
        iter([{"image": images, "labels": labels}]),
    ]
    found = [onnxtrain.compare(*pair, data, latency=False) for data in forms]
    assert len({(f.samples, f.agreement, f.second.metrics["accuracy"]) for f in found}) == 1
    assert all(layer.errors.snr > 5 for f in found for layer in f.layers)
    bare = onnxtrain.compare(*pair, images, latency=False)
    assert bare.agreement == found[0].agreement
    assert bare.first.metrics == {}


def test_a_fixed_batch_runs_as_it_is() -> None:
    found = onnxtrain.compare(network(8), network("n"), samples(20))
    assert found.samples == 16
    assert list(found.first.latency) == [8]
    assert found.notes == ("the last 4 samples do not fill a batch and are left out",)


def token_model(by: float) -> onnx.ModelProto:
    table = np.random.default_rng(0).standard_normal((9, 9)).astype(np.float32) * by
    return model(
        [helper.make_node("Gather", ["table", "ids"], ["logits"], "embed")],
        [value("ids", ["n", "length"], onnx.TensorProto.INT64)],
        [value("logits", ["n", "length", 9])],
        {"table": table},
    )


def test_scores_of_tokens_have_their_classes_on_the_last_axis() -> None:
    ids = np.random.default_rng(0).integers(0, 9, (6, 5))
    found = onnxtrain.compare(token_model(1), token_model(-1), (ids, ids), latency=False)
    assert found.agreement == 0
    assert 0 <= found.first.metrics["accuracy"] <= 1
    assert found.outputs["logits"].relative == pytest.approx(2)


def regression(bias: float) -> onnx.ModelProto:
    return model(
        [helper.make_node("Add", ["x", "b"], ["y"], "add")],
        [value("x", ["n", 1])], [value("y", ["n", 1])], {"b": np.full(1, bias, np.float32)},
    )  # fmt: skip


def test_targets_that_are_no_classes() -> None:
    x = np.linspace(0, 1, 10, dtype=np.float32)[:, None]
    found = onnxtrain.compare(regression(0), regression(0.5), (x, x), latency=False)
    assert found.agreement is None
    assert found.first.metrics == {"mae": 0}
    assert found.second.metrics["mae"] == pytest.approx(0.5)


def test_outputs_of_other_names_are_compared_in_order() -> None:
    other = regression(0.25)
    other.graph.node[0].output[0] = other.graph.output[0].name = "z"
    found = onnxtrain.compare(regression(0), other, np.zeros((3, 1), np.float32), latency=False)
    assert found.outputs["y"].largest == pytest.approx(0.25)


# ---- what does not fit ---------------------------------------------------------------------------


def test_what_does_not_fit_is_said_clearly(models, tmp_path) -> None:
    images, labels = samples(8)
    first = models / "float.onnx"

    def refused(kind: type[Exception], words: str, second=first, data=(images, labels), **more):
        with pytest.raises(kind, match=words):
            onnxtrain.compare(first, second, data, latency=False, **more)

    refused(InputError, "take different inputs.*image float.*x float", regression(0))
    refused(ArgumentError, "and the data have none", data=images, metrics="accuracy")
    refused(ArgumentError, "labels last.*not NoneType", data=None)
    refused(ArgumentError, "not str", data="test.npz")
    refused(ArgumentError, "gave no batch", data=[])
    refused(ArgumentError, "3 arrays, and the model has 1 inputs", data=(images, labels, labels))
    refused(ArgumentError, "the label 9 is no class", data=(images, labels + 9 - labels))
    refused(ArgumentError, "of='x'.*scores", of="x")
    refused(ArgumentError, "batch_size", batch_size=0)
    refused(ArgumentError, "there is no metric 'acuracy'", metrics="acuracy")
    refused(InputError, "shape", data=(images[:, :1], labels))
    refused(ModelError, "there is no model file", tmp_path / "missing.onnx")
    text = tmp_path / "text.onnx"
    text.write_text("<html>")
    refused(ModelError, "a web page", text)
    small = onnxtrain.Limits(nodes=3)
    refused(ModelError, "nodes", limits=small)


def test_a_model_that_onnxruntime_refuses_is_named(tmp_path, models) -> None:
    odd = network()
    odd.graph.node[2].op_type = "NoSuchOperator"
    onnx.save(odd, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match=r"onnxruntime does not load .*odd\.onnx"):
        onnxtrain.compare(models / "float.onnx", tmp_path / "odd.onnx", samples(8))


def test_files_outside_of_the_folder_of_a_model_are_refused(tmp_path, models) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    onnx.save(
        network(), inside / "away.onnx", save_as_external_data=True, location="t.data",
        size_threshold=0,
    )  # fmt: skip
    (inside / "t.data").rename(tmp_path / "t.data")
    (inside / "t.data").symlink_to(tmp_path / "t.data")
    with pytest.raises(ModelError, match="outside of the folder"):
        onnxtrain.compare(models / "float.onnx", inside / "away.onnx", samples(8))


def test_outputs_that_are_not_numbers_are_an_error_of_that_model(models) -> None:
    broken = network()
    tensor = next(t for t in broken.graph.initializer if t.name == "head.bias")
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(4, np.nan, np.float32), tensor.name))
    with pytest.raises(NonFiniteError) as caught:
        onnxtrain.compare(models / "float.onnx", broken, samples(8), latency=False)
    assert "the second model" in caught.value.__notes__[0]
    found = onnxtrain.compare(models / "float.onnx", broken, samples(8)[0], latency=False)
    assert found.outputs["scores"].nonfinite == 32
    assert "32 elements are not finite" in str(found)


def test_a_model_that_fails_on_the_data_is_named() -> None:
    reshape = model(
        [helper.make_node("Reshape", ["x", "shape"], ["y"], "r")],
        [value("x", ["n", 1])], [value("y", [4, 1])], {"shape": np.array([4, 1])},
    )  # fmt: skip
    x = np.zeros((3, 1), np.float32)
    with pytest.raises(RunError, match="the second model does not run on these samples"):
        onnxtrain.compare(regression(0), reshape, x, latency=False)

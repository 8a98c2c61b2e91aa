"""Adapters merged into every form of layer: in float, quantized again, or beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain import Adapter
from onnxtrain.errors import AdapterError, ArgumentError
from onnxtrain.offline.lora import Lora
from onnxtrain.offline.passes.lora.add import add_lora
from onnxtrain.offline.writer.base_data import BaseData
from test_lora_forms import (
    DEPTH,
    FORMS,
    MICROSOFT,
    RANDOM,
    WIDTH,
    Form,
    factors_of,
    floats,
    integers,
    node,
    run,
)

BLOCKED = {"layer.weight": integers(DEPTH, WIDTH), "w_scale": floats(2, WIDTH) ** 2 + 0.001}


def nbits(name: str, bits: int, zeros: Any = None, block: int = 16, depth: int = DEPTH) -> Form:
    count = -(-depth // block)
    blob = RANDOM.integers(0, 256, (WIDTH, count, block * bits // 8)).astype(np.uint8)
    tensors = {"layer.weight": blob, "s": (floats(WIDTH * count) ** 2 + 0.01).astype("f4")}
    inputs = "x layer.weight s" + (" z" if zeros is not None else "")
    if zeros is not None:
        tensors["z"] = zeros
    made = node(
        "MatMulNBits", inputs, "y", MICROSOFT, K=depth, N=WIDTH, bits=bits, block_size=block
    )
    return Form(name, [made], tensors, (2, 5, depth), depth=depth)


MORE = [
    nbits("MatMulNBits-8", 8),
    nbits("MatMulNBits-zeros", 4, RANDOM.integers(0, 256, (WIDTH, 1)).astype(np.uint8)),
    nbits("MatMulNBits-float-zeros", 4, (floats(WIDTH, 2) * 5 + 8).astype("f4")),
    nbits("MatMulNBits-ragged", 4, None, 16, 40),
    Form(
        "QDQ-channels",
        [node("DequantizeLinear", "layer.weight w_scale", "w", axis=1), node("MatMul", "x w", "y")],
        {"layer.weight": integers(DEPTH, WIDTH), "w_scale": floats(WIDTH) ** 2 + 0.001},
    ),
    Form(
        "QDQ-unsigned",
        [node("DequantizeLinear", "layer.weight w_scale w_zero", "w"), node("MatMul", "x w", "y")],
        {"layer.weight": RANDOM.integers(0, 256, (DEPTH, WIDTH)).astype(np.uint8),
         "w_scale": np.float32(0.01), "w_zero": np.uint8(100)},
    ),
    Form(
        "QDQ-turned",
        [node("DequantizeLinear", "layer.weight w_scale", "w", axis=0),
         node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "x t", "y")],
        {"layer.weight": integers(WIDTH, DEPTH), "w_scale": floats(WIDTH) ** 2 + 0.001},
    ),
    Form(
        "QDQ-Gemm",
        [node("DequantizeLinear", "layer.weight w_scale", "w", axis=0),
         node("Gemm", "x w layer.bias", "y", transB=1, alpha=0.5)],
        {"layer.weight": integers(WIDTH, DEPTH), "w_scale": floats(WIDTH) ** 2 + 0.001,
         "layer.bias": floats(WIDTH)}, (4, DEPTH),
    ),
    Form(
        "QDQ-Conv",
        [node("DequantizeLinear", "layer.weight w_scale", "w", axis=0), node("Conv", "x w", "y")],
        {"layer.weight": integers(WIDTH, DEPTH, 3, 3), "w_scale": floats(WIDTH) ** 2 + 0.001},
        (2, DEPTH, 8, 9), next(f for f in FORMS if f.name == "Conv-1x1").update,
    ),
]  # fmt: skip
ALL = [*FORMS, *MORE]
STAYS = {"MatMulInteger"}  # whose scale is behind it, together with that of x
ONLY_INTEGERS = {
    "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QLinearMatMul",
}  # fmt: skip


def small_factors(form: Form) -> dict[str, Any]:
    made = factors_of(form, 3)
    if form.name == "QDQ-Conv":
        made = {"layer.lora_A.weight": floats(3, DEPTH, 3, 3),
                "layer.lora_B.weight": floats(WIDTH, 3, 1, 1)}  # fmt: skip
    return made


def slotted(form: Form, folder: Any) -> str:
    adapted = add_lora(form.model(), None, [Lora(rank=3)], ["y"])
    file = folder / "inference_model.onnx"
    adapted.slots.write(file, BaseData(folder / "base.data"), {})
    return str(file)


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@pytest.mark.parametrize("way", ["factors", "float", "quantized", "auto"])
def test_merged_models_compute_base_and_update(form: Form, way: Any, tmp_path: Any) -> None:
    model, factors, x = form.model(), small_factors(form), floats(*form.x)
    before = model.SerializeToString()
    base = run(before, {"x": x})
    update = form.update(x, *factors.values())
    for given in (model, slotted(form, tmp_path)):
        merged = onnxtrain.merge_adapter(given, Adapter(factors), tmp_path / "m.onnx", merge=way)
        found = run(str(tmp_path / "m.onnx"), {"x": x})
        inputs = onnx.load(tmp_path / "m.onnx").graph.input
        assert [value.name for value in inputs] == ["x"]
        how = {layer.how for layer in merged.layers}
        if form.name in STAYS:
            assert how == {"factors"}
        if how == {"quantized"}:
            assert way == "quantized"
            error = np.linalg.norm(found - base - update) / np.linalg.norm(base + update)
            assert error < (0.35 if "MatMulNBits" in form.name and "8" not in form.name else 0.05)
        else:
            assert way != "factors" or how == {"factors"}
            assert way != "float" or how == {"float"} or form.name in ONLY_INTEGERS
            scale = np.abs(base + update).max()
            tight = 0.08 if form.name in ("QDQ", "QLinearMatMul") else 2e-4
            if form.name.startswith("QDQ-"):
                tight = 0.03  # onnxruntime multiplies quantized weights with rounded inputs
            np.testing.assert_allclose(found, base + update, rtol=tight, atol=tight * scale)
    assert model.SerializeToString() == before


def test_forms_that_are_quantized_again() -> None:
    for form in ALL:
        merged = onnxtrain.merge_adapter(
            form.model(), Adapter(small_factors(form)), merge="quantized"
        )
        is_float = all(tensor.dtype.kind == "f" for tensor in form.tensors.values())
        wanted = "factors" if form.name in STAYS else "float" if is_float else "quantized"
        assert {layer.how for layer in merged.layers} == {wanted}, form.name
        if wanted == "quantized":
            types = {t.name: (t.data_type, tuple(t.dims)) for t in merged.model.graph.initializer}
            old = {t.name: (t.data_type, tuple(t.dims)) for t in form.model().graph.initializer}
            assert types == old


@pytest.mark.parametrize("form", [f for f in ALL if "NBits" in f.name], ids=lambda f: f.name)
def test_an_update_of_nothing_changes_nothing(form: Form) -> None:
    factors = {n: a * 0 if "lora_B" in n else a for n, a in small_factors(form).items()}
    merged = onnxtrain.merge_adapter(form.model(), Adapter(factors), merge="quantized")
    x = floats(*form.x)
    base = run(form.model().SerializeToString(), {"x": x})
    found = run(merged.model.SerializeToString(), {"x": x})
    np.testing.assert_allclose(found, base, rtol=1e-4, atol=1e-4)
    assert max(layer.errors.largest for layer in merged.layers) < 1e-5


def test_blocks_of_integers(tmp_path: Any) -> None:
    """DequantizeLinear of opset 21, of 4 and 8 bits."""
    for kind in (np.int8, "int4", "uint4"):
        import ml_dtypes

        dtype = np.dtype(kind if kind is np.int8 else getattr(ml_dtypes, str(kind)))
        low, high = (0, 15) if kind == "uint4" else (-7, 7)
        weights = RANDOM.integers(low, high, (DEPTH, WIDTH)).astype(np.int8).astype(dtype)
        nodes = [
            node("DequantizeLinear", "layer.weight s", "w", axis=0, block_size=16),
            node("MatMul", "x w", "y"),
        ]
        tensors = {"layer.weight": weights, "s": (floats(2, WIDTH) ** 2 + 0.01).astype("f4")}
        model = Form("", nodes, tensors).model()
        model.opset_import[0].version, model.ir_version = 21, 10
        form = Form("", [], {}, widths={"layer": WIDTH})
        factors, x = factors_of(form, 2), floats(2, 5, DEPTH)
        wanted = run(model.SerializeToString(), {"x": x}) + x @ product(factors)
        merged = onnxtrain.merge_adapter(model, Adapter(factors), merge="quantized")
        assert [layer.how for layer in merged.layers] == ["quantized"]
        found = run(merged.model.SerializeToString(), {"x": x})
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.25


def product(factors: dict[str, Any]) -> Any:
    return factors["layer.lora_A.weight"] @ factors["layer.lora_B.weight"]


def test_errors_are_told() -> None:
    form = next(f for f in ALL if f.name == "MatMulNBits-zeros")
    merged = onnxtrain.merge_adapter(form.model(), Adapter(small_factors(form)), merge="quantized")
    (layer,) = merged.layers
    assert 0 < layer.errors.mean < 0.1 and 0 < layer.errors.largest < 0.2
    assert 0 < layer.errors.of_update < 1
    assert "1 layers: merged and quantized again; the weights are off by" in str(merged)


def test_a_weight_that_others_read_stays_for_them() -> None:
    nodes = [
        node("Gather", "layer.weight i", "g", axis=1),
        node("ReduceSum", "g", "sum", keepdims=0),
        node("MatMul", "x layer.weight", "p"),
        node("Add", "p sum", "y"),
    ]
    tensors = {"layer.weight": floats(DEPTH, WIDTH), "i": np.array([0, 1])}
    model = Form("", nodes, tensors).model()
    factors, x = factors_of(Form("", [], {}), 2), floats(2, 5, DEPTH)
    merged = onnxtrain.merge_adapter(model, Adapter(factors)).model
    assert {t.name for t in merged.graph.initializer} == {
        "layer.weight",
        "i",
        "layer.weight.merged",
    }
    wanted = run(model.SerializeToString(), {"x": x}) + x @ product(factors)
    found = run(merged.SerializeToString(), {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_share_a_weight() -> None:
    nodes = [
        node("MatMul", "x layer.weight", "p"),
        node("Relu", "p", "r"),
        node("MatMul", "r layer.weight", "y"),
    ]
    model = Form("", nodes, {"layer.weight": floats(DEPTH, DEPTH)}).model()
    form = Form("", [], {}, widths={"layer": DEPTH})
    factors, x = factors_of(form, 2), floats(2, 5, DEPTH)
    w = numpy_helper.to_array(model.graph.initializer[0]) + product(factors)
    wanted = np.maximum(x @ w, 0) @ w
    for way in ("float", "factors"):
        merged = onnxtrain.merge_adapter(model, Adapter(factors), merge=way).model  # type: ignore[arg-type]
        found = run(merged.SerializeToString(), {"x": x})
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_half_precision(tmp_path: Any) -> None:
    half = {"layer.weight": floats(DEPTH, WIDTH).astype(np.float16)}
    nodes = [
        node("Cast", "x", "h", to=10),
        node("MatMul", "h layer.weight", "p"),
        node("Cast", "p", "y", to=1),
    ]
    model = Form("", nodes, half).model()
    factors, x = factors_of(Form("", [], {}), 2), floats(2, 5, DEPTH)
    wanted = run(model.SerializeToString(), {"x": x}) + x @ product(factors)
    for way in ("float", "factors"):
        merged = onnxtrain.merge_adapter(model, Adapter(factors), merge=way).model  # type: ignore[arg-type]
        found = run(merged.SerializeToString(), {"x": x})
        np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_said(tmp_path: Any) -> None:
    form = FORMS[0]
    adapter = Adapter(factors_of(form, 2))
    with pytest.raises(AdapterError, match=r"no layer 'model.layer'.*it has 'layer'"):
        onnxtrain.merge_adapter(form.model(), adapter.renamed(lambda layer: f"model.{layer}"))
    with pytest.raises(AdapterError, match="another base"):
        onnxtrain.merge_adapter(form.model(), Adapter(adapter.tensors, base="0" * 32))
    with pytest.raises(AdapterError, match="it is of another model"):
        other = Form("", [], {}, widths={"layer": 7})
        onnxtrain.merge_adapter(form.model(), Adapter(factors_of(other, 2)))
    with pytest.raises(ArgumentError, match="merge is one of"):
        onnxtrain.merge_adapter(form.model(), adapter, merge="all")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(ort, "LoraAdapter"), reason="this onnxruntime has no adapters")
def test_a_new_last_layer_is_in_the_adapter(tmp_path: Any) -> None:
    from onnxtrain.cli.demo.network import network

    folder = tmp_path / "artifacts"
    lora = onnxtrain.Lora(rank=2, layers="fc1|conv2")
    onnxtrain.prepare(network(), folder, train=lora, classes=4)
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(0.05)
    x = floats(5, 1, 8, 8)
    for _ in range(3):
        session.step(x, np.arange(5) % 4)
    session.export_adapter(tmp_path / "a.onnx_adapter")
    adapter = Adapter.read(tmp_path / "a.onnx_adapter")
    assert len(adapter.pairs) == 2 and len(adapter.whole) == 2
    loaded, options = ort.LoraAdapter(), ort.RunOptions()
    loaded.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(loaded)
    silent = ort.SessionOptions()
    silent.log_severity_level = 3
    model = ort.InferenceSession(folder / "inference_model.onnx", silent)
    found = model.run(None, {"image": x}, options)[0]
    np.testing.assert_allclose(found, session.predict(x), rtol=1e-4, atol=1e-4)
    merged = onnxtrain.merge_adapter(folder / "inference_model.onnx", adapter, tmp_path / "m.onnx")
    assert {layer.how for layer in merged.layers} == {"float"}
    found = ort.InferenceSession(tmp_path / "m.onnx").run(None, {"image": x})[0]
    np.testing.assert_allclose(found, session.predict(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(AdapterError, match=r"inference_model\.onnx"):
        onnxtrain.merge_adapter(network(), adapter)


def test_a_trained_session_merges_into_the_model_of_its_user(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    tensors = {"fc1.weight": rng.normal(size=(8, 6)), "fc1.bias": rng.normal(size=6),
               "fc2.weight": rng.normal(size=(6, 3)), "fc2.bias": rng.normal(size=3)}  # fmt: skip
    nodes = [
        node("MatMul", "x fc1.weight", "a"), node("Add", "a fc1.bias", "b"), node("Relu", "b", "c"),
        node("MatMul", "c fc2.weight", "d"), node("Add", "d fc2.bias", "y"),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n", 8])],
        [helper.make_tensor_value_info("y", 1, ["n", 3])],
        [numpy_helper.from_array(value.astype("f4"), name) for name, value in tensors.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder = tmp_path / "artifacts"
    train = [onnxtrain.Lora(rank=2, alpha=6, layers="*"), "fc2.bias"]
    onnxtrain.prepare(model, folder, train=train, loss="mse", optimizer="adamw")
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(0.05)
    x, y = rng.normal(size=(4, 8)).astype("f4"), rng.normal(size=(4, 3)).astype("f4")
    for _ in range(5):
        session.step(x, y)
    session.export_adapter(tmp_path / "a.onnx_adapter")
    adapter = Adapter.read(tmp_path / "a.onnx_adapter")
    assert adapter.whole == ("fc2.bias",) and adapter.base
    adapter.check(fits=folder)
    wanted = session.predict(x)
    assert np.abs(wanted - run(model.SerializeToString(), {"x": x})).max() > 0.05
    for given in (model, folder / "inference_model.onnx"):
        for way in ("auto", "factors"):
            merged = onnxtrain.merge_adapter(given, adapter, tmp_path / "m.onnx", merge=way)  # type: ignore[arg-type]
            assert not {p.key for p in merged.model.metadata_props} & {"onnxtrain.lora"}
            found = run(str(tmp_path / "m.onnx"), {"x": x})
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    feeds = {"x": x, **{name: adapter[name] for name in adapter}}
    found = run(str(folder / "inference_model.onnx"), feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)

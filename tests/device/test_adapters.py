"""Adapters: combined, converted, checked against models, and those of sessions."""

import contextlib
import copy
import json
import os

import numpy as np
import onnxruntime as ort
import pytest
from adapter_models import BASE, FACTORS, expected, factors, lora_model, lora_session, pairs
from small_runs import open_session
from test_adapter_file import needs_adapters, same

import onnxtrain
from onnxtrain import Adapter
from onnxtrain.errors import (
    AdapterError,
    ArgumentError,
    NonFiniteError,
    StateError,
)
from onnxtrain.format.adapter.pairs import Pair
from onnxtrain.format.adapter.safetensors import safetensors_bytes

X = np.random.default_rng(5).normal(size=(4, 8)).astype("f4")
Y = np.random.default_rng(6).normal(size=(4, 3)).astype("f4")


def arrays(adapter):
    return {name: adapter[name] for name in adapter}


@pytest.fixture(scope="module")
def slotted():
    """The bytes of a model with slots."""
    return lora_model(0, slots=True).SerializeToString()


def run_with(model, adapter, tmp_path):
    """What stock onnxruntime computes with an adapter file."""
    adapter.save(tmp_path / "a.onnx_adapter")
    loaded = ort.LoraAdapter()
    loaded.Load(str(tmp_path / "a.onnx_adapter"))
    options = ort.RunOptions()
    options.add_active_adapter(loaded)
    return ort.InferenceSession(model).run(None, {"x": X}, options)[0]


# ---- one adapter ---------------------------------------------------------------------------------


def test_pairs_are_found_by_their_names() -> None:
    adapter = Adapter(factors(3))
    assert [(p.layer, p.rank, p.scale, p.kind) for p in adapter.pairs] == [
        ("fc1", 3, 1.0, "linear"),
        ("fc2", 3, 1.0, "linear"),
    ]
    assert (adapter.rank, adapter.size, adapter.dtype, len(adapter)) == (3, 69, "float32", 4)
    assert repr(adapter) == "Adapter(2 layers, rank 3, 69 elements)"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_types_are_kept_in_files(dtype, tmp_path) -> None:
    adapter = Adapter(factors(2)).astype(dtype)
    for path in (tmp_path / "a.onnx_adapter", tmp_path / "peft"):
        adapter.save(path)
        read = Adapter.read(path)
        assert read.dtype == dtype
        same(arrays(read), arrays(adapter))


def test_bfloat16_is_rounded_as_torch_does() -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    values = np.random.default_rng(0).normal(size=(40, 50)).astype("f4") * 1e3
    values[0, :4] = np.inf, -np.inf, np.nan, 3.4e38
    made = Adapter({"w.lora_A.weight": values, "w.lora_B.weight": values.T}).astype("bfloat16")
    wanted = torch.tensor(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(made["w.lora_A.weight"], wanted)


BAD = {
    "a single factor": ({"w.lora_A.weight": np.ones((2, 1), "f4")}, "no factor lora_B"),
    "another name": ({"w.lora_C": np.ones((2, 1), "f4")}, "not a factor of LoRA"),
    "DoRA": ({"w.lora_magnitude_vector": np.ones(2, "f4")}, "DoRA"),
    "quantized": ({"w.lora_A.weight": np.ones((2, 1), "u1")}, "unquantized"),
    "quantized names": ({"w.lora_A.quant.weight": np.ones((2, 1), "f4")}, "quantized"),
    "integers": ({"w.lora_A.weight": np.ones((2, 1), "i4")}, "is int32: factors are floats"),
    "ranks": (
        {"w.lora_A.weight": np.ones((2, 1), "f4"), "w.lora_B.weight": np.ones((2, 2), "f4")},
        "do not multiply at rank 1",
    ),
    "vectors": (
        {"w.lora_A.weight": np.ones(2, "f4"), "w.lora_B.weight": np.ones(2, "f4")},
        "no conv layer has",
    ),
    "nothing": ({}, "no factors"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_adapter(case) -> None:
    tensors, message = BAD[case]
    with pytest.raises(AdapterError, match=message):
        Adapter(tensors)


def test_a_record_that_does_not_fit_the_tensors_is_refused() -> None:
    other = Pair("fc9", "fc9.lora_A.weight", "fc9.lora_B.weight", 2, 1.0, "linear")
    with pytest.raises(AdapterError, match=r"'fc9.lora_A.weight' is not there"):
        Adapter(factors(2), pairs=[other])


def test_files_that_are_no_adapters(tmp_path) -> None:
    (tmp_path / "text").write_text("some text that is long enough")
    with pytest.raises(AdapterError, match="neither"):
        Adapter.read(tmp_path / "text")
    with pytest.raises(AdapterError, match="cannot read"):
        Adapter.read(tmp_path / "none")
    with pytest.raises(ArgumentError, match="'onnx' or 'peft'"):
        Adapter(factors(1)).save(tmp_path / "x", format="zip")
    with pytest.raises(AdapterError, match="cannot write"):
        Adapter(factors(1)).save(tmp_path / "nowhere" / "x.onnx_adapter")


def test_a_file_is_replaced_as_a_whole(tmp_path) -> None:
    path = tmp_path / "a.onnx_adapter"
    for rank in (1, 5, 2):
        Adapter(factors(rank)).save(path)
        assert Adapter.read(path).rank == rank
    assert [p.name for p in tmp_path.iterdir()] == ["a.onnx_adapter"]


# ---- several -------------------------------------------------------------------------------------


def test_stacked_adapters_add_up() -> None:
    one, two = factors(2, seed=1), factors(3, seed=2)
    del two["fc1.lora_A.weight"], two["fc1.lora_B.weight"]
    stacked = Adapter.stack([Adapter(one), Adapter(two, base=BASE)], weights=[0.5, 2.0])
    assert {pair.layer: pair.rank for pair in stacked.pairs} == {"fc1": 2, "fc2": 5}
    assert stacked.base == BASE
    for layer, wanted in {
        "fc1": 0.5 * product(one, "fc1"),
        "fc2": 0.5 * product(one, "fc2") + 2 * product(two, "fc2"),
    }.items():
        np.testing.assert_allclose(product(stacked, layer), wanted, rtol=1e-5, atol=1e-5)


def product(tensors, layer):
    return tensors[f"{layer}.lora_A.weight"] @ tensors[f"{layer}.lora_B.weight"]


def test_stacked_convolutions_add_up() -> None:
    rng = np.random.default_rng(0)

    def kernels(rank):
        a, b = rng.normal(size=(rank, 3, 2, 2)), rng.normal(size=(5, rank, 1, 1))
        return {"c.lora_A.weight": a.astype("f4"), "c.lora_B.weight": b.astype("f4")}

    def kernel(tensors):
        b = tensors["c.lora_B.weight"][:, :, 0, 0]
        return np.tensordot(b, tensors["c.lora_A.weight"], 1)

    one, two = kernels(2), kernels(1)
    stacked = Adapter.stack([Adapter(one), Adapter(two)])
    assert stacked.rank == 3
    np.testing.assert_allclose(kernel(stacked), kernel(one) + kernel(two), rtol=1e-5, atol=1e-6)


def test_what_does_not_stack() -> None:
    one = Adapter(factors(1), base=BASE)
    with pytest.raises(AdapterError, match="different bases"):
        Adapter.stack([one, Adapter(factors(1), base="f" * 32)])
    with pytest.raises(AdapterError, match="not of one model and type"):
        Adapter.stack([one, one.astype("float16")])
    with pytest.raises(ArgumentError, match="finite weight for each"):
        Adapter.stack([one], [1.0, 2.0])
    with pytest.raises(ArgumentError, match="at least one"):
        Adapter.stack([])


# ---- models with slots ---------------------------------------------------------------------------


@needs_adapters
def test_onnxruntime_applies_them(slotted, tmp_path) -> None:
    for rank in (1, 4):
        adapter = Adapter(factors(rank))
        adapter.check(fits=slotted)
        made = run_with(slotted, adapter, tmp_path)
        np.testing.assert_allclose(made, expected(X, adapter), rtol=1e-4, atol=1e-4)
    both = Adapter.stack([Adapter(factors(1, 1)), Adapter(factors(2, 2))])
    made = run_with(slotted, both, tmp_path)
    np.testing.assert_allclose(made, expected(X, both), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_a_model_is_said(slotted, tmp_path) -> None:
    adapter = Adapter(factors(2))
    cases = {
        "another base .*: its fingerprint is ffffffffffff": Adapter(factors(2), base="f" * 32),
        "has no slot for 4 of the 4 tensors .*'m.fc1.lora_A.weight'.* Near it are 'fc1.lora_A":
            adapter.renamed(lambda layer: f"m.{layer}"),
        "is float16 in the adapter and float32 in .*astype": adapter.astype("float16"),
        r"has the shape \[5, 1\] in the adapter, and \[8, any\] .*another model":
            Adapter({"fc1.lora_A.weight": np.ones((5, 1), "f4"),
                     "fc1.lora_B.weight": np.ones((1, 6), "f4")}),
    }  # fmt: skip
    for message, wrong in cases.items():
        with pytest.raises(AdapterError, match=message):
            wrong.check(fits=slotted)
    plain = lora_model(2).SerializeToString()
    with pytest.raises(AdapterError, match="no slots for adapters"):
        adapter.check(fits=plain)
    with pytest.raises(AdapterError, match=r"no inference_model.onnx"):
        adapter.check(fits=tmp_path)
    Adapter(factors(2), base=BASE).check(fits=slotted)


# ---- sessions ------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    return lora_session(tmp_path / "artifacts")


def test_a_session_exports_what_it_has_learnt(session, tmp_path) -> None:
    for _ in range(5):
        session.step(X, Y)
    session.export_adapter(tmp_path / "a.onnx_adapter")
    adapter = Adapter.read(tmp_path / "a.onnx_adapter")
    assert adapter.base == BASE
    assert {p.scale for p in adapter.pairs} == {4.0}
    np.testing.assert_allclose(session.predict(X), expected(X, adapter), rtol=1e-4, atol=1e-4)


@needs_adapters
def test_the_exported_adapter_is_the_same_in_onnxruntime(session, slotted, tmp_path) -> None:
    session.step(X, Y)
    made = run_with(slotted, session.adapter(), tmp_path)
    np.testing.assert_allclose(made, session.predict(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["a.onnx_adapter", "peft"])
def test_a_session_begins_from_an_adapter(session, name, tmp_path) -> None:
    given = Adapter(factors(2, seed=9), base=BASE)
    given.save(tmp_path / name)
    session.step(X, Y)
    session.load_adapter(tmp_path / name)
    np.testing.assert_allclose(session.predict(X), expected(X, given), rtol=1e-4, atol=1e-4)
    fresh = lora_session(tmp_path / "fresh")
    fresh.load_adapter(given)
    assert session.step(X, Y)[0] == fresh.step(X, Y)[0]
    same(arrays(session.adapter()), arrays(fresh.adapter()))  # the moments started from zero


def test_a_round_trip_through_a_session_is_exact(session, tmp_path) -> None:
    given = Adapter(factors(2, seed=3))
    session.load_adapter(given)
    same(arrays(session.adapter()), arrays(given))


def test_what_does_not_fit_a_session_changes_nothing(session) -> None:
    before = arrays(session.adapter())
    partial = {n: a for n, a in factors(2).items() if n.startswith("fc1")}
    cases = {
        "rank is 3 instead of 2: prepare with rank=3": Adapter(factors(3)),
        "another base": Adapter(factors(2), base="f" * 32),
        "lacks 2 of the 4 factors": Adapter(partial),
        "is float64": Adapter(factors(2)).astype("float64"),
    }
    for message, wrong in cases.items():
        with pytest.raises(AdapterError, match=message):
            session.load_adapter(wrong)
    same(arrays(session.adapter()), before)


def test_factors_that_are_not_finite_are_not_exported(session, tmp_path) -> None:
    session.update_parameter(FACTORS[0], np.full((8, 2), np.nan, "f4"))
    with pytest.raises(NonFiniteError, match="there is no adapter"):
        session.export_adapter(tmp_path / "a.onnx_adapter")
    assert not (tmp_path / "a.onnx_adapter").exists()
    session.export_adapter(tmp_path / "a.onnx_adapter", allow_nonfinite=True)


def test_a_session_without_factors(tmp_path) -> None:
    with pytest.raises(StateError, match="train='lora'"):
        open_session().export_adapter(tmp_path / "x.onnx_adapter")


def test_what_else_trains_is_in_the_adapter(tmp_path) -> None:
    onnxtrain.prepare(
        lora_model(2), tmp_path / "a", train=[*FACTORS, "fc2.bias"], loss="mse", optimizer="sgd"
    )
    session = onnxtrain.TrainingSession(tmp_path / "a")
    session.set_metadata(lora=pairs(2, 1.0))
    session.step(X, Y)
    adapter = session.adapter()
    assert adapter.whole == ("fc2.bias",)
    assert "1 whole tensors" in repr(adapter)
    np.testing.assert_array_equal(adapter["fc2.bias"], session.get_parameter("fc2.bias"))
    read = Adapter.from_bytes(adapter.to_bytes())
    same(arrays(read), arrays(adapter))
    session.step(X, Y)
    session.load_adapter(read)
    same(arrays(session.adapter()), arrays(adapter))
    with pytest.raises(AdapterError, match=r"save the adapter as .onnx_adapter"):
        adapter.save(tmp_path / "p")
    with pytest.raises(AdapterError, match="do not stack"):
        Adapter.stack([adapter, adapter])


# ---- PEFT ----------------------------------------------------------------------------------------


def test_a_folder_of_peft(tmp_path) -> None:
    scaled = [
        Pair(layer, f"{layer}.lora_A.weight", f"{layer}.lora_B.weight", 2, scale, "linear")
        for layer, scale in (("fc1", 0.5), ("fc2", 3.0))
    ]
    adapter = Adapter(factors(2), pairs=scaled)
    adapter.save(tmp_path / "p", config={"task_type": "CAUSAL_LM"})
    config = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    assert (config["r"], config["task_type"], config["target_modules"]) == (
        2, "CAUSAL_LM", ["fc1", "fc2"],
    )  # fmt: skip
    read = Adapter.read(tmp_path / "p")
    assert read.pairs == adapter.pairs
    for name in adapter:
        np.testing.assert_allclose(read[name], adapter[name], rtol=1e-6)
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


def test_a_crash_leaves_no_weights_with_the_scale_of_others(tmp_path, monkeypatch) -> None:
    """Wherever it happens, the folder has the old adapter, the new one, or none."""
    old, new = Adapter(factors(2, seed=1)), Adapter(factors(3, seed=2))
    replace, outcomes = os.replace, []
    for allowed in range(3):
        left = [allowed]

        def may_crash(*names, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError("power is gone")
            replace(*names)

        place = tmp_path / str(allowed)
        old.save(place)
        with monkeypatch.context() as changed:
            changed.setattr(os, "replace", may_crash)
            with contextlib.suppress(AdapterError):
                new.save(place)
        try:
            outcomes.append(Adapter.read(place).rank)
        except AdapterError:
            outcomes.append(None)
        assert {p.suffix for p in place.iterdir()} <= {".json", ".safetensors"}
    assert outcomes == [None, None, 3]


@pytest.fixture
def folder(tmp_path):
    """A folder of PEFT with rank 4 and alpha 8."""
    Adapter(factors(4)).save(tmp_path / "p", config={"lora_alpha": 8})
    return tmp_path / "p"


def change(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"fc2": 2}}, (2.0, 0.5)),
        ({"alpha_pattern": {"^fc1": 4, "c2": 1}}, (1.0, 2.0)),
        ({"alpha_pattern": {"f.*": 4}}, (1.0, 1.0)),
        ({"alpha_pattern": {r"fc\d+": 16}}, (4.0, 4.0)),
    ],
)
def test_scales_of_peft(folder, fields, scales) -> None:
    change(folder, **fields)
    read = Adapter.read(folder)
    assert tuple(pair.scale for pair in read.pairs) == scales
    for pair, scale in zip(read.pairs, scales, strict=True):
        np.testing.assert_allclose(read[pair.b], factors(4)[pair.b] * scale, rtol=1e-6)


REFUSED = {
    "DoRA": {"use_dora": True},
    "peft_type is 'IA3'": {"peft_type": "IA3"},
    "trains biases": {"bias": "all"},
    "a bias beside B": {"lora_bias": True},
    "'lora_alpha' is 'much'": {"lora_alpha": "much"},
    "lora_alpha is wrong": {"lora_alpha": 0},
    "too complicated": {"alpha_pattern": {"(a+)+b": 3}},
    "alpha_pattern is .*, not an object": {"alpha_pattern": [1]},
    "r is less than 1": {"r": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_configurations_that_are_refused(folder, message) -> None:
    change(folder, **REFUSED[message])
    with pytest.raises(AdapterError, match=message):
        Adapter.read(folder)


def test_whole_weights_and_missing_files_are_refused(folder) -> None:
    (folder / "adapter_config.json").rename(folder / "other")
    with pytest.raises(AdapterError, match=r"needs its adapter_config.json"):
        Adapter.read(folder)
    (folder / "other").rename(folder / "adapter_config.json")
    whole = {"base_model.model.head.weight": np.ones((2, 2), "f4")}
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(whole, {}))
    with pytest.raises(AdapterError, match="modules_to_save"):
        Adapter.read(folder)


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_what_we_write_and_we_what_it_writes(tmp_path, rslora) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import torch
    from torch import nn

    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 8, 3), "flat": nn.Flatten(), "a": nn.Linear(288, 16)}
    net = nn.Sequential()
    for name, part in (parts | {"b": nn.Linear(16, 4)}).items():
        net.add_module(name, part)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=rslora, target_modules=["conv", "a", "b"],
        rank_pattern={"b": 2}, alpha_pattern={"a": 3},
    )  # fmt: skip
    model = peft.get_peft_model(copy.deepcopy(net), config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    model.save_pretrained(tmp_path / "theirs")
    adapter = Adapter.read(tmp_path / "theirs")
    adapter.save(tmp_path / "a.onnx_adapter")
    Adapter.read(tmp_path / "a.onnx_adapter").save(tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "ours")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-4)
        low = torch.tensor(adapter["a.lora_A.weight"] @ adapter["a.lora_B.weight"])
        found = model.base_model.model.a.get_delta_weight("default")
        torch.testing.assert_close(low.T, found, rtol=1e-4, atol=1e-5)

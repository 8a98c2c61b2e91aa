"""Federations that train low-rank factors: the adapter travels, and nothing of the base."""

import shutil

import numpy as np
import onnx
import onnxruntime as ort
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, arrays, federate, of_client, rows
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain import Adapter
from onnxtrain.errors import ModelError
from onnxtrain.federated import client_app, pack
from onnxtrain.federated.bundle import open_artifacts

WIDTH = 256


def network() -> onnx.ModelProto:
    """Two layers: the first, large one is where almost all weights are."""
    rng = np.random.default_rng(0)
    tensors = {
        "fc1.weight": rng.normal(size=(8, WIDTH)) / 3, "fc1.bias": np.zeros(WIDTH),
        "fc2.weight": rng.normal(size=(WIDTH, WIDTH)) / 16, "fc2.bias": np.zeros(WIDTH),
        "fc3.weight": rng.normal(size=(WIDTH, 3)) / 16, "fc3.bias": np.zeros(3),
    }  # fmt: skip
    nodes, value = [], "x"
    for layer in ("fc1", "fc2", "fc3"):
        given = [value, f"{layer}.weight", f"{layer}.bias"]
        nodes.append(helper.make_node("Gemm", given, [layer]))
        nodes.append(helper.make_node("Relu", [layer], [f"{layer}.relu"]))
        value = f"{layer}.relu"
    graph = helper.make_graph(
        nodes[:-1], "g", [helper.make_tensor_value_info("x", 1, ["n", 8])],
        [helper.make_tensor_value_info("fc3", 1, ["n", 3])],
        [numpy_helper.from_array(value.astype("f4"), name) for name, value in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "artifacts"
    lora = onnxtrain.Lora(rank=2, alpha=8, layers="*")
    onnxtrain.prepare(network(), path, train=lora, nominal_checkpoint=True)
    return path


def run(server, client, **options):
    app = client_app(client, of_client, of_client, metrics=["accuracy"])
    return federate(server, app, clients=3, rounds=3, **options)


def test_only_the_adapter_travels(folder, tmp_path) -> None:
    result = run(folder, folder, config=FAST | {"learning-rate": 0.05})
    found = arrays(result)
    session = onnxtrain.TrainingSession(folder)
    adapter = session.adapter()
    assert set(found) == set(adapter)
    size = sum(adapter[name].nbytes for name in adapter)
    for metrics in result.train_metrics_clientapp.values():
        # A header of 128 bytes and more stands before each array.
        assert 3 * size <= metrics["bytes-up"] <= 3 * size + 3 * 400 * len(found)
        assert metrics["bytes-down"] <= 3 * size + 3 * 400 * len(found)
    assert size < (folder / "base.data").stat().st_size / 20
    losses = [m["eval_loss"] for _, m in sorted(result.evaluate_metrics_clientapp.items())]
    assert losses[-1] < 0.98 * losses[0]
    # What the federation came to is an adapter for the stock runtime.
    session.load_parameters(found)
    session.export_adapter(tmp_path / "federated.onnx_adapter")
    learnt = Adapter.read(tmp_path / "federated.onnx_adapter")
    learnt.check(fits=folder)
    x, _ = rows(9)
    model = ort.InferenceSession(folder / "inference_model.onnx")
    made = model.run(None, {"x": x, **{name: learnt[name] for name in learnt}})[0]
    np.testing.assert_allclose(made, session.predict(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [False, True])
def test_packed_artifacts_have_the_base(folder, tmp_path, weights) -> None:
    sizes = pack(folder, tmp_path / "packed.json", weights=weights)
    assert sizes["base.data"] == (folder / "base.data").stat().st_size
    packed = run(tmp_path / "packed.json" if weights else folder, tmp_path / "packed.json")
    plain = run(folder, folder)
    for name, array in arrays(plain).items():
        np.testing.assert_array_equal(arrays(packed)[name], array)
    bundle = open_artifacts(tmp_path / "packed.json")
    place = bundle.base.parent
    assert place.is_dir()
    del bundle
    assert not place.exists()


def test_a_base_that_is_missing_is_told(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path / "a")
    (tmp_path / "a" / "base.data").unlink()
    with pytest.raises(ModelError, match=r"base\.data"):
        open_artifacts(tmp_path / "a").session()

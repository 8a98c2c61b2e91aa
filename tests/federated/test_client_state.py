"""What stays on a client: personal layers, BatchNormalization, moments; also after a restart."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

import onnxruntime as ort
from federations import GOLDEN, arrays, federate, images_of_client, of_client, rows
from flwr.serverapp.strategy import FedAvg

from onnxtrain import TrainingSession
from onnxtrain.errors import ArgumentError, ModelError, StateError
from onnxtrain.federated import client_app, open_artifacts, pack
from onnxtrain.federated.client_state import ClientState

BODY = ["fc1.*"]


def kept(folder, number) -> ClientState:
    file = folder / f"client-{number}.npz"
    return ClientState.from_bytes(file.read_bytes(), str(file))


def test_a_personal_head_stays_and_survives_a_restart(tmp_path) -> None:
    def federation(rounds, **options):
        app = client_app(GOLDEN / "mlp", of_client, of_client, state=tmp_path / "clients")
        return federate(GOLDEN / "mlp", app, rounds=rounds, which=BODY, **options)

    first = federation(2, state=tmp_path / "server")
    assert set(arrays(first)) == {"fc1.weight", "fc1.bias"}
    heads = [kept(tmp_path / "clients", i).local for i in range(3)]
    assert all(set(head) == {"fc2.weight", "fc2.bias"} for head in heads)
    assert not np.array_equal(heads[0]["fc2.weight"], heads[1]["fc2.weight"])
    # Everything is made anew: another server, other clients, in the same folders.
    more = federation(4, state=tmp_path / "server")
    whole_folder = tmp_path / "whole"
    app = client_app(GOLDEN / "mlp", of_client, of_client, state=whole_folder)
    whole = federate(GOLDEN / "mlp", app, rounds=4, which=BODY)
    for name, array in arrays(whole).items():
        assert array.tobytes() == arrays(more)[name].tobytes()
    for number in range(3):
        a, b = (kept(f, number).local for f in (tmp_path / "clients", whole_folder))
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_without_a_folder_the_context_keeps_it() -> None:
    app = client_app(GOLDEN / "mlp", of_client, of_client, metrics=["accuracy"])
    result = federate(GOLDEN / "mlp", app, rounds=5, which=BODY)
    accuracy = [m["accuracy"] for _, m in sorted(result.evaluate_metrics_clientapp.items())]
    assert accuracy[-1] > accuracy[0]


def test_batch_normalization_stays(tmp_path) -> None:
    app = client_app(GOLDEN / "cnn", images_of_client, images_of_client, state=tmp_path)
    result = federate(GOLDEN / "cnn", app, rounds=2, which="no-batch-norm")
    assert set(arrays(result)) == {"conv.weight", "conv.bias", "fc.weight", "fc.bias"}
    own = [kept(tmp_path, i).local for i in range(3)]
    assert all(set(o) == {"bn.weight", "bn.bias", "bn.mean", "bn.var"} for o in own)
    assert not np.array_equal(own[0]["bn.mean"], own[1]["bn.mean"])


def test_a_head_alone_is_shared_and_the_rest_travels_once(tmp_path) -> None:
    """The package has no weights: the frozen layer comes with the first message."""
    file = tmp_path / "artifacts.json"
    pack(GOLDEN / "head", file)
    sent = []

    def data(context):
        return of_client(context)

    app = client_app(file, data, data)

    def watched(message, context):
        config = next(iter(message.content.config_records.values()))
        sent.append((message.metadata.message_type, "onnxtrain-initial" in config))
        return app(message, context)

    result = federate(GOLDEN / "head", watched, rounds=3, which="trainable")
    assert set(arrays(result)) == {"fc2.weight", "fc2.bias"}
    assert result.train_metrics_clientapp[3]["left-out"] == 0
    assert [first for _, first in sent] == [True] * 3 + [False] * 15
    full = federate(GOLDEN / "head", client_app(GOLDEN / "head", of_client), rounds=3)
    for name, array in arrays(full).items():
        assert array.tobytes() == arrays(result)[name].tobytes()


def test_constants_that_are_no_floats_travel_once_too(tmp_path) -> None:
    """A large table of integers is stored in the checkpoint, and a nominal one does not have it."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from onnxtrain import artifacts

    rng = np.random.default_rng(0)
    table = np.tile(np.arange(8), 1100)
    weight = (0.01 * rng.normal(size=(8800, 3))).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["input", "table"], ["wide"], axis=1),
         helper.make_node("MatMul", ["wide", "weight"], ["output"])],
        "table",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(weight, "weight")],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 18)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opset, ir_version=8)
    folder = tmp_path / "artifacts"
    artifacts.generate_artifacts(
        model, loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.SGD,
        artifact_directory=folder, nominal_checkpoint=True,
    )  # fmt: skip
    session = TrainingSession.from_folder(folder)
    assert session.state.has_parameter("table")
    pack(folder, tmp_path / "a.json")
    config = {"learning-rate": 0.01}
    small = federate(folder, client_app(tmp_path / "a.json", of_client), rounds=2, config=config)
    assert set(arrays(small)) == {"weight"}
    assert small.train_metrics_clientapp[2]["left-out"] == 0


def test_a_client_that_lost_its_things_is_told_again(tmp_path) -> None:
    file, folder = tmp_path / "artifacts.json", tmp_path / "clients"
    pack(GOLDEN / "head", file)
    calls = []

    def data(context):
        calls.append(context)
        if len(calls) == 4:  # the first client, at the beginning of its second round
            for kept_file in folder.glob("client-0*"):
                kept_file.unlink()
        return of_client(context)

    app = client_app(file, data, state=folder)
    result = federate(GOLDEN / "head", app, FedAvg(fraction_evaluate=0.0), rounds=3)
    left_out = [m["left-out"] for _, m in sorted(result.train_metrics_clientapp.items())]
    assert left_out == [0, 1, 0]


def test_both_write_their_model_in_the_end(tmp_path) -> None:
    app = client_app(GOLDEN / "mlp", of_client, of_client, state=tmp_path / "device",
                     export="mine.onnx", outputs=["output"])  # fmt: skip
    nodes = [{"partition-id": i, "state-dir": str(tmp_path / f"device-{i}")} for i in range(2)]
    result = federate(GOLDEN / "mlp", app, clients=nodes, which=BODY, export=tmp_path / "all.onnx",
                      outputs=["output"])  # fmt: skip
    x = rows(5)[0]
    given = {}
    for name in ("all.onnx", "device-0/mine.onnx", "device-1/mine.onnx"):
        given[name] = ort.InferenceSession(tmp_path / name).run(None, {"input": x})[0]
    session = TrainingSession.from_folder(GOLDEN / "mlp")
    for number in range(2):
        session.load_parameters(
            {**arrays(result), **kept(tmp_path / f"device-{number}", number).local}
        )
        wanted = session.eval_step(x, rows(5)[1])[1]
        np.testing.assert_allclose(
            given[f"device-{number}/mine.onnx"], wanted, rtol=1e-5, atol=1e-6
        )
    assert not np.allclose(given["device-0/mine.onnx"], given["device-1/mine.onnx"], rtol=1e-3)


def test_a_damaged_file_of_a_client_is_said(tmp_path) -> None:
    app = client_app(GOLDEN / "mlp", of_client, state=tmp_path, keep_optimizer=True)
    federate(GOLDEN / "mlp", app, FedAvg(fraction_evaluate=0.0), rounds=1)
    file = tmp_path / "client-1.npz"
    file.write_bytes(file.read_bytes()[:-30])
    result = federate(GOLDEN / "mlp", app, FedAvg(fraction_evaluate=0.0), rounds=1)
    assert result.train_metrics_clientapp[1]["left-out"] == 1
    with pytest.raises(StateError, match="delete it to start anew"):
        kept(tmp_path, 1)


def test_a_package_has_no_weights_unless_they_are_asked_for(tmp_path) -> None:
    sizes = pack(GOLDEN / "head", tmp_path / "a.json")
    assert "checkpoint" not in sizes
    bundle = open_artifacts(tmp_path / "a.json")
    assert bundle.session().state.nominal
    assert bundle.version == open_artifacts(GOLDEN / "head").version
    assert bundle.version != open_artifacts(GOLDEN / "mlp").version
    assert "checkpoint" in pack(GOLDEN / "head", tmp_path / "b.json", weights=True)
    full = open_artifacts(tmp_path / "b.json").session()
    wanted = TrainingSession.from_folder(GOLDEN / "head")
    assert full.to_buffer(False).numpy().tobytes() == wanted.to_buffer(False).numpy().tobytes()
    assert full.step(*rows(0))[0] == wanted.step(*rows(0))[0]


NO_PACKAGES = (
    b"",
    b"{}",
    b"[1]",
    b'{"onnxtrain-artifacts": 9}',
    b'{"onnxtrain-artifacts": 1, "files": {"a": "="}}',
)


@pytest.mark.parametrize("content", NO_PACKAGES)
def test_a_package_that_is_none(tmp_path, content) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"packed artifacts|knows format 1"):
        open_artifacts(tmp_path / "a.json")


def test_what_does_not_make_sense_is_refused(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="outputs"):
        client_app(GOLDEN / "mlp", of_client, export="model.onnx")
    with pytest.raises(ModelError, match="nominal_checkpoint"):
        pack(GOLDEN / "cnn", tmp_path / "a.json")
    with pytest.raises(ModelError, match="no 'training_model"):
        pack(tmp_path / "nowhere", tmp_path / "a.json")

"""Training on a GPU: all that works on the CPU, with the same numbers."""

import numpy as np
import onnxruntime as ort
import pytest

if "CUDAExecutionProvider" not in ort.get_available_providers():
    pytest.skip("needs a GPU, and onnxruntime-gpu", allow_module_level=True)
onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")  # onnxruntime finds the libraries of CUDA that it has loaded

import onnxtrain  # noqa: E402

X = np.random.default_rng(0).standard_normal((5, 16, 8)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, (5, 16))


@pytest.fixture(scope="module", params=[16, "batch"])
def folder(request, tmp_path_factory):
    rng, made = np.random.default_rng(2), []
    for i, (rows, columns) in enumerate([(8, 12), (12, 12), (12, 3)]):
        weight = rng.standard_normal((rows, columns)).astype(np.float32) / 3
        made += [onnx.numpy_helper.from_array(weight, f"w{i}")]
        made += [onnx.numpy_helper.from_array(np.zeros(columns, np.float32), f"b{i}")]
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w0", "b0"], ["h0"]),
        onnx.helper.make_node("Relu", ["h0"], ["a0"]),
        onnx.helper.make_node("Gemm", ["a0", "w1", "b1"], ["h1"]),
        onnx.helper.make_node("Tanh", ["h1"], ["a1"]),
        onnx.helper.make_node("Gemm", ["a1", "w2", "b2"], ["scores"]),
    ]
    graph = onnx.helper.make_graph(
        nodes, "net",
        [onnx.helper.make_tensor_value_info("x", 1, [request.param, 8])],
        [onnx.helper.make_tensor_value_info("scores", 1, [request.param, 3])], made,
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    folder = tmp_path_factory.mktemp("cuda")
    onnx.save(model, folder / "forward.onnx")
    onnxtrain.prepare(
        model, folder, loss="cross_entropy", optimizer="adamw:clip_norm=1.0", target="cuda",
        outputs=[],
    )  # fmt: skip
    return folder


def opened(folder, device="cuda", **options):
    is_fixed = "batch" not in str(onnx.load(folder / "step_model.onnx").graph.input)
    batch = {} if is_fixed else {"batch_size": 16}
    return onnxtrain.TrainingSession(folder, device=device, **options, **batch)


def losses(session, count=5):
    made = []
    for i in range(count):
        session.set_learning_rate(0.01 * (i + 1))
        made.append(float(session.step(X[i], Y[i])))
    return made


def weights(session):
    value = session.to_buffer(trainable_only=False)
    return np.array(value.numpy())


def test_steps_are_those_of_the_cpu(folder):
    with opened(folder) as gpu, opened(folder, "cpu") as cpu:
        np.testing.assert_allclose(losses(gpu), losses(cpu), rtol=1e-5)
        np.testing.assert_allclose(weights(gpu), weights(cpu), rtol=1e-4, atol=1e-6)


def test_a_rate_of_zero_moves_nothing(folder):
    with opened(folder) as session:
        losses(session)
        before = weights(session)
        session.set_learning_rate(0.0)
        session.step(X[0], Y[0])
        np.testing.assert_array_equal(weights(session), before)


def test_a_batch_that_is_not_finite_changes_nothing(folder):
    with opened(folder) as session:
        losses(session)
        before = weights(session)
        session.step(np.full_like(X[0], np.nan), Y[0])
        assert session.skipped_batches == 1
        np.testing.assert_array_equal(weights(session), before)


def test_a_run_goes_on_on_the_cpu_and_back(folder, tmp_path):
    with opened(folder, "cpu") as session:
        expected = losses(session)
    found = []
    for i, device in enumerate(["cuda", "cpu", "cuda", "cpu", "cuda"]):
        source = folder if i == 0 else tmp_path / "state"
        graphs = (
            []
            if i == 0
            else [folder / f"{n}_model.onnx" for n in ("training", "eval", "optimizer")]
        )
        with onnxtrain.TrainingSession(source, *graphs, device=device) as session:
            session.set_learning_rate(0.01 * (i + 1))
            found.append(float(session.step(X[i], Y[i])))
            session.save_checkpoint(tmp_path / "state", include_optimizer_state=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_module_and_optimizer(folder):
    with opened(folder) as gpu, opened(folder, "cpu") as cpu:
        for session in (gpu, cpu):
            for i in range(4):
                session.train_step(X[i], Y[i])
                if i % 2:
                    session.optimizer_step()
                    session.lazy_reset_grad()
        np.testing.assert_allclose(weights(gpu), weights(cpu), rtol=1e-4, atol=1e-6)


def test_fit_evaluate_and_export(folder, tmp_path):
    data, made = (X.reshape(-1, 8), Y.reshape(-1)), []
    for device in ("cpu", "cuda"):
        with opened(folder, device) as session:
            onnxtrain.fit(session, data, 2, batch_size=16, shuffle=False, validation=data)
            session.export_model_for_inferencing(tmp_path / f"{device}.onnx", ["scores"])
        model = ort.InferenceSession(
            tmp_path / f"{device}.onnx", providers=["CPUExecutionProvider"]
        )
        made += model.run(None, {"x": X[0]})
    np.testing.assert_allclose(made[0], made[1], rtol=1e-3, atol=1e-4)


def test_cached_features(tmp_path_factory, folder):
    """The body is frozen, computed once for each sample, and only the last layer trains."""
    made = tmp_path_factory.mktemp("cached")
    onnxtrain.prepare(
        folder / "forward.onnx", made, train=["w2", "b2"], loss="cross_entropy", optimizer="sgd",
        target="cuda", outputs=[],
    )  # fmt: skip
    data, found = (X.reshape(-1, 8), Y.reshape(-1)), []
    for device in ("cpu", "cuda"):
        with onnxtrain.TrainingSession(made, device=device) as session:
            onnxtrain.fit(session, data, 3, batch_size=16, shuffle=False, cache_features=True)
            found.append(weights(session))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)

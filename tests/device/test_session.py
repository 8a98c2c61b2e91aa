"""TrainingSession: all of training in one object, as other languages have it."""

import shutil

import numpy as np
import onnxruntime as ort
import pytest
from small_runs import GOLDEN, assert_same, gradients, open_session, parameters, reopened, samples

from onnxtrain.api import CheckpointState, Module, Optimizer, TrainingSession
from onnxtrain.device.random_state import set_seed
from onnxtrain.errors import (
    ArgumentError,
    CheckpointError,
    InputError,
    ModelError,
    StateError,
)

MODELS = ["mlp", "head", "cnn"]
GRAPHS = ["training_model", "eval_model", "optimizer_model", "step_model"]


def graphs(model, *names):
    return {name.replace("training", "train"): GOLDEN / model / f"{name}.onnx" for name in names}


def pair(model="mlp", **options):
    """Two sessions that draw the same random numbers."""
    sessions = []
    for _ in range(2):
        set_seed(1)
        sessions.append(TrainingSession.from_folder(GOLDEN / model, **options))
    return sessions


# ---- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_from_files_from_memory_and_from_a_folder(model) -> None:
    files = graphs(model, *GRAPHS)
    checkpoint = GOLDEN / model / "checkpoint"
    contents = {name: path.read_bytes() for name, path in files.items()}
    sessions = []
    for make in (
        lambda: TrainingSession.from_folder(GOLDEN / model),
        lambda: TrainingSession.from_folder(str(GOLDEN / model)),
        lambda: TrainingSession(checkpoint, **files),
        lambda: TrainingSession(CheckpointState.load_checkpoint(checkpoint), **files),
        lambda: TrainingSession(checkpoint.read_bytes(), **contents),
    ):
        set_seed(4)
        sessions.append(make())
        sessions[-1].step(*samples(model=model))
    for other in sessions[1:]:
        assert_same(sessions[0], other)


def test_a_prefix_and_fewer_files(tmp_path) -> None:
    for name in ("training_model.onnx", "checkpoint"):
        shutil.copy(GOLDEN / "mlp" / name, tmp_path / f"my_{name}")
    session = TrainingSession.from_folder(tmp_path, prefix="my_")
    assert session.optimizer is None
    session.train_step(*samples())
    for refused, message in (
        (lambda: session.eval_step(*samples()), "no evaluation graph"),
        (lambda: session.optimizer_step(), "no optimizer graph"),
        (lambda: session.step(*samples()), "no optimizer graph"),
        (lambda: session.get_learning_rate(), "no optimizer"),
        (lambda: session.set_learning_rate(1), "no optimizer"),
        (lambda: session.scheduler_step(), "no optimizer"),
        (lambda: session.export_model_for_inferencing(None, ["output"]), "no evaluation graph"),
    ):
        with pytest.raises(StateError, match=message):
            refused()
    with pytest.raises(ModelError, match=r"no 'training_model\.onnx'"):
        TrainingSession.from_folder(tmp_path)
    with pytest.raises(ModelError, match="no folder"):
        TrainingSession.from_folder(tmp_path / "nowhere")
    (tmp_path / "my_checkpoint").unlink()
    with pytest.raises(ArgumentError, match="no 'my_checkpoint'"):
        TrainingSession.from_folder(tmp_path, prefix="my_")


def test_a_folder_with_a_nominal_checkpoint_alone(tmp_path) -> None:
    shutil.copytree(GOLDEN / "mlp", tmp_path / "a")
    (tmp_path / "a" / "checkpoint").unlink()
    session = TrainingSession.from_folder(tmp_path / "a")
    for refused in (session.step, session.train_step, session.eval_step):
        with pytest.raises(StateError, match="load the model parameters first"):
            refused(*samples())
    session.from_buffer(open_session().to_buffer(trainable_only=False), trainable_only=False)
    assert_same_steps(session, open_session())


def assert_same_steps(one, other, model="mlp"):
    for step in range(3):
        data = samples(model=model, seed=step)
        assert one.step(*data)[0] == other.step(*data)[0]
    assert_same(one, other)


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_step_is_training_update_and_reset(model) -> None:
    fused, apart = pair(model)
    for step in range(5):
        data = samples(model=model, seed=step)
        expected = apart.train_step(*data)
        apart.optimizer_step()
        apart.lazy_reset_grad()
        for ours, theirs in zip(fused.step(*data), expected, strict=True):
            assert np.array_equal(ours, theirs)
    assert_same(fused, apart)
    assert fused.optimizer.step_count == 5


@pytest.mark.parametrize("model", MODELS)
def test_a_step_without_its_graph(model) -> None:
    set_seed(1)
    plain = TrainingSession(GOLDEN / model / "checkpoint", **graphs(model, *GRAPHS[:3]))
    fused, _ = pair(model)
    plain.train_step(*samples(model=model, seed=9))  # not used, as step does not accumulate
    fused.train_step(*samples(model=model, seed=9))
    assert_same_steps(fused, plain, model)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_with_its_graph_alone(model) -> None:
    set_seed(1)
    alone = TrainingSession(
        GOLDEN / model / "checkpoint", **graphs(model, "training_model", "step_model")
    )
    assert_same_steps(alone, pair(model)[0], model)
    with pytest.raises(StateError, match="no optimizer graph"):
        alone.optimizer_step()


def test_training_and_fused_steps_mix() -> None:
    mixed, apart = pair()
    for step in range(6):
        data = samples(seed=step)
        if step % 2:
            mixed.step(*data)
        else:
            mixed.train_step(*data)
            mixed.optimizer_step()
            mixed.lazy_reset_grad()
        apart.step(*data)
    assert_same(mixed, apart)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_leaves_accumulated_gradients_alone(fused) -> None:
    session = open_session()
    if not fused:
        session._fused = None
    session.train_step(*samples(seed=1))
    before = gradients(session.module)
    session.step(*samples(seed=2))
    assert all(np.array_equal(g, before[n]) for n, g in gradients(session.module).items())
    # Accumulation goes on with them, or begins anew if that was asked for before the step.
    session.train_step(*samples(seed=3))
    both = gradients(session.module)
    session.lazy_reset_grad()
    session.step(*samples(seed=2))
    session.train_step(*samples(seed=3))
    alone = gradients(session.module)
    assert all(np.abs(both[n] - before[n]).max() > 1e-3 for n in both)
    assert any(np.abs(both[n] - alone[n]).max() > 1e-2 for n in both)


def test_accumulated_steps_are_one_large_step() -> None:
    x, labels = samples(64)
    parts, whole = open_session("head"), open_session("head")
    for i in range(0, 64, 16):
        parts.train_step(x[i : i + 16], labels[i : i + 16])
    for _, parameter in parts.state.parameters:
        if parameter.requires_grad:
            parameter.grad[:] /= 4
    parts.optimizer_step()
    whole.step(x, labels)
    for name, value in parameters(parts).items():
        np.testing.assert_allclose(value, whole.get_parameter(name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("step", ["train_step", "eval_step", "step"])
def test_inputs_by_position_and_by_name(step) -> None:
    x, labels = samples(5)
    expected = getattr(open_session(), step)(x, labels)
    assert isinstance(expected[0], np.ndarray) and expected[0].shape == ()
    for given, named in (
        ((), {"input": x, "labels": labels}),
        ((x,), {"labels": labels}),
        (({"labels": labels, "input": x},), {}),
    ):
        assert getattr(open_session(), step)(*given, **named)[0] == expected[0]
    values = [ort.OrtValue.ortvalue_from_numpy(v) for v in (x, labels)]
    loss, scores = getattr(open_session(), step)(*values)
    assert isinstance(loss, ort.OrtValue) and loss.numpy() == expected[0]
    assert np.array_equal(scores.numpy(), expected[1])


@pytest.mark.parametrize("step", ["train_step", "eval_step", "step"])
def test_wrong_inputs_change_nothing(step) -> None:
    session = open_session("cnn")
    session.step(*samples(model="cnn"))
    before = session.state.to_bytes(include_optimizer_state=True)
    x, labels = samples(5, "cnn")
    for given in ((x,), (labels, x), (x, labels[:4]), (x[:, 0], labels), (x, labels + 0.5)):
        with pytest.raises(InputError, match=r"labels: int64 \[N\]|'N' is 5"):
            getattr(session, step)(*given)
    assert session.state.to_bytes(include_optimizer_state=True) == before
    getattr(session, step)(x, labels)


def test_names() -> None:
    session = open_session()
    assert session.input_names() == session.input_names(training=False) == ["input", "labels"]
    assert session.output_names()[1:] == session.output_names(training=False)[1:] == ["output"]


def test_the_mode_of_the_module_does_not_matter() -> None:
    session = open_session("cnn")
    session.module.eval()
    first, second = (session.train_step(*samples(model="cnn"))[1] for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("step", ["train_step", "eval_step", "step"])
def test_a_batch_of_nothing_is_refused(step) -> None:
    session = open_session()
    x, labels = samples(1)
    with pytest.raises(InputError, match="'input' has no samples"):
        getattr(session, step)(x[:0], labels[:0])
    assert np.isfinite(getattr(session, step)(x, labels)[0])


# ---- learning rate -------------------------------------------------------------------------------


def test_learning_rate_and_scheduler() -> None:
    session = open_session()
    assert session.get_learning_rate() == float(np.float32(0.001))
    session.set_learning_rate(0.5)
    assert session.get_learning_rate() == session.optimizer.get_learning_rate() == 0.5
    with pytest.raises(StateError, match="register_linear_lr_scheduler"):
        session.scheduler_step()
    session.register_linear_lr_scheduler(1, 3, 0.25)
    rates = [session.get_learning_rate()]
    for _ in range(4):
        session.step(*samples(4))
        session.scheduler_step()
        rates.append(session.get_learning_rate())
    assert rates == [0, 0.25, 0.125, 0, 0]
    with pytest.raises(ArgumentError, match="wrong order"):
        session.register_linear_lr_scheduler(3, 1, 0.25)


# ---- parameters ----------------------------------------------------------------------------------


def test_parameters_are_got_as_copies_and_set() -> None:
    session = open_session("head")
    weight = session.get_parameter("fc2.weight")
    weight[:] = 0
    assert session.get_parameter("fc2.weight").any()
    session.update_parameter("fc2.weight", weight)
    session.update_parameter("fc2.bias", ort.OrtValue.ortvalue_from_numpy(np.float32([1, 2, 3])))
    assert np.array_equal(session.eval_step(*samples(2))[1], np.float32([[1, 2, 3]] * 2))
    assert session.get_parameter_type_and_shape("fc1.weight") == (np.float32, (16, 8))
    for refused in (session.get_parameter, session.get_parameter_type_and_shape):
        with pytest.raises(KeyError, match="Parameter fc3 not found"):
            refused("fc3")
    with pytest.raises(StateError, match="shape"):
        session.update_parameter("fc2.bias", np.zeros(4, np.float32))


def test_buffers() -> None:
    one, other = open_session(), open_session()
    one.step(*samples())
    buffer = one.to_buffer()
    assert buffer.shape() == [one.get_parameters_size()]
    other.from_buffer(buffer)
    assert all(np.array_equal(v, other.get_parameter(n)) for n, v in parameters(one).items())


def test_properties() -> None:
    session = open_session()
    session.add_property("epoch", np.int32(3))
    assert session.get_property("epoch") == 3
    again = reopened(session)
    assert again.get_property("epoch") == 3
    with pytest.raises(KeyError):
        session.get_property("nothing")


# ---- export --------------------------------------------------------------------------------------


def test_export_to_a_file_and_to_bytes(tmp_path) -> None:
    session = open_session()
    session.step(*samples())
    path = tmp_path / "m.onnx"
    assert session.export_model_for_inferencing(path, ["output"]) is None
    content = session.export_model_for_inferencing(None, ["output"])
    assert content == path.read_bytes()
    scores = ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(
        ["output"], {"input": samples()[0]}
    )[0]
    np.testing.assert_allclose(scores, session.eval_step(*samples())[1], rtol=1e-5, atol=1e-6)


# ---- what does not belong together ---------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_another_model(name) -> None:
    for other in {"head", "cnn"}:
        files = graphs("mlp", *GRAPHS) | graphs(other, name)
        with pytest.raises(CheckpointError, match=r"of generation .* belong together"):
            TrainingSession(GOLDEN / "mlp" / "checkpoint", **files)
        # Graphs of earlier versions have no generation, but other names and shapes.
        old = {
            n: file.read_bytes().replace(b'"generation"', b'"generatiom"')
            for n, file in files.items()
        }
        with pytest.raises(CheckpointError, match=r"^((?!generation).)*belong together"):
            TrainingSession(GOLDEN / "mlp" / "checkpoint", **old)


def test_graphs_of_two_optimizers(tmp_path) -> None:
    """The names of the states are changed in the bytes of the step graph."""
    step = (GOLDEN / "head" / "step_model.onnx").read_bytes().replace(b".momentum0", b".m0mentum0")
    files = graphs("head", *GRAPHS) | {"step_model": step}
    state = CheckpointState.load_checkpoint(GOLDEN / "head" / "checkpoint")
    state.generation = None
    with pytest.raises(ModelError, match="of different optimizers"):
        TrainingSession(state, **files)


def test_graphs_of_a_later_format() -> None:
    training = (GOLDEN / "mlp" / "training_model.onnx").read_bytes()
    newer = training.replace(b'{"format": 1', b'{"format": 2')
    assert newer != training
    with pytest.raises(ModelError, match="is of format 2"):
        TrainingSession(GOLDEN / "mlp" / "checkpoint", newer)


# ---- the ORT format ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS)
def ort_folder(request, tmp_path_factory):
    """A golden folder with its graphs in the ORT format."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copy(GOLDEN / request.param / "checkpoint", folder)
    for name in GRAPHS:
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(folder / f"{name}.ort")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.save_model_format", "ORT")
        ort.InferenceSession(
            GOLDEN / request.param / f"{name}.onnx", options, providers=["CPUExecutionProvider"]
        )
    return request.param, folder


@pytest.mark.slow
@pytest.mark.parametrize("memory", [False, True], ids=["paths", "memory"])
def test_graphs_in_the_ort_format(ort_folder, memory) -> None:
    model, folder = ort_folder
    set_seed(1)
    if memory:
        session = TrainingSession(
            (folder / "checkpoint").read_bytes(),
            *((folder / f"{name}.ort").read_bytes() for name in GRAPHS),
        )
    else:
        session = TrainingSession.from_folder(folder)
    expected = pair(model)[0]
    data = samples(model=model)
    for step in ("step", "train_step", "step", "train_step", "eval_step"):
        ours, theirs = (getattr(s, step)(*data)[0] for s in (session, expected))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        session.optimizer_step(), expected.optimizer_step()
    assert session.input_names() == ["input", "labels"]


def test_constants_in_the_ort_format_do_not_change(ort_folder) -> None:
    model, folder = ort_folder
    session = TrainingSession.from_folder(folder)
    trained = next(n for n, p in session.state.parameters if p.requires_grad)
    session.update_parameter(trained, -session.get_parameter(trained))
    if model != "head":
        return
    with pytest.raises(StateError, match=r"'fc1.weight' is a constant of .*\.ort"):
        session.update_parameter("fc1.weight", np.ones((16, 8), np.float32))
    buffer = session.to_buffer(trainable_only=False)
    session.from_buffer(buffer, trainable_only=False)  # nothing changes
    before = session.state.to_bytes()
    with pytest.raises(StateError, match="is a constant of"):
        session.from_buffer(buffer.numpy() + 1, trainable_only=False)
    assert session.state.to_bytes() == before


def test_a_graph_of_another_model_in_the_ort_format(ort_folder) -> None:
    model, folder = ort_folder
    other = "mlp" if model == "cnn" else "cnn"
    state = CheckpointState.load_checkpoint(GOLDEN / other / "checkpoint")
    with pytest.raises(CheckpointError, match="belong together"):
        Module(folder / "training_model.ort", state)
    module = Module(GOLDEN / other / "training_model.onnx", state)
    with pytest.raises(CheckpointError, match="belong together"):
        Optimizer(folder / "optimizer_model.ort", module)


def test_a_damaged_graph_in_the_ort_format(ort_folder) -> None:
    _, folder = ort_folder
    content = (folder / "training_model.ort").read_bytes()
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(ModelError, match="model in memory"):
        Module(content[: len(content) // 2], state)


def test_a_folder_is_enough(tmp_path) -> None:
    shutil.copytree(GOLDEN / "mlp", tmp_path / "artifacts")
    session = TrainingSession(tmp_path / "artifacts")
    same = TrainingSession.from_folder(tmp_path / "artifacts")
    assert session.input_names() == same.input_names()
    assert session.optimizer is not None
    with pytest.raises(ModelError, match="there is no folder"):
        TrainingSession(tmp_path / "nothing")
    with pytest.raises(ArgumentError, match="train_model is missing"):
        TrainingSession((GOLDEN / "mlp" / "checkpoint").read_bytes())

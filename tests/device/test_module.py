"""Module: the semantics of upstream, each with what is corrected."""

import inspect
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from small_runs import GOLDEN, gradients, open_module, samples

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import ArgumentError, CheckpointError, InputError, ModelError, StateError

ORT_VALUE = ort.OrtValue.ortvalue_from_numpy

# ---- construction --------------------------------------------------------------------------------


def test_arguments_have_upstreams_names_order_and_defaults() -> None:
    found = inspect.signature(Module).parameters
    names = ["train_model_uri", "state", "eval_model_uri", "device", "session_options"]
    assert list(found)[:5] == names
    assert [found[n].default for n in names[2:]] == [None, "cpu", None]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(found.values())[5:])


def test_state_has_to_be_a_state() -> None:
    with pytest.raises(TypeError, match="CheckpointState, not dict"):
        Module(GOLDEN / "mlp" / "training_model.onnx", {})  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [str, Path, bytes, bytearray, memoryview])
def test_models_come_from_paths_or_from_memory(form) -> None:
    def given(name):
        path = GOLDEN / "head" / f"{name}.onnx"
        return form(path) if form in (str, Path) else form(path.read_bytes())

    state = CheckpointState.load_checkpoint((GOLDEN / "head" / "checkpoint").read_bytes())
    module = Module(given("training_model"), state, given("eval_model"))
    optimizer = Optimizer(given("optimizer_model"), module)
    expected = open_module("head")
    assert module(*samples())[0] == expected(*samples())[0]
    optimizer.step()
    assert module.eval()(*samples())[0] < expected.eval()(*samples())[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [("nowhere.onnx", "no model at"), (b"\xff" * 40, "model in memory"), (3, "not int")],
)
def test_what_is_no_model_is_an_error(source, message) -> None:
    state = CheckpointState.load_checkpoint(GOLDEN / "mlp" / "checkpoint")
    with pytest.raises(ModelError, match=message):
        Module(source, state)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "no CUDAExecutionProvider; it has .*CPUExecutionProvider"),
        ("cuda:1", "no CUDAExecutionProvider"),
        ("gpu", "'cuda:<number>' or a list"),
        ("cuda:x", "'cuda:<number>' or a list"),
        ("cpu:1", "'cuda:<number>' or a list"),
        ([], "a list of providers"),
        (0, "a list of providers"),
        (["TensorrtExecutionProvider"], "no TensorrtExecutionProvider"),
        ([("CUDAExecutionProvider", {"device_id": 1})], "no CUDAExecutionProvider"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(device, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_module(device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", ["CPUExecutionProvider"]])
def test_the_cpu_in_its_spellings(device) -> None:
    assert open_module(device=device)(*samples())[0] == open_module()(*samples())[0]


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "head", "cnn"])
def test_names_are_those_of_the_user(model) -> None:
    module = open_module(model)
    for mode in (True, False):
        module.train(mode)
        assert module.input_names() == ["input", "labels"]
        loss, output = module.output_names()
        assert loss.startswith("onnx::loss::") and output == "output"


def test_names_in_evaluation_mode_without_a_graph() -> None:
    module = open_module(evaluation=False).eval()
    assert module.input_names() == [] and module.output_names() == []


# ---- mode ----------------------------------------------------------------------------------------


def test_modes() -> None:
    module = open_module()
    assert module.training is True
    assert module.eval() is module and module.training is False
    assert module.train() is module and module.training is True
    assert module.train(False) is module and module.training is False


@pytest.mark.parametrize("wrap", [np.asarray, ORT_VALUE], ids=["arrays", "OrtValues"])
def test_evaluation_without_a_graph_is_an_error(wrap) -> None:
    """Upstream crashed on arrays."""
    module = open_module(evaluation=False).eval()
    with pytest.raises(StateError, match="no evaluation graph"):
        module(*map(wrap, samples()))


def test_evaluation_sees_what_training_makes() -> None:
    module = open_module()
    optimizer = Optimizer(GOLDEN / "mlp" / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    data = samples()
    before = module.eval()(*data)[0]
    module.train()(*data)
    optimizer.step()
    assert module.eval()(*data)[0] < before


def test_evaluation_drops_nothing_and_changes_nothing() -> None:
    module = open_module("cnn")
    data = samples(model="cnn")
    module(*data)
    held = {n: p.data.copy() for n, p in module.state.parameters}
    first, second = (module.eval()(*data)[1] for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(module.train()(*data)[1], module(*data)[1])
    module.eval()(*data)
    for name, value in held.items():
        if not name.startswith(("bn.mean", "bn.var")):
            assert np.array_equal(module.state.parameters[name].data, value)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_arrays_give_arrays(mode) -> None:
    result = open_module().train(mode)(*samples(5))
    assert type(result) is tuple
    loss, scores = result
    assert type(loss) is np.ndarray and loss.shape == () and loss.dtype == np.float32
    assert type(scores) is np.ndarray and scores.shape == (5, 3)


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("inner", [False, True], ids=["OrtValue", "inner value"])
def test_ortvalues_give_ortvalues(mode, inner) -> None:
    given = [ORT_VALUE(array) for array in samples(5)]
    if inner:
        given = [value._ortvalue for value in given]
    loss, scores = open_module().train(mode)(*given)
    assert isinstance(loss, ort.OrtValue) and isinstance(scores, ort.OrtValue)
    expected = open_module().train(mode)(*samples(5))
    assert loss.numpy() == expected[0] and np.array_equal(scores.numpy(), expected[1])


def test_an_array_among_ortvalues_gives_arrays() -> None:
    x, labels = samples(5)
    for given in ((x, ORT_VALUE(labels)), (ORT_VALUE(x), labels)):
        assert open_module()(*given)[0] == open_module()(x, labels)[0]


def test_lists_are_taken() -> None:
    x, labels = samples(5)
    assert open_module()(x.tolist(), labels.tolist())[0] == open_module()(x, labels)[0]


def test_inputs_go_by_name() -> None:
    x, labels = samples(5)
    expected = open_module()(x, labels)[0]
    assert open_module()(labels=labels, input=x)[0] == expected
    assert open_module()(x, labels=labels)[0] == expected
    assert open_module()({"labels": labels, "input": x})[0] == expected


def test_results_are_the_callers_own() -> None:
    module = open_module()
    first = module(*samples(5))
    kept = [value.copy() for value in first]
    module(*samples(5, seed=1))
    assert all(np.array_equal(a, b) for a, b in zip(first, kept, strict=True))


@pytest.mark.parametrize("count", [1, 2, 7, 64, 3])
def test_batches_of_any_size(count) -> None:
    module = open_module()
    for size in (count, 4, count):
        loss, scores = module(*samples(size))
        assert scores.shape == (size, 3) and np.isfinite(loss)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "big-endian", "read-only", "unaligned"])
def test_arrays_of_any_layout(layout) -> None:
    x, labels = samples(5)
    copies = {
        "transposed": np.asfortranarray(x),
        "sliced": np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
        "big-endian": x.astype(">f4"),
        "read-only": x.copy(),
        "unaligned": np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:]
        .view(np.float32)
        .reshape(5, 8),
    }
    given = copies[layout]
    given.flags.writeable = False
    assert open_module()(given, labels)[0] == open_module()(x, labels)[0]


# ---- accumulation --------------------------------------------------------------------------------


def test_gradients_accumulate_until_they_are_reset() -> None:
    first, second = samples(6, seed=1), samples(3, seed=2)
    one, two = open_module(), open_module()
    one(*first)
    two(*second)
    a, b = gradients(one), gradients(two)
    one(*second)
    both = gradients(one)
    for name, gradient in both.items():
        np.testing.assert_allclose(gradient, a[name] + b[name], rtol=1e-6, atol=1e-7)
    one.lazy_reset_grad()
    for name, gradient in gradients(one).items():  # until the next call
        assert np.array_equal(gradient, both[name])
    one(*second)
    for name, gradient in gradients(one).items():
        assert np.array_equal(gradient, b[name])


def test_the_first_call_overwrites() -> None:
    module = open_module()
    for _, parameter in module.state.parameters:
        parameter.grad[:] = np.nan
    module(*samples())
    assert all(np.isfinite(g).all() for g in gradients(module).values())


def test_neither_a_step_nor_evaluation_resets() -> None:
    module = open_module()
    optimizer = Optimizer(GOLDEN / "mlp" / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0)
    module(*samples())
    once = gradients(module)
    optimizer.step()
    module.eval()(*samples())
    module.train()(*samples())
    for name, gradient in gradients(module).items():
        np.testing.assert_allclose(gradient, 2 * once[name], rtol=1e-6)


def test_a_call_that_is_refused_changes_nothing() -> None:
    module = open_module("cnn")
    module(*samples(model="cnn"))
    held = {n: p.data.copy() for n, p in module.state.parameters}
    before = gradients(module)
    module.lazy_reset_grad()
    with pytest.raises(InputError):
        module(*samples(model="mlp"))
    for name, gradient in gradients(module).items():
        assert np.array_equal(gradient, before[name])
    assert all(np.array_equal(module.state.parameters[n].data, v) for n, v in held.items())


# ---- what belongs together -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "training", "message"),
    [
        ("mlp", "cnn", "has the parameter 'conv.weight', and the checkpoint does not"),
        ("head", "mlp", "trains 'fc1.weight', which the checkpoint has as frozen"),
        ("mlp", "head", "'fc1.weight' is a constant in .*, and the checkpoint has it as"),
    ],
)
def test_a_graph_and_a_checkpoint_of_different_models(checkpoint, training, message) -> None:
    state = CheckpointState.load_checkpoint(GOLDEN / checkpoint / "checkpoint")
    with pytest.raises(CheckpointError, match="is of generation"):
        Module(GOLDEN / training / "training_model.onnx", state)
    state.generation = None
    with pytest.raises(CheckpointError, match=message):
        Module(GOLDEN / training / "training_model.onnx", state)


def test_an_evaluation_graph_of_another_model() -> None:
    state = CheckpointState.load_checkpoint(GOLDEN / "mlp" / "checkpoint")
    with pytest.raises(CheckpointError, match="do not belong together"):
        Module(GOLDEN / "mlp" / "training_model.onnx", state, GOLDEN / "cnn" / "eval_model.onnx")


# ---- export --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "head", "cnn"])
def test_the_exported_model_is_the_evaluated_one(model, tmp_path) -> None:
    module = open_module(model)
    x, labels = samples(model=model)
    module(x, labels)
    module.export_model_for_inferencing(tmp_path / "m.onnx", ["output"])
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input"]
    (scores,) = session.run(None, {"input": x})
    np.testing.assert_allclose(scores, module.eval()(x, labels)[1], rtol=1e-5, atol=1e-6)


def test_export_without_an_evaluation_graph(tmp_path) -> None:
    with pytest.raises(StateError, match="no evaluation graph"):
        open_module(evaluation=False).export_model_for_inferencing(tmp_path / "m.onnx", ["output"])


def test_parameters_of_two_modules_on_one_state_are_the_same() -> None:
    module = open_module()
    other = Module(GOLDEN / "mlp" / "training_model.onnx", module.state)
    Optimizer(GOLDEN / "mlp" / "optimizer_model.onnx", module)
    module.state.parameters["fc1.weight"].data[:] = 0
    assert module(*samples())[0] == other(*samples())[0]


def test_what_calls_returned_stays_as_it_was() -> None:
    module = open_module("head")
    optimizer = Optimizer(GOLDEN / "head" / "optimizer_model.onnx", module)
    results, copies = [], []
    for _ in range(4):
        results.append(module(*samples()))
        copies.append([value.copy() for value in results[-1]])
        optimizer.step()
        module.lazy_reset_grad()
    losses = [float(loss) for loss, *_ in copies]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4
    for made, copied in zip(results, copies, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(made, copied, strict=True))

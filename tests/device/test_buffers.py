"""All parameters in one buffer, and nominal states, which are completed by one."""

import numpy as np
import onnxruntime as ort
import pytest
from small_runs import GOLDEN, open_module, samples

from onnxtrain.api import CheckpointState, Optimizer
from onnxtrain.errors import ArgumentError, StateError

ORT_VALUE = ort.OrtValue.ortvalue_from_numpy


# ---- buffers -------------------------------------------------------------------------------------


def test_sizes_and_their_defaults() -> None:
    module = open_module("head")
    trained, all_ = 16 * 3 + 3, 8 * 16 + 16 + 16 * 3 + 3
    assert module.get_parameters_size() == trained
    assert module.get_parameters_size(trainable_only=False) == all_
    assert module.get_contiguous_parameters().shape() == [all_]
    assert module.get_contiguous_parameters(trainable_only=True).shape() == [trained]


def test_the_buffer_is_in_the_order_of_the_graph() -> None:
    module = open_module()
    buffer = module.get_contiguous_parameters()
    assert isinstance(buffer, ort.OrtValue) and buffer.data_type() == "tensor(float)"
    assert buffer.device_name() == "cpu"
    names = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    values = [module.state.parameters[name].data.reshape(-1) for name in names]
    assert np.array_equal(buffer.numpy(), np.concatenate(values))
    buffer.numpy()[:] = 0
    assert module.state.parameters["fc1.weight"].data.any()  # it is a copy


@pytest.mark.parametrize("trainable_only", [True, False])
@pytest.mark.parametrize(
    "form",
    [
        lambda v: v,
        lambda v: v._ortvalue,
        lambda v: v.numpy(),
        lambda v: v.numpy().reshape(1, -1, 1),
    ],
    ids=["OrtValue", "inner value", "array", "another shape"],
)
def test_buffers_go_back(form, trainable_only) -> None:
    """Upstream took its inner value alone."""
    module = open_module("head")
    buffer = module.get_contiguous_parameters(trainable_only)
    changed = form(ORT_VALUE(buffer.numpy() * 2))
    before = {n: p.data.copy() for n, p in module.state.parameters}
    module.copy_buffer_to_parameters(changed, trainable_only)
    for name, parameter in module.state.parameters:
        factor = 1 if trainable_only and not parameter.requires_grad else 2
        assert np.array_equal(parameter.data, factor * before[name])
    module(*samples())
    module.copy_buffer_to_parameters(buffer, trainable_only)
    assert np.array_equal(module.get_contiguous_parameters(trainable_only).numpy(), buffer.numpy())
    assert module.eval()(*samples())[0] == open_module("head").eval()(*samples())[0]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (np.zeros(50, np.float32), "has 50 elements, and 51 are needed"),
        (np.zeros(51), "float32, not float64"),
        ([0.0] * 51, "not list"),
        (None, "not NoneType"),
    ],
)
def test_a_buffer_that_does_not_fit_changes_nothing(buffer, message) -> None:
    module = open_module("head")
    before = module.get_contiguous_parameters().numpy().copy()
    with pytest.raises(ArgumentError, match=message):
        module.copy_buffer_to_parameters(buffer)
    assert np.array_equal(module.get_contiguous_parameters().numpy(), before)


def test_the_buffer_of_a_model_with_statistics() -> None:
    module = open_module("cnn")
    module(*samples(model="cnn"))
    buffer = module.get_contiguous_parameters().numpy()
    assert buffer.size == module.get_parameters_size(False)
    assert buffer.size == module.get_parameters_size() + 8
    other = open_module("cnn")
    other.copy_buffer_to_parameters(buffer, trainable_only=False)
    for name, parameter in module.state.parameters:
        assert np.array_equal(other.state.parameters[name].data, parameter.data), name


# ---- nominal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "head"])
def test_a_nominal_module_asks_for_parameters(model, tmp_path) -> None:
    module = open_module(model, "nominal_checkpoint")
    optimizer = Optimizer(GOLDEN / model / "optimizer_model.onnx", module)
    assert module.get_parameters_size(False) == open_module(model).get_parameters_size(False)
    assert optimizer.get_learning_rate() == pytest.approx(0.001)  # upstream crashed
    optimizer.set_learning_rate(0.5)
    for refused in (
        lambda: module(*samples()),
        lambda: module.eval()(*samples()),
        lambda: optimizer.step(),
        lambda: module.get_contiguous_parameters(),
        lambda: module.export_model_for_inferencing(tmp_path / "m.onnx", ["output"]),
        lambda: module.copy_buffer_to_parameters(np.zeros(195, np.float32)),
    ):
        with pytest.raises(StateError, match=r"Please load the model parameters first\."):
            refused()
        module.train()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["mlp", "head"])
def test_a_buffer_completes_a_nominal_module(model, tmp_path) -> None:
    complete, nominal = open_module(model), open_module(model, "nominal_checkpoint")
    optimizers = [
        Optimizer(GOLDEN / model / "optimizer_model.onnx", m) for m in (complete, nominal)
    ]
    optimizers[1].set_learning_rate(0.25)
    nominal.copy_buffer_to_parameters(complete.get_contiguous_parameters(), trainable_only=False)
    assert optimizers[1].get_learning_rate() == 0.25
    optimizers[0].set_learning_rate(0.25)
    assert not nominal.state.nominal
    for _, parameter in nominal.state.parameters:
        assert not parameter.requires_grad or not parameter.grad.any()
    for _ in range(2):
        assert complete(*samples())[0] == nominal(*samples())[0]
        for optimizer in optimizers:
            optimizer.step()
    assert np.array_equal(
        complete.get_contiguous_parameters().numpy(), nominal.get_contiguous_parameters().numpy()
    )
    CheckpointState.save_checkpoint(nominal.state, tmp_path / "c", include_optimizer_state=True)
    assert not CheckpointState.load_checkpoint(tmp_path / "c").nominal

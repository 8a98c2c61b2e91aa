"""Session options of the user, and a fixed size of batches."""

import numpy as np
import onnxruntime as ort
import pytest
from small_runs import GOLDEN, open_module, samples

from onnxtrain.api import Optimizer
from onnxtrain.errors import ArgumentError, InputError

SHARED = ort.SessionOptions()


# ---- session options -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "head", "cnn"])
def test_one_options_object_serves_all_sessions(model) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    module = open_module(model, session_options=options)
    optimizer = Optimizer(GOLDEN / model / "optimizer_model.onnx", module)
    module(*samples(model=model))
    optimizer.step()
    loss = module.eval()(*samples(model=model))[0]
    plain = open_module(model).eval()(*samples(model=model))[0]
    assert np.isfinite(loss) and loss != plain


def test_only_threads_of_the_optimizer_stop_at_once() -> None:
    module = open_module("mlp")
    optimizer = Optimizer(GOLDEN / "mlp" / "optimizer_model.onnx", module)
    module(*samples())
    optimizer.step()

    def stops(graph):
        options = graph.session.get_session_options()
        try:
            return options.get_session_config_entry("session.force_spinning_stop") == "1"
        except Exception:  # an entry that was not set
            return False

    assert not stops(module.training_executor.graph)
    assert stops(optimizer._graph)


def test_a_function_makes_options_for_each_session() -> None:
    made = []

    def options():
        made.append(ort.SessionOptions())
        made[-1].graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return made[-1]

    module = open_module("head", session_options=options)
    assert module(*samples())[0] == pytest.approx(open_module("head")(*samples())[0])
    module.eval()(*samples())
    assert len(made) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "not dict"),
        (lambda: None, "returned NoneType: it has to make new"),
        (lambda: SHARED, "the same options for two sessions"),
    ],
    ids=["dict", "None", "the same twice"],
)
def test_options_that_are_none(options, message) -> None:
    def use():
        module = open_module("head", session_options=options)
        module(*samples())
        module.eval()(*samples())

    with pytest.raises(ArgumentError, match=message):
        use()


# ---- batch_size ----------------------------------------------------------------------------------


def test_a_fixed_batch_size() -> None:
    module = open_module(batch_size=16)
    assert module(*samples(16))[0] == pytest.approx(open_module()(*samples(16))[0])
    module.eval()(*samples(16))
    with pytest.raises(InputError, match="has 8 samples, and batch_size=16 fixed it"):
        module(*samples(8))


def test_a_batch_size_that_follows_the_data() -> None:
    module, plain = open_module(batch_size="auto"), open_module()
    for size in (16, 5, 16):
        for mode in (True, False):
            ours, theirs = (m.train(mode)(*samples(size))[1] for m in (module, plain))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "many"])
def test_a_batch_size_that_is_none(size) -> None:
    with pytest.raises(ArgumentError, match="batch_size"):
        open_module(batch_size=size)


def test_a_batch_size_with_options_of_the_user() -> None:
    module = open_module(batch_size=16, session_options=ort.SessionOptions())
    assert np.isfinite(module(*samples(16))[0]) and np.isfinite(module.eval()(*samples(16))[0])
    with pytest.raises(ArgumentError, match="a function that makes new options"):
        open_module(batch_size="auto", session_options=ort.SessionOptions())
    module = open_module(batch_size="auto", session_options=ort.SessionOptions)
    assert np.isfinite(module(*samples(16))[0]) and np.isfinite(module(*samples(3))[0])


def test_passes_for_quantized_operators_run_where_there_are_any() -> None:
    """A model that is read from its file is not looked at, and keeps all of them."""
    from onnxtrain.device.run.session_settings import needless_optimizers

    assert needless_optimizers("step_model.onnx") is None
    for operator in (b"QuantizeLinear", b"DequantizeLinear", b"MatMulNBits", b"MatMulInteger"):
        assert needless_optimizers(b"\n\x04" + operator + b":\x00") is None
    assert "QDQSelectorActionTransformer" in (needless_optimizers(b"\n\x04MatMul:\x00") or ())

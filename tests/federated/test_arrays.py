"""Parameters as Flower's records, and back."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import GOLDEN
from flwr.app import Array, ArrayRecord

from onnxtrain import TrainingSession
from onnxtrain.api import CheckpointState
from onnxtrain.errors import ArgumentError, NonFiniteError, OnnxTrainError, StateError
from onnxtrain.federated import from_arrays, open_artifacts, to_arrays

BN = {"bn.weight", "bn.bias", "bn.mean", "bn.var"}
CNN = {"conv.weight", "conv.bias", "fc.weight", "fc.bias", *BN}


def session(name: str) -> TrainingSession:
    return TrainingSession.from_folder(GOLDEN / name)


@pytest.mark.parametrize(
    ("folder", "which", "names"),
    [
        ("cnn", "changing", CNN),
        ("cnn", "everything", CNN),
        ("cnn", "trainable", CNN - {"bn.mean", "bn.var"}),
        ("cnn", "no-batch-norm", CNN - BN),
        ("cnn", ["conv.*"], {"conv.weight", "conv.bias"}),
        ("cnn", ["!fc.*"], CNN - {"fc.weight", "fc.bias"}),
        ("cnn", lambda name: name.endswith("bias"), {"conv.bias", "bn.bias", "fc.bias"}),
        ("head", "changing", {"fc2.weight", "fc2.bias"}),
        ("head", "trainable", {"fc2.weight", "fc2.bias"}),
        ("head", "everything", {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}),
    ],
)  # fmt: skip
def test_which_parameters_are_taken(folder, which, names) -> None:
    assert set(to_arrays(session(folder), which)) == names


def test_a_record_sets_what_it_was_made_of() -> None:
    one, other = session("cnn"), session("cnn")
    one.set_learning_rate(0.1)
    x = np.random.default_rng(0).normal(size=(6, 1, 6, 6)).astype(np.float32)
    for _ in range(3):
        one.step(x, np.arange(6) % 3)
    before = other.eval_step(x, np.arange(6) % 3)[1]
    from_arrays(other, to_arrays(one))
    after = other.eval_step(x, np.arange(6) % 3)[1]
    assert np.array_equal(after, one.eval_step(x, np.arange(6) % 3)[1])
    assert not np.array_equal(before, after)


def test_a_record_holds_copies() -> None:
    held = session("mlp")
    record = to_arrays(held)
    held.state.parameters["fc1.bias"].data[:] = 7
    assert not (record["fc1.bias"].numpy() == 7).any()


def test_a_nominal_session_is_complete_after_a_record_of_everything() -> None:
    full = session("head")
    nominal = TrainingSession(
        GOLDEN / "head" / "nominal_checkpoint",
        *(GOLDEN / "head" / f"{n}.onnx" for n in ("training_model", "eval_model")),
    )
    with pytest.raises(StateError, match=r"no values for 'fc1\.bias'"):
        from_arrays(nominal, to_arrays(full))
    from_arrays(nominal, to_arrays(full, "everything"))
    x = np.ones((2, 8), np.float32)
    got, wanted = (s.eval_step(x, np.array([0, 1]))[1] for s in (nominal, full))
    assert np.array_equal(got, wanted)


def record_with(held: TrainingSession, **changed: np.ndarray) -> ArrayRecord:
    record = to_arrays(held)
    for name, array in changed.items():
        record[name.replace("__", ".")] = Array(array)
    return record


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"fc2__bias": np.zeros(4, np.float32)},
            ArgumentError,
            r"shape \[3\], and the received array \[4\]",
        ),
        ({"fc9__bias": np.zeros(3, np.float32)}, OnnxTrainError, "no parameter 'fc9.bias' here"),
        (
            {"fc2__bias": np.zeros(3, np.int64)},
            ArgumentError,
            "is float32, and the received array int64",
        ),
        ({"fc2__bias": np.full(3, 1e300)}, NonFiniteError, "values that do not fit float32"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, error, words) -> None:
    held = session("mlp")
    record = record_with(held, fc1__bias=np.ones(16, np.float32), **change)
    before = held.to_buffer().numpy().tobytes()
    with pytest.raises(error, match=words):
        from_arrays(held, record)
    assert held.to_buffer().numpy().tobytes() == before


def test_other_floats_are_converted_and_counters_passed_over() -> None:
    held = session("mlp")
    from_arrays(held, record_with(
        held, fc2__bias=np.array([0.5, 1, 2], np.float64), fc1__count=np.array(3, np.int64)
    ))  # fmt: skip
    assert held.get_parameter("fc2.bias").tolist() == [0.5, 1, 2]
    assert "fc1.count" not in to_arrays(held)


def test_bytes_that_are_no_array() -> None:
    held = session("mlp")
    record = to_arrays(held)
    record["fc2.bias"] = Array("float32", (3,), "numpy.ndarray", b"nothing")
    with pytest.raises(ArgumentError, match=r"'fc2\.bias' cannot be read"):
        from_arrays(held, record)


def test_a_state_alone_knows_less() -> None:
    state = CheckpointState.load_checkpoint(GOLDEN / "cnn" / "checkpoint")
    assert set(to_arrays(state, "trainable")) == CNN - {"bn.mean", "bn.var"}
    assert set(to_arrays(state, "everything")) == CNN
    for which in ("changing", "no-batch-norm", ["conv.*"]):
        with pytest.raises(StateError, match="TrainingSession"):
            to_arrays(state, which)
    record = to_arrays(state, "trainable")
    record["fc.bias"] = Array(np.array([1, 2, 3], np.float32))
    from_arrays(state, record)
    assert state.parameters["fc.bias"].data.tolist() == [1, 2, 3]


@pytest.mark.parametrize("which", ["all", ["nothing.*"], ["!nothing"], lambda name: False, [3]])
def test_a_choice_that_means_nothing(which) -> None:
    with pytest.raises(OnnxTrainError, match="which"):
        to_arrays(session("mlp"), which)


def test_only_states_have_parameters() -> None:
    with pytest.raises(ArgumentError, match="not of dict"):
        to_arrays({})
    with pytest.raises(OnnxTrainError, match="no artifacts at"):
        open_artifacts("nowhere")

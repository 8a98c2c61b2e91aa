"""What is fed to a graph: converted where nothing is lost, refused with names, shapes and types."""

import numpy as np
import onnxruntime as ort
import pytest
from small_runs import gradients, open_module, samples

from onnxtrain.errors import InputError

ORT_VALUE = ort.OrtValue.ortvalue_from_numpy


# ---- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint16, np.uint64, np.float64, np.float32])
def test_labels_of_another_type_are_converted(dtype) -> None:
    """Upstream took int64 alone."""
    x, labels = samples()
    assert open_module()(x, labels.astype(dtype))[0] == open_module()(x, labels)[0]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64, bool])
def test_inputs_of_another_type_are_converted_if_nothing_is_lost(dtype) -> None:
    x, labels = samples()
    x = np.round(x).astype(dtype)
    assert open_module()(x, labels)[0] == open_module()(x.astype(np.float32), labels)[0]


def test_nan_and_infinity_survive_a_conversion() -> None:
    x, labels = samples(2)
    x = np.round(x).astype(np.float64)
    x[0, 0], x[1, 1] = np.nan, np.inf
    assert np.isnan(open_module()(x, labels)[0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input", np.full((2, 8), 0.1), r"'input' is float32, but .* float64, and .*0\.1"),
        ("input", np.full((2, 8), 1e300), r"float64, and .*1e\+300.* at \[0, 0\] would change"),
        ("input", np.full((2, 8), 2**24 + 1), r"16777217.* would change; .*astype\('float32'\)"),
        ("labels", np.array([1, 0.5]), r"'labels' is int64, but .* float64, and .*0\.5.* at \[1\]"),
        ("labels", np.array([1, np.nan]), "nan.* would change"),
        ("labels", np.array([1, 2**63], np.uint64), r"9223372036854775808.* at \[1\]"),
        ("labels", [0.5, 1], r"'labels' is int64, but .* float64"),
        ("labels", np.array(["a", "b"]), "cannot be converted"),
        ("labels", ["a", "b"], "cannot be converted"),
        ("labels", np.array([1j, 2]), "cannot be converted"),
        ("labels", [[1], [1, 2]], "'labels' is not an array"),
        ("labels", None, "'labels' is None"),
        ("input", ORT_VALUE(np.zeros((2, 8))), r"tensor\(float\), but .* tensor\(double\)"),
        ("labels", ORT_VALUE(np.zeros(2, np.int32)), r"tensor\(int64\), but .* tensor\(int32\)"),
    ],
)  # fmt: skip
def test_what_would_lose_something_is_an_error(name, value, message) -> None:
    inputs = dict(zip(("input", "labels"), samples(2), strict=True)) | {name: value}
    module = open_module()
    with pytest.raises(InputError, match=message) as caught:
        module(**inputs)
    assert "input: float [N, 8]; labels: int64 [N]" in str(caught.value)
    assert not any(g.any() for g in gradients(module).values())


# ---- wrong inputs --------------------------------------------------------------------------------


def test_the_wrong_number_of_inputs() -> None:
    x, labels = samples(2)
    with pytest.raises(InputError) as caught:
        open_module()(x)
    assert str(caught.value) == (
        "1 inputs were given (float32 [2, 8]), and there are 2. "
        "The inputs are, in this order: input: float [N, 8]; labels: int64 [N]"
    )
    with pytest.raises(InputError, match=r"3 inputs were given .*there are 2"):
        open_module()(x, labels, labels)
    with pytest.raises(InputError, match=r"0 inputs were given \(none\)"):
        open_module()()


def test_the_wrong_order_of_inputs() -> None:
    x, labels = samples(8)
    with pytest.raises(InputError) as caught:
        open_module()(labels, x)
    message = str(caught.value)
    assert "the input 'input' has the shape [N, 8], and the array [8]" in message
    assert "in this order: input: float [N, 8]; labels: int64 [N]" in message
    assert "Given: int64 [8]; float32 [8, 8]" in message


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        (1, ["input"], "given twice: 'input'; missing: 'labels'"),
        (0, ["input"], "missing: 'labels'"),
        (0, ["input", "labels", "more"], "unknown: 'more'"),
        (3, ["labels"], "given twice: 'labels'"),
        (0, ["fc1.weight", "input", "labels"], "unknown: 'fc1.weight'"),
    ],
)
def test_wrong_names(given, named, message) -> None:
    x, labels = samples(2)
    values = {"input": x, "labels": labels}
    with pytest.raises(InputError, match=message):
        open_module()(*[x, labels, labels][:given], **{name: values.get(name, x) for name in named})


def test_sizes_that_do_not_agree() -> None:
    x, labels = samples(4)
    with pytest.raises(InputError, match="'N' is 4 in 'input' and 3 in 'labels'"):
        open_module()(x, labels[:3])

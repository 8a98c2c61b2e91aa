"""Frozen layers of many forms run once over the data; training is as without that, to the bit."""

import io
import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.device.loop.feature_cache import FrozenFeatures
from onnxtrain.errors import ArgumentError

RNG = np.random.default_rng(2)
IMAGES = RNG.normal(size=(22, 2, 6, 6)).astype(np.float32)
TOKENS = RNG.integers(0, 20, (22, 5))
LABELS = RNG.integers(0, 3, 22)


def exported(module, *example, mode=torch.onnx.TrainingMode.EVAL, names=("x",), fixed=False):
    """The model of a module, by torch's exporter; the batch is symbolic unless it is fixed."""
    torch.manual_seed(0)

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, example, file, input_names=list(names), output_names=["y"], dynamo=False,
            dynamic_axes=None if fixed else {name: {0: "N"} for name in (*names, "y")},
            training=mode, do_constant_folding=False,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


class Convs(nn.Module):
    """Two convolutions, with something between them, and a linear layer."""

    def __init__(self, between=None, before=None) -> None:
        super().__init__()
        self.before = nn.Identity() if before is None else before
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.between = nn.ReLU() if between is None else between
        self.conv2 = nn.Conv2d(4, 5, 3)
        self.fc = nn.Linear(5 * 4 * 4, 3)

    def forward(self, x):
        x = self.between(self.conv1(self.before(x)))
        return self.fc(torch.flatten(torch.relu(self.conv2(x)), 1))


class Attention(nn.Module):
    """Attention over tokens, with masks from the shape and the content of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        n, t = ids.shape
        q, k, v = self.qkv(self.embedding(ids)).reshape(n, t, 3, 8).unbind(2)
        scores = q @ k.transpose(1, 2) + torch.where(ids[:, None, :] == 0, -1e4, 0.0)
        h = self.norm((torch.softmax(scores, -1) @ v).reshape(n * t, 8)).reshape(n, t, 8)
        real = (ids != 0).float().unsqueeze(-1)
        return self.head((h * real).sum(1) / torch.clamp(real.sum(1), min=1))


class Branches(nn.Module):
    """Two frozen branches, whose values the head reads beside the samples themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)
        self.skip = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.one(x)) * torch.sigmoid(self.two(x))) + self.skip(x)


class TimeMajor(nn.Module):
    """A recurrent layer whose results have the samples on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids).transpose(0, 1))[0][-1])


class Centered(nn.Module):
    """Subtracts the mean of the batch from frozen features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        return self.head(torch.tanh(h - h.mean(0, keepdim=True)))


def image(count=2):
    return torch.zeros(count, 2, 6, 6)


TRAINING = {"mode": torch.onnx.TrainingMode.TRAINING}
CASES = {
    # module, example, data, what trains, how it is exported
    "conv": (Convs(), image(), IMAGES, ["conv2*", "fc*"], {}),
    "attention": (Attention(), torch.ones(2, 5, dtype=torch.long), TOKENS, ["head*"], {}),
    "norm": (Attention(), torch.ones(2, 5, dtype=torch.long), TOKENS, ["norm*", "head*"], {}),
    "branches": (Branches(), torch.zeros(2, 8), RNG.normal(size=(22, 8)), ["head*", "skip*"], {}),
    "time major": (TimeMajor(), torch.ones(2, 5, dtype=torch.long), TOKENS, ["head*"], {}),
    "dropout": (Convs(nn.Dropout(0.5)), image(), IMAGES, ["conv2*", "fc*"], TRAINING),
    "batch statistics": (Convs(nn.BatchNorm2d(4)), image(), IMAGES, ["conv2*", "fc*"], TRAINING),
    "centered": (Centered(), torch.zeros(2, 8), RNG.normal(size=(22, 8)), ["head*"], {}),
    "frozen statistics": (Convs(nn.BatchNorm2d(4)), image(), IMAGES, ["conv2*", "fc*"], {}),
}


def prepared(folder, module, example, train, how, **options):
    model = exported(module, example, **how)
    onnxtrain.prepare(model, folder, train=train, optimizer="adamw", **options)


def train(folder, data, **settings):
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(0.02)
    history = onnxtrain.fit(
        session, (np.asarray(data), LABELS[: len(data)]), 3, seed=5, progress=False,
        **{"batch_size": 4, **settings},
    )  # fmt: skip
    return history.losses, {n: np.array(p.data) for n, p in session.state.parameters}


def as_input(data):
    return data.astype(np.float32) if data.dtype.kind == "f" else data


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}, {"micro_batch_size": 3}], ids=str)
def test_the_same_numbers(name, settings, tmp_path) -> None:
    module, example, data, trains, how = CASES[name]
    options = {"bn": "batch"} if name == "batch statistics" else {}
    prepared(tmp_path, module, example, trains, how, **options)
    losses, values = train(tmp_path, as_input(data), **settings)
    cached, other = train(tmp_path, as_input(data), cache_features=True, **settings)
    # A micro-batch has another size than the batches that features are computed in.
    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    np.testing.assert_allclose(cached, losses, **tolerance)
    for key, value in values.items():
        np.testing.assert_allclose(other[key], value, **tolerance, err_msg=key)
    assert len(set(losses)) > 1


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("conv", ("x",)), ("branches", ()), ("time major", ("x",)), ("attention", None)],
)
def test_what_crosses(name, inputs, tmp_path) -> None:
    module, example, data, trains, how = CASES[name]
    prepared(tmp_path, module, example, trains, how)
    session = onnxtrain.TrainingSession(tmp_path)
    given = dict(zip(session.input_names(), (as_input(data), LABELS), strict=True))
    features = FrozenFeatures(session, given)
    if inputs is not None:
        assert features.inputs == inputs
    made = features.compute(given, 4)
    assert all(len(made[name]) == 22 for name in features.features)
    assert len(features.values) == 1


@pytest.mark.parametrize(
    ("module", "trains", "how", "message"),
    [
        (Convs(), ["conv1*"], {}, "no frozen Conv, MatMul or recurrent layer comes before"),
        (Convs(before=nn.Dropout(0.5)), ["fc*"], TRAINING, "a Dropout in the frozen layers draws"),
        (Convs(before=nn.BatchNorm2d(2)), ["fc*"], TRAINING, "with all samples of a batch"),
    ],
    ids=["nothing frozen", "dropout", "batch statistics"],
)
def test_the_true_reason(module, trains, how, message, tmp_path) -> None:
    prepared(tmp_path, module, image(), trains, how, bn="batch" if "Batch" in str(module) else None)
    with pytest.raises(ArgumentError, match=message):
        train(tmp_path, IMAGES, cache_features=True)


def test_a_batch_that_the_session_fixes(tmp_path) -> None:
    prepared(tmp_path, Convs(), image(), ["conv2*", "fc*"], {})
    found = []
    for options in ({}, {"batch_size": 4}, {"batch_size": "auto"}):
        session = onnxtrain.TrainingSession(tmp_path, **options)
        history = onnxtrain.fit(
            session, (IMAGES, LABELS), 2, batch_size=4, seed=5, drop_last=True, progress=False,
            cache_features=True,
        )  # fmt: skip
        found.append(history.losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


# onnxruntime's converter does not close the files that it reads.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_ort_format_is_refused(tmp_path) -> None:
    prepared(tmp_path, Convs(), image(), ["fc*"], {}, ort_format=True)
    for path in tmp_path.glob("*.onnx"):
        path.unlink()
    with pytest.raises(ArgumentError, match="ORT format"):
        train(tmp_path, IMAGES, cache_features=True)


def test_a_fixed_batch(tmp_path) -> None:
    prepared(tmp_path, Convs(), image(4), ["conv2*", "fc*"], {"fixed": True})
    losses, values = train(tmp_path, IMAGES, drop_last=True)
    cached, other = train(tmp_path, IMAGES, drop_last=True, cache_features=True)
    assert cached == losses
    for key, value in values.items():
        np.testing.assert_array_equal(other[key], value)


INTEGERS = {"train": ["fc*"], "calibration": [IMAGES]}


@pytest.mark.parametrize("scales", ["fixed", "average"])
def test_frozen_layers_of_integers_run_once(tmp_path, scales) -> None:
    model = exported(Convs(), torch.zeros(2, 2, 6, 6))
    onnxtrain.prepare(model, tmp_path, quantize=f"int8:scales={scales}", **INTEGERS)
    sessions = [onnxtrain.TrainingSession(tmp_path) for _ in range(2)]
    for session, cached in zip(sessions, (False, True), strict=True):
        session.set_learning_rate(0.05)
        onnxtrain.fit(
            session, (IMAGES, LABELS), 2, batch_size=5, seed=1, cache_features=cached,
            progress=False,
        )  # fmt: skip
    one, other = (session.get_parameter("fc.weight") for session in sessions)
    np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


class Beside(torch.nn.Module):
    """A frozen convolution that reads, with one scale, what a layer that trains reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.fc1, self.fc2 = torch.nn.Linear(48, 3), torch.nn.Linear(72, 3)

    def forward(self, x):
        return self.fc1(torch.relu(self.conv(x)).flatten(1)) + self.fc2(x.flatten(1))


def test_ranges_that_follow_training_keep_features_from_being_kept(tmp_path) -> None:
    model = exported(Beside(), torch.zeros(2, 2, 6, 6))
    onnxtrain.prepare(model, tmp_path, quantize="int8", **INTEGERS)
    with pytest.raises(ArgumentError, match="the ranges of integers in the frozen layers follow"):
        onnxtrain.fit(
            onnxtrain.TrainingSession(tmp_path), (IMAGES, LABELS), cache_features=True,
            progress=False,
        )  # fmt: skip

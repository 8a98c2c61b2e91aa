"""Keywords that `fit` had before: they do what their successors do, and say so once."""

import warnings

import pytest
from small_runs import assert_same, open_session, samples

from onnxtrain import CheckFinite, EarlyStopping, SaveCheckpoint, fit
from onnxtrain.device.loop import old_keywords
from onnxtrain.errors import ArgumentError

DATA = samples(24)
COMMON = {"epochs": 4, "batch_size": 8, "seed": 1, "progress": False}


@pytest.fixture(autouse=True)
def untold(monkeypatch) -> None:
    """Each test is told anew."""
    monkeypatch.setattr(old_keywords, "_told", set())


# Each: the old keywords, what the warning says to write, and the new keywords.
PAIRS = {
    "evaluate": ({"evaluate": DATA}, "validation=", {"validation": DATA}),
    "scheduler": ({"scheduler": "cosine"}, "schedule=", {"schedule": "cosine"}),
    "early_stopping": (
        {"early_stopping": 2}, "EarlyStopping", {"callbacks": EarlyStopping(patience=2)},
    ),
    "early_stopping-settings": (
        {"early_stopping": {"patience": 1, "min_delta": 9.0}},
        "EarlyStopping",
        {"callbacks": EarlyStopping(patience=1, min_delta=9.0)},
    ),
    "check_every": ({"check_every": 3}, "CheckFinite", {"callbacks": CheckFinite(every=3)}),
    "micro_batch": ({"micro_batch": 4}, "micro_batch_size=", {"micro_batch_size": 2}),
    "accumulation": (
        {"accumulate": 2, "accumulation": "sum"}, "accumulate=", {"accumulate": (2, "sum")},
    ),
    "accumulation-mean": ({"accumulation": "mean"}, "accumulate=", {}),
    "nothing": ({"evaluate": None, "checkpoint": None, "check_every": None}, "", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_old_keywords_do_what_the_new_ones_do(name) -> None:
    old, said, new = PAIRS[name]
    one, other = open_session(), open_session()
    with pytest.warns(DeprecationWarning, match=said):
        before = fit(one, DATA, **COMMON, **old)
    after = fit(other, DATA, **COMMON, **new)
    assert before.losses == after.losses
    assert [record.values for record in before.epochs] == [record.values for record in after.epochs]
    assert_same(one, other)


@pytest.mark.parametrize("every", [None, "epoch", 2, "best", (2, "best")])
def test_checkpoints(every, tmp_path) -> None:
    files = []
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "run"
        session = open_session()
        if folder == "old":
            with pytest.warns(DeprecationWarning, match="SaveCheckpoint"):
                fit(session, DATA, **COMMON, checkpoint=path, checkpoint_every=every)
        else:
            fit(session, DATA, **COMMON, callbacks=SaveCheckpoint(path, every or "epoch"))
        files.append(sorted(file.name for file in path.parent.iterdir()))
    assert files[0] == files[1]
    assert_same(*(open_session(checkpoint=tmp_path / name / "run") for name in ("old", "new")))


def test_each_is_said_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            fit(open_session(), DATA, progress=False, evaluate=None, micro_batch=2)
    assert sorted(str(each.message).partition("=")[0] for each in told) == [
        "fit(evaluate", "fit(micro_batch",
    ]  # fmt: skip
    assert {each.filename for each in told} == {__file__}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"evaluate": DATA, "validation": DATA}, "validation= was given twice"),
        ({"scheduler": "cosine", "schedule": "linear"}, "schedule= was given twice"),
        ({"micro_batch": 2, "micro_batch_size": 4}, "micro_batch_size= was given twice"),
        ({"early_stopping": 2, "callbacks": EarlyStopping()}, "has 2 EarlyStopping"),
        ({"micro_batch": 3, "batch_size": 8}, "cannot be divided into 3 equal passes"),
        ({"accumulation": "median"}, "accumulation must be one of"),
        ({"checkpoint_every": 3}, "checkpoint_every needs a file"),
        ({"early_stopping": {"wait": 3}}, "early_stopping: .*'wait'"),
        ({"early_stopping": "soon"}, "patience must be"),
        ({"check_every": 0}, "every must be"),
    ],
)
def test_wrong_ones(keywords, message) -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(ArgumentError, match=message):
        fit(open_session(), DATA, progress=False, **keywords)


def test_unknown_keywords_are_an_error() -> None:
    with pytest.raises(TypeError, match="shuffled"):
        fit(open_session(), DATA, shuffled=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SaveCheckpoint("no/such/folder/x"), "there is no folder"),
        (lambda: SaveCheckpoint("x", "hour"), "'epoch' or 'best'"),
        (lambda: SaveCheckpoint("x", 0), "every must be"),
        (lambda: EarlyStopping(patience=0), "patience must be"),
        (lambda: CheckFinite(0), "every must be"),
    ],
)
def test_wrong_callbacks(make, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()

"""The history of a run: values, JSON, pictures."""

import itertools
import json
import math
import subprocess
import sys

import pytest

from onnxtrain.device.loop.history import EpochRecord, History
from onnxtrain.errors import ArgumentError, UnknownNameError


def made() -> History:
    return History(
        losses=[1.5, 0.1, 1 / 3, 5e-324],
        epochs=[
            EpochRecord(1, 2, 7, 0.9, 0.01, 0.5, {"eval_loss": 1.0, "accuracy": 0.25}),
            EpochRecord(2, 4, 7, 0.2, 0.001, 0.4, {"eval_loss": 0.7, "accuracy": 0.75}),
        ],
        stopped="no better eval_loss",
        best_epoch=2,
    )


def test_values_by_name() -> None:
    history = made()
    assert history["accuracy"] == [0.25, 0.75]
    assert history["loss"] == [0.9, 0.2]
    assert history.epochs[0]["eval_loss"] == 1.0
    with pytest.raises(UnknownNameError, match=r"no 'f1'; it has .*accuracy"):
        history["f1"]


def test_repr() -> None:
    assert repr(made()) == (
        "History(2 epochs, 4 steps, loss 0.2, eval_loss 0.7, accuracy 0.75, no better eval_loss)"
    )
    assert repr(History(losses=[1.0])) == "History(0 epochs, 1 step)"


def test_json_keeps_everything() -> None:
    history = made()
    history.epochs[1].values["confusion"] = [[3, 1], [0, 3]]
    assert History.from_json(history.to_json()) == history
    assert History.from_json(History().to_json()) == History()
    history.interrupted = True
    assert History.from_json(history.to_json().encode()).interrupted


def test_json_has_no_words_that_only_python_knows() -> None:
    history = made()
    history.epochs[0].values |= {"f1": math.nan, "each": [1.0, -math.inf]}
    text = history.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    values = History.from_json(text).epochs[0].values
    assert math.isnan(values["f1"])
    assert values["each"] == [1.0, -math.inf]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', "null", '{"format": 1, "losses": [["a"]]}', "[" * 100_000],
)
def test_other_json_is_refused(text) -> None:
    with pytest.raises(ArgumentError, match="not the JSON of a history"):
        History.from_json(text)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(ending, tmp_path) -> None:
    pytest.importorskip(
        "matplotlib", reason="the picture is drawn with matplotlib, which is in an extra"
    )
    path = tmp_path / f"run.{ending}"
    figure = made().plot(path)
    assert path.stat().st_size > 1000
    assert [line.get_label() for line in figure.axes[0].lines] == [
        "loss of a step",
        "loss",
        "eval loss",
    ]
    assert [line.get_label() for line in figure.axes[1].lines] == ["accuracy"]
    assert list(figure.axes[1].lines[0].get_xdata()) == [2, 4]


def test_plot_of_an_unfinished_epoch(tmp_path) -> None:
    pytest.importorskip(
        "matplotlib", reason="the picture is drawn with matplotlib, which is in an extra"
    )
    figure = History(losses=[3.0, 2.0]).plot(tmp_path / "run.png")
    assert len(figure.axes) == 1


def test_plot_leaves_out_what_is_not_one_number_in_each_epoch(tmp_path) -> None:
    pytest.importorskip(
        "matplotlib", reason="the picture is drawn with matplotlib, which is in an extra"
    )
    history = made()
    history.epochs[0].values["confusion"] = history.epochs[1].values["confusion"] = [[1]]
    history.epochs[1].values["late"] = 1.0
    figure = history.plot(tmp_path / "run.png")
    assert [line.get_label() for line in figure.axes[1].lines] == ["accuracy"]


def test_plot_without_a_path_can_be_shown() -> None:
    pytest.importorskip(
        "matplotlib", reason="the picture is drawn with matplotlib, which is in an extra"
    ).use("Agg")
    from matplotlib import pyplot

    figure = made().plot()
    assert pyplot.figure(figure.number) is figure
    pyplot.close(figure)


def test_matplotlib_is_asked_for_only_when_something_is_drawn() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
from onnxtrain.device.loop.history import History
try:
    History().plot("x.png")
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "pip install 'onnxtrain[cli]'" in result.stdout


def long_run(steps: int) -> History:
    losses = [1 / step for step in range(1, steps + 1)]
    losses[steps // 3] = 1e-9  # the best one
    epochs = [
        EpochRecord(n, 2 * n, 7, losses[2 * n - 1], 0.01, 0.5) for n in range(1, steps // 2 + 1)
    ]
    return History(losses, epochs, best_epoch=steps // 3)


@pytest.mark.parametrize("steps", [0, 1, 999, 1000])
def test_a_short_history_is_kept_whole(steps) -> None:
    history = History(losses=[0.5] * steps)
    assert history.thinned() == history
    assert (history.steps, history.loss_steps) == (steps, list(range(1, steps + 1)))


@pytest.mark.parametrize("steps", [1001, 2500, 65_537, 200_000])
def test_a_checkpoint_keeps_a_part_of_a_long_history(steps) -> None:
    history = long_run(steps)
    kept = history.thinned()
    assert 500 <= len(kept.losses) <= 1002 and len(kept.epochs) <= 1002
    assert kept.steps == steps
    at = dict(zip(kept.loss_steps, kept.losses, strict=True))
    assert all(history.losses[step - 1] == loss for step, loss in at.items())
    assert at[steps] == history.losses[-1] and min(at.values()) == 1e-9
    gaps = [b - a for a, b in itertools.pairwise(kept.loss_steps)]
    assert max(gaps) <= 2 * steps / 1000 + 1
    assert kept.epochs[-1] == history.epochs[-1]
    assert steps // 3 in [record.epoch for record in kept.epochs]
    assert History.from_json(kept.to_json()) == kept


def test_what_is_kept_does_not_depend_on_interruptions() -> None:
    whole = long_run(20_000)
    history = History()
    for stop in (3, 900, 1001, 1005, 2500, 9999, 20_000):
        history.losses += whole.losses[history.steps : stop]
        history = history.thinned()
    assert history.loss_steps == whole.thinned().loss_steps
    assert history.losses == whole.thinned().losses


@pytest.mark.parametrize("steps", ["x", [0], [2, 1], [1.5], [2**60], [1, 2, 3, 4, 5], [True]])
def test_steps_that_cannot_be(steps) -> None:
    content = json.loads(made().to_json())
    with pytest.raises(ArgumentError, match="kept_steps"):
        History.from_json(json.dumps({**content, "kept_steps": steps}))

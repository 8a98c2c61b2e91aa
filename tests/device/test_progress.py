"""What is shown while training runs."""

import io
import os
import sys

import pytest

from onnxtrain.device.loop.history import EpochRecord
from onnxtrain.device.loop.progress import (
    Bar,
    Lines,
    ProgressDisplay,
    bar_line,
    describe,
    duration,
    make_progress,
)
from onnxtrain.errors import ArgumentError

RECORD = EpochRecord(2, 20, 640, 0.123456, 1e-3, 65, {"eval_loss": 0.5, "confusion": [[1]]})


def test_the_line_of_an_epoch() -> None:
    assert describe(RECORD, 5) == "epoch 2/5  loss 0.1235  eval_loss 0.5  lr 0.001  1:05"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (60, "1:00"), (3599, "59:59"), (7241, "2:00:41")],
)
def test_duration(seconds, text) -> None:
    assert duration(seconds) == text


def test_the_bar_shows_what_there_is_room_for() -> None:
    line = bar_line("epoch 1/3", 25, 100, 0.5, 12.5, 120)
    assert line == (
        "epoch 1/3  [=======                       ]  25/100  loss 0.5  12 steps/s  6s left"
    )
    for columns in range(121):
        shown = bar_line("epoch 1/3", 25, 100, 0.5, 12.5, columns)
        assert len(shown) <= columns
        assert ("left" in shown) <= ("steps/s" in shown) <= ("loss" in shown)
    assert bar_line("epoch 1/3", 25, 100, 0.5, 12.5, 30) == "epoch 1/3  25/100  loss 0.5"
    assert bar_line("epoch 1/3", 25, 100, 0.5, 12.5, 4) == "epoc"


def test_the_bar_without_a_total() -> None:
    assert bar_line("epoch 1/3", 25, None, 0.5, 2.5, 80) == ("epoch 1/3  25  loss 0.5  2.5 steps/s")


def test_the_bar_never_overflows() -> None:
    assert "[==============================]" in bar_line("e", 120, 100, 0.5, 1, 120)
    assert "[          " in bar_line("e", 0, 100, 0.5, 0, 120)


def test_a_bar_is_one_line_that_is_replaced() -> None:
    stream = io.StringIO()
    bar = Bar(stream, width=60)
    bar.begin_epoch(1, 2, 3)
    for step in (1, 2, 3):
        bar.step(step, 1 / step)
    bar.evaluating()
    bar.end_epoch(RECORD, 2)
    bar.close()
    text = stream.getvalue()
    assert text.count("\n") == 1
    pieces = text.split("\r")
    assert all(len(piece.rstrip("\n")) < 60 for piece in pieces)
    assert pieces[-1] == describe(RECORD, 2) + "\n"
    # The last step is always shown, however soon it follows.
    assert any("3/3" in piece for piece in pieces)
    assert any("evaluating" in piece for piece in pieces)


def test_a_bar_that_was_left_ends_its_line() -> None:
    stream = io.StringIO()
    bar = Bar(stream, width=60)
    bar.begin_epoch(1, 2, None)
    bar.step(1, 1.0)
    bar.say("interrupted")
    bar.step(2, 1.0)
    bar.close()
    bar.close()
    assert "\rinterrupted\n" in stream.getvalue()
    assert stream.getvalue().endswith("\n")


def test_lines_are_one_for_each_epoch() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin_epoch(1, 2, 3)
    for step in (1, 2, 3):
        lines.step(step, 1.0)
    lines.evaluating()
    assert stream.getvalue() == ""
    lines.end_epoch(RECORD, 5)
    lines.close()
    assert stream.getvalue() == describe(RECORD, 5) + "\n"


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_a_stream_that_is_gone_does_no_harm(kind, monkeypatch) -> None:
    closed = io.StringIO()
    closed.close()
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", None)
    for stream in (closed, broken, narrow, None):
        shown = kind(stream)
        shown.begin_epoch(1, 1, 2)
        shown.step(2, 1.0)
        shown.evaluating()
        shown.end_epoch(RECORD, 1)
        shown.say("größer")
        shown.close()
    with pytest.raises(BrokenPipeError):
        broken.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_shown_where(monkeypatch) -> None:
    assert type(make_progress(None, Terminal())) is Bar
    assert type(make_progress(True, Terminal())) is Bar
    assert type(make_progress(None, io.StringIO())) is Lines
    assert type(make_progress(False, Terminal())) is ProgressDisplay
    assert type(make_progress("lines", Terminal())) is Lines
    assert type(make_progress("bar", io.StringIO())) is Bar
    own = ProgressDisplay()
    assert make_progress(own) is own
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert type(make_progress(None)) is Bar
    monkeypatch.setattr(sys, "stderr", None)
    assert type(make_progress(None)) is Lines
    with pytest.raises(ArgumentError, match="progress must be"):
        make_progress("loud")

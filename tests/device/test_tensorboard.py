"""The event files of the TensorBoard callback, read back by the format's own rules."""

import struct
from pathlib import Path

import numpy as np
import pytest
from small_runs import open_session, samples

import onnxtrain
from onnxtrain.device.loop.tensorboard import masked
from onnxtrain.errors import ArgumentError

QUIET = {"batch_size": 4, "progress": False}


def records(path):
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked(data[:8]),)
        content, end = data[12 : 12 + length], 12 + length
        assert struct.unpack("<I", data[end : end + 4]) == (masked(content),)
        yield memoryview(content)
        data = data[end + 4 :]


def varint(data):
    return sum((byte & 127) << 7 * place for place, byte in enumerate(data))


def fields(message):
    """The fields of a message of protobuf, by number and as bytes."""
    place = 0
    while place < len(message):
        number, kind = message[place] >> 3, message[place] & 7
        place += 1
        start = place
        if kind in (0, 2):
            while message[place] & 128:
                place += 1
            place += 1
            if kind == 2:
                start, place = place, place + varint(message[start:place])
        else:
            place += {1: 8, 5: 4}[kind]
        yield number, message[start:place]


def read(folder):
    """What TensorBoard would show: tag to list of (step, value)."""
    shown: dict[str, list] = {}
    for path in sorted(Path(folder).iterdir()):
        for number, event in enumerate(map(lambda r: dict(fields(r)), records(path))):
            step = varint(event[2])
            assert struct.unpack("<d", event[1])[0] > 1.7e9
            if number == 0:
                assert bytes(event[3]) == b"brain.Event:2"
            if 7 in event:  # a start: what follows replaces later steps
                shown = {tag: [p for p in points if p[0] < step] for tag, points in shown.items()}
            for _, value in fields(event.get(5, b"")):
                parts = dict(fields(value))
                (number,) = struct.unpack("<f", parts[2])
                shown.setdefault(bytes(parts[1]).decode(), []).append((step, number))
    return shown


def test_the_checksum() -> None:
    # CRC-32C of "123456789" is 0xE3069283, by its definition.
    crc = 0xE3069283
    assert masked(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_the_course_of_a_run(tmp_path) -> None:
    session = open_session(learning_rate=0.5)
    history = onnxtrain.fit(
        session, samples(16), 3, validation=samples(8), metrics=["accuracy", "confusion"],
        schedule=lambda step: 2.0**-step, callbacks=onnxtrain.TensorBoard(tmp_path / "a/b"),
        **QUIET,
    )  # fmt: skip
    shown = read(tmp_path / "a/b")
    assert shown.keys() == {"loss", "learning_rate", "epoch_loss", "eval_loss", "accuracy"}
    steps = list(range(1, 13))
    assert shown["loss"] == list(zip(steps, history.losses, strict=True))
    assert shown["learning_rate"] == [(step, 2.0 ** (1 - step)) for step in steps]
    assert [step for step, _ in shown["epoch_loss"]] == [4, 8, 12]
    for name in ("eval_loss", "accuracy"):
        np.testing.assert_allclose([v for _, v in shown[name]], history[name], rtol=1e-6)


def test_every_few_steps(tmp_path) -> None:
    board = onnxtrain.TensorBoard(tmp_path, every=5)
    for _ in range(2):
        onnxtrain.fit(open_session(), samples(16), 3, callbacks=board, **QUIET)
    assert len(list(tmp_path.iterdir())) == 2
    assert [step for step, _ in read(tmp_path)["loss"]] == [5, 10]
    with pytest.raises(ArgumentError, match="every"):
        onnxtrain.TensorBoard(tmp_path, every=0)


def test_a_resumed_run_shows_each_step_once(tmp_path) -> None:
    saved = onnxtrain.SaveCheckpoint(tmp_path / "run", 4)

    board = onnxtrain.TensorBoard(tmp_path / "log")

    class Fail:
        def on_step_end(self, run):
            if run.step == 6:
                raise RuntimeError("power failure")

    with pytest.raises(RuntimeError):
        onnxtrain.fit(open_session(), samples(16), 3, callbacks=[saved, board, Fail()], **QUIET)
    again = open_session(checkpoint=tmp_path / "run")
    history = onnxtrain.fit(
        again, samples(16), 3, callbacks=[saved, onnxtrain.TensorBoard(tmp_path / "log")],
        resume=True, **QUIET,
    )  # fmt: skip
    shown = read(tmp_path / "log")
    assert shown["loss"] == list(zip(range(1, 13), history.losses, strict=True))

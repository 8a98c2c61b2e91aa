"""A callback that writes the course of a run for TensorBoard, which is not needed to write it.

An event file is a sequence of records: the length of the data (8 bytes), its checksum (4), the data
and its checksum (4), little-endian. The data of each is a message of protobuf, `Event`; the
checksum is CRC-32C, rotated and shifted ("masked"), since it lies beside what it is made of.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from onnxtrain.device.checks import at_least
from onnxtrain.device.loop.callbacks import Run
from onnxtrain.format.model.wire import bytes_field, number_field, text_field

# Fields of Event, of its Summary and SessionLog, and how a float and a double are marked.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS, _START = 1, 1, 2, 1, 1
_DOUBLE, _FLOAT = 1, 5
_files = count()


class TensorBoard:
    """Write loss, learning rate and metrics to event files; a callback of `fit`.

    `tensorboard --logdir LOG_DIR` shows them, over the steps of the run: `loss` and `learning_rate`
    of each step, and of each epoch `epoch_loss`, `eval_loss` and the metrics by name. A resumed run
    goes on in a file of its own, and what it repeats is shown once.

    Args:
        log_dir: the folder, which is created. A folder inside for each run lets you compare them.
        every: write each so many steps.

    """

    def __init__(self, log_dir: str | os.PathLike[str], every: int = 1) -> None:
        self.log_dir = Path(log_dir)
        self.every = at_least(1, "TensorBoard: every", every)
        self._file: Path | None = None
        self._rate = 0.0

    def on_train_begin(self, run: Run) -> None:
        """Begin a file."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname() or "localhost"
        name = f"events.out.tfevents.{int(time.time())}.{host}.{os.getpid()}.{next(_files)}"
        self._file = self.log_dir / name
        self._write(0, text_field(_FILE_VERSION, "brain.Event:2"))
        # Later steps of files from before, which a resumed run takes again, are not shown.
        self._write(run.step + 1, bytes_field(_SESSION_LOG, number_field(_STATUS, _START)))
        self._rate = run.session.get_learning_rate()

    def on_step_end(self, run: Run) -> None:
        """Write the loss of a step, and the rate that it was taken with."""
        if run.step % self.every == 0:
            self._write_values(run.step, {"loss": run.loss, "learning_rate": self._rate})
        self._rate = run.session.get_learning_rate()

    def on_evaluate(self, run: Run) -> None:
        """Write what evaluation found."""
        self._write_values(run.step, run.values)

    def on_epoch_end(self, run: Run) -> None:
        """Write the mean loss of an epoch."""
        if run.record is not None:
            self._write_values(run.step, {"epoch_loss": run.record.loss})

    def _write_values(self, step: int, values: Mapping[str, Any]) -> None:
        summary = b"".join(
            bytes_field(_VALUE, text_field(_TAG, name) + _float(_SIMPLE_VALUE, value))
            for name, value in values.items()
            if isinstance(value, int | float)
        )
        self._write(step, bytes_field(_SUMMARY, summary))

    def _write(self, step: int, content: bytes) -> None:
        assert self._file is not None
        when = bytes([_WALL_TIME << 3 | _DOUBLE]) + struct.pack("<d", time.time())
        # Not kept open, since nobody would close it if the run fails.
        with self._file.open("ab") as file:
            file.write(record(when + number_field(_STEP, step) + content))


def _float(number: int, value: float) -> bytes:
    return bytes([number << 3 | _FLOAT]) + struct.pack("<f", value)


def record(data: bytes) -> bytes:
    """Return data with its length and the checksums of both."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def masked(data: bytes) -> int:
    """Return the masked CRC-32C of data."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    """Return the CRC-32C of each byte, by the reflected polynomial of Castagnoli."""
    made = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        made.append(byte)
    return tuple(made)

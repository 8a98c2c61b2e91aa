"""The plain interface of `onnxtrain.h`, through ctypes: what Python does, and its sentences."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_tensors import Options, PlainTensor, plain_tensors
from small_runs import GOLDEN, open_session, samples
from upstream_table import Host, OrtError, library_of_the_wheel

from onnxtrain.device.random_state import set_seed
from onnxtrain.errors import OnnxTrainError

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "native" / "include" / "onnxtrain.h"
INPUTS, OUTPUTS, EVAL_INPUTS, EVAL_OUTPUTS, PARAMETERS, TRAINABLE = range(6)


class Plain:
    """A session of the plain interface."""

    def __init__(self, host: Host, folder: Path, checkpoint: Path | None = None, **options: int):
        self.host = host
        self.pointer = c_void_p()
        given = Options(size=ctypes.sizeof(Options), **options)
        path = None if checkpoint is None else str(checkpoint).encode()
        host.function(
            "onnxtrain_open", c_char_p(str(folder).encode()), c_char_p(path), byref(given),
            byref(self.pointer),
        )  # fmt: skip

    def __call__(self, name: str, *given: Any) -> None:
        self.host.function(f"onnxtrain_{name}", self.pointer, *given)

    def run(self, name: str, *arrays: Any, output: str | None = None, **named: Any) -> float:
        fed, made, loss = plain_tensors(*arrays, **named), (PlainTensor * 1)(), c_float()
        made[0].name = None if output is None else output.encode()
        made[0].data, made[0].size = ctypes.addressof(loss), 4
        self(name, byref(fed), c_size_t(len(fed)), byref(made), c_size_t(1))
        assert made[0].type == 1 and made[0].rank == 0 and made[0].size == 4
        return loss.value

    def names(self, kind: int) -> list[str]:
        count, found = c_size_t(), []
        self("count", c_int32(kind), byref(count))
        for index in range(count.value):
            name = c_char_p()
            self("name", c_int32(kind), c_size_t(index), byref(name))
            found.append((name.value or b"").decode())
        return found

    def property(self, name: str) -> Any:
        size, kind = c_size_t(), c_int32()
        self("get_property", c_char_p(name), byref(kind), c_void_p(), byref(size))
        held = ctypes.create_string_buffer(size.value)
        self("get_property", c_char_p(name), byref(kind), byref(held), byref(size))
        if kind.value == 2:
            return held.value.decode()
        return np.frombuffer(held.raw, np.float32 if kind.value else np.int64)[0]

    def close(self) -> None:
        self.host.own.onnxtrain_close(self.pointer)


@pytest.fixture
def host(host: Host) -> Host:
    """The program with a seed that it was given through the plain interface."""
    host.own.onnxtrain_set_seed(c_int64(9))
    set_seed(9)
    return host


@pytest.fixture
def session(host: Host) -> Iterator[Plain]:
    made = Plain(host, GOLDEN / "mlp", threads=1)
    yield made
    made.close()


def test_steps_are_pythons(session, tmp_path) -> None:
    theirs = open_session()
    theirs.register_linear_lr_scheduler(2, 20, float(np.float32(0.1)))
    session("register_linear_lr_scheduler", c_int64(2), c_int64(20), c_float(0.1))
    names = session.names(INPUTS)
    for index in range(6):
        inputs, labels = samples(16, seed=index)
        named = dict(zip(names, (inputs, labels), strict=True))
        reverse = dict(reversed(named.items()))
        loss = session.run("step", **reverse)
        assert abs(loss - theirs.step(inputs, labels)[0]) <= 1e-6
        loss = session.run("train_step", inputs, labels, output=session.names(OUTPUTS)[0])
        assert abs(loss - theirs.train_step(inputs, labels)[0]) <= 1e-6
        if index % 2:
            session("optimizer_step")
            session("lazy_reset_grad")
            theirs.optimizer_step()
            theirs.lazy_reset_grad()
        session("scheduler_step")
        theirs.scheduler_step()
        loss = session.run("eval_step", inputs, labels)
        assert abs(loss - theirs.eval_step(inputs, labels)[0]) <= 1e-6
    done, skipped, rate = c_int64(), c_int64(), c_float()
    session("step_count", byref(done), byref(skipped))
    session("get_learning_rate", byref(rate))
    assert (done.value, skipped.value) == (theirs.optimizer.step_count, 0)
    assert rate.value == theirs.get_learning_rate()
    session("save_checkpoint", c_char_p(str(tmp_path / "c").encode()), c_int32(1))
    theirs.save_checkpoint(tmp_path / "python", include_optimizer_state=True)
    assert (tmp_path / "c").read_bytes() == (tmp_path / "python").read_bytes()


def test_a_run_goes_on_from_a_checkpoint(host, session, tmp_path) -> None:
    theirs = open_session()
    theirs.step(*samples(16))
    theirs.save_checkpoint(tmp_path / "state", include_optimizer_state=True)
    resumed = Plain(host, GOLDEN / "mlp", tmp_path / "state")
    loss = resumed.run("step", *samples(16, seed=1))
    assert abs(loss - theirs.step(*samples(16, seed=1))[0]) <= 1e-6
    resumed.close()


def test_names(session) -> None:
    theirs = open_session()
    assert session.names(INPUTS) == theirs.module.input_names()
    assert session.names(OUTPUTS) == theirs.module.output_names()
    assert session.names(EVAL_INPUTS) == theirs.module.eval().input_names()
    assert session.names(EVAL_OUTPUTS) == theirs.module.output_names()
    assert sorted(session.names(PARAMETERS)) == sorted(n for n, _ in theirs.state.parameters)
    assert sorted(session.names(TRAINABLE)) == sorted(theirs.state._training.trainable_names())


def test_parameters(session) -> None:
    theirs = open_session()
    for name in session.names(PARAMETERS):
        expected = theirs.get_parameter(name)
        found = np.empty_like(expected)
        place = plain_tensors(**{name: found})[0]
        session("get_parameter", byref(place))
        np.testing.assert_array_equal(found, expected)
        assert tuple(place.dims[: place.rank]) == expected.shape
        twice = expected * 2
        session("update_parameter", byref(plain_tensors(**{name: twice})[0]))
        session("get_parameter", byref(place))
        np.testing.assert_array_equal(found, twice)
        theirs.update_parameter(name, twice)
    value = PlainTensor(name=session.names(PARAMETERS)[0].encode())
    session("get_parameter", byref(value))
    np.testing.assert_array_equal(
        session.host.array(c_void_p(value.value)), theirs.get_parameter(value.name.decode())
    )
    for only in (0, 1):
        count = c_size_t()
        session("parameters_size", c_int32(only), byref(count))
        held = np.empty(count.value, np.float32)
        session("get_parameters", c_int32(only), c_void_p(held.ctypes.data), count)
        np.testing.assert_array_equal(held, theirs.to_buffer(bool(only)).numpy())
        held += 1
        session("set_parameters", c_int32(only), c_void_p(held.ctypes.data), count)
        again = np.empty_like(held)
        session("get_parameters", c_int32(only), c_void_p(again.ctypes.data), count)
        np.testing.assert_array_equal(again, held)
        with pytest.raises(OrtError, match="elements, and"):
            session("get_parameters", c_int32(only), c_void_p(held.ctypes.data), c_size_t(1))
        session.host.own.onnxtrain_close(c_void_p())
        theirs.from_buffer(held, bool(only))


def test_properties(session) -> None:
    text = "trié".encode()
    for name, kind, value in ((b"n", 0, c_int64(-3)), (b"x", 1, c_float(0.5))):
        session("set_property", c_char_p(name), c_int32(kind), byref(value))
        assert session.property(name) == value.value
    session("set_property", c_char_p(b"t"), c_int32(2), c_char_p(text))
    assert session.property(b"t") == "trié"
    with pytest.raises(OrtError, match="has 6 bytes, and there is room for 2"):
        small = ctypes.create_string_buffer(2)
        session("get_property", c_char_p(b"t"), c_void_p(), byref(small), byref(c_size_t(2)))
    with pytest.raises(OrtError, match=r"Property none not found\."):
        session.property(b"none")
    with pytest.raises(OrtError, match="reserved"):
        name = c_char_p(b"__onnxtrain__.x")
        session("set_property", name, c_int32(0), byref(c_int64(1)))


def test_wrong_tensors_are_refused(host, session) -> None:
    import onnxruntime as ort

    inputs, labels = samples(8)
    for arrays in ((), (inputs,), (inputs.astype(np.float64), labels), (inputs, samples(9)[1])):
        given = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
        with pytest.raises(OnnxTrainError) as expected:
            open_session().step(*given)
        with pytest.raises(OrtError) as found:
            session.run("step", *arrays)
        assert found.value.args == (2, str(expected.value))
    name = session.names(INPUTS)[0]
    with pytest.raises(OrtError, match="there is no input 'x1': there are 'input', 'labels'"):
        session.run("step", inputs, x1=labels)
    with pytest.raises(OrtError, match="is given twice"):
        session.run("step", inputs, **{name: inputs})
    with pytest.raises(OrtError, match="there is no output 'y'"):
        session.run("step", inputs, labels, output="y")
    fed, made = plain_tensors(inputs, labels), (PlainTensor * 9)()
    for count, expected in ((2, "is asked for twice"), (9, "outputs are asked for")):
        for k in range(count):
            made[k].name = session.names(OUTPUTS)[0].encode() if count == 2 else None
        with pytest.raises(OrtError, match=expected):
            session("step", byref(fed), c_size_t(2), byref(made), c_size_t(count))
    for change in ({"size": 3}, {"rank": 9}, {"type": 99}, {"type": 8}, {"data": None}):
        fed = plain_tensors(inputs, labels)
        for key, value in change.items():
            setattr(fed[0], key, value)
        with pytest.raises(OrtError, match=re.escape(f"the input {name!r}")):
            session("step", byref(fed), c_size_t(2), c_void_p(), c_size_t(0))
    fed = plain_tensors(inputs, labels)
    fed[0].dims[0] = -1
    with pytest.raises(OrtError, match="impossible shape"):
        session("step", byref(fed), c_size_t(2), c_void_p(), c_size_t(0))


def test_null_is_refused(host) -> None:
    names = set(re.findall(r"OrtStatus\* (onnxtrain_\w+)\(", HEADER.read_text(encoding="utf-8")))
    assert len(names) == 25
    for name in sorted(names):
        with pytest.raises(OrtError) as found:
            host.function(name, *[c_void_p()] * 5)
        assert found.value.args[1].endswith("is NULL"), name


def test_options(host, tmp_path) -> None:
    with pytest.raises(OrtError, match="there is no folder"):
        Plain(host, tmp_path / "none")
    with pytest.raises(OrtError, match="is not a folder of training artifacts"):
        Plain(host, tmp_path)
    with pytest.raises(OrtError, match="threads is at least 0, not -1"):
        Plain(host, GOLDEN / "mlp", threads=-1)
    given, made = Options(size=0), c_void_p()
    folder = c_char_p(str(GOLDEN / "mlp").encode())
    with pytest.raises(OrtError, match=r"options\.size"):
        host.function("onnxtrain_open", folder, c_void_p(), byref(given), byref(made))
    older = Options(size=8, threads=-1)  # what an older program does not have is not read
    host.function("onnxtrain_open", folder, c_void_p(), byref(older), byref(made))
    host.own.onnxtrain_close(made)


def test_two_sessions_in_two_threads(host) -> None:
    losses: dict[int, list[float]] = {}

    def train(index: int) -> None:
        session = Plain(host, GOLDEN / "mlp", threads=1)
        losses[index] = [session.run("step", *samples(16, seed=k)) for k in range(50)]
        session.close()

    threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses[0] == losses[1] and len(losses[0]) == 50


def test_memory_is_told(host) -> None:
    held, most = c_uint64(), c_uint64()
    host.own.onnxtrain_memory(byref(held), byref(most))
    before = held.value
    session = Plain(host, GOLDEN / "mlp")
    session.run("step", *samples(16))
    host.own.onnxtrain_memory(byref(held), byref(most))
    assert most.value >= held.value > before
    session.close()
    host.own.onnxtrain_memory(byref(held), c_void_p())
    assert held.value == before


LIMITED = """
import sys
sys.path[:0] = sys.argv[1:4]
from test_capi_plain import *
host = Host(Path(sys.argv[4]))
session = Plain(host, GOLDEN / "mlp", memory_limit=1_000_000)
session.run("step", *samples(16))
try:
    session.run("step", *samples(100_000))
except OrtError as error:
    assert "Available memory" in error.args[1], error
else:
    raise AssertionError("more memory was taken than was allowed")
session.run("eval_step", *samples(16))
try:
    Plain(host, GOLDEN / "mlp", memory_limit=2_000_000)
except OrtError as error:
    assert "a limit of 1,000,000 bytes already" in error.args[1], error
session.close()
"""


def test_memory_is_bounded(library) -> None:
    folders = [str(ROOT / "tests" / name) for name in ("capi", "device", "fuzz")]
    words = [sys.executable, "-c", LIMITED, *folders, str(library)]
    made = subprocess.run(words, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


SOAK = """
import sys
sys.path[:0] = sys.argv[1:4]
from test_capi_plain import *

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

host, data = Host(Path(sys.argv[4])), samples(16)
session = Plain(host, GOLDEN / "mlp", threads=1)
fed, loss = plain_tensors(*data), (PlainTensor * 1)()
number = c_float()
for step in range(10_000):
    if step == 1_000:
        before = resident()
    loss[0].data, loss[0].size = ctypes.addressof(number), 4
    session("step", byref(fed), c_size_t(2), byref(loss), c_size_t(1))
    loss[0].data = None
    if step % 10 == 0:
        session("eval_step", byref(fed), c_size_t(2), byref(loss), c_size_t(1))
        host.own.onnxtrain_release_value(c_void_p(loss[0].value))
        loss[0].value = None
session.close()
grown = resident() - before
assert grown < 1_000_000, grown
"""


def test_nothing_leaks_over_ten_thousand_steps(library) -> None:
    folders = [str(ROOT / "tests" / name) for name in ("capi", "device", "fuzz")]
    words = [sys.executable, "-c", SOAK, *folders, str(library)]
    made = subprocess.run(words, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def test_without_a_runtime(library) -> None:
    program = f"""
import ctypes
own = ctypes.CDLL({str(library)!r})
own.onnxtrain_open.restype = own.onnxtrain_version.restype = ctypes.c_void_p
own.onnxtrain_message.restype = ctypes.c_char_p
made = ctypes.c_void_p()
status = ctypes.c_void_p(own.onnxtrain_open(b"folder", None, None, ctypes.byref(made)))
assert b"no onnxruntime is attached" in own.onnxtrain_message(status)
assert own.onnxtrain_code(status) == 1 and own.onnxtrain_code(None) == 0
own.onnxtrain_release_status(status)
own.onnxtrain_release_status(None)
assert own.onnxtrain_message(None) == b"" and own.onnxtrain_attach(None) == 0
assert own.onnxtrain_api_version() == 1
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def test_the_runtime_is_attached(library) -> None:
    runtime, own = ctypes.CDLL(str(library_of_the_wheel())), ctypes.CDLL(str(library))
    runtime.OrtGetApiBase.restype = c_void_p
    assert own.onnxtrain_attach(c_void_p(runtime.OrtGetApiBase())) == 1

"""What a model file may cost to read, and what happens to it while it is in use."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx_bytes import FLOAT, external, graph, model, node, value
from reading_cost import costs_of

from onnxtrain.device.export.inference_model import export_model
from onnxtrain.errors import ModelError
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.model.tensor import inline_data
from onnxtrain.format.model.wire import Reader, bytes_field, number_field, text_field, varint_bytes

HERE = Path(__file__).resolve().parent
MEGABYTE = 2**20


def sum_of(count: int, elements: int, **entries) -> bytes:
    """A model that adds many tensors of one file."""
    names = [f"w{i}" for i in range(count)]
    body = graph(
        [node("Sum", ["x", *names], ["y"])],
        [value("x", FLOAT, [elements])],
        [value("y", FLOAT, [elements])],
        [external(n, FLOAT, [elements], location="w.bin", **entries) for n in names],
    )
    return model(body)


def export(path) -> bytes | None:
    return export_model(ModelFile.read(path), ["y"], {}, path.with_name("out.onnx"))


def test_tensors_of_a_model_have_together_at_most_the_size_of_their_file(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(sum_of(1, MEGABYTE))
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(4 * MEGABYTE)
    export(path)
    assert (tmp_path / "out.onnx").stat().st_size > 4 * MEGABYTE
    path.write_bytes(sum_of(2, MEGABYTE))
    with pytest.raises(ModelError, match=r"overlaps with other tensors in w\.bin"):
        export(path)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_a_link_does_not_lead_out_of_the_folder(tmp_path) -> None:
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"password" * 50)
    path = folder / "m.onnx"
    path.write_bytes(sum_of(1, 64))
    (folder / "w.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="outside the folder"):
        export(path)
    (folder / "w.bin").unlink()
    (folder / "inside" / "w").write_bytes(bytes(256))
    (folder / "w.bin").symlink_to(folder / "inside" / "w")
    export(path)
    # The folder itself may be behind a link.
    (tmp_path / "link").symlink_to(folder)
    export(tmp_path / "link" / "m.onnx")


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs pipes")
    (tmp_path / "m.onnx").write_bytes(sum_of(1, 64))
    os.mkfifo(tmp_path / "w.bin")
    with pytest.raises(ModelError, match="not a regular file"):
        export(tmp_path / "m.onnx")


COUNT = 310_000
MANY = {
    "metadata": lambda: bytes_field(14, b"") * COUNT + bytes_field(7, b""),
    "initializers": lambda: bytes_field(
        7, b"".join(bytes_field(5, text_field(8, f"{i:x}")) for i in range(COUNT))
    ),
    "names": lambda: bytes_field(7, bytes_field(5, text_field(8, "") * COUNT)),
    "dimensions": lambda: bytes_field(
        7, bytes_field(5, text_field(8, "w") + bytes_field(1, b"\1" * 4_000_000))
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is told by Linux")
def test_many_small_parts_take_little_memory_and_time(tmp_path) -> None:
    paths = []
    for name, make in MANY.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(make())
    costs = costs_of("model", paths)
    for path, (error, kilobytes, seconds) in zip(paths, costs, strict=True):
        assert error is not None, path.name
        assert kilobytes < 100_000, (path.name, kilobytes)
        assert seconds < 5, (path.name, seconds)


@pytest.mark.parametrize(
    ("code", "field", "dtype"),
    [(7, 7, "<i8"), (6, 5, "<i4"), (3, 5, "<i1"), (5, 5, "<i2"), (13, 11, "<u8"), (12, 11, "<u4")],
)
def test_elements_that_are_stored_as_numbers(code, field, dtype) -> None:
    limits = np.iinfo(dtype)
    rng = np.random.default_rng(code)
    values = rng.integers(limits.min, limits.max, 70_000, dtype, endpoint=True)
    values[:2] = limits.min, limits.max
    numbers = b"".join(varint_bytes(int(number)) for number in values)
    message = number_field(1, len(values) + 1) + number_field(2, code)
    message += bytes_field(field, numbers) + number_field(field, 5)
    found = inline_data(Reader("test"), memoryview(message))
    assert np.frombuffer(found, dtype).tolist() == [*values.tolist(), 5]
    for wrong in (numbers[:-1] + b"\x80", b"\x80" * 11 + b"\1" + numbers, numbers + b"\1\1"):
        with pytest.raises(ModelError):
            inline_data(Reader("test"), memoryview(message[:8] + bytes_field(field, wrong)))


IN_USE = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from small_runs import GOLDEN, samples
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import OnnxTrainError

folder = Path(sys.argv[2])
shutil.copytree(GOLDEN / "head", folder, dirs_exist_ok=True)
expected = TrainingSession.from_folder(GOLDEN / "head")
session = TrainingSession.from_folder(folder)
for file in folder.iterdir():
    os.truncate(file, 10)
for _ in range(3):
    assert session.step(*samples())[0] == expected.step(*samples())[0]
session.eval_step(*samples())
session.export_model_for_inferencing(folder / "out.onnx", ["output"])
session.save_checkpoint(folder / "checkpoint")
"""


def test_files_that_shrink_while_a_session_uses_them(tmp_path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", IN_USE, str(HERE), str(tmp_path / "f")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def large(path: Path) -> None:
    """A model of 80 MB that returns one of its constants."""
    data = np.arange(20 * MEGABYTE, dtype=np.float32)
    constant = number_field(1, len(data)) + number_field(2, FLOAT) + text_field(8, "c")
    body = graph(
        [node("Add", ["x", "c"], ["y"])],
        [value("x", FLOAT, [1])],
        [value("y", FLOAT, [len(data)])],
        [constant + bytes_field(9, data.tobytes())],
    )
    path.write_bytes(model(body))


def test_the_bytes_of_a_large_model_are_not_kept(tmp_path) -> None:
    """They are read again, and another file in its place is refused."""
    path = tmp_path / "m.onnx"
    large(path)
    read = ModelFile.read(path)
    assert read.content.loadable() == str(path)
    size = path.stat().st_size
    first = read.data
    assert len(first) == size and read.data.obj is first.obj  # no second copy while one is in use
    del first
    export_model(read, ["y"], {}, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").stat().st_size > 80_000_000
    with open(path, "r+b") as file:
        file.truncate(size - 4096)
    for use in (lambda: read.data, read.content.loadable):
        with pytest.raises(ModelError, match=r"m\.onnx has changed since it was read"):
            use()
    path.unlink()
    with pytest.raises(ModelError, match="there is no model"):
        export_model(read, ["y"], {}, tmp_path / "again.onnx")

"""Checkpoints are read as they were written, and written as ONNX Runtime's classes read them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import a_training_state, as_plain_data, of_every_type

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint import layout as checkpoint_layout
from onnxtrain.format.checkpoint.content import (
    RESERVED_PREFIX,
    CheckpointContent,
    OptimizerGroup,
    RawTensor,
    merge_properties,
    split_properties,
    tensor_bytes,
)
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint


@pytest.fixture(params=["inline", "external"])
def threshold(request):
    return {"inline": 2**40, "external": 0}[request.param]


@pytest.mark.parametrize(
    "dims", [(), (1,), (3, 5), (0,), (2, 0, 3), (7, 3, 2, 5), (1,) * 32], ids=str
)
def test_every_type_survives(tmp_path, dims, threshold) -> None:
    content = CheckpointContent(trainable=of_every_type(dims))
    write_checkpoint(tmp_path / "c", content, sort=False, external_data_threshold=threshold)
    back = read_checkpoint(tmp_path / "c")
    content.has_external_data = threshold == 0
    assert as_plain_data(back) == as_plain_data(content)


def test_a_training_state_survives(tmp_path, threshold) -> None:
    content = a_training_state(size=40)
    write_checkpoint(tmp_path / "c", content, sort=False, external_data_threshold=threshold)
    content.has_external_data = threshold == 0
    assert as_plain_data(read_checkpoint(tmp_path / "c")) == as_plain_data(content)
    assert (tmp_path / "c.data").exists() == (threshold == 0)
    if threshold == 2**40:
        assert as_plain_data(read_checkpoint((tmp_path / "c").read_bytes())) == as_plain_data(
            content
        )


def test_content_with_external_data_gets_external_data_again(tmp_path) -> None:
    content = a_training_state(size=40)
    content.has_external_data = True
    write_checkpoint(tmp_path / "c", content)
    assert (tmp_path / "c.data").stat().st_size > 640
    with pytest.raises(CheckpointError, match="external data"):
        read_checkpoint((tmp_path / "c").read_bytes())


def test_only_large_parameters_are_external(tmp_path) -> None:
    content = CheckpointContent(
        trainable={"small": np.zeros(15, np.float32), "large": np.ones(16, np.float32)},
        optimizer_groups={"group0": OptimizerGroup(1, 0.1, {"large": [np.ones(16, np.float32)]})},
    )
    written = write_checkpoint(tmp_path / "c", content, external_data_threshold=0)
    assert written.locations["large"].path.name == "c.data"
    assert written.locations["small"].path.name == "c"
    assert (tmp_path / "c.data").stat().st_size == 64 + 4 + 24 + 24


def test_the_threshold_counts_whole_mebibytes(tmp_path) -> None:
    content = CheckpointContent(trainable={"w": np.zeros(2**20 + 1, np.uint8)})
    write_checkpoint(tmp_path / "c", content, external_data_threshold=2 * 2**20)
    assert read_checkpoint(tmp_path / "c").has_external_data
    write_checkpoint(tmp_path / "c", content, external_data_threshold=2 * 2**20 + 1)
    assert not read_checkpoint(tmp_path / "c").has_external_data
    assert os.listdir(tmp_path) == ["c"]


def test_momentums_too_large_for_the_file_are_external(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_layout, "MOMENTUM_THRESHOLD", 0)
    content = a_training_state(size=40)
    write_checkpoint(tmp_path / "c", content, sort=False, external_data_threshold=0)
    content.has_external_data = True
    assert as_plain_data(read_checkpoint(tmp_path / "c")) == as_plain_data(content)
    assert (tmp_path / "c.data").stat().st_size > 3 * 640


def test_a_nominal_checkpoint_has_names_and_types_only(tmp_path) -> None:
    content = a_training_state()
    content.optimizer_groups.clear()
    content.nominal = True
    write_checkpoint(tmp_path / "c", content, external_data_threshold=0)
    back = read_checkpoint(tmp_path / "c")
    assert back.nominal and not back.has_external_data
    assert {name: (t.code, t.dims, t.data.size) for name, t in back.trainable.items()} == {
        "b": (1, (), 0),
        "w": (1, (), 0),
    }
    assert {name: t.code for name, t in back.frozen.items()} == {"flag": 9, "table": 7}


def test_everything_is_sorted_on_request(tmp_path) -> None:
    content = CheckpointContent(
        trainable={name: np.zeros(1, np.float32) for name in ("b", "é", "a", "Z", "\U0001f600")},
        optimizer_groups={"g1": OptimizerGroup(), "g0": OptimizerGroup()},
        properties={"q": 1, "p": 2},
    )
    write_checkpoint(tmp_path / "c", content)
    back = read_checkpoint(tmp_path / "c")
    assert list(back.trainable) == sorted(content.trainable, key=lambda name: name.encode())
    assert list(back.optimizer_groups) == ["g0", "g1"]
    assert list(back.properties) == ["p", "q"]
    write_checkpoint(tmp_path / "c", content, sort=False)
    assert list(read_checkpoint(tmp_path / "c").trainable) == list(content.trainable)


def test_empty_strings_in_a_tensor(tmp_path) -> None:
    texts = np.array(["", "a", ""], object)
    write_checkpoint(tmp_path / "c", CheckpointContent(frozen={"texts": texts}))
    assert read_checkpoint(tmp_path / "c").frozen["texts"].tolist() == ["", "a", ""]


def test_a_thousand_tensors_and_long_names(tmp_path, threshold) -> None:
    tensors = {f"{i}-" + "n" * (i % 97 * 40): np.full(i % 50, i, np.float32) for i in range(1000)}
    content = CheckpointContent(frozen=tensors, has_external_data=threshold == 0)
    write_checkpoint(tmp_path / "c", content, sort=False, external_data_threshold=threshold)
    assert as_plain_data(read_checkpoint(tmp_path / "c")) == as_plain_data(content)


def test_where_tensors_lie(tmp_path, threshold) -> None:
    content = CheckpointContent(frozen=of_every_type((9, 8)), trainable={"e": np.zeros((0, 2))})
    written = write_checkpoint(tmp_path / "c", content, external_data_threshold=threshold)
    assert set(written.locations) == set(content.frozen) - {"STRING"}
    for name, place in written.locations.items():
        stored = place.path.read_bytes()[place.offset : place.offset + place.length]
        assert stored == bytes(tensor_bytes(content.frozen[name]))
        assert place.offset % (64 if place.length >= 64 else 8) == 0


def test_arrays_are_views_of_the_file(tmp_path, threshold) -> None:
    w = np.arange(2**20, dtype=np.float32)
    write_checkpoint(
        tmp_path / "c",
        CheckpointContent(trainable={"w": w}),
        external_data_threshold=threshold,
    )
    array = read_checkpoint(tmp_path / "c").trainable["w"]
    assert isinstance(array, np.ndarray)
    assert not array.flags.owndata and not array.flags.writeable and array.flags.aligned
    # It outlives the file.
    write_checkpoint(tmp_path / "c", CheckpointContent())
    np.testing.assert_array_equal(array, w)


def test_arrays_in_any_form_are_written(tmp_path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    content = CheckpointContent(
        trainable={
            "transposed": base.T,
            "strided": base[::2, ::-3],
            "big-endian": base.astype(">f4"),
            "scalar": np.array(2.5, ">f8"),
            "text": np.array([["a", "bc"]]),
        }
    )
    write_checkpoint(tmp_path / "c", content, sort=False)
    back = read_checkpoint(tmp_path / "c").trainable
    for name, value in content.trainable.items():
        np.testing.assert_array_equal(back[name], value)
        assert back[name].shape == value.shape


def test_bits_of_types_that_numpy_lacks() -> None:
    tensor = RawTensor(16, (1, 2), np.array([0x80, 0x3F, 0, 0x40], np.uint8))
    assert tensor.bits().tolist() == [[0x3F80, 0x4000]]
    with pytest.raises(CheckpointError, match="packed"):
        RawTensor(22, (2,), np.zeros(1, np.uint8)).bits()


def test_properties_keep_their_types_and_extremes(tmp_path) -> None:
    properties = {
        "least": -(2**63),
        "most": 2**63 - 1,
        "true": True,
        "third": 1 / 3,
        "inf": math.inf,
        "none": 0.0,
        "numpy": np.int32(4),
        "text": "a\0b\U0001f600" * 1000,
    }
    write_checkpoint(tmp_path / "c", CheckpointContent(properties=properties))
    back = read_checkpoint(tmp_path / "c").properties
    assert back == {**properties, "true": 1, "third": float(np.float32(1 / 3))}
    assert type(back["none"]) is float
    write_checkpoint(tmp_path / "c", CheckpointContent(properties={"nan": math.nan}))
    assert math.isnan(read_checkpoint(tmp_path / "c").properties["nan"])


def test_reserved_properties_are_kept_apart() -> None:
    user, reserved = {"epoch": 3}, {"learning_rate": 0.1, "scheduler": "linear"}
    merged = merge_properties(user, reserved)
    assert merged[RESERVED_PREFIX + "learning_rate"] == 0.1
    assert split_properties(merged) == (user, reserved)
    with pytest.raises(CheckpointError, match="reserved"):
        merge_properties({RESERVED_PREFIX + "x": 1}, {})


F = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CheckpointContent(trainable={"w": F}, frozen={"w": F}), "trainable and frozen"),
        (CheckpointContent(trainable={"": F}), "not a name"),
        (CheckpointContent(trainable={"\udc80": F}), "UTF-8"),
        (CheckpointContent(trainable={"w": [1.0]}), "not a numpy array"),  # type: ignore[dict-item]
        (CheckpointContent(trainable={"w": F.astype("M8[s]")}), "no element type"),
        (CheckpointContent(trainable={"w": np.array([1, "a"], object)}), "no element type"),
        (CheckpointContent(trainable={"w": RawTensor(99, (), F)}), "unknown"),  # type: ignore[arg-type]
        (CheckpointContent(trainable={"w": RawTensor(16, (3,), np.zeros(4, np.uint8))}), "fill"),
        (CheckpointContent(trainable={"w": RawTensor(16, (-1,), np.zeros(0, np.uint8))}), "shape"),
        (
            CheckpointContent(trainable={"w": RawTensor(16, (1,) * 33, np.zeros(2, np.uint8))}),
            "shape",
        ),
        (CheckpointContent(properties={"p": 2**63}), "64 bits"),
        (CheckpointContent(properties={"p": 1e39}), "32 bits"),
        (CheckpointContent(properties={"p": None}), "NoneType"),  # type: ignore[dict-item]
        (CheckpointContent(nominal=True, optimizer_groups={"g": OptimizerGroup()}), "nominal"),
        (CheckpointContent(optimizer_groups={"g": OptimizerGroup(step=2**63)}), "64 bits"),
    ],
)
def test_content_that_no_file_can_hold_is_refused(tmp_path, content, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "c", content)
    assert os.listdir(tmp_path) == []


def test_the_classes_of_onnxruntime_read_what_is_written(tmp_path) -> None:
    """A reader that shares nothing with ours sees each field where the schema has it."""
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.Checkpoint import Checkpoint

    content = a_training_state(size=40)
    written = write_checkpoint(tmp_path / "c", content)
    data = (tmp_path / "c").read_bytes()
    root = Checkpoint.GetRootAs(data, 0)
    assert Checkpoint.CheckpointBufferHasIdentifier(data, 0)
    assert root.Version() == 2
    module = root.ModuleState()
    assert (module.RequiresGradParamsLength(), module.FrozenParamsLength()) == (2, 2)
    assert not module.IsNominalState() and not module.HasExternalData()
    w = module.RequiresGradParams(1)
    assert (w.Name(), w.DataType(), w.DimsAsNumpy().tolist()) == (b"w", 1, [40, 4])
    assert w.RawDataAsNumpy().tobytes() == content.trainable["w"].tobytes()
    assert w.DocString() is None and w.StringDataIsNone() and w.ExternalDataOffset() == -1
    assert data[written.locations["w"].offset :].startswith(w.RawDataAsNumpy().tobytes())
    group = root.OptimizerGroups(0)
    assert (group.GroupName(), group.Step(), group.InitialLearningRate()) == (b"group0", 7, 0.5)
    state = group.OptimizerStates(1)
    assert state.ParamName() == b"w"
    assert [state.Momentums(i).Name() for i in range(2)] == [b"momentum0", b"momentum1"]
    bag = root.PropertyBag()
    assert [(p.Name(), p.Value()) for p in map(bag.Ints, range(2))] == [(b"epoch", 3), (b"zero", 0)]
    assert (bag.Floats(0).Name(), bag.Floats(0).Value()) == (b"loss", 0.25)
    assert [p.Value() for p in map(bag.Strings, range(2))] == [b"", "été".encode()]


def test_fields_without_content_are_absent_as_upstream_has_it(tmp_path) -> None:
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.Checkpoint import Checkpoint

    write_checkpoint(tmp_path / "saved", CheckpointContent())
    write_checkpoint(tmp_path / "generated", CheckpointContent(), sort=False)
    saved = Checkpoint.GetRootAs((tmp_path / "saved").read_bytes(), 0)
    generated = Checkpoint.GetRootAs((tmp_path / "generated").read_bytes(), 0)
    assert not saved.OptimizerGroupsIsNone() and generated.OptimizerGroupsIsNone()
    assert saved.PropertyBag() is None and generated.PropertyBag() is None
    assert not generated.ModuleState().FrozenParamsIsNone()


@pytest.mark.slow
def test_large_files_are_in_memory_once(tmp_path) -> None:
    """Writing 256 MB takes no more memory than the tensors have, reading no more than the file."""
    program = """
import sys
import numpy as np
from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint
w = np.zeros(2**26, np.float32)
write_checkpoint(sys.argv[1], CheckpointContent(frozen={"w": w}))
del w
write_checkpoint(sys.argv[1], read_checkpoint(sys.argv[1]))
# Not ru_maxrss, which begins with the memory of the process that started this one.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)
assert peak < 2**18 + 2**17, peak
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process is told by Linux alone")
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "c")], check=True)


def test_reading_and_writing_needs_numpy_alone() -> None:
    program = """
import sys
import onnxtrain.format.checkpoint.file
print([name for name in ("onnx", "onnx_ir", "google.protobuf", "torch", "onnxruntime")
       if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"

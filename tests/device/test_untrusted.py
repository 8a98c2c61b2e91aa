"""Records, metadata and names out of files: what cannot be right is our error, and says what."""

import json
import math

import numpy as np
import pytest
from small_runs import GOLDEN, open_session, samples

import onnxtrain
from onnxtrain.device.loop.history import History
from onnxtrain.device.session import TrainingSession
from onnxtrain.device.state import CheckpointState
from onnxtrain.errors import CheckpointError, ModelError, OnnxTrainError
from onnxtrain.format import npy, strict_json
from onnxtrain.format.checkpoint.file import read_checkpoint

TRAINING = "__onnxtrain__.training"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of fit with a cosine schedule and a best epoch."""
    path = tmp_path_factory.mktemp("run") / "c"
    fit(open_session(learning_rate=0.01), [onnxtrain.SaveCheckpoint(path, ("epoch", "best"))])
    return path.read_bytes()


def fit(session, callbacks=(), **more):
    stop = onnxtrain.EarlyStopping(patience=9)
    return onnxtrain.fit(
        session, samples(16), 2, batch_size=8, validation=samples(8), metrics=["accuracy"],
        schedule="cosine", callbacks=[*callbacks, stop], progress=False, **more,
    )  # fmt: skip


def resumed(saved, change):
    """Resume the run after a change of its record, given as the text that is in the file."""
    content = read_checkpoint(saved)
    content.properties[TRAINING] = change(content.properties[TRAINING])
    return fit(
        TrainingSession.from_folder(GOLDEN / "mlp", checkpoint=CheckpointState(content)),
        resume=True,
    )


def places(value, path=()):
    """The ways to all entries of plain data."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            yield from places(value[key], (*path, key))


def replaced(text, place, wrong):
    """A JSON text with another text for one of its entries."""
    record = holder = json.loads(text)
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = "@@"
    return json.dumps(record).replace('"@@"', wrong)


WRONG = (
    "Infinity", "NaN", "-1", "1e999", str(10**400), "true", "null", '""', '"x"', "[]", "{}",
    "[[1]]",
    '{"name": 3}', "[" * 99 + "]" * 99, "[" * 3000 + "]" * 3000,
)  # fmt: skip


def test_a_record_as_it_was_saved_is_resumed(saved) -> None:
    assert len(resumed(saved, lambda text: text).epochs) == 2


@pytest.mark.slow
def test_any_wrong_value_at_any_place_of_a_record(saved) -> None:
    """What is not needed may be wrong; nothing else than our errors comes out."""
    text = read_checkpoint(saved).properties[TRAINING]
    refused = 0
    for number, place in enumerate(places(json.loads(text))):
        for wrong in WRONG[number % 5 :: 5]:
            changed = replaced(text, place, wrong)
            try:
                resumed(saved, lambda _, changed=changed: changed)
            except OnnxTrainError as error:
                refused += 1
                assert len(str(error)) < 700, place
    assert refused > 100


@pytest.mark.parametrize(
    ("place", "wrong", "says"),
    [
        ("seed", "Infinity", "'seed' is inf, not a whole number"),
        ("epoch", "1.5", "'epoch' is 1.5, not a whole number"),
        ("scheduler initial_lr", '"NaN"', "'initial_lr' is nan, not a finite number"),
        ("scheduler initial_lr", "[]", "'initial_lr' is \\[\\], not a finite number"),
        ("scheduler name", "{}", "the name of a scheduler is {}"),
        ("scheduler state", "7", "the state of a scheduler is 7, not an object"),
        ("loss_sum", str(10**400), "damaged record"),
        ("history", "7", "'history' is 7, not an object"),
        ("history epochs", "{}", "'epochs' is not a list"),
        ("history losses data", '"!"', "base64"),
        ("format", '1, "format": 1', "damaged record"),
        ("rate", '"fast"', "'rate' is 'fast'"),
        ("rates", '{"-1": 0.1}', "'rates' has '-1', which is no step"),
        ("best waited", '"Infinity"', "'waited' is inf, not a whole number"),
        ("random", '{"seed": 1, "draws": 0.5}', "'draws' is 0.5, not a whole number"),
    ],
)
def test_records_that_cannot_be_right(place, wrong, says, saved) -> None:
    path = ("private", "fit", *place.split())
    with pytest.raises(CheckpointError, match=says):
        resumed(saved, lambda text: replaced(text, path, wrong))


def test_strict_json_refuses_what_is_made_to_harm() -> None:
    for text in ('{"a": 1, "a": 2}', "[" * 200 + "]" * 200, "[" * 10**5, "9" * 301, "{", b"\xff"):
        with pytest.raises(ValueError, match=r"\w"):
            strict_json.loads(text)
    assert strict_json.loads('["NaN", 1e400, -Infinity]')[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "{}",
        '"x"',
        "[" * 10**5,
        '{"format": 1}',
        '{"format": 1, "losses": {}}',
        b"\xff\xfe",
    ],
)
def test_histories_that_are_none(text) -> None:
    with pytest.raises(OnnxTrainError, match="not the JSON of a history"):
        History.from_json(text)


# ---- graphs --------------------------------------------------------------------------------------


def test_moments_of_a_type_that_is_no_float(tmp_path) -> None:
    import onnx

    for code, says in (
        (7, "int64"),
        (16, "bfloat16"),
        (99, "type 99"),
        (0, "type 0"),
        (8, "string"),
    ):
        model = onnx.load(GOLDEN / "mlp" / "optimizer_model.onnx")
        moment = next(v for v in model.graph.input if ".momentum" in v.name)
        moment.type.tensor_type.elem_type = code
        (tmp_path / "o.onnx").write_bytes(model.SerializeToString())
        state = CheckpointState.load_checkpoint(GOLDEN / "mlp" / "checkpoint")
        state.generation = None
        with pytest.raises(ModelError, match=f"as {says}"):
            TrainingSession(
                state,
                GOLDEN / "mlp" / "training_model.onnx",
                optimizer_model=tmp_path / "o.onnx",
            )


# ---- names ---------------------------------------------------------------------------------------


def test_names_and_texts_that_are_not_utf8(tmp_path) -> None:
    session = open_session()
    for name, value in (("\ud800", 1), ("x", "\udcff"), ("y", b"\xff")):
        with pytest.raises((OnnxTrainError, ValueError)):
            session.add_property(name, value)
            session.save_checkpoint(tmp_path / "c")
    with pytest.raises(OnnxTrainError):
        session.export_model_for_inferencing(None, ["\ud800"])
    with pytest.raises(OnnxTrainError):
        TrainingSession("\ud800")
    with pytest.raises(OnnxTrainError):
        TrainingSession("a\0b")


def test_errors_are_safe_on_a_terminal() -> None:
    error = OnnxTrainError("a \x1b[2J\x07\x9b31m\u202e\r b\n c \ud800")
    assert str(error) == "a \\x1b[2J\\x07\\x9b31m\\u202e\\r b\n c \\ud800"
    assert str(OnnxTrainError("größer, 大きい", advice="yes")) == "größer, 大きい yes"


# ---- arrays --------------------------------------------------------------------------------------


def test_arrays_are_what_numpy_wrote(tmp_path) -> None:
    given = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.asfortranarray(np.eye(3, 2)),
        "c": np.zeros((0, 4), np.float32), "d": np.array("text"), "e": np.array(3.5),
    }  # fmt: skip
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **given)
        found = npy.read_npz(tmp_path / "x.npz")
        assert list(found) == list(given)
        for name, array in given.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
    for name in ("a", "b", "c", "e"):
        np.save(tmp_path / "x.npy", given[name])
        np.testing.assert_array_equal(npy.map_npy(tmp_path / "x.npy"), given[name])


def test_an_archive_that_would_fill_the_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(npy, "_ALWAYS", 2**20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(2**21, np.uint8))
    with pytest.raises(OnnxTrainError, match=r"says that its [\d,]+ bytes become 2,097,"):
        npy.read_npz(tmp_path / "bomb.npz")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(4, 8)", "(-1,) "), ("(4, 8)", "(2**9)"), ("(4, 8)", "(4, 9)"), ("'<f4'", "'|V0'"),
        ("'<f4'", "'|O4'"), ("(4, 8)", "((((((" ), ("False", "12345"), ("descr", "de\0cr"),
    ],
)  # fmt: skip
def test_headers_that_do_not_fit_the_file(old, new, tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 8), np.float32))
    data = (tmp_path / "x.npy").read_bytes()
    assert old.encode() in data
    (tmp_path / "x.npy").write_bytes(data.replace(old.encode(), new.encode()))
    with pytest.raises(OnnxTrainError, match=r"is not a \.npy file"):
        npy.map_npy(tmp_path / "x.npy")


def test_an_archive_whose_directory_would_fill_the_memory(tmp_path, monkeypatch) -> None:
    np.savez(tmp_path / "x.npz", **{f"a{i}": np.zeros(1) for i in range(50)})
    assert len(npy.read_npz(tmp_path / "x.npz")) == 50
    monkeypatch.setattr(npy, "_MOST_DIRECTORY", 2000)
    with pytest.raises(OnnxTrainError, match="too many arrays"):
        npy.read_npz(tmp_path / "x.npz")
    # A record for archives of more than 4 GB may say something else, and is what counts.
    data = (tmp_path / "x.npz").read_bytes()
    end = data.rfind(b"PK\5\6")
    start, size = data.find(b"PK\1\2"), len(data[data.find(b"PK\1\2") : end])
    large = b"PK\6\6" + (44).to_bytes(8, "little") + bytes(12) + (50).to_bytes(8, "little") * 2
    large += size.to_bytes(8, "little") + start.to_bytes(8, "little")
    locator = b"PK\6\7" + bytes(4) + end.to_bytes(8, "little") + (1).to_bytes(4, "little")
    small = data[end : end + 12] + bytes(4) + data[end + 16 :]
    (tmp_path / "y.npz").write_bytes(data[:end] + large + locator + small)
    with pytest.raises(OnnxTrainError, match="too many arrays"):
        npy.read_npz(tmp_path / "y.npz")
    monkeypatch.undo()
    assert len(npy.read_npz(tmp_path / "y.npz")) == 50


@pytest.mark.parametrize("levels", [101, 300, 900, 5000])
@pytest.mark.parametrize("key", ["onnxtrain.classes", "onnxtrain.image", "onnxtrain.activation"])
def test_metadata_of_many_levels(key, levels) -> None:
    session = open_session()
    for left, right in (("[", "]"), ('{"a":', "}")):
        session.state.properties[key] = left * levels + "1" + right * levels
        with pytest.raises(ModelError, match="the metadata of the model cannot be read"):
            session.metadata  # noqa: B018

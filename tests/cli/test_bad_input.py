"""What is wrong is said in one line, with exit code 2."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain.cli import main
from onnxtrain.cli.demo.network import network

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "mlp", "artifacts")
    onnx.save(network(), "model.onnx")
    Path("text.onnx").write_text("this is no model")
    Path("text.npz").write_text("these are no arrays")
    Path("empty").mkdir()
    Path("file").write_text("a file")
    x, labels = np.zeros((4, 8), np.float32), np.arange(4) % 3
    np.savez("good.npz", input=x, labels=labels)
    np.savez("range.npz", input=x, labels=labels + 5)
    np.savez("shape.npz", input=np.zeros((4, 7), np.float32), labels=labels)
    np.save("x.npy", x)
    header = ",".join(f"f{i}" for i in range(8))
    Path("good.csv").write_text(f"{header},label\n" + "1,2,3,4,5,6,7,8,0\n" * 4)
    Path("word.csv").write_text(f"{header},label\n" + "1,2,3,4,5,x,7,8,0\n" * 4)
    Path("nolabel.csv").write_text(f"{header},kind\n" + "1,2,3,4,5,6,7,8,0\n" * 4)
    Path("range.csv").write_text(f"{header},label\n" + "1,2,3,4,5,6,7,8,7\n" * 4)
    Path("blank.csv").write_text(f"{header},label\n1,2,3,4,5,6,7,8,0\n1,2,3,4,5,6,7,8,\n")
    Path("short.csv").write_text(f"{header},label\n1,2,3\n")
    Path("locked").mkdir()
    np.savez("only-images.npz", image=np.zeros((4, 1, 8, 8), np.float32))
    shutil.copy("artifacts/checkpoint", "run")
    shutil.copy("x.npy", "picture.png")
    nasty_arrays(x, labels)
    nasty_tables(header)
    return tmp_path


def nasty_arrays(x: np.ndarray, labels: np.ndarray) -> None:
    good = Path("good.npz").read_bytes()
    Path("half.npz").write_bytes(good[: len(good) // 2])
    Path("nothing.npz").write_bytes(b"")
    np.savez("none.npz")
    with open("array.npz", "wb") as file:
        np.save(file, x)
    np.save("object.npy", np.array([{}, {}], object))
    Path("half.npy").write_bytes(Path("x.npy").read_bytes()[:90])
    odd = {
        "object": {"input": np.array([{}] * 4, object)},
        "empty": {"input": x[:0], "labels": labels[:0]},
        "uneven": {"labels": labels[:3]},
        "negative": {"labels": labels - 1},
        "words": {"labels": np.array(["a", "b", "c", "d"])},
        "fraction": {"labels": labels + 0.5},
        "unknown": {"labels": np.full(4, np.nan)},
        "onehot": {"labels": np.eye(3)[labels]},
        "number": {"input": np.float32(1)},
        "text": {"input": x.astype(str)},
        "complex": {"input": x.astype(complex)},
        "dates": {"input": x.astype("datetime64[s]")},
        "nan": {"input": np.full_like(x, np.nan)},
        "infinite": {"input": np.full_like(x, np.inf)},
        "giant": {"labels": labels.astype(np.uint64) + 2**63},
    }
    for name, arrays in odd.items():
        np.savez(f"odd-{name}.npz", **{"input": x, "labels": labels, **arrays})


def nasty_tables(header: str) -> None:
    row = "1,2,3,4,5,6,7,8"
    Path("empty.csv").write_text("")
    Path("header.csv").write_text(f"{header},label\n")
    Path("gap.csv").write_text(f"{header},label\n1,2,3,,5,6,7,8,0\n")
    Path("nan.csv").write_text(f"{header},label\n1,2,3,nan,5,6,7,8,0\n")
    Path("semicolon.csv").write_text(f"{header},label\n{row},0\n".replace(",", ";"))
    Path("giant.csv").write_text(f"{header},label\n{row},{'9' * 30}\n")
    Path("oneclass.csv").write_text(f"{header},label\n{row},cat\n{row},cat\n")
    Path("binary.csv").write_bytes(bytes(range(256)) * 9)
    Path("wide.csv").write_text(f"{header},label\n{row},0\n", encoding="utf-16")
    Path("prose.csv").write_text("Dear reader\nthis is a letter\n")


CASES = {
    # arguments: what the line has to say
    "inspect missing.onnx": "does not exist",
    "inspect text.onnx": "not an ONNX model",
    "inspect empty": "is a folder",
    "inspect model.onnx --of nothing": "'nothing'",
    "inspect model.onnx --size batch": "NAME=NUMBER",
    "prepare missing.onnx -o out": "does not exist",
    "prepare text.onnx -o out": "not an ONNX model",
    "prepare model.onnx -o file": "cannot be written",
    "prepare model.onnx -o out --train nothing.*": "nothing.*",
    "prepare model.onnx -o out --loss hinge": "invalid choice: 'hinge'",
    "prepare model.onnx": "--output",
    "prepare model.onnx -o out --classes 0": "at least 1",
    "prepare model.onnx -o out --after pool": "give classes too",
    "prepare model.onnx -o out --classes 2 --after nothing": "'nothing'",
    "prepare model.onnx -o out --momentum 0.9": "adamw has no momentum",
    "train missing --data good.npz": "onnxtrain prepare",
    "train empty --data good.npz": "onnxtrain prepare",
    "train artifacts --data missing.npz": "does not exist",
    "train artifacts --data text.npz": "numpy.savez",
    "train artifacts --data file": "neither",
    "train artifacts --data range.npz": "3 classes, 0 to 2",
    "train artifacts --data range.csv": "3 classes, 0 to 2",
    "train artifacts --data shape.npz": "(4, 7)",
    "train artifacts --data x.npy": "one .npy for each",
    "train artifacts --data empty": "such as empty/cat/1.jpg",
    "train artifacts --data good.csv --label nothing": "no column 'nothing'",
    "train artifacts --data good.csv --columns f0,nothing": "no column 'nothing'",
    "train artifacts --data nolabel.csv": "--label",
    "train artifacts --data word.csv": "row 2, column 'f5'",
    "train artifacts --data short.csv": "3 cells",
    "train artifacts --data good.npz --checkpoint no/such/file": "does not exist",
    "train artifacts --data good.npz --checkpoint empty": "is a folder",
    "train artifacts --data good.npz --plot curve.doc": ".png",
    "train artifacts --data good.npz --from missing": "not there",
    "train artifacts --data good.npz --from file": "checkpoint",
    "train artifacts --data good.npz --epochs -1": "epochs",
    "train artifacts --data good.npz --metric bleu --eval good.npz": "bleu",
    "train artifacts": "--data",
    "train artifacts --data good.npz --optimiser adamw": "see onnxtrain train --help",
    "eval artifacts --data missing.npz": "does not exist",
    "eval artifacts --data good.npz --checkpoint missing": "not there",
    "eval artifacts --data good.npz --metric bleu": "bleu",
    "export missing -o out.onnx": "onnxtrain prepare",
    "export artifacts -o no/such/out.onnx": "does not exist",
    "export artifacts -o out.onnx --outputs nothing": "nothing",
    "export artifacts -o out.onnx --checkpoint file": "checkpoint",
    "checkpoint show missing": "not there",
    "checkpoint show file": "checkpoint",
    "prepare nothing.npz -o out": "it is empty, or not a whole model",
    "eval artifacts --data good.npz --metric accuracy:ignore=3": "settings that it does not take",
    "eval artifacts --data good.npz --metric f1:average=all": "average must be one of",
    "gradient missing.onnx --wrt x -o g.onnx": "does not exist",
    "gradient text.onnx --wrt x -o g.onnx": "not an ONNX model",
    "gradient model.onnx --wrt nothing -o g.onnx": "nothing",
    "gradient model.onnx --wrt image -o no/g.onnx": "-o",
    "ops Nothing": "no operator 'Nothing'",
    "demo -o file": "is a file",
    "completion tcsh": "bash",
    "nothing": "invalid choice",
    # Files that are not what their name says.
    "inspect half.npz": "not an ONNX model",
    "inspect .": "is a folder",
    "inspect /dev/null": "not a regular file",
    "inspect model.onnx --size batch=0": "NAME=NUMBER",
    "gradient model.onnx --wrt image -o model.onnx": "choose another file",
    "prepare half.npz -o out --classes 2": "not an ONNX model",
    "prepare model.onnx -o file/out": "name another folder",
    "prepare model.onnx -o out --freeze nothing.*": "'nothing.*' matches no initializer",
    "prepare model.onnx -o out --freeze nothing": "--freeze: nothing to freeze",
    "prepare model.onnx -o out --loss huber:width=2": "huber:width=2",
    "prepare model.onnx -o out --loss hubert": "invalid choice: 'hubert'",
    "prepare model.onnx -o out --classes 99999999999": "not enough memory",
    "prepare model.onnx -o out --weight-decay nan": "--weight-decay",
    "prepare model.onnx -o out --clip-norm -1": "--clip-norm",
    "train artifacts --data half.npz": "numpy.savez",
    "train artifacts --data nothing.npz": "numpy.savez",
    "train artifacts --data none.npz": "it has none",
    "train artifacts --data array.npz": "numpy.savez",
    "train artifacts --data odd-object.npz": "plain arrays",
    "train artifacts --data object.npy object.npy": "numpy.save",
    "train artifacts --data half.npy half.npy": "numpy.save",
    "train artifacts --data empty x.npy": "not a .npy file",
    # Numbers that are not what the model takes.
    "train artifacts --data odd-empty.npz": "is empty",
    "train artifacts --data odd-uneven.npz": "differ in their number of samples",
    "train artifacts --data odd-negative.npz": "0 to 2: number the labels from 0",
    "train artifacts --data odd-words.npz": "holds text",
    "train artifacts --data odd-fraction.npz": "0.5 for sample 0",
    "train artifacts --data odd-unknown.npz": "nan for sample 0",
    "train artifacts --data odd-onehot.npz": "argmax",
    "train artifacts --data odd-number.npz": "a scalar",
    "train artifacts --data odd-text.npz": "holds text",
    "train artifacts --data odd-complex.npz": "holds complex numbers",
    "train artifacts --data odd-dates.npz": "holds dates",
    "train artifacts --data odd-nan.npz -q": "not a number, the first in sample",
    "train artifacts --data odd-infinite.npz -q": "not a number, the first in sample",
    "train artifacts --data odd-giant.npz": "number the labels from 0",
    "eval artifacts --data odd-nan.npz": "not a number, the first in sample 0",
    "eval artifacts --data odd-words.npz": "holds text",
    "eval artifacts --data odd-empty.npz": "is empty",
    "eval artifacts --data range.npz": "3 classes, 0 to 2",
    "eval artifacts --data empty": "such as empty/cat/1.jpg",
    "eval artifacts --data good.csv --label nothing": "no column 'nothing'",
    # Tables.
    "train artifacts --data empty.csv": "CSV file with a header",
    "train artifacts --data header.csv": "no rows",
    "train artifacts --data gap.csv": "row 2, column 'f3' is ''",
    "train artifacts --data blank.csv": "row 3 has no label in column 'label'",
    "train artifacts --data nan.csv -q": "not a number, the first in sample 0",
    "train artifacts --data semicolon.csv": "separated by commas",
    "train artifacts --data giant.csv": "too large",
    "train artifacts --data oneclass.csv": "only one class, 'cat'",
    "train artifacts --data binary.csv": "not a CSV file",
    "train artifacts --data wide.csv": "UTF-8",
    "train artifacts --data prose.csv": "--label",
    "train artifacts --data good.csv --columns f0,f1": "(4, 2)",
    # Options that make no sense.
    "train artifacts --data good.npz --map nothing=input": "no input 'nothing'",
    "train artifacts --data good.npz --map input": "INPUT=ARRAY",
    "train artifacts --data good.npz --epochs 0": "at least 1",
    "train artifacts --data good.npz --batch-size 0": "at least 1",
    "train artifacts --data good.npz --lr -1": "at least 0",
    "train artifacts --data good.npz --lr nan": "at least 0",
    "train artifacts --data good.npz --warmup 2": "from 0 to 1",
    "train artifacts --data good.npz --seed -1": "at least 0",
    "train artifacts --data good.npz --std 0": "other than 0",
    "train artifacts --data good.npz --mean nan": "takes numbers",
    "train artifacts --data good.npz --metric f1": "--validation",
    "train artifacts --data good.npz --resume --restart": "not allowed with",
    "train artifacts --data good.npz --checkpoint artifacts/checkpoint --restart": "another file",
    "train artifacts --data good.npz --checkpoint artifacts/eval_model.onnx": "another file",
    "train artifacts --data good.npz --checkpoint file --restart": "not a checkpoint",
    "export artifacts -o artifacts/training_model.onnx": "choose another file",
    "export artifacts -o artifacts/checkpoint": "choose another file",
    "export artifacts -o empty": "is a folder",
    # No command overwrites what it reads, nor a run with something else.
    "predict model.onnx only-images.npz -o only-images.npz": "is a file of the data",
    "predict artifacts only-images.npz -o artifacts/checkpoint": "the checkpoint to read",
    "export artifacts --checkpoint run -o run": "is the checkpoint to read: choose another file",
    "export artifacts -o run": "is a checkpoint: choose another file",
    "train artifacts --data x.npy picture.png --plot picture.png": "is a file of the data",
    "export empty -o model.onnx": "onnxtrain prepare",
    "checkpoint show empty": "not there",
    "checkpoint show model.onnx": "it is not a checkpoint",
    "demo -o file/x": "give another --output",
    "demo --seed -1": "at least 0",
}


def one_line(capsys, arguments: str) -> str:
    try:
        code = main(arguments.split())
    except SystemExit as ended:  # argparse ends by itself
        code = ended.code
    shown = capsys.readouterr()
    assert code == 2, shown
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize("arguments", CASES)
def test_one_line_says_what_to_do(folder, capsys, arguments) -> None:
    assert CASES[arguments] in one_line(capsys, arguments)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize(
    "arguments",
    ["prepare model.onnx -o locked/out", "export artifacts -o locked/m.onnx",
     "train artifacts --data good.npz --checkpoint locked/run",
     "gradient model.onnx --wrt image -o locked/g.onnx"],
)  # fmt: skip
def test_where_nothing_can_be_written(folder, capsys, arguments) -> None:
    Path("locked").chmod(0o500)
    one_line(capsys, arguments)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has /proc")
@pytest.mark.parametrize(
    "arguments",
    ["prepare model.onnx -o /proc/out", "export artifacts -o /proc/m.onnx", "demo -o /proc/demo",
     "train artifacts --data good.npz --checkpoint /proc/run -q",
     "train artifacts --data good.npz --plot /proc/curve.png -q",
     "gradient model.onnx --wrt image -o /proc/g.onnx"],
)  # fmt: skip
def test_where_not_even_root_can_write(folder, capsys, arguments) -> None:
    assert "/proc" in one_line(capsys, arguments)


def test_a_failed_run_is_no_bad_input(folder, capsys) -> None:
    """Exit code 1: what was given can be read, and training came to nothing."""
    np.savez("large.npz", input=np.full((4, 8), 1e30, np.float32), labels=np.arange(4) % 3)
    run = ["train", "artifacts", "--data", "large.npz", "-q", "--lr", "1e30", "--epochs", "9"]
    assert main(run) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "not finite" in shown or "not a number" in shown or "is nan" in shown


def test_a_pattern_that_matches_nothing_behind_a_softmax(folder, capsys) -> None:
    model = network()
    model.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], ["p"]))
    model.graph.output[0].name = "p"
    onnx.save(model, "softmax.onnx")
    shown = one_line(capsys, "prepare softmax.onnx -o out --train classifier.*")
    assert "the model has no such initializer or input" in shown
    assert not Path("out").exists()


def test_empty_names_are_no_names(folder, capsys) -> None:
    for arguments in (
        ["prepare", "model.onnx", "-o", ""],
        ["inspect", ""],
        ["checkpoint", "show", ""],
        ["train", "artifacts", "--data", ""],
        ["export", "artifacts", "-o", " "],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "the name is empty" in capsys.readouterr().err


def test_what_is_refused_leaves_files_alone(folder, capsys) -> None:
    before = {path: path.read_bytes() for path in Path("artifacts").iterdir()}
    model = Path("model.onnx").read_bytes()
    for arguments in (
        "export artifacts -o artifacts/training_model.onnx",
        "train artifacts --data good.npz --checkpoint artifacts/checkpoint --restart",
        "gradient model.onnx --wrt image -o model.onnx",
    ):
        one_line(capsys, arguments)
    assert {path: path.read_bytes() for path in Path("artifacts").iterdir()} == before
    assert Path("model.onnx").read_bytes() == model


IMAGES = {
    "flat": "folder for each class",
    "empty-class": "folder for each class",
    "one": "only one class, 'cat'",
    "half": "half/b/1.jpg' cannot be read as an image",
    "prose": "prose/a/0.png' cannot be read as an image",
    "nothing": "nothing/a/0.jpg' cannot be read as an image",
    "dangling": "dangling/a/0.png' cannot be read as an image",
    "folder": "folder/a/0.png' cannot be read as an image",
    "many": "prepare it with --classes 11",
}


@pytest.mark.parametrize("command", ["train", "eval"])
def test_folders_of_images_that_are_none(folder, capsys, command) -> None:
    image = pytest.importorskip(
        "PIL.Image", reason="images are read with Pillow, which is in an extra"
    )

    def picture(name: str) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (40, 30), (200, 30, 90)).save(path)
        return path

    for name in (
        "flat/0.png",
        "one/cat/0.png",
        "half/a/0.png",
        "prose/b/0.png",
        "nothing/b/0.png",
        "dangling/b/0.png",
        "folder/b/0.png",
        *(f"many/{i}/0.png" for i in range(11)),
    ):
        picture(name)  # fmt: skip
    jpeg = picture("half/b/1.jpg")
    jpeg.write_bytes(jpeg.read_bytes()[:200])
    for name in ("empty-class/a", "prose/a", "nothing/a", "dangling/a", "folder/a/0.png"):
        Path(name).mkdir(parents=True)
    Path("prose/a/0.png").write_text("no image")
    Path("nothing/a/0.jpg").write_bytes(b"")
    Path("dangling/a/0.png").symlink_to("nowhere.png")
    assert main(["prepare", "model.onnx", "-o", "cnn", "-q"]) == 0
    for name, said in IMAGES.items():
        assert said in one_line(capsys, f"{command} cnn --data {name}")
    size = one_line(capsys, f"{command} cnn --data many --image-size 9")
    assert "the model takes images of 8 x 8" in size

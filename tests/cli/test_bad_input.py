"""What is wrong is said in one line, with exit code 2."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain.cli import main
from onnxtrain.demo.network import network

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
    Path("short.csv").write_text(f"{header},label\n1,2,3\n")
    Path("locked").mkdir()
    return tmp_path


CASES = {
    # arguments: what the line has to say
    "inspect missing.onnx": "not there",
    "inspect text.onnx": "not an ONNX model",
    "inspect empty": "a folder, not a file",
    "inspect model.onnx --of nothing": "'nothing'",
    "inspect model.onnx --size batch": "NAME=NUMBER",
    "prepare missing.onnx -o out": "not there",
    "prepare text.onnx -o out": "not an ONNX model",
    "prepare model.onnx -o file": "cannot be written",
    "prepare model.onnx -o out --train nothing.*": "nothing.*",
    "prepare model.onnx -o out --loss hinge": "invalid choice: 'hinge'",
    "prepare model.onnx": "--output",
    "prepare model.onnx -o out --classes 0": "positive",
    "prepare model.onnx -o out --after pool": "--classes",
    "prepare model.onnx -o out --classes 2 --after nothing": "'nothing'",
    "prepare model.onnx -o out --momentum 0.9": "sgd",
    "train missing --data good.npz": "onnxtrain prepare",
    "train empty --data good.npz": "onnxtrain prepare",
    "train artifacts --data missing.npz": "not there",
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
    "train artifacts --data good.npz --checkpoint no/such/file": "no folder",
    "train artifacts --data good.npz --checkpoint empty": "is a folder",
    "train artifacts --data good.npz --plot curve.doc": ".png",
    "train artifacts --data good.npz --from missing": "not there",
    "train artifacts --data good.npz --from file": "checkpoint",
    "train artifacts --data good.npz --epochs -1": "epochs",
    "train artifacts --data good.npz --metric bleu --eval good.npz": "bleu",
    "train artifacts": "--data",
    "eval artifacts --data missing.npz": "not there",
    "eval artifacts --data good.npz --checkpoint missing": "not there",
    "eval artifacts --data good.npz --metric bleu": "bleu",
    "export missing -o out.onnx": "onnxtrain prepare",
    "export artifacts -o no/such/out.onnx": "no folder",
    "export artifacts -o out.onnx --outputs nothing": "nothing",
    "export artifacts -o out.onnx --checkpoint file": "checkpoint",
    "checkpoint show missing": "not there",
    "checkpoint show file": "checkpoint",
    "gradient missing.onnx --wrt x -o g.onnx": "not there",
    "gradient text.onnx --wrt x -o g.onnx": "not an ONNX model",
    "gradient model.onnx --wrt nothing -o g.onnx": "nothing",
    "gradient model.onnx --wrt image -o no/g.onnx": "-o",
    "ops Nothing": "no operator 'Nothing'",
    "demo -o file": "is a file",
    "completion tcsh": "bash",
    "nothing": "invalid choice",
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


def test_a_failed_run_is_no_bad_input(folder, capsys) -> None:
    """Exit code 1: what was given is fine, and training came to nothing."""
    x = np.zeros((4, 8), np.float32)
    x[2, 3] = np.nan
    np.savez("nan.npz", input=x, labels=np.arange(4) % 3)
    assert main(["train", "artifacts", "--data", "nan.npz", "-q"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "sample 2" in shown

"""`onnxtrain predict`, and what training remembers for it."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import onnxtrain
from onnxtrain.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"
OPSET = [helper.make_opsetid("", 17)]
COLOURS = {"blue": (20, 20, 220), "green": (20, 220, 20), "red": (220, 20, 20)}


def model(path: str, dims=("n", 3), weight=None, node="Identity", size: int = 3) -> None:
    """Write a model that multiplies by a matrix, and one more node."""
    matrix = np.eye(3, size, dtype=np.float32) if weight is None else weight
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["before"]),
            helper.make_node(node, ["before"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [dims[0], matrix.shape[1]])],
        [numpy_helper.from_array(matrix, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=OPSET, ir_version=9), path)


def image_model(path: str, side: int | str = 6) -> None:
    """Write a model whose scores are the means of the three channels, mixed."""
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["image"], ["mean"]),
            helper.make_node("Flatten", ["mean"], ["flat"]),
            helper.make_node("Gemm", ["flat", "w", "b"], ["scores"]),
        ],
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, side, side])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3])],
        [
            numpy_helper.from_array(rng.normal(size=(3, 3)).astype(np.float32), "w"),
            numpy_helper.from_array(np.zeros(3, np.float32), "b"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=OPSET, ir_version=9), path)


def photos(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(rng.normal(0, 30, (12, 17, 3)) + colour, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    found = main([str(a) for a in arguments])
    shown = capsys.readouterr()
    assert found == code, shown.err
    return shown.out, shown.err


def result(capsys, *arguments: str) -> dict:
    return json.loads(run(capsys, *arguments, "--json")[0])


# ---- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [6, "side"])
def test_a_photo_gets_the_name_of_its_class(folder, capsys, side) -> None:
    photos(folder / "train", 10)
    photos(folder / "test", 2)
    image_model("model.onnx", side)
    run(capsys, "prepare", "model.onnx", "-o", "art", "-q")
    size = [] if side == 6 else ["--image-size", "6"]
    run(capsys, "train", "art", "--data", "train", "--epochs", "40", "--lr", "0.3", "-q",
        "--mean", "0.4,0.5,0.6", "--std", "0.2", *size)  # fmt: skip
    run(capsys, "export", "art", "-o", "personal.onnx")
    for source in ("personal.onnx", "art"):
        found = result(capsys, "predict", source, "test", "--top", "2")
        names = {p["input"]: p["class"] for p in found["predictions"]}
        assert names == {f"test/{c}/{i}.png": c for c in COLOURS for i in range(2)}
        assert found["activation"] == "softmax"
        first = found["predictions"][0]
        assert [len(p["top"]) for p in found["predictions"]] == [2] * 6
        assert first["probability"] == first["top"][0]["probability"] > 0.5
    # The same pixels by hand, with what the model says about itself.
    about = ort.InferenceSession("personal.onnx").get_modelmeta().custom_metadata_map
    image = json.loads(about["onnxtrain.image"])
    assert image["mean"] == [0.4, 0.5, 0.6]
    assert image.get("size") == (None if side == 6 else [6, 6])
    out, err = run(capsys, "predict", "personal.onnx", "test/red/0.png", "test/blue/1.png")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["input", "class"], ["test/red/0.png", "red"], ["test/blue/1.png", "blue"]
    ]  # fmt: skip
    assert err == ""


def test_pixels_are_scaled_as_in_training(folder, capsys) -> None:
    photos(folder / "test", 1)
    image_model("model.onnx")
    options = ("--mean", "0.4,0.5,0.6", "--std", "0.2")
    run(capsys, "predict", "model.onnx", "test/red/0.png", *options, "-o", "out.npz")
    with Image.open("test/red/0.png") as image:
        pixels = np.asarray(image.convert("RGB"), np.float32) / 255
    middle = pixels[:, 2:14]  # 12 of 17 columns are left of a square, up to half a pixel
    x = ((middle.mean(axis=(0, 1)) - [0.4, 0.5, 0.6]) / 0.2).astype(np.float32)
    expected = onnxtrain.predict("model.onnx", np.ones((1, 3, 6, 6), np.float32) * x[:, None, None])
    np.testing.assert_allclose(np.load("out.npz")["scores"], expected, atol=0.3)


def test_photos_are_upright_and_may_have_16_bits(folder, capsys) -> None:
    model("model.onnx", node="Flatten")
    columns = onnx.load("model.onnx")
    columns.graph.input[0].CopyFrom(
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 3, 3])
    )
    columns.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 9])
    )
    onnx.save(columns, "columns.onnx")
    pixels = np.arange(9, dtype=np.uint8).reshape(3, 3) * 20
    turned = Image.fromarray(np.rot90(pixels).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it a quarter to the right
    turned.save("turned.png", exif=exif)
    Image.fromarray(pixels.astype(np.uint16) * 257).save("deep.png")
    run(capsys, "predict", "columns.onnx", "turned.png", "deep.png", "-o", "y.npz")
    expected = pixels.astype(np.float32).reshape(-1) / 255
    np.testing.assert_allclose(np.load("y.npz")["y"], [expected, expected], atol=1e-6)


# ---- arrays and tables ---------------------------------------------------------------------------


def test_arrays_and_tables(folder, capsys) -> None:
    model("model.onnx")
    x = np.array([[3, 1, 0], [0, 0, 5]], np.float32)
    np.save("x.npy", x)
    np.savez("named.npz", x=x, labels=[0, 2])
    np.savez("only.npz", pictures=x)
    np.savez("usual.npz", images=x, labels=[0, 2])
    with open("rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "c", "label"], *([*row, "?"] for row in x.tolist())])
    for source in ("x.npy", "x=x.npy", "named.npz", "only.npz", "usual.npz", "rows.csv"):
        found = result(capsys, "predict", "model.onnx", source)
        assert [p["index"] for p in found["predictions"]] == [0, 2], source
    power = np.exp([3, 1, 0])
    best = found["predictions"][0]
    assert best["input"] == "rows.csv, row 2"
    assert best["probability"] == pytest.approx(power[0] / power.sum())


def test_a_table_is_read_with_the_columns_of_training(folder, capsys) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).round(3)
    names = np.array(["apple", "pear", "plum"])[x.argmax(axis=1)]
    with open("train.csv", "w", newline="") as file:
        rows = ([n, i, *row] for i, (n, row) in enumerate(zip(names, x, strict=True)))
        csv.writer(file).writerows([["fruit", "number", "a", "b", "c"], *rows])
    with open("new.csv", "w", newline="") as file:
        csv.writer(file).writerows([["c", "b", "a", "number"], [9, 0, 0, 1], [0, 0, 9, 2]])
    model("model.onnx")
    run(capsys, "prepare", "model.onnx", "-o", "art", "-q")
    run(capsys, "train", "art", "--data", "train.csv", "--label", "fruit", "--columns", "a,b,c",
        "-q")  # fmt: skip
    run(capsys, "export", "art", "-o", "fruit.onnx")
    found = result(capsys, "predict", "fruit.onnx", "new.csv")
    assert [p["class"] for p in found["predictions"]] == ["plum", "apple"]


# ---- what the output is --------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["Softmax", "LogSoftmax", "Identity"])
def test_probabilities_are_the_same_wherever_the_softmax_is(folder, capsys, node) -> None:
    model("model.onnx", node=node)
    np.save("x.npy", np.array([[3, 1, 0]], np.float32))
    out, err = run(capsys, "predict", "model.onnx", "x.npy", "--json")
    found = json.loads(out)
    power = np.exp([3, 1, 0])
    assert found["predictions"][0]["probability"] == pytest.approx(power[0] / power.sum(), 1e-4)
    assert found["activation"] == ("none" if node == "Softmax" else "softmax")
    assert ("does not say what 'y' is" in err) == (node != "Softmax")


def test_the_output_of_a_binary_loss_is_a_sigmoid_away_from_probabilities(folder, capsys) -> None:
    model("model.onnx")
    onnxtrain.prepare("model.onnx", "art", loss="bce")
    run(capsys, "export", "art", "-o", "tags.onnx")
    np.save("x.npy", np.array([[3, 1, -2]], np.float32))
    found = result(capsys, "predict", "tags.onnx", "x.npy", "--class-names", "cat,dog,owl")
    top = found["predictions"][0]["top"]
    assert [t["class"] for t in top] == ["cat", "dog", "owl"]
    expected = 1 / (1 + np.exp([-3.0, -1.0, 2.0]))
    np.testing.assert_allclose([t["probability"] for t in top], expected, rtol=1e-5)


def test_a_regression_shows_its_values(folder, capsys) -> None:
    model("model.onnx")
    onnxtrain.prepare("model.onnx", "art", loss="mse")
    run(capsys, "export", "art", "-o", "values.onnx")
    np.save("x.npy", np.array([[3, 1, -2], [0, 0, 1]], np.float32))
    found = result(capsys, "predict", "values.onnx", "x.npy")
    assert [p["values"] for p in found["predictions"]] == [[3, 1, -2], [0, 0, 1]]
    out, _ = run(capsys, "predict", "values.onnx", "x.npy")
    assert out.splitlines()[0].split() == ["input", "y[0]", "y[1]", "y[2]"]


def test_what_is_too_much_to_show_goes_to_a_file(folder, capsys) -> None:
    model("model.onnx", weight=np.ones((3, 20), np.float32))
    onnxtrain.prepare("model.onnx", "art", loss="mse")
    run(capsys, "export", "art", "-o", "wide.onnx")
    np.save("x.npy", np.ones((2, 3), np.float32))
    _, err = run(capsys, "predict", "wide.onnx", "x.npy", code=2)
    assert "has the shape [2, 20], too much to show: write it to a file with --output" in err
    out, _ = run(capsys, "predict", "wide.onnx", "x.npy", "-o", "y.npz")
    assert out == "y.npz: y of the shape [2, 20]\n"
    np.testing.assert_array_equal(np.load("y.npz")["y"], np.full((2, 20), 3))


# ---- bad input -----------------------------------------------------------------------------------

CASES = {
    "missing.onnx x.npy": "there is no model at missing.onnx",
    "x.npy x.npy": "x.npy",
    "model.onnx missing.png": "'missing.png' does not exist",
    "model.onnx empty": "there are no images in 'empty'",
    "model.onnx text.txt": "'text.txt' is not an image",
    "model.onnx one.csv one.csv": "'one.csv' is not an image",
    "model.onnx photo.png": "the input 'x' is of rank 2; for images, it must have 4 axes",
    "model.onnx x.npy --of z": "--of: the outputs of the model are y",
    "model.onnx x.npy -o model.onnx": "--output: 'model.onnx' is the model: choose another file",
    "model.onnx x.npy -o missing/y.npz": "does not exist: create it first",
    "model.onnx one.csv": "has the shape (1, 1), and the model takes (n, 3)",
    "model.onnx x.npy --class-names a,a": "classes is a list of different names",
    "empty x.npy": "'empty' is no folder of training artifacts",
    "odd.onnx x.npy": "the property 'onnxtrain.classes' is not valid JSON",
}


@pytest.mark.parametrize("arguments", CASES)
def test_one_line_says_what_is_wrong(folder, capsys, arguments) -> None:
    model("model.onnx")
    odd = onnx.load("model.onnx")
    odd.metadata_props.add(key="onnxtrain.classes", value="?")
    onnx.save(odd, "odd.onnx")
    np.save("x.npy", np.ones((2, 3), np.float32))
    Path("empty").mkdir()
    Path("text.txt").write_text("text")
    Path("one.csv").write_text("a\n1\n")
    Image.new("RGB", (9, 9)).save("photo.png")
    _, err = run(capsys, "predict", *arguments.split(), code=2)
    assert CASES[arguments] in err
    assert err.count("\n") == 1


def test_it_runs_without_onnx() -> None:
    code = (
        "import sys; sys.modules['onnx'] = sys.modules['onnx_ir'] = None\n"
        "from onnxtrain.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    model("model.onnx")
    np.save("x.npy", np.ones((2, 3), np.float32))
    command = [sys.executable, "-c", code, "predict", "model.onnx", "x.npy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- data for training ---------------------------------------------------------------------------


@pytest.fixture
def artifacts(folder) -> Path:
    shutil.copytree(GOLDEN / "mlp", folder / "art")
    return folder / "art"


def test_float64_is_rounded_and_that_is_said(artifacts, capsys) -> None:
    x = np.random.default_rng(0).normal(size=(40, 8))
    y = x[:, :3].argmax(axis=1)
    np.savez("double.npz", x=x, y=y)
    np.savez("single.npz", x=x.astype(np.float32), y=y)
    np.save("x.npy", x)
    np.save("y.npy", y)
    expected = result(capsys, "eval", "art", "--data", "single.npz")
    for files in (["double.npz"], ["x.npy", "y.npy"]):
        out, err = run(capsys, "eval", "art", "--data", *files, "--json")
        assert json.loads(out) == expected
        assert "'input' was rounded from float64 to float32" in err
    _, err = run(capsys, "eval", "art", "--data", "single.npz")
    assert err == ""


@pytest.mark.parametrize("value", [1.7e9 + 1, 1e300, -(2.0**24) - 1])
def test_what_float32_does_not_hold_is_refused(artifacts, capsys, value) -> None:
    x = np.zeros((40, 8))
    x[7, 3] = value
    np.savez("double.npz", x=x, y=np.zeros(40, int))
    _, err = run(capsys, "eval", "art", "--data", "double.npz", code=2)
    assert "for sample 7, which float32, the type of the model, does not hold" in err


def test_classes_can_be_named_on_the_command_line(artifacts, capsys) -> None:
    x = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    np.savez("train.npz", x=x, y=x[:, :3].argmax(axis=1))
    run(capsys, "train", "art", "--data", "train.npz", "--class-names", "a,b,c", "-q")
    run(capsys, "export", "art", "-o", "model.onnx")
    found = result(capsys, "predict", "model.onnx", "train.npz")
    assert {p["class"] for p in found["predictions"]} <= set("abc")
    model("more.onnx")
    run(capsys, "prepare", "more.onnx", "-o", "new", "--classes", "one,two", "-q")
    assert onnxtrain.TrainingSession("new").metadata.classes == ["one", "two"]


def test_a_checkpoint_of_an_earlier_version_knows_its_classes(artifacts, capsys) -> None:
    session = onnxtrain.TrainingSession("art")
    columns = [f"f{i}" for i in range(8)]
    old = {"label": "fruit", "columns": columns, "classes": ["z", "b", "a"], "size": 9}
    session.add_property("data", json.dumps(old))
    session.save_checkpoint("art/trained")
    with open("test.csv", "w", newline="") as file:
        rows = [[*columns, "fruit"], [0] * 8 + ["b"], [1] * 8 + ["z"]]
        csv.writer(file).writerows(rows)
    found = result(capsys, "eval", "art", "--data", "test.csv")
    assert found["classes"] == ["z", "b", "a"]
    session.add_property("data", "of my own")
    session.save_checkpoint("art/trained")
    _, err = run(capsys, "eval", "art", "--data", "test.csv", code=2)
    assert "choose the column of the labels with --label" in err


@pytest.mark.parametrize(("fixed", "accumulate"), [(1, 32), (4, 8), (64, 1)])
def test_a_fixed_batch_is_accumulated(folder, capsys, fixed, accumulate) -> None:
    model("model.onnx", dims=(fixed, 3))
    run(capsys, "prepare", "model.onnx", "-o", "art", "-q")
    x = np.random.default_rng(0).normal(size=(130, 3)).astype(np.float32)
    np.savez("train.npz", x=x, y=x.argmax(axis=1))
    _, err = run(capsys, "train", "art", "--data", "train.npz", "--validation", "train.npz")
    assert f"trains with --batch-size {fixed} --accumulate {accumulate}" in err
    assert ("the last 2 samples do not fill a batch" in err) == (fixed > 1)
    steps = result(capsys, "checkpoint", "show", "art")["steps"]
    assert steps == -(-(130 // fixed) // accumulate)
    found = result(capsys, "eval", "art", "--data", "train.npz")
    assert found["samples"] == 130 - 130 % fixed
    _, err = run(
        capsys, "train", "art", "--data", "train.npz", "--batch-size", "65", "--restart", code=2
    )
    asked = f"--batch-size {fixed} --accumulate {65 // fixed}"
    assert f"exported for batches of {fixed}: leave out --batch-size, or pass {asked}" in err

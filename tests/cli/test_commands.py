"""The commands do what they say, on real files."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.cli.demo.network import network
from onnxtrain.cli.parser import LOSSES, OPTIMIZERS
from onnxtrain.offline import losses, optimizers

GOLDEN = Path(__file__).parents[1] / "golden"


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return x, x[:, :3].argmax(axis=1)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with artifacts of a small classifier and data of each kind."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "mlp", tmp_path / "artifacts")
    x, labels = samples(128)
    np.savez("train.npz", x=x, y=labels)
    unseen, unseen_labels = samples(64, seed=1)
    np.savez("test.npz", input=unseen, labels=unseen_labels)
    np.save("x.npy", x)
    np.save("labels.npy", labels)
    for name, words in (("numbers.csv", "0 1 2"), ("words.csv", "apple pear plum")):
        with open(name, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*(f"f{i}" for i in range(8)), "label"])
            names = words.split()
            writer.writerows([*row, names[n]] for row, n in zip(x, labels, strict=True))
    return tmp_path


def run(capsys, *arguments: str) -> str:
    code = main(arguments)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def result(capsys, *arguments: str) -> dict:
    return json.loads(run(capsys, *arguments, "--json"))


def test_train_eval_export_and_what_comes_out_runs_in_onnxruntime(folder, capsys) -> None:
    common = ("--data", "train.npz", "--eval", "test.npz", "--lr", "0.01")
    history = result(capsys, "train", "artifacts", *common, "--epochs", "8", "-q")
    assert [record["epoch"] for record in history["epochs"]] == list(range(1, 9))
    values = result(capsys, "eval", "artifacts", "--data", "test.npz")
    assert values["checkpoint"] == "artifacts/trained"
    assert values["accuracy"] == history["epochs"][-1]["values"]["accuracy"] > 0.7
    fresh = result(
        capsys, "eval", "artifacts", "--data", "test.npz", "--checkpoint", "artifacts/checkpoint"
    )
    assert fresh["eval_loss"] > values["eval_loss"]
    exported = result(capsys, "export", "artifacts", "-o", "model.onnx")
    data = np.load("test.npz")
    (scores,) = ort.InferenceSession("model.onnx").run(
        exported["outputs"], {"input": data["input"]}
    )
    assert (scores.argmax(axis=1) == data["labels"]).mean() == values["accuracy"]


@pytest.mark.parametrize(
    "data",
    [["x.npy", "labels.npy"], ["labels=labels.npy", "input=x.npy"], ["numbers.csv"], ["words.csv"]],
    ids=["npy", "npy-named", "csv", "csv-words"],
)
def test_every_kind_of_data_trains_alike(folder, capsys, data) -> None:
    expected = result(capsys, "train", "artifacts", "--data", "train.npz", "-q")
    trained = ("train", "artifacts", "--data", *data, "-q", "--checkpoint", "other")
    found = result(capsys, *trained)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)


def test_evaluation_numbers_words_as_training_did(folder, capsys) -> None:
    run(capsys, "train", "artifacts", "--data", "words.csv", "-q")
    with open("words.csv") as file:
        rows = [row for row in csv.reader(file) if row[-1] != "apple"]
    with open("some.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    values = result(capsys, "eval", "artifacts", "--data", "some.csv", "--metric", "confusion")
    assert values["classes"] == ["apple", "pear", "plum"]
    assert sum(values["confusion"][0]) == 0
    assert sum(map(sum, values["confusion"])) == len(rows) - 1


def test_arrays_of_other_names_are_mapped(folder, capsys) -> None:
    data = np.load("train.npz")
    np.savez("odd.npz", features=data["x"], kind=data["y"])
    assert main(["eval", "artifacts", "--data", "odd.npz"]) == 2
    assert "--map input=ARRAY" in capsys.readouterr().err
    values = result(
        capsys, "eval", "artifacts", "--data", "odd.npz", "--map", "input=features",
        "--map", "labels=kind",
    )  # fmt: skip
    assert values["samples"] == 128


def test_a_run_is_not_replaced_by_accident(folder, capsys) -> None:
    train = ("train", "artifacts", "--data", "train.npz", "-q")
    run(capsys, *train)
    before = Path("artifacts/trained").read_bytes()
    assert main(train) == 2
    assert "--resume" in capsys.readouterr().err
    assert Path("artifacts/trained").read_bytes() == before
    assert len(result(capsys, *train, "--restart", "--epochs", "2")["epochs"]) == 2


def test_a_resumed_run_is_as_one_that_never_stopped(folder, capsys) -> None:
    train = ("train", "artifacts", "--data", "train.npz", "--schedule", "linear", "-q")
    whole = result(capsys, *train, "--epochs", "4", "--checkpoint", "whole")
    result(capsys, *train, "--epochs", "4", "--checkpoint", "half", "--early-stopping", "9")
    assert whole["losses"] == result(capsys, *train, "--epochs", "4", "--checkpoint", "half",
                                     "--resume")["losses"]  # fmt: skip
    first = result(capsys, *train[:-3], "-q", "--epochs", "2", "--checkpoint", "two")
    both = result(capsys, *train[:-3], "-q", "--epochs", "4", "--checkpoint", "two", "--resume")
    assert len(both["epochs"]) == 4
    assert both["losses"][: len(first["losses"])] == first["losses"]


def test_the_picture_of_a_run(folder, capsys) -> None:
    pytest.importorskip(
        "matplotlib", reason="the picture is drawn with matplotlib, which is in an extra"
    )
    shown = run(capsys, "train", "artifacts", "--data", "train.npz", "--plot", "curve.svg")
    assert "curve.svg" in shown
    assert Path("curve.svg").read_text().startswith("<?xml")


def test_a_checkpoint_is_shown(folder, capsys) -> None:
    run(capsys, "train", "artifacts", "--data", "words.csv", "--epochs", "2", "-q")
    shown = result(capsys, "checkpoint", "show", "artifacts")
    assert (shown["steps"], shown["epochs"]) == (8, 2)
    trains = {p["name"]: p["shape"] for p in shown["parameters"] if p["trains"]}
    assert [8] in [shape[-1:] for shape in trains.values()]
    assert json.loads(shown["properties"]["onnxtrain.classes"]) == ["apple", "pear", "plum"]
    text = run(capsys, "checkpoint", "show", "artifacts/trained")
    assert "8 steps, 2 epochs" in text
    assert all(name in text for name in trains)
    nominal = run(capsys, "checkpoint", "show", "artifacts/nominal_checkpoint")
    assert "names without values" in nominal


# ---- the workstation -----------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "model.onnx")
    return tmp_path


def test_inspect_says_what_would_train(model, capsys) -> None:
    shown = result(capsys, "inspect", "model.onnx")
    assert shown["can_train"]
    assert shown["weights"]["fc1.weight"] == 64 * 512
    assert shown["reasons"]["fc1.weight"].startswith("weight of ")
    assert shown["verdict"].startswith("trains wholly")
    text = run(capsys, "inspect", "model.onnx", "--weights")
    assert "conv1.weight" in text and "weight of Conv" in text
    assert "MB per sample" in text and "verdict       trains wholly" in text
    bounded = network()
    bounded.graph.initializer.append(onnx.helper.make_tensor("low", 1, [], [0.0]))
    bounded.graph.node.append(onnx.helper.make_node("Clip", ["scores", "low"], ["y"], "clip"))
    bounded.graph.output[0].name = "y"
    onnx.save(bounded, "bounded.onnx")
    assert "bound of Clip 'clip'" in run(capsys, "inspect", "bounded.onnx", "--all")
    assert "'clip'" not in run(capsys, "inspect", "bounded.onnx", "--weights")


def test_prepare_trains_what_was_asked_for(model, capsys) -> None:
    made = result(
        capsys, "prepare", "model.onnx", "--train", "fc2.*", "--optimizer", "sgd",
        "--momentum", "0.9", "--clip-norm", "1", "-o", "out",
    )  # fmt: skip
    assert set(made["trainable"]) == {"fc2.weight", "fc2.bias"}
    session = onnxtrain.TrainingSession.from_folder("out")
    assert session.output_names()[1:] == ["scores"]


def test_prepare_keeps_within_a_memory_budget(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(deep_network(), "model.onnx")
    made = {}
    for budget in ("70%", "1GB"):
        made[budget] = result(
            capsys, "prepare", "model.onnx", "--memory-budget", budget, "--size", "batch=512",
            "-o", f"out{len(made)}",
        )["memory"]  # fmt: skip
        assert made[budget]["sizes"] == {"batch": 512}
        assert made[budget]["peak"] <= made[budget]["budget"]
    tight, loose = made["70%"], made["1GB"]
    assert tight["budget"] == int(tight["without"] * 0.7) and tight["copies"] > 0
    assert loose["peak"] == loose["without"] == tight["without"] and loose["copies"] == 0
    assert loose["budget"] == 2**30
    too_little = ["prepare", "model.onnx", "--memory-budget", "1kB", "-o", "tiny"]
    assert main(too_little) == 2
    assert "--size batch=32" in capsys.readouterr().err
    assert main([*too_little, "--size", "batch=512"]) == 2
    assert "or more, or train with smaller batches" in capsys.readouterr().err
    assert not Path("tiny").exists()


def deep_network() -> onnx.ModelProto:
    """Layers with several activations each, of which one is enough to compute the others again."""
    rng, helper = np.random.default_rng(0), onnx.helper
    nodes, weights, x = [], [], "x"
    for layer in range(6):
        weight = rng.normal(size=(64, 64), scale=0.1).astype(np.float32)
        weights.append(onnx.numpy_helper.from_array(weight, f"w{layer}"))
        for op, more in (("MatMul", [f"w{layer}"]), ("Sigmoid", []), ("Tanh", []), ("Sigmoid", [])):
            y = f"{op}{len(nodes)}"
            nodes.append(helper.make_node(op, [x, *more], [y]))
            x = y
    given, scores = (
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch", 64]) for n in ("x", x)
    )
    graph = helper.make_graph(nodes, "deep", [given], [scores], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_the_loss_is_computed_before_a_final_softmax(model, capsys) -> None:
    """Cross entropy of probabilities would be another function, and a bad one."""
    whole = network()
    whole.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], ["p"]))
    whole.graph.output[0].name = "p"
    onnx.save(whole, "softmax.onnx")
    assert main(["prepare", "softmax.onnx", "-o", "a"]) == 0
    assert "the loss is computed from 'scores'" in capsys.readouterr().out
    run(capsys, "prepare", "model.onnx", "-o", "b", "-q")
    images = np.random.default_rng(0).random((4, 1, 8, 8), np.float32)
    labels = np.arange(4)
    one, other = (
        onnxtrain.TrainingSession.from_folder(f).eval_step(images, labels)[0] for f in "ab"
    )
    assert one == pytest.approx(float(other))


def test_a_new_head_for_other_classes_and_a_folder_of_images(model, capsys) -> None:
    image = pytest.importorskip(
        "PIL.Image", reason="images are read with Pillow, which is in an extra"
    )
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name, level in (("dark", 40), ("bright", 210)):
            Path(part, name).mkdir(parents=True)
            for i in range(8):
                pixels = rng.normal(level, 20, (20, 30)).clip(0, 255).astype(np.uint8)
                image.fromarray(pixels).save(Path(part, name, f"{i}.png"))
    made = result(capsys, "prepare", "model.onnx", "--classes", "2", "-o", "out")
    assert made["trainable"] == {"head.weight": 128, "head.bias": 2}
    train = ("train", "out", "--data", "train", "--lr", "0.01", "--epochs", "20", "-q")
    run(capsys, *train, "--mean", "0.5", "--std", "0.25")
    values = result(capsys, "eval", "out", "--data", "test")
    assert values["classes"] == ["bright", "dark"]
    assert values["accuracy"] == 1.0
    shutil.rmtree("test/bright")
    assert result(capsys, "eval", "out", "--data", "test")["accuracy"] == 1.0


def test_gradient_writes_a_model_that_runs(model, capsys) -> None:
    shown = result(capsys, "gradient", "model.onnx", "--wrt", "image", "-o", "grad.onnx")
    assert shown["outputs"] == ["scores", "image_grad"]
    image = np.random.default_rng(0).random((1, 1, 8, 8), np.float32)
    _, found = ort.InferenceSession("grad.onnx").run(
        None, {"image": image, "scores_grad": np.ones((1, 10), np.float32)}
    )
    assert found.shape == image.shape
    assert np.abs(found).max() > 0


def test_ops_are_listed(capsys) -> None:
    everything = result(capsys, "ops")["operators"]
    assert len(everything) > 150
    assert {row["how"] for row in result(capsys, "ops", "--how", "refused")["operators"]} == {
        "refused"
    }
    assert "Relu" in run(capsys, "ops", "relu")


def test_the_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"onnxtrain {onnxtrain.__version__}\n"


@pytest.mark.slow
def test_demo_tells_the_whole_story(tmp_path, capsys) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package, reason="it is in an extra")
    values = result(capsys, "demo", "-o", str(tmp_path / "demo"), "-q")
    assert values["user_before"] < 0.7
    assert values["user_after"] > values["user_before"] + 0.2
    assert values["exported_accuracy"] == pytest.approx(values["user_after"], abs=0.005)
    assert not values["onnx_imported_on_device"]
    assert Path(values["picture"]).stat().st_size > 10_000


def test_frozen_layers_run_once_and_the_result_is_the_same(model, capsys) -> None:
    run(capsys, "prepare", "model.onnx", "--train", "fc2.*", "-o", "out", "-q")
    images = np.random.default_rng(0).random((40, 1, 8, 8), np.float32)
    np.savez("data.npz", image=images, labels=np.arange(40) % 10)
    train = ("train", "out", "--data", "data.npz", "--epochs", "2", "-q", "--restart")
    plain = result(capsys, *train)["losses"]
    np.testing.assert_allclose(result(capsys, *train, "--cache-features")["losses"], plain, 1e-5)


def test_names_of_losses_and_optimizers_are_those_of_the_function() -> None:
    assert {name.replace("-", "_") for name in LOSSES} <= losses.BY_NAME.keys()
    assert {losses.BY_NAME[name.replace("-", "_")] for name in LOSSES} == {*losses.BY_NAME.values()}
    assert set(OPTIMIZERS) == set(optimizers.BY_NAME)


def test_what_the_function_can_name_the_command_can(model, capsys) -> None:
    made = run(
        capsys, "prepare", "model.onnx", "-o", "a", "--json", "--prefix", "my_", "--proximal",
        "--nominal-checkpoint", "--outputs", "scores",
        "--loss", "cross-entropy:label_smoothing=0.1",
        "--optimizer", "sgd:momentum=0.9,nesterov=True", "--clip-norm", "1",
    )  # fmt: skip
    assert "my_nominal_checkpoint" in json.loads(made)["files"]
    run(capsys, "prepare", "model.onnx", "-o", "b", "--loss", "mse", "--optimizer", "none", "-q")
    assert not Path("b/optimizer_model.onnx").exists()
    # Names are written as in Python, too.
    run(capsys, "prepare", "model.onnx", "-o", "c", "--loss", "cross_entropy", "-q")
    assert Path("c/optimizer_model.onnx").exists()

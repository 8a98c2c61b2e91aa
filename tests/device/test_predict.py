"""Predictions without labels, from a session and from a model file; metadata of models."""

import json
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ArgumentError, InputError, ModelError, StateError
from onnxtrain.format.model_metadata import ModelMetadata

GOLDEN = Path(__file__).parents[1] / "golden"
rng = np.random.default_rng(0)
X = rng.normal(size=(70, 8)).astype(np.float32)
LABELS = X[:, :3].argmax(axis=1)


def make_session(name: str = "mlp", **options) -> onnxtrain.TrainingSession:
    return onnxtrain.TrainingSession.from_folder(GOLDEN / name, **options)


def model_of(nodes, inputs, outputs, tensors=()) -> bytes:
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(n, t, dims) for n, t, dims in inputs],
        [helper.make_tensor_value_info(n, t, dims) for n, t, dims in outputs],
        [numpy_helper.from_array(array, name) for name, array in tensors],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return made.SerializeToString()


# ---- sessions ------------------------------------------------------------------------------------


def test_predictions_are_those_of_evaluation_and_need_no_labels() -> None:
    session = make_session()
    _, scores = session.eval_step(X, LABELS)
    np.testing.assert_allclose(session.predict(X), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.predict(X, batch_size=9), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.predict(input=X[:3]), scores[:3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "head"])
def test_predictions_follow_training(name) -> None:
    session = make_session(name)
    before = session.predict(X)
    session.set_learning_rate(0.1)
    session.step(X, LABELS)
    after = session.predict(X)
    assert not np.array_equal(before, after)
    np.testing.assert_allclose(after, session.eval_step(X, LABELS)[1], rtol=1e-5, atol=1e-6)
    exported = session.export_model_for_inferencing(None, session.output_names(False)[1:])
    np.testing.assert_allclose(onnxtrain.predict(exported, X), after, rtol=1e-5, atol=1e-6)


def test_a_frozen_parameter_that_is_set_shows() -> None:
    session = make_session("head")
    before = session.predict(X)
    frozen = next(n for n, p in session.state.parameters if not p.requires_grad)
    session.update_parameter(frozen, session.get_parameter(frozen) * 2)
    assert not np.array_equal(session.predict(X), before)


def test_any_values_can_be_predicted() -> None:
    session = make_session()
    active, scores = session.predict(X, outputs=["active", "output"])
    assert active.shape == (70, 16)
    np.testing.assert_array_equal(scores, session.predict(X))
    with pytest.raises(LookupError, match="has no value 'actve'; near are 'active'"):
        session.predict(X, outputs=["actve"])
    with pytest.raises(ArgumentError, match="name the values to predict"):
        session.predict(X, outputs=[])


def test_a_session_with_a_fixed_batch_predicts_any_number_of_samples() -> None:
    session = make_session(batch_size=16)
    np.testing.assert_allclose(session.predict(X), make_session().predict(X), rtol=1e-5, atol=1e-6)


def test_what_predict_does_not_take() -> None:
    session = make_session()
    with pytest.raises(InputError, match="2 inputs were given"):
        session.predict(X, LABELS)
    with pytest.raises(InputError, match=r"has the shape \[N, 8\]"):
        session.predict(X[:, :5])
    with pytest.raises(ArgumentError, match="batch_size"):
        session.predict(X, batch_size=0)
    alone = onnxtrain.TrainingSession(
        GOLDEN / "mlp" / "checkpoint", GOLDEN / "mlp" / "training_model.onnx"
    )
    with pytest.raises(StateError, match="no evaluation graph to predict with"):
        alone.predict(X)


def test_predictions_beside_training_see_whole_steps() -> None:
    session = make_session()
    session.set_learning_rate(0.01)
    trainer = threading.Thread(target=lambda: [session.step(X, LABELS) for _ in range(30)])
    trainer.start()
    while trainer.is_alive():
        assert np.isfinite(session.predict(X)).all()
    trainer.join()


# ---- model files ---------------------------------------------------------------------------------


def test_a_model_is_a_path_bytes_or_a_session(tmp_path) -> None:
    model = make_session().export_model_for_inferencing(None, ["output"])
    path = tmp_path / "model.onnx"
    path.write_bytes(model)
    expected = onnxtrain.predict(model, X)
    assert expected.shape == (70, 3)
    for source in (path, str(path), ort.InferenceSession(model)):
        np.testing.assert_array_equal(onnxtrain.predict(source, X), expected)
    np.testing.assert_array_equal(onnxtrain.predict(path, {"input": X.tolist()}), expected)
    np.testing.assert_array_equal(onnxtrain.predict(path, X[:40], batch_size=40), expected[:40])
    with pytest.raises(ArgumentError, match=r"outputs has \['nothing'\]; the outputs of the model"):
        onnxtrain.predict(path, X, outputs=["nothing"])
    path.write_bytes(model[:100])
    with pytest.raises(ModelError, match=r"model\.onnx"):
        onnxtrain.predict(path, X)


@pytest.mark.parametrize("fixed", [1, 4])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_fixed_batch_is_filled_up(fixed, count) -> None:
    model = model_of(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        [("x", TensorProto.FLOAT, [fixed, 8])], [("y", TensorProto.FLOAT, [fixed, 8])],
        [("w", np.arange(8, dtype=np.float32))],
    )  # fmt: skip
    expected = X[:count] * np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(onnxtrain.predict(model, X[:count]), expected)


def test_inputs_that_are_not_samples_go_to_each_batch() -> None:
    model = model_of(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", 8]), ("factor", TensorProto.FLOAT, [])],
        [("y", TensorProto.FLOAT, ["n", 8])],
    )
    found = onnxtrain.predict(model, X, np.float32(3), batch_size=8)
    np.testing.assert_array_equal(found, X * 3)


def test_outputs_that_are_not_of_samples_are_given_for_one_batch_only() -> None:
    model = model_of(
        [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)],
        [("x", TensorProto.FLOAT, ["n", 8])], [("y", TensorProto.FLOAT, [])],
    )  # fmt: skip
    assert onnxtrain.predict(model, X, batch_size=70).shape == ()
    with pytest.raises(InputError, match="not one row for each sample"):
        onnxtrain.predict(model, X)


def test_inputs_of_different_lengths_are_refused() -> None:
    model = model_of(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [("a", TensorProto.FLOAT, ["n", 8]), ("b", TensorProto.FLOAT, ["n", 8])],
        [("y", TensorProto.FLOAT, ["n", 8])],
    )
    with pytest.raises(InputError, match="the input 'b' has 40 samples, and 'a' has 70"):
        onnxtrain.predict(model, X, X[:40])


def test_strings_are_predicted() -> None:
    model = model_of(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.STRING, ["n", 1])], [("y", TensorProto.STRING, ["n", 1])],
    )  # fmt: skip
    words = np.array([["one"], ["two"], ["three"]])
    assert onnxtrain.predict(model, words, batch_size=2).tolist() == words.tolist()


# ---- metadata ------------------------------------------------------------------------------------


def test_metadata_is_in_the_checkpoint_and_in_what_is_exported(tmp_path) -> None:
    session = make_session()
    session.set_metadata(classes=["apple", "pear", "plum"], mean=[0.5], std=[0.25, 0.5, 1.0])
    session.set_metadata(size=[24, 32])
    session.add_property("mine", "is not for export")
    session.save_checkpoint(tmp_path / "trained")
    again = make_session(checkpoint=tmp_path / "trained")
    assert again.metadata == session.metadata
    assert again.metadata.classes == ["apple", "pear", "plum"]
    for name, options in (("a.onnx", {}), ("b.onnx", {"optimize": True}), ("c.ort", {})):
        kind = "ort" if name.endswith("ort") else "onnx"
        path = tmp_path / name
        again.export_model_for_inferencing(path, ["output"], format=kind, **options)
        found = ort.InferenceSession(path).get_modelmeta().custom_metadata_map
        assert json.loads(found["onnxtrain.classes"]) == ["apple", "pear", "plum"]
        image = {"mean": [0.5], "std": [0.25, 0.5, 1.0], "size": [24, 32]}
        assert json.loads(found["onnxtrain.image"]) == image
        assert "mine" not in found
        assert "onnxtrain" not in found
        assert ModelMetadata.of(found) == session.metadata


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"classes": ["a", "a"]}, "classes is a list of different names"),
        ({"classes": "ab"}, "classes is a list of different names"),
        ({"classes": [1, 2]}, "classes is a list of different names"),
        ({"std": [0.0]}, "std is a list of numbers other than 0"),
        ({"mean": [float("nan")]}, "mean is a list of numbers"),
        ({"size": [224]}, "size is a list of height and width"),
        ({"clases": ["a"]}, "clases"),
    ],
)
def test_metadata_that_cannot_be_right_is_refused(given, message) -> None:
    session = make_session()
    with pytest.raises(ArgumentError, match=message):
        session.set_metadata(**given)
    assert len(session.state.properties) == 0


@pytest.mark.parametrize(
    ("key", "text"),
    [("classes", "["), ("classes", "{}"), ("image", "3"), ("image", '{"std": [0]}'),
     ("activation", '{"y": "tanh"}'), ("classes", "[" * 10**5)],
)  # fmt: skip
def test_damaged_metadata_is_an_error_that_names_it(key, text) -> None:
    session = make_session()
    session.add_property(f"onnxtrain.{key}", text)
    with pytest.raises(ModelError, match=r"cannot be read: "):
        _ = session.metadata


def test_words_that_look_like_numbers_stay_words() -> None:
    about = ModelMetadata(classes=["NaN", "Infinity", "Käse", "\N{SNOWMAN}"])
    assert ModelMetadata.of(about.properties()) == about


# ---- from the model to what is exported ----------------------------------------------------------


def prepared(tmp_path, properties=(), **options):
    source = onnx.load_model_from_string(
        make_session().export_model_for_inferencing(None, ["output"])
    )
    del source.metadata_props[:]
    for key, value in properties:
        source.metadata_props.add(key=key, value=value)
    onnxtrain.prepare(source, tmp_path / "artifacts", **options)
    return onnxtrain.TrainingSession(tmp_path / "artifacts")


def exported_metadata(session, outputs=None) -> dict[str, str]:
    names = outputs or session.output_names(False)[1:]
    model = session.export_model_for_inferencing(None, names)
    return ort.InferenceSession(model).get_modelmeta().custom_metadata_map


def test_metadata_of_the_model_outlives_training(tmp_path) -> None:
    session = prepared(tmp_path, [("author", "me"), ("onnxtrain.classes", '["a", "b", "c"]')])
    assert session.metadata.classes == ["a", "b", "c"]
    found = exported_metadata(session)
    assert found["author"] == "me"
    assert found["onnxtrain.classes"] == '["a", "b", "c"]'
    session.set_metadata(classes=["x", "y", "z"])
    assert exported_metadata(session)["onnxtrain.classes"] == '["x", "y", "z"]'


def test_classes_can_be_named_where_the_layer_is_replaced(tmp_path) -> None:
    old = [("onnxtrain.classes", '["a", "b", "c"]')]
    session = prepared(tmp_path, old, classes=["one", "two"])
    assert session.predict(X).shape == (70, 2)
    assert json.loads(exported_metadata(session)["onnxtrain.classes"]) == ["one", "two"]
    assert "onnxtrain.classes" not in exported_metadata(prepared(tmp_path, old, classes=4))
    with pytest.raises(ArgumentError, match="classes is a list of different names"):
        prepared(tmp_path, classes=["one", "one"])


@pytest.mark.parametrize(
    ("loss", "activation"),
    [("cross_entropy", "softmax"), ("nll", "softmax"), ("bce", "sigmoid"), ("mse", "identity")],
)
def test_the_loss_says_what_makes_probabilities(tmp_path, loss, activation) -> None:
    found = exported_metadata(prepared(tmp_path, loss=loss))
    assert json.loads(found["onnxtrain.activation"]) == {"output": activation}


def test_a_loss_of_ones_own_says_nothing(tmp_path) -> None:
    from onnxtrain import losses

    session = prepared(tmp_path, loss=lambda scores: losses.CrossEntropy()(scores))
    assert "onnxtrain.activation" not in exported_metadata(session)

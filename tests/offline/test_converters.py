"""Models as converters of scikit-learn and Keras write them."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ModelError

X = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32) * [1, 5, 0.2, 3] + 2
X = X.astype(np.float32)
LABELS = ((X[:, 1] > 2).astype(int) + (X[:, 0] > 2)).astype(np.int64)


def pipeline() -> onnx.ModelProto:
    """A StandardScaler and an MLPClassifier, as skl2onnx writes them with zipmap=False."""
    rng = np.random.default_rng(1)
    tensors = {"w1": (4, 16), "b1": (1, 16), "w2": (16, 3), "b2": (1, 3)}
    node = helper.make_node
    graph = helper.make_graph(
        [
            node("Scaler", ["X"], ["scaled"], domain="ai.onnx.ml",
                 offset=X.mean(axis=0).tolist(), scale=(1 / X.std(axis=0)).tolist()),
            node("Cast", ["scaled"], ["cast"], to=TensorProto.FLOAT),
            node("MatMul", ["cast", "w1"], ["m1"]), node("Add", ["m1", "b1"], ["a1"]),
            node("Relu", ["a1"], ["r1"]),
            node("MatMul", ["r1", "w2"], ["m2"]), node("Add", ["m2", "b2"], ["a2"]),
            node("Softmax", ["a2"], ["soft"]),
            node("Identity", ["soft"], ["probabilities"]),
            node("ArgMax", ["soft"], ["label"], axis=1, keepdims=0),
        ],
        "pipeline",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 4])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 3]),
        ],
        [
            numpy_helper.from_array(rng.normal(0, 0.4, shape).astype(np.float32), name)
            for name, shape in tensors.items()
        ],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def test_a_pipeline_of_scikit_learn_trains(tmp_path) -> None:
    made = onnxtrain.prepare(pipeline(), tmp_path, of="probabilities", outputs="probabilities")
    assert sorted(made.trainable) == ["b1", "b2", "w1", "w2"]
    session = onnxtrain.TrainingSession(tmp_path)
    session.set_learning_rate(0.01)
    history = onnxtrain.fit(session, (X, LABELS), epochs=30, progress=False)
    # A second softmax behind that of the model would leave a loss of 0.55 at least.
    assert history.losses[-1] < 0.3
    probabilities = session.predict(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert (probabilities.argmax(axis=1) == LABELS).mean() > 0.9


def test_probabilities_in_dictionaries_are_refused_with_what_to_do(tmp_path) -> None:
    model = pipeline()
    zipped = helper.make_node(
        "ZipMap", ["soft"], ["by class"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]
    )
    model.graph.node.append(zipped)
    del model.graph.output[1]
    kind = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )
    model.graph.output.append(
        helper.make_value_info("by class", helper.make_sequence_type_proto(kind))
    )
    for call in (lambda: onnxtrain.inspect(model), lambda: onnxtrain.prepare(model, tmp_path)):
        with pytest.raises(ModelError, match=r"'by class' as dictionaries .*=\{'zipmap': False\}"):
            call()


@pytest.mark.parametrize("identities", [0, 1, 3])
def test_a_softmax_behind_identities_is_found(tmp_path, identities) -> None:
    model = pipeline()
    names = ["soft", *(f"same{i}" for i in range(identities))]
    for before, after in itertools.pairwise(names):
        model.graph.node.append(helper.make_node("Identity", [before], [after]))
    del model.graph.output[:]
    output = helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, [None, 3])
    model.graph.output.append(output)
    made = onnxtrain.prepare(model, tmp_path)
    assert "the loss is computed from 'a2'" in made.notes[0]

"""Forms that are rewritten before gradients; what is only like them keeps its meaning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper, parser

import onnxtrain
from onnxtrain.errors import OnnxTrainError, TrainingWarning
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.graph.infer import infer_shapes

RNG = np.random.default_rng(0)
WIDTH = 6


def parsed(text: str, initializers: dict[str, Any], opset: int = 17) -> onnx.ModelProto:
    graph = parser.parse_graph(text)
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items()
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> np.ndarray:
    """Run as written: onnxruntime would take more for a LayerNormalization than is one."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)[0]


def slopes(model: onnx.ModelProto, name: str, feeds: dict[str, Any]) -> np.ndarray:
    """Gradients of mean(y²) with respect to a parameter, from differences."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    start = numpy_helper.to_array(tensor).astype(np.float64)

    def loss(array: np.ndarray) -> float:
        tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))
        return float(np.mean(np.square(run(model, feeds), dtype=np.float64)))

    found = np.zeros_like(start)
    for place in np.ndindex(start.shape):
        step = np.zeros_like(start)
        step[place] = 1e-2
        found[place] = (loss(start + step) - loss(start - step)) / 2e-2
    tensor.CopyFrom(numpy_helper.from_array(start.astype(np.float32), name))
    return found


def steps(model: onnx.ModelProto, folder: Path, feeds: dict[str, Any], **options: Any) -> Any:
    """How far one step of length 1 on mean(y²) moves each parameter, and the operators of it."""
    made = onnxtrain.prepare(
        model, folder, loss="mse", optimizer="sgd", native=False, outputs=[], **options
    )
    graph = onnx.load(folder / "training_model.onnx").graph
    operators = {node.op_type for node in graph.node}
    with onnxtrain.TrainingSession(folder) as session:
        session.set_learning_rate(1.0)
        before = {name: session.get_parameter(name).copy() for name in made.trainable}
        y = run(model, feeds)
        session.step(**feeds, target=np.zeros_like(y))
        moved = {name: before[name] - session.get_parameter(name) for name in before}
    return moved, operators


# ---- LayerNormalization in nine nodes ------------------------------------------------------------

NORM = (
    "h=MatMul(x,W) m=ReduceMean<axes=[-1]>(h) c=Sub(h,m) p=Pow(c,two) v=ReduceMean<axes=[-1]>(p) "
    "e=Add(v,eps) s=Sqrt(e) n=Div(c,s) k=Mul(n,scale) y=Add(k,bias)"
)


def norm(body: str = NORM, shape: str = "[B,T,6]", **other: Any) -> onnx.ModelProto:
    numbers = {"two": np.float32(2), "eps": np.float32(0.1)} | other
    weights = {"W": normal(WIDTH, WIDTH), "scale": normal(WIDTH), "bias": normal(WIDTH)}
    return parsed(f"g (float[B,T,6] x) => (float{shape} y) {{ {body} }}", weights | numbers)


@pytest.mark.parametrize(
    ("model", "joined"),
    [
        (norm(), True),
        (norm(NORM.replace("Pow(c,two)", "Mul(c,c)")), True),
        (norm(NORM.replace("p=Pow(c,two)", "d=Sub(h,m) p=Pow(d,two)")), True),
        (norm(two=np.float32([2]), eps=np.float32([0.1])), True),
        (norm(two=np.full(WIDTH, 2, np.float32)), False),
        (norm(shape="[1,B,T,6]", eps=np.full((1, 1, 1, 1), 0.1, np.float32)), False),
        (norm(shape="[1,B,T,6]", two=np.full((1, 1, 1, 1), 2, np.float32)), False),
        (norm(two=np.float32(4)), False),
        (norm(NORM.replace("[-1]", "[1]")), False),
    ],
    ids=["plain", "product", "centred twice", "vectors of one", "exponents", "epsilon with axes",
         "exponent with axes", "fourth power", "another axis"],
)  # fmt: skip
def test_normalizations(model: onnx.ModelProto, joined: bool, tmp_path: Path) -> None:
    x = normal(2, 3, WIDTH)
    moved, operators = steps(model, tmp_path, {"x": x}, train=["W", "scale", "bias"])
    assert ("LayerNormalization" in operators) is joined
    for name, found in moved.items():
        np.testing.assert_allclose(found, slopes(model, name, {"x": x}), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("name", ["eps", "two"])
def test_numbers_of_a_normalization_may_train(name: str, tmp_path: Path) -> None:
    x, model = normal(2, 3, WIDTH), norm(two=np.float32([2]), eps=np.float32([0.1]))
    moved, _ = steps(model, tmp_path, {"x": x}, train=["scale", name])
    assert set(moved) == {"scale", name}
    if name == "eps":
        np.testing.assert_allclose(moved[name], slopes(model, name, {"x": x}), rtol=0.02)


# ---- what torch's newer exporter writes without its optimizer ------------------------------------


def test_a_learned_bias_of_zero_that_is_expanded(tmp_path: Path) -> None:
    model = parsed(
        "g (float[B,3,4,4] x) => (float[B,2,2,2] y) "
        "{ sizes=Constant<value_ints=[2]>() all=Expand(b,sizes) y=Conv(x,w,all) }",
        {"w": normal(2, 3, 3, 3), "b": np.zeros(1, np.float32)},
    )
    x = normal(2, 3, 4, 4)
    moved, _ = steps(model, tmp_path, {"x": x})
    assert set(moved) == {"w", "b"}
    np.testing.assert_allclose(moved["b"], slopes(model, "b", {"x": x}), rtol=0.02)


def test_a_bias_of_constant_zeros_is_dropped() -> None:
    model = parsed(
        "g (float[B,3,4,4] x) => (float[B,2,2,2] y) { sizes=Constant<value_ints=[2]>() "
        "z=Constant<value_int=0>() f=CastLike(z,x) all=Expand(f,sizes) y=Conv(x,w,all) }",
        {"w": normal(2, 3, 3, 3)},
    )
    (layer,) = canonical_model(model).graph
    assert [value.name for value in layer.inputs if value is not None] == ["x", "w"]


def test_weights_that_are_cast_keep_their_names(tmp_path: Path) -> None:
    model = parsed(
        "g (float[B,4] x) => (float[B,4] y) { wide=CastLike(w,x) y=Mul(x,wide) }",
        {"w": normal(4).astype(np.float16)},
    )
    moved, _ = steps(model, tmp_path, {"x": normal(3, 4)}, train=["w"])
    assert set(moved) == {"w"} and np.abs(moved["w"]).max() > 0


@pytest.mark.parametrize("kind", ["string", "float16", "bool", "int32"])
def test_constants_are_cast_as_onnxruntime_casts_them(kind: str) -> None:
    model = parsed(
        f"g (float[3] x, {kind}[1] like) => (float[3] y) "
        "{ c=Constant<value_floats=[1e6,0.,2.5]>() z=CastLike(c,like) q=Cast<to=1>(z) y=Mul(x,q) }",
        {},
        opset=19,
    )
    like = {"string": np.array(["1"]), "float16": np.zeros(1, np.float16)}.get(
        kind, np.zeros(1, bool if kind == "bool" else np.int32)
    )
    feeds = {"x": np.ones(3, np.float32), "like": like}
    session = ort.InferenceSession(onnxtrain.gradient(model, ["x"]).SerializeToString())
    given = {i.name: (feeds | {"y_grad": feeds["x"]})[i.name] for i in session.get_inputs()}
    np.testing.assert_array_equal(session.run(["x_grad"], given)[0], run(model, feeds))


# ---- names and readers ---------------------------------------------------------------------------


def test_names_of_outputs_are_not_believed(tmp_path: Path) -> None:
    """The first axis of y is batch · steps, whatever its declaration says."""
    model = parsed(
        "g (float[batch,steps,4] x) => (float[batch,3] y) { h=Reshape(x,sizes) y=MatMul(h,w) }",
        {"sizes": np.array([-1, 4]), "w": normal(4, 3)},
    )
    onnxtrain.prepare(model, tmp_path, loss="cross_entropy", optimizer="sgd")
    with onnxtrain.TrainingSession(tmp_path) as session:
        loss = session.step(normal(2, 5, 4), RNG.integers(0, 3, 10))[0]
    assert np.isfinite(loss)


def test_a_row_that_is_declared_as_a_batch_is_summed_where_it_broadcasts(tmp_path: Path) -> None:
    model = parsed(
        "g (float[batch,3] x, float[k,4] z) => (float[batch,3] y, float[batch,3] h) "
        "{ p=MatMul(z,w) h=Reshape(p,sizes) y=Add(x,h) }",
        {"sizes": np.array([-1, 3]), "w": normal(4, 3)},
    )
    feeds = {"x": normal(5, 3), "z": normal(1, 4)}
    moved, _ = steps(model, tmp_path, feeds, of="y", train=["w"])
    np.testing.assert_allclose(moved["w"], slopes(model, "w", feeds), rtol=0.02, atol=1e-3)


def test_declared_shapes_of_other_domains_stay() -> None:
    """Names such as tf2onnx gives are not taken for those that inference makes up."""
    node = helper.make_node("Their", ["z"], ["f"], domain="their.own")
    model = parsed(
        "g (float[B,T,8] x) => (float[B,T,4] z) "
        "{ s=Shape(x) last=Constant<value_int=2>() d=Gather(s,last) two=Constant<value_int=2>() "
        "half=Div(d,two) start=Constant<value_ints=[0]>() axis=Constant<value_ints=[2]>() "
        "ends=Reshape(half,axis1) z=Slice(x,start,ends,axis) }",
        {"axis1": np.array([1])},
    )
    model.graph.node.append(node)
    model.opset_import.append(helper.make_opsetid("their.own", 1))
    shape = ["unk__3", "unk__4"]
    model.graph.value_info.append(helper.make_tensor_value_info("f", 1, shape))
    loaded = ir.serde.deserialize_model(model)
    infer_shapes(loaded)
    found = next(v for n in loaded.graph for v in n.outputs if v.name == "f")
    assert found.shape is not None and len(found.shape) == 2


# ---- probabilities, and nodes in any order -------------------------------------------------------

ENDS = {
    "written out": "e=Exp(h) t=ReduceSum<keepdims=1>(e,last) y=Div(e,t)",
    "expanded": "e=Exp(h) t=ReduceSum<keepdims=1>(e,last) s=Shape(e) u=Expand(t,s) y=Div(e,u)",
    "integers": "p=Softmax(h) q=QuantizeLinear(p,scale,zero) y=DequantizeLinear(q,scale,zero)",
    "branches": "p=Softmax(h) y=If(flag)<then_branch=t() => (float[B,3] a) {a=Identity(p)}, "
                "else_branch=e() => (float[B,3] b) {b0=Softmax(h) b=Identity(b0)}>",
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_probabilities_in_other_forms_are_warned_of(end: str, tmp_path: Path) -> None:
    model = parsed(
        f"g (float[B,4] x) => (float[B,3] y) {{ h=MatMul(x,w) {end} }}",
        {"w": normal(4, 3), "last": np.array([-1]), "scale": np.float32(1 / 255),
         "zero": np.uint8(0), "flag": np.array(True)},
    )  # fmt: skip
    with pytest.warns(TrainingWarning, match="'y' comes out of a Softmax.* from 'h'"):
        onnxtrain.prepare(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        onnxtrain.prepare(model, tmp_path, of="h")


def test_a_quotient_of_other_powers_is_none(tmp_path: Path) -> None:
    end = "e=Exp(h) n=Neg(h) f=Exp(n) t=ReduceSum<keepdims=1>(f,last) y=Div(e,t)"
    model = parsed(
        f"g (float[B,4] x) => (float[B,3] y) {{ h=MatMul(x,w) {end} }}",
        {"w": normal(4, 3), "last": np.array([-1])},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        onnxtrain.prepare(model, tmp_path)


def test_nodes_in_any_order(tmp_path: Path) -> None:
    """onnxruntime computes such models, and writes them where it converts to float16."""
    body = "m=MatMul(x,w) r=Relu(m) y=If(flag)<then_branch=t() => (float[B,3] a) {a=Identity(r)}, "
    body += "else_branch=e() => (float[B,3] b) {b=Neg(r)}>"
    given = parsed(
        f"g (float[B,4] x) => (float[B,3] y) {{ {body} }}",
        {"w": normal(4, 3), "flag": np.array(True)},
    )
    expected = onnxtrain.prepare(given, tmp_path / "sorted", loss="mse").trainable
    nodes = list(given.graph.node)[::-1]
    del given.graph.node[:]
    given.graph.node.extend(nodes)
    assert onnxtrain.prepare(given, tmp_path / "turned", loss="mse").trainable == expected
    first, second = (
        (tmp_path / name / "training_model.onnx").read_bytes() for name in ("sorted", "turned")
    )
    assert first == second


@pytest.mark.parametrize(
    "nodes",
    ["z=Identity(y) y=Identity(z)", "y=Softmax()", "y=Div(x)",
     "y=If(x)<then_branch=t() => (float[B,4] a) {a=Identity(y)}, "
     "else_branch=e() => (float[B,4] b) {b=Identity(y)}>"],
    ids=["cycle", "no input", "one input", "a branch that reads its own result"],
)  # fmt: skip
def test_nonsense_behind_an_output_is_refused(nodes: str, tmp_path: Path) -> None:
    model = parsed(f"g (float[B,4] x) => (float[B,4] y) {{ {nodes} }}", {})
    with pytest.raises(OnnxTrainError, match=r"^(?!.*report it)"):
        onnxtrain.prepare(model, tmp_path)


def test_a_branch_gives_the_output_that_is_read(tmp_path: Path) -> None:
    """The second result of the If is probabilities, the first are scores."""
    branches = ", ".join(
        f"{name}=b() => (float[B,3] s{name}, float[B,3] p{name}) "
        f"{{s{name}=Identity(h) p{name}=Softmax(h)}}" for name in ("then_branch", "else_branch")
    )  # fmt: skip
    for output, has_warning in (("p", True), ("s", False)):
        text = f"h=MatMul(x,w) s,p=If(flag)<{branches}> y=Identity({output})"
        model = parsed(
            f"g (float[B,4] x) => (float[B,3] y) {{ {text} }}",
            {"w": normal(4, 3), "flag": np.array(True)},
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", TrainingWarning)
            onnxtrain.prepare(model, tmp_path / output)
        assert any("Softmax" in str(each.message) for each in found) is has_warning

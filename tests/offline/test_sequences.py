"""Sequences of tensors, as torch's exporters write split, chunk, unbind and stack."""

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import check_gradient, run
from graphs import model, value
from onnxtrain.errors import MissingGradientError, NotDifferentiableError

node = helper.make_node
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
I = {str(i): np.array(i) for i in range(-1, 4)}  # noqa: E741


def of_parts(
    split: onnx.NodeProto, first: str, second: str, dims=("rows", "columns"), **constants
) -> onnx.ModelProto:
    """y = a * a + 2 b for two elements of a sequence."""
    return model(
        [
            split,
            node("SequenceAt", ["parts", first], ["a"]),
            node("SequenceAt", ["parts", second], ["b"]),
            node("Mul", ["a", "a"], ["aa"]),
            node("Sum", ["aa", "b", "b"], ["y"]),
        ],
        [value("x", dims)],
        [value("y", None)],
        {**I, **constants},
    )


def split_to_sequence(*sizes: str, **attributes: int) -> onnx.NodeProto:
    return node("SplitToSequence", ["x", *sizes], ["parts"], **attributes)


CASES = {
    "sizes": of_parts(split_to_sequence("sizes", axis=1), "0", "2", sizes=np.array([2, 2, 2])),
    "width": of_parts(split_to_sequence("2", axis=1), "-1", "0", dims=("rows", 6)),
    "width-symbolic": of_parts(split_to_sequence("2", axis=1), "2", "0"),
    "ones": of_parts(split_to_sequence(), "-1", "0", dims=(4, "columns")),
    "ones-symbolic": of_parts(split_to_sequence(axis=1), "3", "0"),
    "unbind": of_parts(split_to_sequence(axis=-1, keepdims=0), "-1", "1", dims=("rows", 6)),
    "unbind-symbolic": of_parts(split_to_sequence(axis=1, keepdims=0), "-1", "1"),
    "listed": of_parts(node("SequenceConstruct", ["x", "c", "x"], ["parts"]), "2", "1", c=2 * X),
}


@pytest.mark.parametrize("name", CASES)
def test_elements_that_are_known(name: str) -> None:
    extended = check_gradient(CASES[name], {"x": X}, ["x"], "y")
    assert not any("Sequence" in n.op_type for n in extended.graph.node)


def test_a_width_that_run_time_tells() -> None:
    given = of_parts(split_to_sequence("width", axis=1), "0", "1")
    given.graph.input.append(value("width", [], TensorProto.INT64))
    check_gradient(given, {"x": X, "width": np.array(3)}, ["x"], "y")


@pytest.mark.parametrize(("first", "second"), [("0", "1"), ("-1", "1")])
def test_sizes_that_run_time_tells(first: str, second: str) -> None:
    given = of_parts(split_to_sequence("sizes", axis=1), first, second)
    given.graph.input.append(value("sizes", ["count"], TensorProto.INT64))
    check_gradient(given, {"x": X, "sizes": np.array([2, 2, 2])}, ["x"], "y")


def test_parts_of_known_sizes_are_one_split() -> None:
    """Its gradient is one Concat; that of slices would be a Pad for each."""
    extended = onnxtrain.gradient(CASES["sizes"], "x")
    operators = [n.op_type for n in extended.graph.node]
    assert operators.count("Split") == 1
    assert "Slice" not in operators


@pytest.mark.parametrize("new_axis", [0, 1])
def test_concatenated_again(new_axis: int) -> None:
    given = model(
        [
            node("SequenceEmpty", [], ["none"]),
            node("SequenceInsert", ["none", "x"], ["one"]),
            node("Mul", ["x", "x"], ["xx"]),
            node("SequenceInsert", ["one", "xx", "0"], ["two"]),
            node("ConcatFromSequence", ["two"], ["y"], axis=1, new_axis=new_axis),
        ],
        [value("x", ["rows", 6])],
        [value("y", None)],
        I,
    )
    check_gradient(given, {"x": X}, ["x"], "y")


def test_mapped_by_a_body() -> None:
    """As the dynamo exporter writes vstack: what has too few axes gains one."""
    reshape = helper.make_graph(
        [node("Reshape", ["t", "row"], ["reshaped"])], "then", [], [value("reshaped", None)]
    )
    keep = helper.make_graph(
        [node("Identity", ["t"], ["same"], "keep")], "else", [], [value("same", None)]
    )
    body = helper.make_graph(
        [
            node("Shape", ["t"], ["shape"], "count"),
            node("Size", ["shape"], ["rank"]),
            node("CastLike", ["1", "rank"], ["one"]),
            node("LessOrEqual", ["rank", "one"], ["few"]),
            node("If", ["few"], ["made"], then_branch=reshape, else_branch=keep),
        ],
        "body", [value("t", None)], [value("made", None)],
    )  # fmt: skip
    given = model(
        [
            node("ReduceSum", ["x", "0v"], ["m"], keepdims=0),
            node("SequenceConstruct", ["x", "m"], ["list"]),
            node("SequenceMap", ["list"], ["rows"], "map", body=body),
            node("SequenceAt", ["rows", "0"], ["a"]),
            node("SequenceAt", ["rows", "1"], ["b"]),
            node("Concat", ["a", "b"], ["y"], axis=0),
        ],
        [value("x", ["rows", 6])],
        [value("y", None)],
        {**I, "row": np.array([1, -1]), "0v": np.array([0])},
    )
    extended = check_gradient(given, {"x": X}, ["x"], "y")
    assert not {"If", "SequenceMap"} & {n.op_type for n in extended.graph.node}


def test_the_length_is_a_number() -> None:
    given = model(
        [
            split_to_sequence("2", axis=1),
            node("SequenceLength", ["parts"], ["count"]),
            node("Cast", ["count"], ["number"], to=TensorProto.FLOAT),
            node("Mul", ["x", "number"], ["y"]),
        ],
        [value("x", ["rows", 6])],
        [value("y", ["rows", 6])],
        I,
    )
    check_gradient(given, {"x": X}, ["x"], "y")


SPLITS = {
    "width": split_to_sequence("2", axis=1),
    "sizes": split_to_sequence("sizes", axis=1),
    "ones": split_to_sequence(axis=1),
    "unbind": split_to_sequence(axis=1, keepdims=0),
    "unbind-as-torch-has-it": split_to_sequence("one", axis=1, keepdims=0),
    "listed": node("SequenceConstruct", ["x", "c", "x"], ["parts"]),
}


@pytest.mark.parametrize("dims", [("rows", "columns"), (4, 6)], ids=["symbolic", "static"])
@pytest.mark.parametrize("index", [1, -1])
@pytest.mark.parametrize("name", SPLITS)
def test_an_index_that_run_time_tells(name: str, index: int, dims: tuple[object, object]) -> None:
    if name == "listed" and dims != (4, 6):
        return  # whether the shapes agree is not known
    sizes = np.array([2, 2, 2])
    given = of_parts(SPLITS[name], "index", "0", dims, sizes=sizes, one=np.array(1), c=2 * X)
    given.graph.input.append(value("index", [], TensorProto.INT64))
    extended = check_gradient(given, {"x": X, "index": np.array(index)}, ["x"], "y")
    assert not any("Sequence" in n.op_type for n in extended.graph.node)


@pytest.mark.parametrize("name", SPLITS)
def test_a_length_that_run_time_tells(name: str) -> None:
    given = model(
        [
            SPLITS[name],
            node("SequenceLength", ["parts"], ["count"]),
            node("Cast", ["count"], ["number"], to=TensorProto.FLOAT),
            node("Mul", ["x", "number"], ["y"]),
        ],
        [value("x", ["rows", "columns"])],
        [value("y", ["rows", "columns"])],
        {**I, "sizes": np.array([2, 2, 2]), "one": np.array(1), "c": 2 * X},
    )
    check_gradient(given, {"x": X}, ["x"], "y", eps=1.0)


# A Loop over the rows of x, which appends to a list what it computes in each step.
LISTS = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[rows,6] x, float[6,6] w, float[6] h) => (float[{out}] y)
    <int64 last = {{-1}}, bool yes = {{1}}, int64 one = {{1}}> {{
    rows = SplitToSequence<axis = 0, keepdims = 0>(x)
    count = SequenceLength(rows)
    {start}
    end, outs = Loop (count, yes, h, start) <
        body = step (int64 i, bool go, float[6] a, seq(float[?]) before)
            => (bool on, float[6] b, seq(float[?]) after) {{
        on = Identity(yes)
        row = SequenceAt(rows, i)
        p = MatMul(a, w) q = Add(p, row) b = Tanh(q)
        after = SequenceInsert(before, b) }}>
    {read}
}}
"""
EMPTY, WITH_FIRST = "start = SequenceEmpty()", "start = SequenceConstruct(h)"
READERS = {
    "stack": ("k,6", EMPTY, "y = ConcatFromSequence<axis = 0, new_axis = 1>(outs)"),
    "stack-behind": ("6,k", EMPTY, "y = ConcatFromSequence<axis = -1, new_axis = 1>(outs)"),
    "cat": ("k", EMPTY, "y = ConcatFromSequence<axis = 0, new_axis = 0>(outs)"),
    "last": ("6", EMPTY, "z = SequenceAt(outs, last) y = Mul(z, end)"),
    "after-a-first": ("k,6", WITH_FIRST, "y = ConcatFromSequence<axis = 0, new_axis = 1>(outs)"),
    "length": ("6", WITH_FIRST, "n = SequenceLength(outs) m = Cast<to = 1>(n) y = Mul(end, m)"),
    "read-by-another-loop": ("6", EMPTY, """n = SequenceLength(outs)
        y = Loop (n, yes, end) <body = step2 (int64 j, bool go2, float[6] a2)
            => (bool on2, float[6] b2) {
            on2 = Identity(go2) e = SequenceAt(outs, j) f = Mul(e, a2) b2 = Add(f, h) }>"""),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_list_that_a_loop_appends_to(name: str) -> None:
    out, start, read = READERS[name]
    given = onnx.parser.parse_model(LISTS.format(out=out, start=start, read=read))
    rng = np.random.default_rng(1)
    feeds = {
        "x": X,
        "w": (rng.standard_normal((6, 6)) / 3).astype(np.float32),
        "h": rng.standard_normal(6).astype(np.float32),
    }
    extended = check_gradient(given, feeds, ["x", "w", "h"], "y", rounding=1e-5)
    assert not any("Sequence" in n.op_type for n in extended.graph.node)


def growing(index: str) -> onnx.ModelProto:
    text = LISTS.format(out="k,6", start=WITH_FIRST, read=READERS["stack"][2])
    reads = f"g = SequenceAt(before, {index}) p = MatMul(g, w)"
    return onnx.parser.parse_model(text.replace("p = MatMul(a, w)", reads))


def test_a_list_whose_last_element_is_read_while_it_grows() -> None:
    rng = np.random.default_rng(1)
    feeds = {"x": X, "w": rng.standard_normal((6, 6)) / 3, "h": rng.standard_normal(6)}
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    extended = check_gradient(growing("last"), single, ["x", "w", "h"], "y", rounding=1e-5)
    assert not any("Sequence" in n.op_type for n in extended.graph.node)


def test_a_list_whose_other_elements_are_read_while_it_grows_is_refused() -> None:
    given = growing("i")
    with pytest.raises(MissingGradientError, match="SequenceInsert"):
        onnxtrain.gradient(given, "x")


def test_a_list_that_is_not_on_the_way_stays() -> None:
    text = LISTS.format(out="6", start=EMPTY, read="y = Mul(end, end)")
    given = onnx.parser.parse_model(text.replace(
        "=> (float[6] y)", "=> (float[6] y, seq(float[6]) outs)"))  # fmt: skip
    extended = onnxtrain.gradient(given, ["x", "w"], of="y")
    onnx.checker.check_model(extended)
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((6, 6)) / 3).astype(np.float32)
    h = rng.standard_normal(6).astype(np.float32)
    y, outs, dx, dw = run(extended, {"x": X, "w": w, "h": h, "y_grad": np.ones(6, np.float32)})
    np.testing.assert_allclose(outs[-1] ** 2, y, rtol=1e-5)
    slope = 2 * outs[-1] * (1 - outs[-1] ** 2)
    np.testing.assert_allclose(dx[-1], slope, rtol=1e-4, atol=1e-6)
    assert dw.shape == (6, 6)


def test_a_list_that_a_step_reads_is_refused_where_the_gradient_needs_it() -> None:
    text = LISTS.format(out="6", start=WITH_FIRST, read="y = Mul(end, end)")
    reads = "k = SequenceLength(before) f = Cast<to = 1>(k) p0 = MatMul(a, w) p = Mul(p0, f)"
    given = onnx.parser.parse_model(text.replace("p = MatMul(a, w)", reads))
    with pytest.raises(NotDifferentiableError, match="'before' in each step"):
        onnxtrain.gradient(given, ["x"])

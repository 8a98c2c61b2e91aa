"""Small models that would take a machine down: a few hundred bytes that ask for 2**40 elements,
a billion nodes, or a nesting without end; and nodes with every attribute at an extreme.

`CASES` maps a name to a function that makes the model, as a proto or as the bytes of a file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from graphs import model, value

Made = onnx.ModelProto | bytes
HUGE = (2**26, 2**33, 2**40, 2**62)
INT64, FLOAT, BOOL, STRING = (
    TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL, TensorProto.STRING
)  # fmt: skip
Arrays = dict[str, Any]
Nodes = list[onnx.NodeProto]
node = helper.make_node


def scored(nodes: Nodes, last: str, arrays: Arrays | None = None, **options: Any) -> Any:
    """Return y = x w + mean(last): a model that trains, if `last` can be computed."""
    own = [
        node("Cast", [last], ["z_float"], to=FLOAT),
        node("ReduceMean", ["z_float"], ["z_mean"], keepdims=0),
        node("MatMul", ["x", "w"], ["xw"], "product"),
        node("Add", ["xw", "z_mean"], ["y"], "last"),
    ]
    weights = {"w": np.ones((3, 2), np.float32), "one": np.ones((1, 1, 1), np.float32)}
    return model(
        [*nodes, *own], [value("x", ["batch", 3])], [value("y", ["batch", 2])],
        {**weights, **(arrays or {})}, **options,
    )  # fmt: skip


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def sized_by_input(n: int) -> Iterator[tuple[str, Nodes, Arrays]]:
    """Operators whose result has as many elements as an input says."""
    yield "ConstantOfShape", [node("ConstantOfShape", ["n"], ["z"])], {"n": ints(n)}
    yield "ConstantOfShape-4", [node("ConstantOfShape", ["n"], ["z"])], {"n": ints(n, n, n, n)}
    zero = helper.make_tensor("v", INT64, [1], [7])
    nodes = [node("ConstantOfShape", ["n"], ["z"], value=zero)]
    yield "ConstantOfShape-int", nodes, {"n": ints(n)}
    span = {"a": np.array(0), "b": np.array(n), "c": np.array(1)}
    yield "Range", [node("Range", ["a", "b", "c"], ["z"])], span
    floats = {k: v.astype(np.float64) for k, v in span.items()}
    yield "Range-double", [node("Range", ["a", "b", "c"], ["z"])], floats
    floats = {"a": np.float32(0), "b": np.float32(1), "c": np.float32(1 / n)}
    yield "Range-fine", [node("Range", ["a", "b", "c"], ["z"])], floats
    yield "Expand", [node("Expand", ["one", "n"], ["z"])], {"n": ints(n, 1, 1)}
    yield "Expand-int", [node("Expand", ["i", "n"], ["z"])], {"i": ints(3), "n": ints(n)}
    yield "Tile", [node("Tile", ["one", "n"], ["z"])], {"n": ints(1, n, 1)}
    yield "Tile-int", [node("Tile", ["i", "n"], ["z"])], {"i": ints(3), "n": ints(n)}
    yield "Pad", [node("Pad", ["one", "n"], ["z"])], {"n": ints(0, 0, n, 0, 0, n)}
    yield "Pad-x", [node("Pad", ["x", "n"], ["z"])], {"n": ints(0, 0, 0, n)}
    yield "Pad-edge", [node("Pad", ["x", "n"], ["z"], mode="edge")], {"n": ints(0, 0, 0, n)}
    yield "Pad-int", [node("Pad", ["i", "n"], ["z"])], {"i": ints(3), "n": ints(0, n)}
    yield "Resize", [node("Resize", ["one", "", "", "n"], ["z"])], {"n": ints(1, 1, n)}
    scale = {"s": np.array([1, 1, n], np.float32)}
    yield "Resize-scales", [node("Resize", ["one", "", "s"], ["z"], mode="linear")], scale
    nodes = [
        node("Unsqueeze", ["x", "axis"], ["x3"]),
        node("Resize", ["x3", "", "s"], ["z"], mode="linear"),
    ]
    yield "Resize-x", nodes, {**scale, "axis": ints(1)}
    hot = {"i": ints(1, 2), "d": np.array(n), "v": np.array([0, 1])}
    yield "OneHot", [node("OneHot", ["i", "d", "v"], ["z"])], hot
    nodes = [node("ConstantOfShape", ["n"], ["k"]), node("EyeLike", ["k"], ["z"])]
    yield "EyeLike", nodes, {"n": ints(n, n)}
    for op in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        yield op, [node(op, ["n"], ["z"])], {"n": np.array(n)}
    mel = {"a": np.array(n), "b": np.array(n), "c": np.array(8000)}
    mel |= {"d": np.float32(0), "e": np.float32(4000)}
    yield "MelWeightMatrix", [node("MelWeightMatrix", list("abcde"), ["z"])], mel
    yield "DFT", [node("DFT", ["one", "n"], ["z"], axis=1)], {"n": np.array(n)}
    yield "TopK", [node("TopK", ["x", "n"], ["z", "i"])], {"n": ints(n)}
    yield "CenterCropPad", [node("CenterCropPad", ["x", "n"], ["z"], axes=[1])], {"n": ints(n)}
    yield "AffineGrid", [node("AffineGrid", ["t", "n"], ["z"])], {
        "n": ints(1, 1, n, n), "t": np.ones((1, 2, 3), np.float32)}  # fmt: skip
    yield "Col2Im", [node("Col2Im", ["one", "n", "k"], ["z"])], {"n": ints(n, n), "k": ints(1, 1)}
    unpool = {"i": np.zeros((1, 1, 1), np.int64), "n": ints(1, 1, n)}
    yield "MaxUnpool", [node("MaxUnpool", ["one", "i", "n"], ["z"], kernel_shape=[1])], unpool
    yield "Reshape-empty", [node("Reshape", ["e", "n"], ["z"], allowzero=1)], {
        "e": np.zeros(0, np.float32), "n": ints(0, n)}  # fmt: skip
    yield "Split", [
        node("Expand", ["one", "n"], ["k"]), node("SplitToSequence", ["k"], ["q"], axis=0),
        node("SequenceAt", ["q", "i"], ["z"])], {"n": ints(n, 1, 1), "i": np.array(0)}  # fmt: skip
    outer = {"p": ints(n, 1), "q": ints(1, n)}
    nodes = [node("Expand", ["one", "p"], ["c"]), node("Expand", ["one", "q"], ["r"])]
    yield "outer-product", [*nodes, node("Mul", ["c", "r"], ["z"])], outer
    yield "MatMul", [*nodes, node("MatMul", ["c", "r"], ["z"])], outer
    yield "Einsum", [*nodes, node("Einsum", ["c", "r"], ["z"], equation="kab,kcd->abcd")], outer
    yield "Gather", [
        node("ConstantOfShape", ["n"], ["i"], value=zero), node("Gather", ["x", "i"], ["z"], axis=1)
    ], {"n": ints(n)}  # fmt: skip
    yield "Slice", [node("Expand", ["one", "n"], ["k"]), node("Slice", ["k", "a", "b"], ["z"])], {
        "n": ints(n, 1, 1), "a": ints(1), "b": ints(2**62)}  # fmt: skip
    yield "Bernoulli", [node("Expand", ["one", "n"], ["k"]), node("Bernoulli", ["k"], ["z"])], {
        "n": ints(n, 1, 1)}  # fmt: skip


def sized_by_attribute(n: int) -> Iterator[tuple[str, Nodes, Arrays]]:
    for op in ("RandomNormal", "RandomUniform"):
        yield op, [node(op, [], ["z"], shape=[n])], {}
        yield f"{op}-4", [node(op, [], ["z"], shape=[n, n, n, n])], {}
    yield "Multinomial", [node("Multinomial", ["x"], ["z"], sample_size=min(n, 2**62))], {}
    image = {"i": np.ones((1, 1, 4, 4), np.float32), "k": np.ones((1, 1, 1, 1), np.float32)}
    for mode in ("AveragePool", "MaxPool", "LpPool"):
        for what, attributes in (
            ("kernel", {"kernel_shape": [n, n]}),
            ("pads", {"kernel_shape": [1, 1], "pads": [0, n, 0, n]}),
            ("both", {"kernel_shape": [n, 1], "pads": [n - 1, 0, n - 1, 0]}),
        ):
            yield f"{mode}-{what}", [
                node("Unsqueeze", ["x", "axes"], ["x4"]), node(mode, ["x4"], ["z"], **attributes)
            ], {"axes": ints(1, 2)}  # fmt: skip
    for op in ("Conv", "ConvTranspose"):
        for what in ("pads", "strides", "dilations", "group"):
            count = {"pads": [0, n, 0, n], "group": n}.get(what, [n, n])
            nodes = [node(op, ["i", "k"], ["z"], **{what: count})]
            yield f"{op}-{what}", nodes, image
    nodes = [node("ConvTranspose", ["i", "k"], ["z"], output_shape=[n, n])]
    yield "ConvTranspose-shape", nodes, image
    yield "Split-outputs", [node("Split", ["x"], ["z"], axis=1, num_outputs=n)], {}
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        arrays = {
            "lw": np.ones((1, gates, 3), np.float32),
            "lr": np.ones((1, gates, 1), np.float32),
        }
        yield op, [
            node("Unsqueeze", ["x", "a"], ["x3"]),
            node(op, ["x3", "lw", "lr"], ["z"], hidden_size=n),
        ], {**arrays, "a": ints(0)}  # fmt: skip
    yield "DepthToSpace", [node("DepthToSpace", ["i"], ["z"], blocksize=n)], image
    yield "RoiAlign", [
        node("RoiAlign", ["i", "r", "b"], ["z"], output_height=n, output_width=n, sampling_ratio=n)
    ], {**image, "r": np.ones((1, 4), np.float32), "b": ints(0)}  # fmt: skip
    yield "TfIdf", [node("TfIdfVectorizer", ["s"], ["z"], max_gram_length=1, max_skip_count=0,
        min_gram_length=1, mode="TF", ngram_counts=[0], ngram_indexes=[n], pool_int64s=[1])], {
        "s": ints(1)}  # fmt: skip


def computed(n: int) -> Iterator[tuple[str, Nodes, Arrays]]:
    """The number itself is computed, by a chain of squares or sums."""
    nodes, last = [], "two"
    for i in range(max(1, n.bit_length().bit_length() - 1)):
        nodes.append(node("Mul", [last, last], [f"m{i}"]))
        last = f"m{i}"
    yield "squares", [*nodes, node("ConstantOfShape", [last], ["z"])], {"two": ints(2)}
    span = {"two": np.array(2), "a": np.array(0), "c": np.array(1)}
    yield "squares-range", [*nodes, node("Range", ["a", last, "c"], ["z"])], span
    for op, options in (("Concat", {"axis": 0}), ("Einsum", {"equation": "i,j->ij"})):
        nodes, last = [], "v"
        for i in range(n.bit_length()):
            nodes.append(node(op, [last, last], [f"m{i}"], **options))
            last = f"m{i}"
            if op == "Einsum":
                nodes.append(node("Reshape", [last, "flat"], [f"f{i}"]))
                last = f"f{i}"
        for kind in (np.int64, np.float32):
            arrays = {"v": np.ones(2, kind), "flat": ints(-1)}
            yield (
                f"doubling-{op}-{kind.__name__}",
                [*nodes, node("Identity", [last], ["z"])],
                arrays,
            )
    wide = {f"b{i}": np.ones([2 if i == k else 1 for k in range(40)], np.int64) for i in range(40)}
    yield "wide-Max", [node("Max", list(wide), ["z"])], wide
    yield "shape-of-shape", [
        node("Expand", ["one", "n"], ["k"]), node("Shape", ["k"], ["s"]),
        node("ConstantOfShape", ["s"], ["z"])], {"n": ints(n, 1, 1)}  # fmt: skip


def looped(n: int) -> Iterator[tuple[str, Nodes, Arrays]]:
    """A Loop or Scan of 2**40 steps, with what it collects, or a sequence that grows."""
    step = value("step", [], INT64)
    keep, kept = value("keep", [], BOOL), value("kept", [], BOOL)
    same = node("Identity", ["keep"], ["kept"])
    trips = {"n": np.array(n), "go": np.array(True), "s0": np.float32(1)}
    collect = helper.make_graph(
        [same, node("Add", ["s", "s"], ["t"]), node("Identity", ["t"], ["u"])], "body",
        [step, keep, value("s", [])], [kept, value("t", []), value("u", [])],
    )  # fmt: skip
    yield "Loop", [node("Loop", ["n", "go", "s0"], ["last", "z"], body=collect)], trips
    carry = helper.make_graph(
        [same, node("Concat", ["s", "s"], ["t"], axis=0)], "body",
        [step, keep, value("s", None)], [kept, value("t", None)],
    )  # fmt: skip
    yield "Loop-doubling", [node("Loop", ["n", "go", "v"], ["z"], body=carry)], {
        **trips, "v": np.ones(2, np.float32)}  # fmt: skip
    several = helper.make_tensor_sequence_value_info
    insert = helper.make_graph(
        [same, node("SequenceInsert", ["q", "one"], ["r"])], "body",
        [step, keep, several("q", FLOAT, None)], [kept, several("r", FLOAT, None)],
    )  # fmt: skip
    yield "Loop-sequence", [
        node("SequenceEmpty", [], ["empty"]),
        node("Loop", ["n", "go", "empty"], ["q_all"], body=insert),
        node("ConcatFromSequence", ["q_all"], ["z"], axis=0)], trips  # fmt: skip
    scan = helper.make_graph(
        [node("Add", ["s", "e"], ["t"]), node("Identity", ["t"], ["u"])], "body",
        [value("s", []), value("e", [])], [value("t", []), value("u", [])],
    )  # fmt: skip
    yield "Scan", [
        node("ConstantOfShape", ["many"], ["e_all"]),
        node("Scan", ["s0", "e_all"], ["last", "z"], body=scan, num_scan_inputs=1)], {
        **trips, "many": ints(n)}  # fmt: skip


def in_branch(nodes: Nodes, arrays: Arrays) -> onnx.ModelProto:
    """Put nodes into both branches of an If whose condition is an input."""
    tensors = [numpy_helper.from_array(np.asarray(a), k) for k, a in arrays.items()]
    branches = {
        name: helper.make_graph(nodes, name, [], [value("z", None)], tensors)
        for name in ("then_branch", "else_branch")
    }
    made = scored([node("If", ["flag"], ["picked"], **branches)], "picked")
    made.graph.input.append(value("flag", [], BOOL))
    return made


def in_function(nodes: Nodes, arrays: Arrays) -> onnx.ModelProto:
    made = scored(
        [node("Own", ["x", "one", *arrays], ["z"], domain="my")], "z", arrays, domains=["my"]
    )
    imports = [helper.make_opsetid("", 18)]
    body = helper.make_function("my", "Own", ["x", "one", *arrays], ["z"], nodes, imports)
    made.functions.append(body)
    return made


def as_constants(nodes: Nodes, arrays: Arrays) -> onnx.ModelProto:
    constants = [
        node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array), name))
        for name, array in arrays.items()
    ]
    return scored([*constants, *nodes], "z")


# ---- structure -----------------------------------------------------------------------------------


def functions(bodies: dict[str, Sequence[str]]) -> onnx.ModelProto:
    """Functions that call others, one after the other; an empty body is a Relu."""
    made = scored([node("f0", ["x"], ["z"], domain="my")], "z", domains=["my"])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    for name, calls in bodies.items():
        nodes, last = [], "a"
        for i, called in enumerate(calls or ["Relu"]):
            domain = "" if called == "Relu" else "my"
            nodes.append(node(called, [last], [f"v{i}"], domain=domain))
            last = f"v{i}"
        nodes.append(node("Identity", [last], ["b"]))
        made.functions.append(helper.make_function("my", name, ["a"], ["b"], nodes, imports))
    return made


def tower(levels: int, width: int) -> onnx.ModelProto:
    bodies = {f"f{i}": [f"f{i + 1}"] * width for i in range(levels)}
    return functions({**bodies, f"f{levels}": []})


def nested(depth: int) -> onnx.ModelProto:
    """Branches in branches; made in place, since protobuf copies no message that deep."""
    made = scored([node("Identity", ["r0"], ["z"])], "z")
    made.graph.input.append(value("flag", [], BOOL))
    graph = made.graph
    for level in range(depth):
        held = graph.node.add(op_type="If", input=["flag"], output=[f"r{level}"])
        other = held.attribute.add(name="else_branch", type=5).g
        other.name = "g"
        other.node.append(node("Cos", ["x"], [f"o{level}"]))
        other.output.append(value(f"o{level}", None))
        held.attribute.add(name="then_branch", type=5)
        graph = held.attribute[1].g
        graph.name = "g"
        graph.output.append(value(f"r{level + 1}", None))
    graph.node.append(node("Neg", ["x"], [f"r{depth}"]))
    return made


def nested_bytes(depth: int) -> bytes:
    """A file whose graphs lie in each other, written without protobuf, which would refuse it."""
    inner = b""
    for _ in range(depth):
        for field in (0x32, 0x2A, 0x0A):  # attribute.g, node.attribute, graph.node
            inner = bytes([field]) + varint(len(inner)) + inner
    return b"\x08\x08" + b"\x3a" + varint(len(inner)) + inner


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def tensor_dims(dims: Sequence[int], kind: int = FLOAT, **data: Any) -> onnx.ModelProto:
    made = scored([node("Identity", ["big"], ["z"])], "z")
    made.graph.initializer.append(TensorProto(name="big", data_type=kind, dims=dims, **data))
    return made


def input_dims(dims: Sequence[int]) -> onnx.ModelProto:
    made = scored([node("Relu", ["big"], ["z"])], "z")
    made.graph.input.append(value("big", dims))
    return made


def sparse(dims: Sequence[int]) -> onnx.ModelProto:
    made = scored([node("Identity", ["big"], ["z"])], "z")
    added = made.graph.sparse_initializer.add(dims=dims)
    added.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "big"))
    added.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64)))
    return made


def type_tower(depth: int) -> onnx.ModelProto:
    made = scored([], "x")
    kind = made.graph.input.add(name="q").type
    for _ in range(depth):
        kind = kind.sequence_type.elem_type
    kind.tensor_type.elem_type = FLOAT
    return made


def long_chain(length: int, op: str, reads: int) -> onnx.ModelProto:
    nodes = [node(op, [f"v{i}"] * reads, [f"v{i + 1}"]) for i in range(length)]
    nodes[0].input[:] = ["x"] * reads
    return scored(nodes, f"v{length}")


def text(kind: str) -> onnx.ModelProto:
    strings = helper.make_tensor("s", STRING, [1], [b"a" * 64])
    nodes, last = [], "s"
    for i in range(40):
        nodes.append(node("StringConcat", [last, last], [f"s{i}"]))
        last = f"s{i}"
    nodes = nodes if kind == "doubling" else []
    if kind == "regex":
        nodes = [node("RegexFullMatch", ["s"], ["m"], pattern="(a|a)*b")]
    if kind == "split":
        nodes = [node("StringSplit", ["s"], ["m", "k"], delimiter="a")]
    made = scored(nodes, "x", opset=20)
    made.graph.initializer.append(strings)
    return made


def bad_text(where: str) -> bytes:
    """A model whose name is not UTF-8 in one place."""
    made = scored([node("Relu", ["x"], ["QQQQ"], "WWWW")], "QQQQ", domains=["ZZZZ"])
    made.graph.name, made.graph.doc_string = "GGGG", "DDDD"
    made.graph.initializer[0].name = made.graph.initializer[0].name
    made.metadata_props.add(key="KKKK", value="VVVV")
    made.producer_name = "PPPP"
    made.graph.node[0].attribute.append(helper.make_attribute("AAAA", "SSSS"))
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "BBBB"
    return made.SerializeToString().replace(where.encode() * 4, b"\xff\xfe\xc0\x80")


# ---- every operator ------------------------------------------------------------------------------

EXTREMES = (0, 1, -1, 2, 7, -99, 2**20, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))


def any_operator(seed: int) -> onnx.ModelProto:
    """A node of some operator, with inputs of some kind and attributes at extremes."""
    rng = random.Random(seed)
    schemas = [
        s
        for s in onnx.defs.get_all_schemas()
        if s.domain in ("", "ai.onnx.ml") and not s.deprecated
    ]
    schema = schemas[seed % len(schemas)]
    big = [int(rng.choice(EXTREMES)) for _ in range(rng.randint(0, 4))]
    arrays: Arrays = {
        "big": np.array(big, np.int64), "huge": np.array(rng.choice(EXTREMES), np.int64),
        "small": ints(*range(rng.randint(0, 3))), "nothing": np.zeros((0, 3), np.float32),
        "scalar": np.float32(rng.choice([0, 1, -1, 1e30, np.nan, np.inf])),
        "image": np.ones((1, 2, 4, 4), np.float32), "flag": np.array(True),
        "matrix": np.ones((3, 3), np.float32), "few": np.array([1e9, 2, 3], np.float32),
    }  # fmt: skip
    names = [*arrays, "x", "x", "x", "w"]
    inputs = []
    least = min(schema.min_input, 12)
    for i in range(rng.randint(least, max(least, min(schema.max_input, least + 3)))):
        types = schema.inputs[min(i, len(schema.inputs) - 1)].types if schema.inputs else ()
        suited = [
            n for n in names
            if n in "xw" or f"tensor({_type_name(arrays[n].dtype)})" in types
        ]  # fmt: skip
        inputs.append(rng.choice(suited if rng.random() < 0.85 and suited else names))
    made = node(schema.name, inputs, ["z", "z1", "z2", "z3"][: max(1, min(schema.min_output, 4))])
    made.domain = schema.domain
    for name, attribute in schema.attributes.items():
        if attribute.required or rng.random() < 0.4:
            chosen = _attribute(rng, name, attribute.type)
            if chosen is not None:
                made.attribute.append(chosen)
    result = scored([made], "z", arrays, opset=onnx.defs.onnx_opset_version())
    result.ir_version = 10
    result.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return result


def _type_name(dtype: np.dtype) -> str:
    return {"float32": "float"}.get(dtype.name, dtype.name)


def _attribute(rng: random.Random, name: str, kind: Any) -> onnx.AttributeProto | None:
    kinds = onnx.defs.OpSchema.AttrType
    number = rng.choice(EXTREMES if rng.random() < 0.6 else (0, 1, 2, 3))
    several = [
        rng.choice(EXTREMES if rng.random() < 0.3 else (1, 2, 3)) for _ in range(rng.randint(0, 4))
    ]
    text = rng.choice(["", "sum", "constant", "ij,jk->ik", "SAME_UPPER", "\0", "é" * 3])
    chosen = {
        kinds.INT: number, kinds.INTS: several, kinds.FLOAT: float(number), kinds.STRING: text,
        kinds.FLOATS: [float(n) for n in several], kinds.STRINGS: [text] * rng.randint(0, 3),
        kinds.TENSOR: numpy_helper.from_array(ints(*several), "t"),
        kinds.GRAPH: helper.make_graph([node("Relu", ["x"], ["r"])], "g", [], [value("r", None)]),
    }.get(kind)  # fmt: skip
    if chosen is None:
        return None
    if isinstance(chosen, list) and not chosen:
        empty = {kinds.INTS: 7, kinds.FLOATS: 6, kinds.STRINGS: 8}[kind]
        return onnx.AttributeProto(name=name, type=empty)
    return helper.make_attribute(name, chosen)


def _cases() -> Iterator[tuple[str, Callable[[], Made]]]:
    for n in HUGE:
        power = n.bit_length() - 1
        for family in (sized_by_input, sized_by_attribute, computed, looped):
            for name, nodes, arrays in family(n):
                key = f"{name}-{power}"
                yield key, lambda a=nodes, b=arrays: scored(a, "z", b)
                if n == 2**40:
                    yield f"{key}-constants", lambda a=nodes, b=arrays: as_constants(a, b)
                    yield f"{key}-function", lambda a=nodes, b=arrays: in_function(a, b)
                    yield f"{key}-branch", lambda a=nodes, b=arrays: in_branch(a, b)
    yield "functions-doubling", lambda: tower(60, 2)
    yield "functions-wide", lambda: tower(6, 30)
    yield "functions-deep", lambda: tower(3000, 1)
    yield "functions-recursive", lambda: functions({"f0": ["f0"]})
    yield "functions-mutual", lambda: functions({"f0": ["f1", "f1"], "f1": ["f0"]})
    yield "functions-unused-mutual", lambda: functions({"f0": [], "f1": ["f2"], "f2": ["f1"]})
    for depth in (28, 60, 200, 3000):
        yield f"nested-{depth}", lambda d=depth: nested(d)
    for depth in (40, 1000, 30000):
        yield f"nested-bytes-{depth}", lambda d=depth: nested_bytes(d)
    for dims in ([2**62], [2**32, 2**32], [0, 2**62], [2**62, 0], [1] * 100, [1] * 10000, [-1]):
        label = f"{dims[:2]}x{len(dims)}"
        yield f"initializer-{label}", lambda d=dims: tensor_dims(d)
        yield f"initializer-one-{label}", lambda d=dims: tensor_dims(d, raw_data=bytes(4))
        yield f"initializer-int4-{label}", lambda d=dims: tensor_dims(d, 22, raw_data=bytes(1))
        yield (
            f"initializer-string-{label}",
            lambda d=dims: tensor_dims(d, STRING, string_data=[b"a"]),
        )
        yield f"input-{label}", lambda d=dims: input_dims(d)
        yield f"sparse-{label}", lambda d=dims: sparse(d)
    for depth in (20, 90, 3000):
        yield f"types-{depth}", lambda d=depth: type_tower(d)
    for op, reads in (("Add", 2), ("Mul", 2), ("Concat", 1), ("Relu", 1), ("Shape", 1)):
        yield f"chain-{op}", lambda o=op, r=reads: long_chain(2000, o, r)
    for kind in ("doubling", "regex", "split"):
        yield f"text-{kind}", lambda k=kind: text(k)
    for letter in "QWZGDKVPASB":
        yield f"not-utf8-{letter}", lambda c=letter: bad_text(c)


CASES: dict[str, Callable[[], Made]] = dict(_cases())

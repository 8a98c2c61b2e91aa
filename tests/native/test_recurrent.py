"""Kernels of LSTM, GRU and RNN: against the bodies of their functions, and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both

Array = np.ndarray[Any, Any]
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
NAMES = ("x", "w", "r", "b", "lengths", "h", "c", "p")
SIZES = (5, 3, 4, 7)  # steps, batch, width of the input, width of the state
DIRECTIONS = ("forward", "reverse", "bidirectional")


def shapes_of(op: str, sizes: tuple[int, int, int, int], directions: int) -> dict[str, list[int]]:
    steps, batch, inputs, hidden = sizes
    d, n = directions, GATES[op]
    return {
        "x": [steps, batch, inputs], "w": [d, n * hidden, inputs], "r": [d, n * hidden, hidden],
        "b": [d, 2 * n * hidden], "h": [d, batch, hidden], "c": [d, batch, hidden],
        "p": [d, 3 * hidden],
    }  # fmt: skip


class Layer:
    """A layer with the optional inputs that `has` names, and numbers for it."""

    def __init__(
        self,
        op: str,
        has: str = "b",
        sizes: tuple[int, int, int, int] = SIZES,
        lengths: list[int] | None = None,
        outputs: int | None = None,
        **attributes: Any,
    ) -> None:
        directions = 2 if attributes.get("direction") == "bidirectional" else 1
        shapes = shapes_of(op, sizes, directions)
        names = [n for n in NAMES if n in "xwr" or n in has or (n == "lengths" and lengths)]
        random = np.random.default_rng(len(names) + sizes[0])
        scale = max(1, sizes[3]) ** -0.5
        self.feeds: dict[str, Array] = {
            n: (random.uniform(-1, 1, shapes[n]) * (1 if n in "xhc" else scale)).astype(np.float32)
            for n in names
            if n != "lengths"
        }
        if lengths is not None:
            self.feeds["lengths"] = np.array(lengths, np.int32)
        self.wrt = [n for n in names if n != "lengths"]
        inputs = [n if n in names else "" for n in NAMES]
        while not inputs[-1]:
            inputs.pop()
        count = outputs or (3 if op == "LSTM" else 2)
        states = [f"y{i}" for i in range(count)]
        layer = helper.make_node(op, inputs, states, hidden_size=sizes[3], **attributes)
        # A number that depends on all outputs, each element with a factor of its own.
        nodes, parts = [layer], []
        constants = []
        for state in states:
            shape = [sizes[0], directions, *shapes["h"][1:]] if state == "y0" else shapes["h"]
            factor = random.uniform(-1, 1, shape).astype(np.float32)
            constants.append(onnx.numpy_helper.from_array(factor, f"{state}_factor"))
            nodes.append(helper.make_node("Mul", [state, f"{state}_factor"], [f"{state}_part"]))
            nodes.append(
                helper.make_node("ReduceSum", [f"{state}_part"], [f"{state}_sum"], keepdims=0)
            )
            parts.append(f"{state}_sum")
        nodes.append(helper.make_node("Sum", parts, ["total"]))
        types = {n: TensorProto.INT32 if n == "lengths" else TensorProto.FLOAT for n in names}
        given = [helper.make_tensor_value_info(n, types[n], self.feeds[n].shape) for n in names]
        results = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in (*states, "total")
        ]
        graph = helper.make_graph(nodes, "graph", given, results, constants)
        opset = helper.make_opsetid("", 18)
        self.model = helper.make_model(graph, opset_imports=[opset], ir_version=8)

    def gradient(self, wrt: list[str] | None = None) -> onnx.ModelProto:
        return gradient_with_functions(self.model, wrt or self.wrt, "total")

    def check(self, wrt: list[str] | None = None, ulps: float = 32) -> None:
        """Compare the kernels with their functions; what `total` adds up may cancel."""
        model = self.gradient(wrt)
        op = self.model.graph.node[0].op_type
        assert kinds_of(model) == {op, f"{op}Grad"}
        total = [o.name for o in model.graph.output].index("total")
        plain, native = run_both(model, self.feeds)
        np.testing.assert_allclose(native.pop(total), plain.pop(total), rtol=1e-5, atol=1e-5)
        assert_near(plain, native, ulps)


def everywhere() -> list[Any]:
    """Each operator in all directions, with and without lengths and optional inputs."""
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("LSTM", "bhcp", {}),
        ("GRU", "bh", {}),
        ("GRU", "bh", {"linear_before_reset": 1}),
        ("RNN", "bh", {}),
        ("RNN", "bh", {"activations": ["Relu"]}),
    ]
    cases = []
    for op, everything, attributes in kinds:
        # Y_h of an empty sequence is memory that onnxruntime 1.19's RNN never wrote.
        some = [5, 1, 3] if op == "RNN" else [5, 0, 3]
        for direction in DIRECTIONS:
            for lengths in (None, some):
                for has in ("", everything):
                    given = dict(attributes)
                    if "activations" in given and direction == "bidirectional":
                        given["activations"] = ["Relu", "Relu"]
                    name = [op, *map(str, attributes), direction, "lengths" if lengths else "full"]
                    label = "-".join([*name, has or "bare"])
                    cases.append(pytest.param(op, has, lengths, direction, given, id=label))
    return cases


@pytest.mark.parametrize(("op", "has", "lengths", "direction", "attributes"), everywhere())
def test_kernels_compute_what_the_functions_do(
    op: str, has: str, lengths: list[int] | None, direction: str, attributes: dict[str, Any]
) -> None:
    Layer(op, has, lengths=lengths, direction=direction, **attributes).check()


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1), (3, 1, 2, 33), (2, 40, 3, 16), (40, 33, 17, 50), (4, 15, 70, 64), (3, 2, 5, 96)],
    ids=str,
)
def test_sizes(op: str, sizes: tuple[int, int, int, int]) -> None:
    more: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
    Layer(op, "bhcp" if op == "LSTM" else "bh", sizes, **more).check(ulps=64)


@pytest.mark.parametrize("op", GATES)
def test_a_batch_of_nothing(op: str) -> None:
    layer = Layer(op, sizes=(4, 0, 3, 5))
    for found in run(layer.gradient(), layer.feeds, native=True):
        assert not np.any(found)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("wrt", ["x", "w", "r", "b", "h"])
def test_one_gradient_alone(op: str, wrt: str) -> None:
    Layer(op, "bh", outputs=1).check([wrt])


def test_what_lies_beyond_the_length_of_a_sequence_does_not_matter() -> None:
    for op in GATES:
        layer = Layer(op, "bh", lengths=[5, 2, 0], direction="bidirectional")
        model = layer.gradient()
        expected = run(model, layer.feeds, native=True)
        assert not expected[1][:, 2].any()  # the state of an empty sequence
        x = layer.feeds["x"] = layer.feeds["x"].copy()
        x[2:, 1] = np.nan
        x[:, 2] = np.nan
        for before, after in zip(expected, run(model, layer.feeds, native=True), strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("op", GATES)
def test_results_do_not_depend_on_threads(op: str) -> None:
    layer = Layer(op, "bh", (12, 40, 30, 80), direction="bidirectional")
    model = layer.gradient()
    first = run(model, layer.feeds, native=True, threads=1)
    for threads in (1, 2, 3):
        for a, b in zip(first, run(model, layer.feeds, native=True, threads=threads), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("LSTM", {"clip": 0.5}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"activations": ["HardSigmoid", "Tanh", "Tanh"]}),
        ("GRU", {"activations": ["Sigmoid", "Softsign"]}),
        ("RNN", {"activations": ["LeakyRelu"]}),
    ],
    ids=str,
)
def test_other_layers_stay_plain(op: str, attributes: dict[str, Any]) -> None:
    assert not {op, f"{op}Grad"} & kinds_of(Layer(op, **attributes).gradient())


def test_an_output_that_only_the_gradient_needs() -> None:
    """The model reads Y_h alone; the gradient reads Y as well."""
    layer = Layer("LSTM", "bhc")
    graph = layer.model.graph
    graph.node[0].output[0] = ""
    del graph.output[0], graph.node[1:3]
    graph.node[-1].input.remove("y0_sum")
    layer.check()


# ---- torch -------------------------------------------------------------------------------------

# Gates of torch in the order of ONNX.
ORDER = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}


def as_onnx(op: str, parameter: torch.Tensor) -> Array:
    parts = np.split(parameter.detach().numpy(), GATES[op])
    return np.concatenate([parts[i] for i in ORDER[op]])


@pytest.mark.parametrize("op", GATES)
def test_torch(op: str) -> None:
    sizes = (20, 19, 24, 40)
    steps, batch, inputs, hidden = sizes
    torch.manual_seed(0)
    net = getattr(torch.nn, op)(inputs, hidden).double()
    x = torch.randn(steps, batch, inputs, dtype=torch.double, requires_grad=True)
    more: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
    layer = Layer(op, "b", sizes, outputs=1, **more)
    biases = as_onnx(op, net.bias_ih_l0), as_onnx(op, net.bias_hh_l0)
    given = {
        "x": x.detach().numpy(), "w": as_onnx(op, net.weight_ih_l0)[None],
        "r": as_onnx(op, net.weight_hh_l0)[None], "b": np.concatenate(biases)[None],
    }  # fmt: skip
    feeds = {name: value.astype(np.float32) for name, value in given.items()}
    factor = onnx.numpy_helper.to_array(layer.model.graph.initializer[0])[:, 0]
    total = (net(x)[0] * torch.from_numpy(factor.copy())).sum()
    total.backward()
    assert x.grad is not None
    db = as_onnx(op, net.bias_ih_l0.grad), as_onnx(op, net.bias_hh_l0.grad)
    expected = [
        x.grad.numpy(), as_onnx(op, net.weight_ih_l0.grad)[None],
        as_onnx(op, net.weight_hh_l0.grad)[None], np.concatenate(db)[None],
    ]  # fmt: skip
    found = run(layer.gradient(), feeds, native=True)[2:]  # behind Y and the sum
    assert_near([np.asarray(e, np.float32) for e in expected], found, ulps=32)


# ---- wrong inputs ------------------------------------------------------------------------------


def call(feeds: dict[str, Array], **attributes: Any) -> list[Any]:
    """Run the kernel LSTM alone, on whatever it is given."""
    roles = [NAMES.index(name) for name in feeds]
    node = helper.make_node(
        "LSTM_0", list(feeds), ["y", "saved"], domain="ai.onnxtrain",
        **{"input_roles": roles, "output_roles": [0, 3], **attributes},
    )  # fmt: skip
    types = {n: helper.np_dtype_to_tensor_dtype(v.dtype) for n, v in feeds.items()}
    given = [helper.make_tensor_value_info(n, types[n], v.shape) for n, v in feeds.items()]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "saved")]
    graph = helper.make_graph([node], "graph", given, outputs)
    body = [helper.make_node("Identity", ["x"], [name]) for name in ("y", "saved")]
    opsets = [helper.make_opsetid("", 18)]
    function = helper.make_function(
        "ai.onnxtrain", "LSTM_0", list(feeds), ["y", "saved"], body, opsets
    )
    opsets.append(helper.make_opsetid("ai.onnxtrain", 1))
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    return run(model, feeds, native=True)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("x of two axes", {"x": np.zeros((3, 4), np.float32)}, "X and R have three axes"),
    ("x of another width", {"x": np.zeros((5, 3, 9), np.float32)}, "W has another shape"),
    ("x of another type", {"x": np.zeros((5, 3, 4), np.float64)}, "not of type float"),
    ("gates", {"r": np.zeros((1, 21, 7), np.float32)}, "number of gates"),
    ("directions", {"r": np.zeros((2, 28, 7), np.float32)}, "number of gates and directions"),
    ("bias", {"b": np.zeros((1, 55), np.float32)}, "B has another shape"),
    ("initial state", {"h": np.zeros((1, 4, 7), np.float32)}, "initial_h has another shape"),
    ("peepholes", {"p": np.zeros((3, 7), np.float32)}, "P has another shape"),
    ("length", {"lengths": np.array([5, 6, 1], np.int32)}, "a length is negative or greater"),
    ("negative length", {"lengths": np.array([5, -1, 1], np.int32)}, "a length is negative"),
    ("lengths of int64", {"lengths": np.array([5, 1, 1])}, "a vector of int32"),
    ("too few lengths", {"lengths": np.array([5], np.int32)}, "one for each sequence"),
    ("direction", {"direction": 3}, "the direction is not one of"),
    ("role", {"input_roles": [0, 1, 99]}, "a role of an input is unknown"),
    ("output", {"output_roles": [0, -1]}, "a role of an output is unknown"),
    ("no inputs", {"input_roles": [0]}, "X and R have three axes"),
]


@pytest.mark.parametrize(("change", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_inputs_are_errors(change: dict[str, Any], message: str) -> None:
    layer = Layer("LSTM", "bhcp")
    arrays = {k: v for k, v in change.items() if isinstance(v, np.ndarray)}
    others = {k: v for k, v in change.items() if k not in arrays}
    with pytest.raises(Exception, match=message):
        call({**layer.feeds, **arrays}, **others)

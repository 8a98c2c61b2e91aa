"""Specs of rules/rnn.py, lstm.py and gru.py, and comparisons with torch.

The reference evaluator knows no lengths, activations, clipping or coupled gates, and its Scan runs
in one direction only: the Specs get no second opinion from it. Instead, what it does know is
checked in float64 with a Scan that runs both ways, and torch in float64 is the oracle for the rest.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_scan import Scan

import onnxtrain
from gradcheck import Spec, _compare_feeds, check_gradient, check_spec, ids, run

T, B, X, H = 4, 3, 2, 3  # steps, batch, width of the input, width of the state
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
LENGTHS = np.array([4, 2, 1], np.int32)
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def layer(op: str, id: str, has: str = "b", lengths: Any = None, of: int = 0, **attrs: Any) -> Spec:
    """A layer that has the optional inputs b, h, c, p that `has` names."""
    d, n = DIRECTIONS[attrs.get("direction", "forward")], GATES[op]
    steps = attrs.pop("steps", T)
    inputs = [
        (steps, B, X), (d, n * H, X), (d, n * H, H),
        (d, 2 * n * H) if "b" in has else None,
        lengths,
        (d, B, H) if "h" in has else None,
        (d, B, H) if "c" in has else None,
        (d, 3 * H) if "p" in has else None,
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    attrs["hidden_size"] = H
    outputs = 3 if op == "LSTM" else 2
    # second opinion: the reference evaluator has no Scan that runs backwards; see torch, below
    return Spec(op, inputs, attrs, (-1, 1), id, outputs, of, rtol=2e-2, second_opinion=False)


def everywhere(op: str, **attrs: Any) -> list[Spec]:
    """One layer in all directions, with and without lengths, for each of its outputs."""
    everything = "bhcp" if op == "LSTM" else "bh"
    cases = [("", 0), *((everything, of) for of in range(3 if op == "LSTM" else 2))]
    return [
        layer(op, "-".join((direction, has or "bare", kind, f"y{of}", *attrs)), has, lengths, of,
              direction=direction, **attrs)
        for direction in DIRECTIONS
        for kind, lengths in (("full", None), ("lengths", LENGTHS))
        for has, of in cases
    ]  # fmt: skip


ALPHA_BETA = {
    "Affine": ([0.4], [0.1]), "LeakyRelu": ([0.1], None), "ThresholdedRelu": ([0.2], None),
    "ScaledTanh": ([1.5], [0.6]), "HardSigmoid": ([0.3], [0.4]), "Elu": ([0.7], None),
}  # fmt: skip
NAMES = ["Sigmoid", "Tanh", "Relu", "Softsign", "Softplus", *ALPHA_BETA]


def activated(name: str) -> Spec:
    alpha, beta = ALPHA_BETA.get(name, (None, None))
    given = {"activation_alpha": alpha, "activation_beta": beta}
    attrs = {key: value for key, value in given.items() if value is not None}
    return layer("RNN", f"activation-{name}", "bh", activations=[name], **attrs)


SPECS = [
    *everywhere("RNN"),
    *everywhere("LSTM"),
    *everywhere("GRU"),
    *everywhere("GRU", linear_before_reset=1),
    *(activated(name) for name in NAMES),
    layer("LSTM", "one-step", "bhcp", steps=1, direction="bidirectional"),
    layer("LSTM", "cell-only", "c", of=2),
    layer("LSTM", "peepholes-only", "p"),
    layer("LSTM", "coupled", "bhc", input_forget=1),
    layer("LSTM", "coupled-peepholes", "bhcp", LENGTHS, input_forget=1),
    layer("LSTM", "clip", "bhcp", clip=0.4, direction="bidirectional"),
    layer("LSTM", "clip-coupled", "bhcp", clip=0.8, input_forget=1),
    layer("LSTM", "activations", "bhcp", direction="bidirectional",
          activations=["HardSigmoid", "Softsign", "Elu", "Sigmoid", "ScaledTanh", "Affine"],
          activation_alpha=[0.3, 0.7, 1.2, 0.8], activation_beta=[0.4, 0.6, 0.2]),
    layer("GRU", "activations", "bh", direction="bidirectional",
          activations=["HardSigmoid", "Softsign", "Sigmoid", "LeakyRelu"],
          activation_alpha=[0.3, 0.2], activation_beta=[0.4]),
    layer("GRU", "clip", "bh", clip=0.8),
    layer("GRU", "clip-linear-first", "bh", clip=0.8, linear_before_reset=1),
    layer("RNN", "clip", "bh", clip=0.8, direction="reverse"),
    *(layer(op, "empty-sequence", "bh", np.array([4, 0, 2], np.int32), of=1,
            direction="bidirectional") for op in GATES),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


# ---- a second opinion in float64 ---------------------------------------------------------------


class ScanBothWays(Scan):
    """The Scan of the reference evaluator, reversing what is to be scanned from the end."""

    op_domain = ""

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        kept = [a for a in onnx_node.attribute if not a.name.endswith("_directions")]
        self.backwards = len(kept) < len(onnx_node.attribute)
        plain = helper.make_node("Scan", onnx_node.input, onnx_node.output)
        plain.attribute.extend(kept)
        super().__init__(plain, run_params)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        states = len(args) - self.num_scan_inputs
        step = -1 if self.backwards else 1
        results = super()._run(*args[:states], *(a[::step] for a in args[states:]), **kwargs)
        return tuple(r if i < states else r[::step] for i, r in enumerate(results))


ScanBothWays.__name__ = "Scan"  # the evaluator looks an operator up by the name of its class


def run_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    wanted = {i.name for i in model.graph.input}
    evaluator = ReferenceEvaluator(model, new_ops=[ScanBothWays])
    return evaluator.run(None, {k: v for k, v in feeds.items() if k in wanted})


@pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize("of", [0, 1], ids=["y", "y_h"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", ["RNN", "LSTM", "GRU", "GRU-linear-first"])
def test_second_opinion(op: str, direction: str, of: int, batch_first: bool) -> None:
    """In float64; onnxruntime does not run layout=1, so this is where it is checked."""
    linear_first, op = op.endswith("first"), op.split("-")[0]
    d, n = DIRECTIONS[direction], GATES[op]
    rng = np.random.default_rng(4)
    state = (B, d, H) if batch_first else (d, B, H)
    shapes = {"x": (B, T, X) if batch_first else (T, B, X), "w": (d, n * H, X),
              "r": (d, n * H, H), "b": (d, 2 * n * H), "h": state, "c": state,
              "p": (d, 3 * H)}  # fmt: skip
    names = list(shapes)[: 7 if op == "LSTM" else 5]
    feeds = {name: rng.uniform(-1, 1, shapes[name]) for name in names}
    attrs = {"linear_before_reset": 1} if linear_first else {}
    node = helper.make_node(op, [*names[:4], "", *names[4:]], ["y", "y_h"], name="node",
                            direction=direction, hidden_size=H, layout=int(batch_first),
                            **attrs)  # fmt: skip
    inputs = [
        helper.make_tensor_value_info(k, TensorProto.DOUBLE, v.shape) for k, v in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(k, TensorProto.DOUBLE, None) for k in ("y", "y_h")]
    graph = helper.make_graph([node], "graph", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    output = ("y", "y_h")[of]
    extended = onnxtrain.gradient(model, names, of=output)
    _compare_feeds(op, model, extended, feeds, names, output, run_reference, 1e-5, 1e-6)


# ---- torch -------------------------------------------------------------------------------------

IN_TORCH = {"RNN": torch.nn.RNN, "GRU": torch.nn.GRU, "LSTM": torch.nn.LSTM}
ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}  # the gates of ONNX, as torch counts


def rows_of(op: str, tensor: torch.Tensor) -> np.ndarray:
    """Order the gates along the first axis as ONNX does."""
    blocks = tensor.detach().numpy().reshape(GATES[op], H, -1)[ORDER[op]]
    return blocks.reshape(GATES[op] * H, -1)


def in_onnx(op: str, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return weights of torch, or their gradients, as W, R and B."""
    suffixes = ["", "_reverse"][: len(tensors) // 4]
    w, r, wb, rb = (
        np.stack([rows_of(op, tensors[f"{kind}_l0{suffix}"]) for suffix in suffixes])
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    return {"w": w, "r": r, "b": np.concatenate([wb, rb], axis=1)[:, :, 0]}


@pytest.mark.parametrize("lengths", [None, [5, 5, 2, 1]], ids=["full", "packed"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_all_gradients_are_those_of_torch(op: str, bidirectional: bool, lengths: Any) -> None:
    """A loss of all outputs at once, with respect to all inputs, against torch in float64."""
    torch.manual_seed(5)
    steps, batch, d = 5, 4, 1 + bidirectional
    module = IN_TORCH[op](X, H, bidirectional=bidirectional).double()
    x = torch.randn(steps, batch, X, dtype=torch.double, requires_grad=True)
    states = {
        name: torch.randn(d, batch, H, dtype=torch.double, requires_grad=True)
        for name in ("h", "c")[: 1 + (op == "LSTM")]
    }
    initial = tuple(states.values())
    packed: Any = x
    if lengths is not None:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    y, final = module(packed, initial if op == "LSTM" else initial[0])
    if lengths is not None:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y)
    results = [y, *(final if op == "LSTM" else [final])]
    factors = [torch.randn_like(result) for result in results]
    sum((r * f).sum() for r, f in zip(results, factors, strict=True)).backward()

    weights = in_onnx(op, dict(module.named_parameters()))
    feeds = {"x": x.detach().numpy(), **weights}
    feeds |= {name: value.detach().numpy() for name, value in states.items()}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    # Y of ONNX has the directions on an axis of its own, before the batch.
    by_direction = factors[0].reshape(steps, batch, d, H).permute(0, 2, 1, 3)
    constants = [f.numpy().astype(np.float32) for f in (by_direction, *factors[1:])]
    model = weighted_sum_of_outputs(op, bidirectional, feeds, constants, lengths)
    gradients = run(onnxtrain.gradient(model, list(feeds)), feeds)[1:]

    parameters = {name: p.grad for name, p in module.named_parameters()}
    expected = {"x": x.grad.numpy(), **in_onnx(op, parameters)}
    expected |= {name: value.grad.numpy() for name, value in states.items()}
    for name, actual in zip(feeds, gradients, strict=True):
        np.testing.assert_allclose(actual, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def weighted_sum_of_outputs(
    op: str,
    bidirectional: bool,
    feeds: dict[str, np.ndarray],
    factors: list[np.ndarray],
    lengths: list[int] | None,
) -> onnx.ModelProto:
    outputs = ["y", "y_h", "y_c"][: len(factors)]
    states = [name for name in ("h", "c") if name in feeds]
    attrs = {"linear_before_reset": 1} if op == "GRU" else {}
    node = helper.make_node(
        op, ["x", "w", "r", "b", "" if lengths is None else "lengths", *states], outputs,
        hidden_size=H, direction="bidirectional" if bidirectional else "forward", **attrs,
    )  # fmt: skip
    nodes = [node]
    constants = {f"factor_{name}": f for name, f in zip(outputs, factors, strict=True)}
    for name in outputs:
        nodes.append(helper.make_node("Mul", [name, f"factor_{name}"], [f"{name}_weighted"]))
        nodes.append(
            helper.make_node("ReduceSum", [f"{name}_weighted"], [f"{name}_sum"], keepdims=0)
        )
    nodes.append(helper.make_node("Sum", [f"{name}_sum" for name in outputs], ["loss"]))
    if lengths is not None:
        constants["lengths"] = np.array(lengths, np.int32)
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in feeds.items()],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


class Stacked(torch.nn.Module):
    """Two layers in both directions, batch first, as most models have them."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.recurrent = IN_TORCH[op](X, H, num_layers=2, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(2 * H, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0])


@pytest.mark.filterwarnings("ignore")  # of the exporter, which is about to be retired
@pytest.mark.parametrize("op", GATES)
def test_an_exported_model_has_the_gradients_of_torch(op: str, tmp_path: Path) -> None:
    """Without folding, the exporter keeps the names and slices of torch's own parameters."""
    torch.manual_seed(8)
    net = Stacked(op)
    torch.onnx.export(
        net, (torch.randn(B, T, X),), tmp_path / "net.onnx", dynamo=False, opset_version=17,
        input_names=["x"], output_names=["y"], do_constant_folding=False,
        dynamic_axes={"x": {0: "batch", 1: "time"}, "y": {0: "batch", 1: "time"}},
    )  # fmt: skip
    x = torch.randn(B + 1, T + 2, X, requires_grad=True)
    y = net(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected = {"x": x.grad, **{name: p.grad for name, p in net.named_parameters()}}
    extended = onnxtrain.gradient(tmp_path / "net.onnx", list(expected))
    feeds = {"x": x.detach().numpy(), "y_grad": cotangent.numpy()}
    results = run(extended, feeds)
    gradients = dict(zip([o.name for o in extended.graph.output], results, strict=True))
    np.testing.assert_allclose(gradients.pop("y"), y.detach().numpy(), rtol=1e-4, atol=1e-5)
    for name, actual in gradients.items():
        wanted = expected[name.removesuffix("_grad")].numpy()
        np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-5, err_msg=name)


# ---- what a table cannot say -------------------------------------------------------------------


def one_layer(op: str, outputs: list[str], dtype: int = TensorProto.FLOAT, **attrs: Any) -> Any:
    n = GATES[op]
    rng = np.random.default_rng(6)
    shapes = {"x": (T, B, X), "w": (1, n * H, X), "r": (1, n * H, H)}
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    feeds = {name: rng.uniform(-1, 1, shape).astype(kind) for name, shape in shapes.items()}
    node = helper.make_node(op, ["x", "w", "r", "", "lengths"], outputs, hidden_size=H, **attrs)
    graph = helper.make_graph(
        [node], "graph",
        [helper.make_tensor_value_info(k, dtype, v.shape) for k, v in feeds.items()],
        [helper.make_tensor_value_info(o, dtype, None) for o in outputs if o],
        [onnx.numpy_helper.from_array(LENGTHS, "lengths")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return model, feeds


@pytest.mark.parametrize(
    ("op", "outputs"), [("RNN", ["", "h"]), ("GRU", ["", "h"]), ("LSTM", ["", "h"]),
                        ("LSTM", ["", "", "h"])],
)  # fmt: skip
def test_the_states_need_not_be_an_output(op: str, outputs: list[str]) -> None:
    model, feeds = one_layer(op, outputs)
    check_gradient(model, feeds, list(feeds), "h")


@pytest.mark.parametrize("op", GATES)
def test_nothing_comes_from_beyond_the_lengths(op: str) -> None:
    model, feeds = one_layer(op, ["y"])
    extended = onnxtrain.gradient(model, list(feeds))
    cotangent = np.random.default_rng(7).uniform(-1, 1, (T, 1, B, H)).astype(np.float32)
    expected = run(extended, {**feeds, "y_grad": cotangent})[1:]
    beyond = np.arange(T)[:, None] >= LENGTHS
    feeds["x"] = np.where(beyond[:, :, None], np.float32(np.nan), feeds["x"])
    cotangent[beyond[:, None]] = np.nan
    actual = run(extended, {**feeds, "y_grad": cotangent})[1:]
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op", GATES)
def test_float16(op: str) -> None:
    """onnxruntime computes the layer in float32 between casts; the gradient is near enough."""
    results = []
    for dtype in (TensorProto.FLOAT16, TensorProto.FLOAT):
        model, feeds = one_layer(op, ["y"], dtype)
        cotangent = np.ones((T, 1, B, H), feeds["x"].dtype)
        results.append(run(onnxtrain.gradient(model, list(feeds)), {**feeds, "y_grad": cotangent}))
    for half, single in zip(*results, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, single, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["Affine", "ScaledTanh", "ThresholdedRelu"])
def test_numbers_without_an_agreed_default_are_asked_for(name: str) -> None:
    model, feeds = one_layer("RNN", ["y"], activations=[name])
    with pytest.raises(onnxtrain.errors.NotDifferentiableError, match="activation_alpha"):
        onnxtrain.gradient(model, list(feeds))


@pytest.mark.parametrize("op", GATES)
def test_ranks_that_inference_cannot_tell_are_known(op: str) -> None:
    model, feeds = one_layer(op, ["y", "h"])
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    check_gradient(model, feeds, list(feeds), "y")
    check_gradient(model, feeds, list(feeds), "h")

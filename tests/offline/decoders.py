"""Small language models as exporters for generation write them, and the same in torch.

`Builder` writes the operators of ONNX Runtime GenAI's builder; `plain_model` those of torch's
exporter, which joins the keys and values of earlier tokens to the new ones by Concat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
VOCABULARY, WIDTH, INNER, HEADS, GROUPS, SIZE, LAYERS = 96, 32, 48, 4, 2, 8, 2
LONGEST = 64
EPSILON = 1e-5


def weights(seed: int = 0) -> dict[str, Array]:
    """Return random weights, by name; matrices are (in, out)."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    found = {"embed": (matrix(VOCABULARY, WIDTH) * 5).astype(np.float32)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        found[f"{layer}.norm1"] = 1 + 0.1 * matrix(WIDTH)
        found[f"{layer}.q"] = matrix(WIDTH, HEADS * SIZE)
        found[f"{layer}.k"] = matrix(WIDTH, GROUPS * SIZE)
        found[f"{layer}.v"] = matrix(WIDTH, GROUPS * SIZE)
        found[f"{layer}.o"] = matrix(HEADS * SIZE, WIDTH)
        found[f"{layer}.norm2"] = 1 + 0.1 * matrix(WIDTH)
        found[f"{layer}.gate"] = matrix(WIDTH, INNER)
        found[f"{layer}.up"] = matrix(WIDTH, INNER)
        found[f"{layer}.down"] = matrix(INNER, WIDTH)
    found["norm"] = 1 + 0.1 * matrix(WIDTH)
    found["head"] = matrix(WIDTH, VOCABULARY)
    return found


def angles() -> tuple[Array, Array]:
    """Return cosines and sines of rotary positions, (positions, half of the size of a head)."""
    rates = 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    turned = np.arange(LONGEST)[:, None] * rates
    return np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)


# ---- torch ---------------------------------------------------------------------------------------


def logits(w: dict[str, torch.Tensor], ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Compute the scores of the next tokens; `numbers` are those of the attention mask."""
    length = ids.shape[1]
    causal = torch.arange(length)[:, None] >= torch.arange(length)
    seen = (numbers[:, :, None] == numbers[:, None]) & causal
    cos, sin = (torch.from_numpy(a[:length]).to(w["embed"].dtype) for a in angles())

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * scale

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.reshape(*x.shape[:2], count, SIZE).transpose(1, 2)

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["embed"][ids]
    for i in range(LAYERS):
        own = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items()}
        h = norm(x, own["norm1"])
        q, k = turn(heads(h @ own["q"], HEADS)), turn(heads(h @ own["k"], GROUPS))
        v = heads(h @ own["v"], GROUPS)
        k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)) / SIZE**0.5
        mixed = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).reshape(h.shape[0], length, -1) @ own["o"]
        h = norm(x, own["norm2"])
        x = x + (torch.nn.functional.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"]
    return norm(x, w["norm"]) @ w["head"]


def next_token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the labels that count, as language models are trained."""
    return torch.nn.functional.cross_entropy(
        scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


# ---- ONNX ----------------------------------------------------------------------------------------


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def add(self, op_type: str, inputs: list[str], outputs: int = 1, **more: Any) -> list[str]:
        name = f"{op_type}_{len(self.nodes)}"
        made = [f"{name}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, made, name, **more))
        return made

    def one(self, op_type: str, *inputs: str, **more: Any) -> str:
        return self.add(op_type, list(inputs), **more)[0]

    def constant(self, array: Array, name: str) -> str:
        if all(t.name != name for t in self.initializers):
            self.initializers.append(numpy_helper.from_array(array, name))
        return name


@dataclass
class Builder:
    """Writes a model as ONNX Runtime GenAI's builder does."""

    w: dict[str, Array]
    bits: int = 0  # of matrices; 0 for floats
    packed: bool = True  # whether one matrix makes queries, keys and values

    def model(self) -> onnx.ModelProto:
        """Return the model, with a cache of keys and values."""
        g = self.g = _Graph()
        cos, sin = angles()
        g.constant(cos, "cos_cache"), g.constant(sin, "sin_cache")
        one = g.constant(np.array([1], np.int64), "one")
        lengths = g.one("Sub", g.one("ReduceSum", "attention_mask", one, keepdims=0), one)
        last = g.one("Cast", lengths, to=TensorProto.INT32)
        axis = g.constant(np.array(1, np.int64), "axis")
        total = g.one("Gather", g.one("Shape", "attention_mask"), axis, axis=0)
        total = g.one("Cast", total, to=TensorProto.INT32)
        x = g.one("Gather", g.constant(self.w["embed"], "model.embed_tokens.weight"), "input_ids")
        norm1 = g.constant(self.w["model.layers.0.norm1"], "model.layers.0.input_layernorm.weight")
        h = g.one("SimplifiedLayerNormalization", x, norm1, epsilon=EPSILON, axis=-1, stash_type=1)
        caches: list[onnx.ValueInfoProto] = []
        presents: list[onnx.ValueInfoProto] = []
        for i in range(LAYERS):
            name = f"model.layers.{i}"
            past = [f"past_key_values.{i}.{kind}" for kind in ("key", "value")]
            attended, *present = self._attention(name, h, past, last, total)
            caches += [_cache(p, "past_sequence_length") for p in past]
            presents += [_cache(p, "total_sequence_length") for p in present]
            x, h = self._skip_norm(x, self._matmul(attended, f"{name}.o"), f"{name}.norm2")
            gate, up = self._matmul(h, f"{name}.gate"), self._matmul(h, f"{name}.up")
            inner = g.one("Mul", g.one("Mul", gate, g.one("Sigmoid", gate)), up)
            following = f"model.layers.{i + 1}.norm1" if i + 1 < LAYERS else "norm"
            x, h = self._skip_norm(x, self._matmul(inner, f"{name}.down"), following)
        g.nodes.append(helper.make_node("Identity", [self._matmul(h, "head")], ["logits"]))
        self._inline_logits()
        inputs = [
            _tokens("input_ids", "sequence_length"),
            _tokens("attention_mask", "total_sequence_length"),
        ]
        outputs = [_floats("logits", ["batch_size", "sequence_length", VOCABULARY])]
        graph = helper.make_graph(
            g.nodes, "decoder", [*inputs, *caches], [*outputs, *presents], g.initializers
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _inline_logits(self) -> None:
        """Let the last product be the output itself."""
        identity = self.g.nodes.pop()
        self.g.nodes[-1].output[0] = identity.output[0]

    def _attention(self, name: str, h: str, past: list[str], last: str, total: str) -> list[str]:
        if self.packed:
            self.w[f"{name}.qkv"] = np.concatenate([self.w[f"{name}.{n}"] for n in "qkv"], 1)
            three = [self._matmul(h, f"{name}.qkv"), "", ""]
        else:
            three = [self._matmul(h, f"{name}.{n}") for n in "qkv"]
        angles = ["cos_cache", "sin_cache"]
        made = self.g.add(
            "GroupQueryAttention", [*three, *past, last, total, *angles, "", "", ""],
            3, domain="com.microsoft", num_heads=HEADS, kv_num_heads=GROUPS, do_rotary=1,
            rotary_interleaved=0, local_window_size=-1, softcap=0.0, scale=SIZE**-0.5,
        )  # fmt: skip
        number = name.rpartition(".")[2]
        names = [made[0], f"present.{number}.key", f"present.{number}.value"]
        del self.g.nodes[-1].output[:]
        self.g.nodes[-1].output.extend(names)
        return names

    def _skip_norm(self, x: str, y: str, name: str) -> tuple[str, str]:
        scale = self.g.constant(self.w[name], f"{name}.weight")
        made = self.g.add(
            "SkipSimplifiedLayerNormalization", [x, y, scale], 4,
            domain="com.microsoft", epsilon=EPSILON,
        )  # fmt: skip
        self.g.nodes[-1].output[1] = self.g.nodes[-1].output[2] = ""
        return made[3], made[0]

    def _matmul(self, x: str, name: str) -> str:
        matrix = self.w[name]
        if not self.bits:
            return self.g.one("MatMul", x, self.g.constant(matrix, f"{name}.MatMul.weight"))
        packed, scales = quantize(matrix, self.bits)
        self.w[name] = dequantize(packed, scales, self.bits, matrix.shape[0])
        return self.g.one(
            "MatMulNBits", x,
            self.g.constant(packed, f"{name}.MatMul.weight_Q{self.bits}"),
            self.g.constant(scales.reshape(-1), f"{name}.MatMul.weight_scales"),
            domain="com.microsoft", K=matrix.shape[0], N=matrix.shape[1], bits=self.bits,
            block_size=16,
        )  # fmt: skip


def quantize(matrix: Array, bits: int, block: int = 16) -> tuple[Array, Array]:
    """Return the bytes and scales that MatMulNBits reads; zero is in the middle."""
    rows = matrix.T.reshape(matrix.shape[1], -1, block)  # (N, blocks, block)
    middle = 2 ** (bits - 1)
    scales = np.abs(rows).max(-1, keepdims=True) / (middle - 1)
    numbers = np.clip(np.round(rows / scales) + middle, 0, 2 * middle - 1).astype(np.uint8)
    packed = numbers if bits == 8 else numbers[..., ::2] | (numbers[..., 1::2] << 4)
    return packed, scales[..., 0].astype(np.float32)


def dequantize(packed: Array, scales: Array, bits: int, k: int) -> Array:
    """Return the matrix (K, N) that the bytes stand for."""
    numbers = packed
    if bits == 4:
        numbers = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)
    rows = (numbers.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]
    return rows.reshape(packed.shape[0], k).T.copy()


def _tokens(name: str, length: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["batch_size", length])


def _floats(name: str, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _cache(name: str, length: str) -> onnx.ValueInfoProto:
    return _floats(name, ["batch_size", GROUPS, length, SIZE])


PLAIN = """
<ir_version: 8, opset_import: ["" : 18]>
decoder (int64[batch, length] input_ids, int64[batch, length] position_ids,
         float[batch, 2, past, 4] past_key, float[batch, 2, past, 4] past_value)
     => (float[batch, length, 12] logits, float[batch, 2, total, 4] present_key,
         float[batch, 2, total, 4] present_value)
<int64[1] two = {2}, int64[4] heads = {0, 0, 2, 4}, int64[3] flat = {0, 0, 8},
 int64 zero = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] second = {1}> {
    words = Gather (embed_weight, input_ids)
    places = Gather (position_weight, position_ids)
    x = Add (words, places)
    k0 = MatMul (x, k_weight)
    v0 = MatMul (x, v_weight)
    k1 = Reshape (k0, heads)
    v1 = Reshape (v0, heads)
    k = Transpose <perm = [0, 2, 1, 3]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    present_key = Concat <axis = 2> (past_key, k)
    present_value = Concat <axis = 2> (past_value, v)
    kt = Transpose <perm = [0, 1, 3, 2]> (present_key)
    scores = MatMul (k, kt)
    past_sizes = Shape (past_key)
    past_length = Gather <axis = 0> (past_sizes, two)
    total_sizes = Shape (present_key)
    total = Gather <axis = 0> (total_sizes, two)
    past_scalar = Squeeze (past_length, first)
    total_scalar = Squeeze (total, first)
    keys = Range (zero, total_scalar, one)
    queries = Range (past_scalar, total_scalar, one)
    column = Unsqueeze (queries, second)
    ahead = Greater (keys, column)
    hidden = Cast <to = 1> (ahead)
    much = Mul (hidden, minus)
    seen = Add (scores, much)
    weights = Softmax <axis = -1> (seen)
    mixed = MatMul (weights, present_value)
    back = Transpose <perm = [0, 2, 1, 3]> (mixed)
    joined = Reshape (back, flat)
    logits = MatMul (joined, head_weight)
}
"""


def plain_model() -> onnx.ModelProto:
    """Return a layer of attention whose cache is joined by Concat, with learned positions."""
    model = onnx.parser.parse_model(PLAIN)
    rng = np.random.default_rng(3)
    shapes = {
        "embed_weight": (12, 8), "position_weight": (16, 8), "k_weight": (8, 8),
        "v_weight": (8, 8), "head_weight": (8, 12),
    }  # fmt: skip
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(-1e4), "minus"))
    return model


# ---- data ----------------------------------------------------------------------------------------


def batch(seed: int = 0) -> dict[str, Array]:
    """Return two rows: one of two sequences and padding, one padded on the left."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, (2, 12))
    mask = np.array([[1] * 5 + [2] * 5 + [0] * 2, [0] * 3 + [1] * 9])
    return {"input_ids": ids, "attention_mask": mask}

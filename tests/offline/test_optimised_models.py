"""Models that onnxruntime's optimizers have saved: same numbers, same gradients as before."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onnxtrain
from onnxtrain.offline.frontend.canonical_model import canonical_model

Array = np.ndarray[Any, Any]


class Layer(nn.Module):
    """One layer of BERT."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = (
            p(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5 + mask
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = self.norm1(x + self.o(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, width), nn.Embedding(12, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.head = nn.Linear(width, 3)

    def forward(self, ids, mask, segments):
        additive = (1.0 - mask[:, None, None, :].float()) * -10000.0
        places = self.places(torch.arange(ids.shape[1])[None])
        x = self.norm(self.words(ids) + places + self.segments(segments))
        for layer in self.layers:
            x = layer(x, additive)
        return self.head(torch.tanh(x[:, 0]))


class Convolutions(nn.Module):
    """Convolutions with the activations that fuse into them, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU6())
        self.last = nn.Conv2d(8, 8, 3, padding=1)
        self.leaky = nn.Sequential(nn.Conv2d(8, 4, 3, stride=2, groups=4), nn.LeakyReLU(0.2))
        self.gate = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid())
        self.head = nn.Sequential(nn.Linear(4 * 9, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x):
        x = self.first(x)
        x = self.leaky(F.relu(x + self.last(self.inner(x))))
        return self.head((x * self.gate(x)).flatten(1))


class Decoder(nn.Module):
    """What language models are made of now: RMS norms, gates, transposed and scaled products."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)
        self.fast = nn.Linear(width, width)

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        x = x + F.silu(self.gate(y)) * self.up(y)
        scores = torch.softmax(x @ x.transpose(-1, -2) * 0.25, -1)
        return F.gelu(self.fast(scores @ x), approximate="tanh")


@dataclass(frozen=True)
class Example:
    net: type[nn.Module]
    inputs: Mapping[str, Any]
    wrt: tuple[str, ...]


def ints(high: int, *shape: int):
    return torch.from_numpy(np.random.default_rng(1).integers(0, high, shape))


EXAMPLES = {
    "bert": Example(
        Bert,
        {
            "ids": ints(50, 2, 8),
            "mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3]),
            "segments": ints(2, 2, 8),
        },
        ("layers.0.norm1.weight", "layers.1.up.bias", "head.weight"),
    ),
    "convolutions": Example(
        Convolutions, {"x": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))},
        ("x", "head.0.weight", "inner.0.weight"),
    ),
    "decoder": Example(
        Decoder, {"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))},
        ("x", "scale", "gate.bias"),
    ),
}  # fmt: skip


def export(example: Example, opset: int) -> onnx.ModelProto:
    torch.manual_seed(0)
    net = example.net().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    file = io.BytesIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net, tuple(example.inputs.values()), file, dynamo=False, opset_version=opset,
                input_names=list(example.inputs), output_names=["y"],
                dynamic_axes={name: {0: "batch"} for name in example.inputs},
            )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load_from_string(file.getvalue())


def by_onnxruntime(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimised.onnx")


def by_transformers_tool(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    optimizer = pytest.importorskip(
        "onnxruntime.transformers.optimizer", reason="not every build of onnxruntime has it"
    )
    onnx.save(model, folder / "model.onnx")
    logging.disable(logging.WARNING)
    try:
        return optimizer.optimize_model(
            str(folder / "model.onnx"), model_type="bert", num_heads=2, hidden_size=16, opt_level=0
        ).model
    finally:
        logging.disable(logging.NOTSET)


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    kinds = {i.name: np.int32 if "int32" in i.type else None for i in session.get_inputs()}
    fed = {k: v.astype(kinds[k] or v.dtype) for k, v in feeds.items() if k in kinds}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, fed), strict=True))


def fused_operators(model: onnx.ModelProto) -> set[str]:
    odd = {"SimplifiedLayerNormalization"}
    return {n.op_type for n in model.graph.node if n.domain or n.op_type in odd}


@pytest.mark.parametrize(
    ("name", "optimise", "opset", "expected"),
    [
        ("bert", by_onnxruntime, 17, {"BiasGelu"}),
        ("bert", by_onnxruntime, 14, {"BiasGelu"}),
        ("bert", by_transformers_tool, 17,
         {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"}),
        ("bert", by_transformers_tool, 14, {"EmbedLayerNormalization", "Attention"}),
        ("convolutions", by_onnxruntime, 17, {"FusedConv"}),
        ("convolutions", by_onnxruntime, 13, {"FusedConv"}),
        ("decoder", by_onnxruntime, 17,
         {"QuickGelu", "FusedMatMul", "SimplifiedLayerNormalization"}),
    ],
    ids=lambda v: v.__name__ if callable(v) else str(v) if not isinstance(v, set) else "",
)  # fmt: skip
def test_optimised_model(name: str, optimise, opset: int, expected: set[str], tmp_path: Path):
    example = EXAMPLES[name]
    original = export(example, opset)
    optimised = optimise(original, tmp_path)
    assert expected <= fused_operators(optimised), "the optimizer did not fuse what it used to"
    feeds = {k: v.numpy() for k, v in example.inputs.items()}
    plain = ir.to_proto(canonical_model(optimised))
    assert not fused_operators(plain)
    kept = {t.name for t in optimised.graph.initializer}
    assert {i for n in optimised.graph.node for i in n.input} & kept <= {
        t.name for t in plain.graph.initializer
    }
    wanted = run(optimised, feeds)["y"]
    np.testing.assert_allclose(run(plain, feeds)["y"], wanted, rtol=1e-4, atol=1e-5)
    check_gradients(example, original, optimised, feeds)


def check_gradients(
    example: Example, before: onnx.ModelProto, after: onnx.ModelProto, feeds: Mapping[str, Array]
) -> None:
    old_names, new_names = ({t.name for t in m.graph.initializer} for m in (before, after))
    wrt = [n for n in example.wrt if n in feeds or n in old_names & new_names]
    assert wrt, "the optimizer renamed every value that the test differentiates"
    ct = np.random.default_rng(2).standard_normal(run(before, feeds)["y"].shape).astype(np.float32)
    old, new = (
        run(onnxtrain.gradient(m, wrt, of="y"), {**feeds, "y_grad": ct}) for m in (before, after)
    )
    for name in wrt:
        scale = np.abs(old[f"{name}_grad"]).max()
        np.testing.assert_allclose(
            new[f"{name}_grad"], old[f"{name}_grad"], rtol=1e-3, atol=1e-4 * scale, err_msg=name
        )

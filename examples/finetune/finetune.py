"""Fine-tunes the int4 SmolLM2-135M that ONNX Runtime GenAI runs, and hands the adapter back to it.

    make finetune

The model is the deployed one: 4-bit weights, with a cache of keys and values. Low-rank factors
beside its layers learn the style of Debian's fortunes; the weights stay as they are.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
from fortunes import rows
from smollm2 import build

import onnxtrain

PROMPT = "The trouble with computers is"


def main(folder: Path, steps: int) -> None:
    """Build the model, prepare it, train, export the adapter and generate with and without it."""
    build(folder / "smollm2")
    base = folder / "smollm2" / "int4"
    artifacts = folder / "finetune"
    started = time.time()
    made = onnxtrain.prepare(
        base / "model.onnx",
        artifacts,
        train="lora:rank=8,alpha=16",
        loss="next_token",
        memory_budget="150MB",
        sizes={"batch_size": 1, "sequence_length": 256},
    )
    print(f"a step takes {made.memory}")
    print(f"prepared in {time.time() - started:.0f} s: {made.parameter_count:,} parameters train")
    train, held_out = rows(folder)
    session = onnxtrain.TrainingSession(artifacts)
    session.set_learning_rate(1e-3)
    print(f"perplexity before: {perplexity(session, held_out):.2f}")
    for step in range(steps):
        loss = session.step(**feeds(train[step % len(train)][None]))
        if step % 10 == 0:
            print(f"step {step:3}: loss {float(loss):.3f}", flush=True)
    print(f"perplexity after:  {perplexity(session, held_out):.2f}")
    adapter = folder / "fortunes.onnx_adapter"
    session.export_adapter(adapter)
    deployed = deploy(base, artifacts, folder / "deployed")
    print(f"\n--- as it was\n{write_on(deployed, PROMPT)}")
    print(f"\n--- with {adapter.name}\n{write_on(deployed, PROMPT, adapter)}")


def feeds(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a step takes. All tokens are one sequence (1), and each is predicted."""
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}


def perplexity(session: onnxtrain.TrainingSession, held_out: np.ndarray) -> float:
    """Return how many tokens the model hesitates between, on average."""
    losses = [float(session.eval_step(**feeds(row[None]))) for row in held_out]
    return float(np.exp(np.mean(losses)))


def deploy(base: Path, artifacts: Path, folder: Path) -> Path:
    """Write a folder for ONNX Runtime GenAI: the model with slots, its weights, the tokenizer."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    (folder / "model.onnx.data").unlink(missing_ok=True)
    shutil.copy(artifacts / "inference_model.onnx", folder / "model.onnx")
    shutil.copy(artifacts / "base.data", folder)
    return folder


def write_on(folder: Path, prompt: str, adapter: Path | None = None, length: int = 60) -> str:
    """Let ONNX Runtime GenAI write on, with or without an adapter: always the likeliest token."""
    import onnxruntime_genai as og

    model = og.Model(str(folder))
    tokenizer, adapters = og.Tokenizer(model), og.Adapters(model)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=length, do_sample=False)
    generator = og.Generator(model, parameters)
    if adapter is not None:
        adapters.load(str(adapter), adapter.stem)
        generator.set_active_adapter(adapters, adapter.stem)
    generator.append_tokens(tokenizer.encode(prompt))
    while not generator.is_done():
        generator.generate_next_token()
    return str(tokenizer.decode(generator.get_sequence(0)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    main(given.folder.resolve(), given.steps)

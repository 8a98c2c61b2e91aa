"""SmolLM2-135M in 4 bits: what is learnt here, stock onnxruntime and ONNX Runtime GenAI apply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxtrain

pytest.importorskip("onnxruntime_genai", reason="`make test-lm` sets up an environment with GenAI")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "finetune"))
TAUGHT = "The trouble with computers is that they remember what everybody else would forget."
PROMPT = "The trouble with computers is"
HEADS, SIZE = 3, 64  # of the keys and values of earlier tokens


class Trained(NamedTuple):
    """A session that knows one sentence by heart, and what was written from it."""

    session: onnxtrain.TrainingSession
    base: Path
    artifacts: Path
    adapter: Path
    ids: np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from smollm2 import build
    from tokenizers import Tokenizer

    build(ROOT / "build" / "smollm2")
    base, folder = ROOT / "build" / "smollm2" / "int4", tmp_path_factory.mktemp("lm")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    ids = np.array([tokenizer.encode(TAUGHT).ids], np.int64)
    artifacts = folder / "artifacts"
    onnxtrain.prepare(
        with_float_inputs(base / "model.onnx", folder / "model.onnx"), artifacts,
        train="lora:rank=8,alpha=16", loss="next_token", outputs="logits",
    )  # fmt: skip
    session = onnxtrain.TrainingSession(artifacts)
    session.set_learning_rate(2e-3)
    for _ in range(25):
        session.step(input_ids=ids, attention_mask=np.ones_like(ids), labels=ids)
    adapter = folder / "taught.onnx_adapter"
    session.export_adapter(adapter)
    return Trained(session, base, artifacts, adapter, ids)


def with_float_inputs(source: Path, target: Path) -> Path:
    """Write the model with MatMulNBits that do not round what they read to 8 bits.

    Rounding hides whether two graphs compute the same: it makes steps out of small differences.
    """
    model = onnx.load(source)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    onnx.save(model, target)
    return target


def logits(model: Path, ids: np.ndarray[Any, Any], adapter: Path | None = None) -> Any:
    """Run a model for generation without earlier tokens, in stock onnxruntime."""
    session = ort.InferenceSession(str(model))
    past = np.zeros((1, HEADS, 0, SIZE), np.float32)
    names = [value.name for value in session.get_inputs()]
    feeds = {name: past for name in names if name.startswith("past_key_values")}
    options = ort.RunOptions()
    if adapter is not None:
        loaded = ort.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return session.run(["logits"], feeds, options)[0]


def test_adapter_merged_model_and_training_graph_have_the_same_logits(
    trained: Trained, tmp_path: Path
) -> None:
    ids, adapter = trained.ids, trained.adapter
    slots = trained.artifacts / "inference_model.onnx"
    expected = trained.session.predict(
        input_ids=ids, attention_mask=np.ones_like(ids), outputs=["logits"]
    )
    merged = onnxtrain.merge_adapter(slots, adapter, tmp_path / "merged.onnx")
    assert {layer.how for layer in merged.layers} == {"factors"}
    before = np.abs(logits(slots, ids) - expected).max()
    assert before > 1  # the adapter does something
    assert np.abs(logits(slots, ids, adapter) - expected).max() < 1e-3
    assert np.abs(logits(tmp_path / "merged.onnx", ids) - expected).max() < 1e-3


def test_genai_writes_what_was_learnt(trained: Trained, tmp_path: Path) -> None:
    from finetune import deploy, write_on

    deployed = deploy(trained.base, trained.artifacts, tmp_path / "deployed")
    length = trained.ids.shape[1]
    assert write_on(deployed, PROMPT, trained.adapter, length) == TAUGHT
    plain = write_on(deployed, PROMPT, None, length)
    assert plain.startswith(PROMPT)
    assert plain != TAUGHT
    assert plain == write_on(original(trained.base, tmp_path), PROMPT, None, length)


def original(base: Path, folder: Path) -> Path:
    """Return the folder of the model without slots, with inputs that are not rounded either."""
    import shutil

    shutil.copytree(base, folder / "original")
    with_float_inputs(base / "model.onnx", folder / "original" / "model.onnx")
    return folder / "original"


def test_peft_loads_the_adapter(trained: Trained, tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    adapter = onnxtrain.Adapter.read(trained.adapter)
    adapter.save(tmp_path / "peft", format="peft", config={"task_type": "CAUSAL_LM"})
    base = LlamaForCausalLM.from_pretrained(trained.base.parent / "float", dtype=torch.float32)
    tokens = torch.from_numpy(trained.ids)
    with torch.no_grad():
        before = float(base(input_ids=tokens, labels=tokens).loss)
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"))
        after = float(model(input_ids=tokens, labels=tokens).loss)
    assert before > 2  # the float model is another base than the one of 4 bits
    assert after < 0.5 * before

"""Gradients of `transformers` architectures, exported by both exporters, against torch's.

`make test-transformers` sets up an environment and runs this. Each network is tiny and its weights
are random, so nothing is downloaded. Every parameter has to be found in the artifacts, once, with
torch's gradient to 1e-4 of its norm; tied and shared weights are one parameter, as in torch.

    python benchmarks/transformers_gradients.py [NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
import transformers

from onnxtrain import prepare
from onnxtrain.api import CheckpointState, Module

TOLERANCE = 1e-4
SMALL = 1e-3  # gradients below this part of the largest one are held against that part
VOCABULARY, LENGTH, BATCH = 61, 7, 2
# A scripted function with an If whose branches have different ranks, on a length that may change.
KNOWN = {("DeBERTa", "torchscript")}

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
IMAGE = {
    "image_size": 16, "patch_size": 4, "num_channels": 3, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 5,
}  # fmt: skip
AUDIO = {
    "vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
ENCODER_DECODER = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def sequences() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids()}


def image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16)}


def speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 20), "decoder_input_ids": ids()}


@dataclass(frozen=True)
class Architecture:
    """A network: its class, its configuration without "Config", and what it takes."""

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Any = text
    output: str = "logits"


ARCHITECTURES = {
    "BERT": Architecture("BertForMaskedLM", "Bert", TEXT),
    "ALBERT": Architecture("AlbertForMaskedLM", "Albert", {**TEXT, "embedding_size": 8}),
    "DistilBERT": Architecture(
        "DistilBertForMaskedLM", "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
         "max_position_embeddings": 32},
    ),
    "RoBERTa": Architecture("RobertaForMaskedLM", "Roberta", TEXT),
    "ELECTRA": Architecture("ElectraForMaskedLM", "Electra", {**TEXT, "embedding_size": 8}),
    "DeBERTa": Architecture(
        "DebertaForMaskedLM", "Deberta",
        {**TEXT, "relative_attention": True, "pos_att_type": "c2p|p2c",
         "max_relative_positions": 8},
    ),
    "DeBERTa-v2": Architecture(
        "DebertaV2ForMaskedLM", "DebertaV2",
        {**TEXT, "relative_attention": True, "pos_att_type": "c2p|p2c",
         "max_relative_positions": 8},
    ),
    "MobileBERT": Architecture(
        "MobileBertForMaskedLM", "MobileBert",
        {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "MPNet": Architecture("MPNetForMaskedLM", "MPNet", TEXT),
    "SqueezeBERT": Architecture(
        "SqueezeBertForMaskedLM", "SqueezeBert", {**TEXT, "embedding_size": 16}
    ),
    "XLNet": Architecture(
        "XLNetLMHeadModel", "XLNet",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
        inputs=lambda: {"input_ids": ids()},
    ),
    "GPT-2": Architecture(
        "GPT2LMHeadModel", "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    ),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM", "GPTNeoX", TEXT),
    "OPT": Architecture(
        "OPTForCausalLM", "OPT", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}
    ),
    "Llama": Architecture("LlamaForCausalLM", "Llama", {**DECODER, "tie_word_embeddings": True}),
    "Qwen2": Architecture("Qwen2ForCausalLM", "Qwen2", {**DECODER, "tie_word_embeddings": True}),
    "Gemma": Architecture("GemmaForCausalLM", "Gemma", DECODER),
    "Phi": Architecture("PhiForCausalLM", "Phi", TEXT),
    "T5": Architecture(
        "T5ForConditionalGeneration", "T5",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
         "num_heads": 2, "decoder_start_token_id": 0},
        inputs=sequences,
    ),
    "BART": Architecture(
        "BartForConditionalGeneration", "Bart", ENCODER_DECODER, inputs=sequences
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration", "Whisper",
        {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10,
         "max_target_positions": 32},
        inputs=speech,
    ),
    "ViT": Architecture("ViTForImageClassification", "ViT", IMAGE, inputs=image),
    "DeiT": Architecture("DeiTForImageClassification", "DeiT", IMAGE, inputs=image),
    "BEiT": Architecture(
        "BeitForImageClassification", "Beit",
        {**IMAGE, "use_relative_position_bias": True, "layer_scale_init_value": 0.1}, inputs=image,
    ),
    "Swin": Architecture(
        "SwinForImageClassification", "Swin",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
         "window_size": 4, "num_labels": 5},
        inputs=image,
    ),
    "ConvNeXt": Architecture(
        "ConvNextForImageClassification", "ConvNext",
        {"num_stages": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "image_size": 16,
         "patch_size": 2, "layer_scale_init_value": 0.1, "num_labels": 5},
        inputs=image,
    ),
    "Wav2Vec2": Architecture(
        "Wav2Vec2ForCTC", "Wav2Vec2", AUDIO,
        inputs=lambda: {"input_values": torch.randn(BATCH, 400)},
    ),
    "CLIP": Architecture(
        "CLIPModel", "CLIP",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8},
        inputs=lambda: {"input_ids": ids(), **image()}, output="logits_per_image",
    ),
}  # fmt: skip


class OneOutput(torch.nn.Module):
    """The network, with its inputs in order and one output."""

    def __init__(self, net: torch.nn.Module, names: list[str], output: str) -> None:
        super().__init__()
        self.net, self.names, self.output = net, names, output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the output that the loss is computed from."""
        given = dict(zip(self.names, inputs, strict=True))
        return getattr(self.net(**given, return_dict=True), self.output)


def make(chosen: Architecture) -> tuple[OneOutput, tuple[torch.Tensor, ...]]:
    """Return a network whose parameters are all random, and its inputs."""
    torch.manual_seed(0)
    settings = dict(chosen.settings)
    config = getattr(transformers, f"{chosen.config}Config")(**settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config._attn_implementation = "eager"
    net = getattr(transformers, chosen.model)(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():  # no two are equal by chance, as zeros and ones are
            parameter.add_(torch.randn_like(parameter) * 0.1)
    inputs = chosen.inputs()
    return OneOutput(net, list(inputs), chosen.output).eval(), tuple(inputs.values())


def export(
    net: OneOutput, inputs: tuple[torch.Tensor, ...], exporter: str, fold: bool
) -> onnx.ModelProto:
    """Export with a batch and length that may change, folding constants or not.

    With fixed ones an exporter looks up positions by itself, and drops the rest of their table.
    """
    names = {"input_names": net.names, "output_names": ["y"]}
    axes = [range(1 if x.is_floating_point() else 2) for x in inputs]
    if exporter == "dynamo":
        dynamic = tuple({axis: torch.export.Dim.AUTO for axis in own} for own in axes)
        program = torch.onnx.export(
            net, inputs, dynamo=True, verbose=False, optimize=fold, dynamic_shapes=(dynamic,),
            **names,
        )  # fmt: skip
        assert program is not None
        return program.model_proto
    file = io.BytesIO()
    symbols = {
        name: {axis: ("batch", "length")[axis] for axis in own}
        for name, own in zip(net.names, axes, strict=True)
    }
    torch.onnx.export(
        net, inputs, file, dynamo=False, opset_version=17, dynamic_axes=symbols,
        do_constant_folding=fold, **names,
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


@dataclass
class Outcome:
    """What one architecture gave, exported by one exporter."""

    errors: dict[str, float] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)  # parameters that would train apart
    folded: list[str] = field(default_factory=list)  # those that the exporter computed away
    named: list[str] = field(default_factory=list)  # those that train only where named
    failure: str = ""
    not_exported: str = ""  # why torch itself could not

    @property
    def mark(self) -> str:
        """Whether every parameter has torch's gradient, "skip" where torch has no model."""
        if self.not_exported:
            return "skip"
        wrong = self.failure or self.twice or self.folded
        return "wrong" if wrong or max(self.errors.values()) >= TOLERANCE else "ok"

    def __str__(self) -> str:
        """Return a line."""
        if self.not_exported or self.failure:
            return self.not_exported or self.failure
        worst = max(self.errors, key=lambda name: self.errors[name])
        said = f"{len(self.errors)} parameters, largest error {self.errors[worst]:.1e} ({worst})"
        wrong = [f"{n} {e:.1e}" for n, e in self.errors.items() if e >= TOLERANCE]
        what_else = {
            "wrong": wrong,
            "apart": self.twice,
            "folded": self.folded,
            "named": self.named,
        }
        for what, names in what_else.items():
            said += f"; {what}: {', '.join(names[:6])}" if names else ""
        return said


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep standard output quiet: the torchscript exporter prints graphs that it cannot export."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def compare(name: str, exporter: str) -> Outcome:
    """Compare the gradients; parameters that were folded are compared in a plain export."""
    outcome = compare_export(name, exporter, fold=True)
    if outcome.folded:
        plain = compare_export(name, exporter, fold=False)
        outcome.failure = plain.failure or plain.not_exported
        outcome.errors |= {n: e for n, e in plain.errors.items() if n in outcome.folded}
        outcome.twice += [n for n in plain.twice if n in outcome.folded]
        outcome.folded = plain.folded
        outcome.named += [n for n in plain.named if n not in outcome.named]
    return outcome


def compare_export(name: str, exporter: str, fold: bool) -> Outcome:
    """Compare the gradients of a mean squared error."""
    net, inputs = make(ARCHITECTURES[name])
    target = torch.randn_like(net(*inputs))
    try:
        with silent():
            model = export(net, inputs, exporter, fold)
    except Exception as error:  # torch's, not ours: there is nothing to compare
        return Outcome(not_exported=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    double = net.double()
    given = [x.double() if x.is_floating_point() else x for x in inputs]
    torch.nn.functional.mse_loss(double(*given), target.double()).backward()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours, named = _gradients(
                net, model, folder, [x.numpy() for x in inputs], target.numpy()
            )
        except Exception as error:
            return Outcome(failure=f"{type(error).__name__}: {str(error)[:300]}")
    outcome = _held_against(double, ours)
    outcome.named = [n.removeprefix("net.") for n in named]
    return outcome


def _gradients(
    net: OneOutput,
    model: onnx.ModelProto,
    folder: str,
    inputs: list[np.ndarray],
    target: np.ndarray,
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Return value and gradient of each parameter, and those that train only where named.

    Without a note of the exporter, a number or a table that is added may be a constant.
    """
    trains = prepare(model, folder, loss="mse", optimizer=None).trainable
    stored = {tensor.name for tensor in model.graph.initializer}
    named = [n for n, p in net.named_parameters() if p.requires_grad and n in stored - set(trains)]
    if named:
        prepare(model, folder, loss="mse", optimizer=None, train=[*trains, *named])
    state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
    module = Module(f"{folder}/training_model.onnx", state, f"{folder}/eval_model.onnx")
    feeds = dict(zip(net.names, inputs, strict=True))
    module.train()(*[feeds.get(name, target) for name in module.input_names()])
    return {n: (p.data, p.grad) for n, p in state.parameters if p.requires_grad}, named


def _held_against(
    net: torch.nn.Module, ours: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Outcome:
    """Find each of torch's parameters by its value, and compare the gradients."""
    outcome = Outcome()
    with_gradient = {
        n.removeprefix("net."): p for n, p in net.named_parameters() if p.grad is not None
    }
    largest = max(float(p.grad.norm()) for p in with_gradient.values())
    for name, parameter in with_gradient.items():
        theirs = parameter.grad.numpy()
        if not np.any(theirs):
            continue
        value = parameter.detach().numpy().astype(np.float32)
        found = list(_uses_of(value, ours))
        if len(found) != 1:
            (outcome.twice if found else outcome.folded).append(name)
            continue
        gradient, axes = found[0]
        error = np.linalg.norm(gradient.transpose(axes).reshape(theirs.shape) - theirs)
        outcome.errors[name] = error / max(np.linalg.norm(theirs), SMALL * largest)
    return outcome


def _uses_of(
    value: np.ndarray, ours: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Yield the gradients of parameters that hold this value, and the axes that turn them back.

    The norms of Gemma multiply by the weight plus one, which exporters compute.
    """
    for data, gradient in ours.values():
        if data.size != value.size:
            continue
        straight = tuple(range(data.ndim))
        for axes in dict.fromkeys([straight, straight[::-1]]):
            turned = data.transpose(axes).reshape(value.shape)
            if np.array_equal(turned, value) or np.array_equal(turned, value + np.float32(1)):
                yield gradient, axes
                break


def main() -> int:
    """Compare all, or those that are named; return how many are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="one of " + ", ".join(ARCHITECTURES)
    )
    parser.add_argument("--exporter", choices=("torchscript", "dynamo"))
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    exporters = [given.exporter] if given.exporter else ["torchscript", "dynamo"]
    marks = []
    for name in given.names or ARCHITECTURES:
        for exporter in exporters:
            outcome = compare(name, exporter)
            known = outcome.mark == "wrong" and (name, exporter) in KNOWN
            marks.append("known" if known else outcome.mark)
            print(f"{marks[-1]:6}{name:12} {exporter:12} {outcome}", flush=True)
    return int("wrong" in marks)


if __name__ == "__main__":
    sys.exit(main())

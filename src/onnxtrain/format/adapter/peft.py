"""Adapters as Hugging Face PEFT keeps them: a folder of two files.

`adapter_model.safetensors` has `base_model.model.<layer>.lora_A.weight` of shape `[rank, in]` and
`lora_B` of `[out, rank]`: both transposed, and B without the scale. `adapter_config.json` has what
the scale is made of.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from onnxtrain.errors import AdapterError
from onnxtrain.format import strict_json
from onnxtrain.format.adapter.elements import converted, float_name, numbers_of
from onnxtrain.format.adapter.pairs import Pair, pairs_by_name, shape_of
from onnxtrain.format.checkpoint.content import Array, Tensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
# What changes how the factors are used; each is absent, None or false in plain LoRA.
_VARIANTS = {
    "use_dora": "DoRA", "use_qalora": "QALoRA", "lora_bias": "a bias beside B",
    "use_bdlora": "BD-LoRA", "alora_invocation_tokens": "activated LoRA", "kasa_config": "KaSA",
    "arrow_config": "Arrow", "monteclora_config": "MonteCLoRA",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens", "target_parameters": "factors of bare parameters",
}  # fmt: skip
# A pattern of layers may have this much that matches any text: more takes time without bound.
_MOST_WILDCARDS = 2
_TOKEN = re.compile(r"\.\*|\\d\+|\[0-9\]\+|\\d|\\\.|\^|[\w\-.]")


# ---- reading -------------------------------------------------------------------------------------


def read_config(text: bytes, source: str) -> dict[str, Any]:
    """Read the configuration, and refuse what is not plain LoRA."""
    try:
        config = strict_json.mapping(strict_json.loads_plain(text), "it")
        kind = config.get("peft_type")
        if kind != "LORA":
            raise ValueError(f"peft_type is {strict_json.shortened(kind)}: only LORA is supported")
        for key, what in _VARIANTS.items():
            if config.get(key):
                raise ValueError(
                    f"it uses {what} ({key}), which is not supported: only plain LoRA is"
                )
        if config.get("bias", "none") != "none":
            raise ValueError("it trains biases, too (bias), which is not supported in an adapter")
        if strict_json.number(config, "r") < 1:
            raise ValueError("r is less than 1")
        strict_json.number(config, "lora_alpha")
        for value in strict_json.mapping(_patterns(config), "alpha_pattern").values():
            strict_json.number({"alpha_pattern": value}, "alpha_pattern")
    except ValueError as error:
        raise AdapterError(f"{source}: {error}") from None
    return config


def _patterns(config: Mapping[str, Any]) -> Any:
    return config.get("alpha_pattern") or {}


def from_peft(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str
) -> tuple[dict[str, Tensor], tuple[Pair, ...]]:
    """Return the factors under the names of slots, transposed and scaled, and their pairs."""
    named = {_slot_name(name, source): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors):
        raise AdapterError(f"{source}: names of tensors differ only in their prefix")
    made: dict[str, Tensor] = {}
    pairs = []
    for pair in pairs_by_name(named, source):
        a, b = named[pair.a], named[pair.b]
        kind = float_name(a, pair.a), float_name(b, pair.b)
        rank = (*shape_of(a), 0)[0]
        scale = _scale(config, pair.layer, rank, source)
        first, second = _turned(numbers_of(a)), _turned(numbers_of(b))
        made[pair.a] = converted(first, kind[0])
        made[pair.b] = converted(second * second.dtype.type(scale), kind[1])
        pairs.append(pair._replace(rank=rank, scale=scale))
    return made, tuple(pairs)


def _slot_name(name: str, source: str) -> str:
    slot = name.removeprefix(_PREFIX).replace(".lora_A.default.", ".lora_A.")
    slot = slot.replace(".lora_B.default.", ".lora_B.")
    if ".lora_" not in slot:
        raise AdapterError(
            f"{source}: it also holds {name[:200]!r}, a whole weight (modules_to_save), which an "
            "adapter of low-rank factors cannot carry: merge it into the base, or train without it"
        )
    return slot


def _turned(factor: Array) -> Array:
    """Matrices are transposed; the kernels of convolutions are the same on both sides."""
    return factor.T if factor.ndim == 2 else factor


def _scale(config: Mapping[str, Any], layer: str, rank: int, source: str) -> float:
    alpha = config["lora_alpha"]
    for key, value in _patterns(config).items():
        if _matches(key, layer, source):
            alpha = value
            break
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank) if rank else 0.0
    if not 0 < scale < math.inf:
        raise AdapterError(
            f"{source}: the scale of {layer[:200]!r} is {scale}: lora_alpha is wrong"
        )
    return float(scale)


def _matches(key: str, layer: str, source: str) -> bool:
    """Whether a pattern of PEFT takes a layer: it has to match the end of its path."""
    pieces = _TOKEN.findall(key)
    if len("".join(pieces)) != len(key) or sum(p[-1] in "*+" for p in pieces) > _MOST_WILDCARDS:
        raise AdapterError(
            f"{source}: the pattern {strict_json.shortened(key)} in alpha_pattern is too "
            "complicated: name the layers"
        )
    ends = [layer, *(layer[found.end() :] for found in re.finditer(r"\.", layer))]
    if pieces[:1] == ["^"]:
        return re.fullmatch("".join(pieces[1:]), layer) is not None
    return any(re.fullmatch("".join(pieces), end) for end in ends)


# ---- writing -------------------------------------------------------------------------------------


def to_peft(
    tensors: Mapping[str, Tensor], pairs: tuple[Pair, ...], more: Mapping[str, Any]
) -> tuple[dict[str, Tensor], bytes]:
    """Return the tensors as PEFT names them, and the configuration; `more` is added to it."""
    made: dict[str, Tensor] = {}
    for pair in pairs:
        for name, factor, scale in ((pair.a, "A", 1.0), (pair.b, "B", pair.scale)):
            kind, values = float_name(tensors[name], name), _turned(numbers_of(tensors[name]))
            made[f"{_PREFIX}{pair.layer}.lora_{factor}.weight"] = converted(
                values if scale == 1.0 else values / values.dtype.type(scale), kind
            )
    config = _config(pairs) | dict(more)
    return made, json.dumps(config, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def _config(pairs: tuple[Pair, ...]) -> dict[str, Any]:
    ranks = Counter(pair.rank for pair in pairs).most_common(1)[0][0]
    alphas = Counter(_alpha(pair) for pair in pairs).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": ranks,
        "lora_alpha": alphas,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": sorted(pair.layer for pair in pairs),
        "rank_pattern": {_exactly(p): p.rank for p in pairs if p.rank != ranks},
        "alpha_pattern": {_exactly(p): _alpha(p) for p in pairs if _alpha(p) != alphas},
    }


def _exactly(pair: Pair) -> str:
    return "^" + pair.layer.replace(".", r"\.")


def _alpha(pair: Pair) -> float:
    """Return scale · rank: a whole number where it is one but for rounding, as PEFT has them."""
    alpha = pair.scale * pair.rank
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-9) else alpha

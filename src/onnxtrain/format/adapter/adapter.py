"""An adapter: pairs of low-rank factors by the names of their slots, and its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onnxtrain.errors import AdapterError, ArgumentError
from onnxtrain.format.adapter import peft
from onnxtrain.format.adapter.elements import converted, float_name, numbers_of
from onnxtrain.format.adapter.onnx_file import (
    AdapterContent,
    is_onnx_adapter,
    onnx_adapter_bytes,
    read_onnx_adapter,
)
from onnxtrain.format.adapter.pairs import (
    Pair,
    pairs_by_name,
    pairs_of_record,
    record_of_pairs,
    require_consistent,
)
from onnxtrain.format.adapter.safetensors import (
    is_safetensors,
    read_safetensors,
    safetensors_bytes,
)
from onnxtrain.format.adapter.slots import Slots, require_fits, slots_of
from onnxtrain.format.checkpoint.content import Array, Tensor
from onnxtrain.format.checkpoint.store import reason_of
from onnxtrain.format.committed_folder import sync_folder
from onnxtrain.format.file_bytes import OpenFile
from onnxtrain.format.folder_lock import settle
from onnxtrain.format.replace_file import (
    NewFiles,
    leftovers_of,
    make_folder,
    replace_file,
    temporary_for,
)

Format = Literal["onnx", "peft"]
PathLike = str | os.PathLike[str]
_LONGEST_CONFIG = 1 << 24


class Adapter:
    """What fine-tuning with LoRA changed: two small factors for each layer.

    `adapter[name]` is a factor as an array, under the name of its slot in the model. B holds the
    scale (alpha / rank) already. Where biases or other tensors trained, too, they are there whole,
    under their own names (`whole`).

    Args:
        tensors: the factors by name: `<layer>.lora_A.weight` `[in, rank]` and
            `<layer>.lora_B.weight` `[rank, out]`, or kernels of convolutions.
        pairs: which belong together; found by their names if it is not given.
        base: the fingerprint of the model that the factors were trained on, if known.

    Examples:
        >>> factors = {"fc.lora_A.weight": np.ones((8, 2)), "fc.lora_B.weight": np.ones((2, 3))}
        >>> Adapter(factors).save("style.onnx_adapter")
        >>> adapter = Adapter.read("style.onnx_adapter")
        >>> adapter.rank
        2
        >>> adapter.save("style", format="peft")

    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        pairs: Sequence[Pair] = (),
        base: str = "",
        source: str = "the adapter",
    ) -> None:
        for name, tensor in tensors.items():
            float_name(tensor, name)
        self.source, self.base = source, base
        self.tensors = dict(tensors)
        self.pairs = tuple(pairs) or pairs_by_name(tensors, source)
        require_consistent(self.pairs, self.tensors, source)
        named = {name for pair in self.pairs for name in (pair.a, pair.b)}
        self.whole = tuple(name for name in self.tensors if name not in named)
        if not self.tensors:
            raise AdapterError(f"{source}: it has no factors")

    def __getitem__(self, name: str) -> Array:
        return numbers_of(self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        whole = f", {len(self.whole)} whole tensors" if self.whole else ""
        return f"Adapter({len(self.pairs)} layers, rank {self.rank}{whole}, {self.size:,} elements)"

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max((pair.rank for pair in self.pairs), default=0)

    @property
    def size(self) -> int:
        """The number of elements of all factors."""
        return sum(self[name].size for name in self)

    @property
    def dtype(self) -> str:
        """The element type of its factors: "float32", or several with commas between them."""
        return ", ".join(sorted({float_name(t, name) for name, t in self.tensors.items()}))

    # ---- files ---------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: PathLike) -> Adapter:
        """Read an `.onnx_adapter` file, or a folder or safetensors file of PEFT, by its content."""
        place = Path(path)
        if place.is_dir():
            place = place / peft.WEIGHTS
        data = _bytes_of(place)
        start = bytes(data[:9])
        if is_onnx_adapter(start):
            return cls.from_bytes(data, str(place))
        if not is_safetensors(start):
            raise AdapterError(
                f"{place} is not an adapter: it is neither an .onnx_adapter file nor safetensors"
            )
        tensors = read_safetensors(data, str(place))
        beside = place.with_name(peft.CONFIG)
        config = peft.read_config(bytes(_bytes_of(beside, _LONGEST_CONFIG)), str(beside))
        made, pairs = peft.from_peft(tensors, config, str(place))
        return cls(made, pairs=pairs, source=str(place))

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview, source: str = "the adapter"
    ) -> Adapter:
        """Read the bytes of an `.onnx_adapter` file, which must not change afterwards."""
        content = read_onnx_adapter(memoryview(data).cast("B"), source)
        try:
            pairs, base = pairs_of_record(content.note)
        except ValueError as error:
            raise AdapterError(f"{source}: the record at its end is wrong: {error}") from None
        return cls(content.tensors, pairs=pairs, base=base, source=source)

    def to_bytes(self) -> bytes:
        """Return what `save` writes to an `.onnx_adapter` file."""
        return onnx_adapter_bytes(
            AdapterContent(self.tensors, record_of_pairs(self.pairs, self.base))
        )

    def save(
        self,
        path: PathLike,
        format: Format | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the adapter, replaced as a whole or not at all.

        Args:
            path: a file, or for PEFT a folder.
            format: "onnx" for `.onnx_adapter`, which onnxruntime and GenAI load, or "peft" for a
                folder of two files. By default the name decides: `.onnx_adapter` or anything else.
            config: for PEFT, fields to add to `adapter_config.json`, such as
                `{"task_type": "CAUSAL_LM"}`.

        """
        place = Path(path)
        kind = format or ("onnx" if place.suffix == ".onnx_adapter" else "peft")
        if kind not in ("onnx", "peft"):
            raise ArgumentError(f"the format of an adapter is 'onnx' or 'peft', not {format!r}")
        if kind == "onnx":
            made = self.to_bytes()
            with _translated("write", place):
                replace_file(place, lambda file: file.write(made))
            return
        if self.whole:
            raise AdapterError(
                f"{self.whole[0]!r} was trained whole, which a folder of PEFT cannot hold here: "
                "save the adapter as .onnx_adapter, or train low-rank factors alone"
            )
        folder = place.parent if place.name == peft.WEIGHTS else place
        tensors, text = peft.to_peft(self.tensors, self.pairs, config or {})
        weights = safetensors_bytes(tensors, {"format": "pt"})
        with _translated("write", folder):
            _replace_both(folder, weights, text)

    # ---- fitting and combining -----------------------------------------------------------------

    def check(self, fits: PathLike | bytes | Slots) -> None:
        """Raise an AdapterError if it does not fit a model with slots, which says what differs.

        Args:
            fits: the model: a file, its bytes, or a folder of artifacts. Names, shapes and types
                are compared, and the fingerprint of the base where both tell it.

        """
        slots = fits if isinstance(fits, Slots) else slots_of(fits)
        require_fits(self.tensors, self.pairs, self.base, slots)

    def astype(self, dtype: str) -> Adapter:
        """Return it with another element type: float32, float16, bfloat16 or float64."""
        return self._with({name: converted(self[name], dtype) for name in self}, self.pairs)

    def renamed(self, rename: Callable[[str], str]) -> Adapter:
        """Return it with other names: `rename` makes the new path of a layer of the old one."""
        tensors = {name: self.tensors[name] for name in self.whole}
        pairs = []
        for pair in self.pairs:
            layer = rename(pair.layer)
            new = pair._replace(layer=layer, a=f"{layer}.lora_A.weight", b=f"{layer}.lora_B.weight")
            if new.a in tensors:
                raise ArgumentError(f"two layers would be called {layer!r}")
            tensors |= {new.a: self.tensors[pair.a], new.b: self.tensors[pair.b]}
            pairs.append(new)
        return self._with(tensors, tuple(pairs))

    def _with(self, tensors: Mapping[str, Tensor], pairs: tuple[Pair, ...]) -> Adapter:
        return Adapter(tensors, pairs=pairs, base=self.base, source=self.source)

    @staticmethod
    def stack(adapters: Sequence[Adapter], weights: Sequence[float] | None = None) -> Adapter:
        """Return one adapter that does what several do together, each times its weight.

        The ranks of a layer add up: `(x·A₁)·B₁ + (x·A₂)·B₂` is one product with the factors side
        by side.
        """
        if not adapters:
            raise ArgumentError("stack takes at least one adapter")
        factors = [1.0] * len(adapters) if weights is None else list(weights)
        if len(factors) != len(adapters) or not np.isfinite(factors).all():
            raise ArgumentError(f"stack takes a finite weight for each adapter, not {weights!r}")
        bases = {adapter.base for adapter in adapters if adapter.base}
        if len(bases) > 1:
            raise AdapterError("the adapters were trained on different bases: they do not stack")
        if len(adapters) > 1 and any(adapter.whole for adapter in adapters):
            raise AdapterError("adapters that replace whole tensors do not stack")
        stacked: dict[str, Tensor] = {name: adapters[0].tensors[name] for name in adapters[0].whole}
        pairs: dict[tuple[str, str], Pair] = {}
        for adapter, factor in zip(adapters, factors, strict=True):
            for pair in adapter.pairs:
                known = pairs.get((pair.a, pair.b))
                a, b = adapter[pair.a], adapter[pair.b] * adapter[pair.b].dtype.type(factor)
                if known is not None:
                    a = _joined(stacked[pair.a], a, pair.a, pair.rank_axes[0])
                    b = _joined(stacked[pair.b], b, pair.b, pair.rank_axes[1])
                stacked |= {pair.a: a, pair.b: b}
                rank = a.shape[pair.rank_axes[0]]
                pairs[pair.a, pair.b] = pair._replace(rank=rank, scale=1.0)
        made = Adapter(stacked, pairs=tuple(pairs.values()), base="".join(bases))
        kinds = {adapter.dtype for adapter in adapters}
        return made.astype(kinds.pop()) if kinds == {"bfloat16"} else made


def _joined(first: Tensor, second: Array, name: str, axis: int) -> Array:
    before = numbers_of(first)
    same = before.ndim == second.ndim and all(
        i == axis or before.shape[i] == second.shape[i] for i in range(before.ndim)
    )
    if not same or before.dtype != second.dtype:
        raise AdapterError(
            f"{name!r} is {before.dtype} {list(before.shape)} in one adapter and {second.dtype} "
            f"{list(second.shape)} in another: they are not of one model and type"
        )
    return np.concatenate([before, second], axis)


# ---- files ---------------------------------------------------------------------------------------


def _bytes_of(path: Path, at_most: int | None = None) -> memoryview:
    with _translated("read", path):
        settle(path.parent)
        with OpenFile(path) as file:
            if at_most is not None and file.size > at_most:
                raise AdapterError(f"{path} has {file.size:,} bytes, which no configuration has")
            return file.read_all()


@contextmanager
def _translated(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into an `AdapterError`."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        hint = ""
        if isinstance(error, FileNotFoundError) and path.name == peft.CONFIG:
            hint = f": a safetensors adapter needs its {peft.CONFIG} beside it, for the scale"
        raise AdapterError(f"cannot {action} {path}: {reason}{hint}") from error


def _replace_both(folder: Path, weights: bytes, config: bytes) -> None:
    """Replace the two files of an adapter of PEFT.

    No rename replaces two files at once. The old weights go first, so that a crash leaves the old
    adapter, the new one, or none, but never weights with the scale of others.
    """
    make_folder(folder)
    new_files = {folder / peft.CONFIG: config, folder / peft.WEIGHTS: weights}
    leftovers = "|".join(leftovers_of(path) for path in new_files)
    with NewFiles(folder, leftovers) as new:
        written = {}
        for path, content in new_files.items():
            written[path] = temporary_for(path)
            new.write(written[path], lambda file, c=content: file.write(c), path)  # type: ignore[misc]
        with new.committing():
            (folder / peft.WEIGHTS).unlink(missing_ok=True)
            sync_folder(folder)
            for path, temporary in written.items():
                os.replace(temporary, path)
            sync_folder(folder)

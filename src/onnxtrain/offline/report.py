"""The report of `inspect`: what a model holds, and whether it trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import one_line
from onnxtrain.offline.choices import Choice
from onnxtrain.offline.memory import Activations, megabytes
from onnxtrain.offline.passes.quantize.summary import IntegerOperators
from onnxtrain.offline.selection import Finding, some_of, why_nothing_trains

_LONGEST = 24  # characters of a dimension; formulas of sizes are longer
_NUMPY_NAMES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True)
class Report:
    """What `inspect` found. Initializers are listed with their numbers of elements."""

    outputs: tuple[str, ...]
    weights: dict[str, int]  # what would train
    tied: tuple[str, ...]  # "a = b (transposed)": the first of these copies is such a weight
    statistics: dict[str, int]  # mean and variance of each BatchNormalization
    constants: dict[str, int]  # all other initializers
    unreached: tuple[str, ...]  # those of the constants that look like weights without a gradient
    without_gradient: tuple[str, ...]  # the operators that stand in the way of training
    parameter_bytes: int  # of the weights
    activations: Activations | None  # what a step takes beside them; None without a gradient
    opset: int  # of the operators, after old ones have been upgraded
    inputs: dict[str, str]  # type and shape by name: "float32[batch, 3, 224, 224]"
    output_types: dict[str, str]
    file_opset: int  # which the file states
    ir_version: int
    producer: str  # the exporter and its version
    tensors: dict[str, Finding]  # every initializer, what it is, and why it trains or does not
    blocked: tuple[str, ...]  # weights that an operator without a gradient keeps from training
    features: dict[str, str]  # values that `replace_classifier` can put a layer behind (after=)
    notes: tuple[str, ...]  # what to know before training, in sentences
    cut_by: tuple[str, ...] = ()  # the operators that end the gradient before what is unreached
    choices: tuple[Choice, ...] = ()  # what each way to train takes, where it was asked for
    integers: IntegerOperators | None = None  # what `quantize` makes of it, where it was asked for

    @property
    def parameter_count(self) -> int:
        """The number of parameters that would train."""
        return sum(self.weights.values())

    @property
    def activation_bytes_per_sample(self) -> int | None:
        """The memory of each sample of a batch at the peak, as far as can be told."""
        return None if self.activations is None else self.activations.bytes_per_sample

    @property
    def can_train(self) -> bool:
        """Whether a gradient comes to a weight."""
        return len(self.weights) > len(self.blocked)

    @property
    def reasons(self) -> dict[str, str]:
        """Why each initializer trains, or does not."""
        return {name: finding.reason for name, finding in self.tensors.items()}

    @property
    def verdict(self) -> str:
        """Say whether the model trains, what stands in the way, and what to do."""
        obstacles = "; ".join(self.without_gradient)
        if self.can_train and not self.blocked:
            more = ""
            if self.unreached and self.cut_by:
                return (
                    f"trains in part: {len(self.weights)} weights receive a gradient, and "
                    f"{len(self.unreached)} do not: {', '.join(self.cut_by)} ends it"
                )
            if self.unreached:
                more = f"; {len(self.unreached)} others do not lead there"
            return f"trains wholly: all {len(self.weights)} weights receive a gradient{more}"
        if self.can_train:
            free = [n for n in self.weights if n not in self.blocked]
            return (
                f"trains in part: {len(free)} of {len(self.weights)} weights receive a gradient "
                f"({some_of(free, 3)}). The others are before {obstacles}"
            )
        if self.blocked:
            return (
                f"does not train: no weight is behind {obstacles}. Put a new layer behind that "
                f"operator (classes=..., after=...), or differentiate another output (of=...)"
            )
        why = why_nothing_trains(self.tensors.values(), self.unreached, self.cut_by)
        return f"does not train: {why}"

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        upgraded = f", upgraded to {self.opset}" if self.opset != self.file_opset else ""
        lines = [
            ("inputs", _ports(self.inputs)),
            ("outputs", _ports(self.output_types)),
            ("format", f"opset {self.file_opset}{upgraded}, IR version {self.ir_version}"
                       f"{f', from {self.producer}' if self.producer else ''}"),
            ("weights", f"{len(self.weights)} tensors, {self.parameter_count:,} parameters, "
                        f"{megabytes(self.parameter_bytes)}"),
            *_grouped(self.tensors[name] for name in self.weights),
            ("tied", "; ".join(self.tied)),
            ("statistics", f"{len(self.statistics)} tensors (BatchNormalization)"),
            ("constants", f"{len(self.constants)} tensors"),
            *_grouped(self.tensors[n] for n in self.constants if not self.tensors[n].is_plain),
            ("activations", str(self.activations or "not known: there is no gradient")),
            *_weighed(self.choices),
            ("integers", str(self.integers or "")),
            ("renamed", self._renamed()),
            ("not reached", ", ".join(self.unreached)),
            ("no gradient", "; ".join(self.without_gradient)),
            ("after=", _ports(self.features, 3)),
            *(("note", note) for note in self.notes),
            ("verdict", self.verdict),
        ]  # fmt: skip
        return "\n".join(f"{name:14}{one_line(text)}" for name, text in lines if text)

    def _renamed(self) -> str:
        renamed = [self.tensors[name] for name in self.weights if self.tensors[name].modules]
        if not renamed:
            return ""
        first = renamed[0]
        return (
            f"{len(renamed)} weights; patterns match their names in torch too: {first.name!r} is "
            f"{' and '.join(first.modules)}"
        )


def _weighed(choices: Sequence[Choice]) -> Iterator[tuple[str, str]]:
    """Yield a line for each choice: what it trains, and what that takes."""
    width = max((len(choice.train) for choice in choices), default=0)
    for choice in choices:
        text = f"{choice.train:{width}}  "
        if choice.problem:
            text += f"cannot train: {choice.problem}"
        else:
            text += (
                f"{choice.parameters:>12,} parameters, {megabytes(choice.parameter_bytes)} with "
                f"AdamW; a step {str(choice.activations).partition(' (')[0]}"
            )
        yield "train=", text


def type_of(value: ir.Value) -> str:
    """Return the type and shape of a value, as "float32[batch, 3]"."""
    name = "unknown" if value.dtype is None else str(value.dtype).lower()
    if value.shape is None:
        return name
    dims = ["?" if len(str(d)) > _LONGEST or not _is_name(str(d)) else str(d) for d in value.shape]
    return f"{_NUMPY_NAMES.get(name, name)}[{', '.join(dims)}]"


def _is_name(dim: str) -> bool:
    return dim != "None" and not dim.startswith("unk__")


def _ports(ports: dict[str, str], most: int = 6) -> str:
    shown = [f"{name} {type_}" for name, type_ in list(ports.items())[:most]]
    return ", ".join(shown) + (f" and {len(ports) - most} more" if len(ports) > most else "")


def _grouped(findings: Iterable[Finding]) -> Iterator[tuple[str, str]]:
    """Yield a line for each kind, with names where there are few."""
    groups: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.advice), []).append(finding.name)
    counts = Counter({key: len(names) for key, names in groups.items()})
    for (kind, advice), count in counts.most_common():
        names = some_of(groups[kind, advice], 3) if count <= 3 or advice else ""
        text = f"  {count} {_plural(kind) if count > 1 else kind}"
        yield "", f"{text}{f' ({names})' if names else ''}{f': {advice}' if advice else ''}"


def _plural(kind: str) -> str:
    first, found, rest = kind.partition(" of ")
    if not found or "," in first or first.endswith("data"):
        return kind
    return f"{first}{'es' if first.endswith('s') else 's'} of {rest}"

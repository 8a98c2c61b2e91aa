"""What a comparison found, as figures and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxtrain.errors import one_line


@dataclass(frozen=True)
class Errors:
    """How far the second model is from the first, over all elements of a value.

    Attributes:
        largest: the largest difference of an element.
        mean: the mean of the differences, without their signs.
        relative: the norm of the differences, divided by the norm of the values of the first.
        snr: the same as a signal-to-noise ratio in decibels: 20 is a relative error of 10 %, 40 of
            1 %. Infinite where nothing differs.
        nonfinite: how many elements are infinite or NaN in one of the two; they count nowhere else.

    """

    largest: float
    mean: float
    relative: float
    snr: float
    nonfinite: int = 0


@dataclass(frozen=True)
class LayerErrors:
    """The errors of a value that both models compute.

    Attributes:
        name: the name of the value.
        operator: what makes it.
        weight: the weight of that layer, if it is one or is fused to one; `Quantize(exclude=...)`
            takes it.
        errors: how far the values are from each other.
        snr_before: the least signal-to-noise ratio among the values that the layer reads. Errors
            add up on their way through a model; a layer that makes one is where the ratio falls.

    """

    name: str
    operator: str
    weight: str | None
    errors: Errors
    snr_before: float


@dataclass(frozen=True)
class Operators:
    """What onnxruntime runs for a model, after its optimisations.

    Attributes:
        integers: operators that compute with integers, and how many there are of each.
        float_products: matrix products, convolutions and recurrent layers of floats: the names of
            the nodes, by operator.
        conversions: how many nodes turn floats into integers, or back.
        total: the number of all nodes.

    """

    integers: dict[str, int]
    float_products: dict[str, list[str]]
    conversions: int
    total: int


@dataclass(frozen=True)
class ComparedModel:
    """Figures of one of the models.

    Attributes:
        name: its file.
        bytes: the size of the file, and of the files of external data.
        metrics: the metrics, by name; empty where the data have no labels.
        latency: the median of the seconds of a run, by the number of samples in it.
        operators: what onnxruntime runs; None if it could not tell.

    """

    name: str
    bytes: int
    metrics: dict[str, Any]
    latency: dict[int, float]
    operators: Operators | None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        first: figures of the first model.
        second: figures of the second model.
        samples: how many samples both models ran on.
        agreement: the part of them for which both choose the same class; None where outputs are no
            scores of classes.
        outputs: the errors of each output, by name.
        layers: the errors of values inside, the worst first.
        notes: what was left out, and why.

    """

    first: ComparedModel
    second: ComparedModel
    samples: int
    agreement: float | None
    outputs: dict[str, Errors]
    layers: tuple[LayerErrors, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.text()

    def text(self, layers: int = 10) -> str:
        """Return the figures as tables, with the worst `layers`."""
        parts = [_table(self._figures()), "\n".join(self._lines())]
        worst = [layer for layer in self.layers if layer.errors.relative][: max(0, layers)]
        if worst:
            head = ("layer", "operator", "weight", "SNR dB", "before", "relative", "largest")
            rows = [
                (x.name, x.operator, x.weight or "", f"{x.errors.snr:.1f}",
                 f"{x.snr_before:.1f}", f"{x.errors.relative:.2%}", f"{x.errors.largest:.4g}")
                for x in worst
            ]  # fmt: skip
            parts.append(_table([head, *rows]))
        return "\n\n".join(part for part in parts if part)

    def _figures(self) -> list[Sequence[str]]:
        models = (self.first, self.second)
        rows: list[Sequence[str]] = [("", *(model.name for model in models))]
        for name, value in self.first.metrics.items():
            if isinstance(value, float):
                rows.append((name, *(f"{model.metrics[name]:.4f}" for model in models)))
        rows.append(("size", *(_size(model.bytes) for model in models)))
        for batch in self.first.latency:
            what = f"latency, batch of {batch}"
            rows.append((what, *(f"{1000 * model.latency[batch]:.3g} ms" for model in models)))
        if all(model.operators is not None for model in models):
            rows.append(("on integers", *(_on_integers(model.operators) for model in models)))
            rows.append(("float products", *(_float_products(model.operators) for model in models)))
        return rows

    def _lines(self) -> list[str]:
        lines = []
        if self.agreement is not None:
            lines.append(f"same class     {self.agreement:.2%} of {self.samples:,} samples")
        for name, e in self.outputs.items():
            wrong = f"; {e.nonfinite:,} elements are not finite" if e.nonfinite else ""
            lines.append(
                f"output         {one_line(name)}: SNR {e.snr:.1f} dB, relative error "
                f"{e.relative:.2%}, largest {e.largest:.4g}, mean {e.mean:.4g}{wrong}"
            )
        return lines + [f"note           {note}" for note in self.notes]


def _on_integers(operators: Operators | None) -> str:
    assert operators is not None
    return ", ".join(f"{n} {op}" for op, n in operators.integers.items()) or "none"


def _float_products(operators: Operators | None) -> str:
    assert operators is not None
    return ", ".join(f"{len(n)} {op}" for op, n in operators.float_products.items()) or "none"


def _size(count: int) -> str:
    return f"{count / 2**20:,.2f} MB" if count >= 10_000 else f"{count:,} bytes"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text, in columns."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )

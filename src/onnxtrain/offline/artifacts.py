"""What `prepare` wrote, as a description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import onnx

from onnxtrain.errors import one_line
from onnxtrain.offline.memory import Activations, estimate
from onnxtrain.offline.passes.remat.budget import StepMemory
from onnxtrain.offline.passes.webgpu.kernels import Uncovered, first_of


@dataclass(frozen=True)
class Artifacts:
    """The artifacts of a model. Tensors and files are listed with their sizes."""

    directory: Path
    files: dict[str, int]  # bytes
    trainable: dict[str, int]  # elements
    frozen: dict[str, int]  # in the checkpoint, but never changed
    statistics: dict[str, int]  # running statistics, which training updates
    unreached: tuple[str, ...]  # what looks like a weight, but receives no gradient
    without_gradient: tuple[str, ...]  # would block the gradient if more parameters trained
    tied: tuple[str, ...]  # "a = b (transposed)": copies of a matrix that are one parameter
    loss: str
    outputs: tuple[str, ...]  # beside the loss
    memory: StepMemory | None  # where a budget was given
    on_cpu: tuple[Uncovered, ...]  # nodes on floats that the target "webgpu" has no kernel for
    notes: tuple[str, ...]  # what was decided in the caller's place, in sentences
    _graph: onnx.ModelProto = field(repr=False, compare=False)
    _inputs: frozenset[str] = field(repr=False, compare=False)

    @property
    def parameter_count(self) -> int:
        """The number of parameters that train."""
        return sum(self.trainable.values())

    @cached_property
    def activations(self) -> Activations:
        """The memory of a training step beside the parameters, estimated from the graph."""
        return self.estimate_memory()

    @property
    def activation_bytes_per_sample(self) -> int:
        """The memory of each sample of a batch at the peak, as far as can be told."""
        return self.activations.bytes_per_sample

    def estimate_memory(self, sizes: Mapping[str, int] | None = None) -> Activations:
        """Estimate the memory of a step; `sizes` gives numbers for symbolic dimensions."""
        return estimate(self._graph, sizes, self._inputs)

    def __str__(self) -> str:
        """Return the summary as a few lines of text."""
        size = sum(self.files.values())
        frozen = sum(self.frozen.values())
        lines = [
            f"{self.directory}: {len(self.files)} files, {size:,} bytes",
            *(f"  {name}  {bytes_:,}" for name, bytes_ in self.files.items()),
            f"trains        {len(self.trainable)} tensors, {self.parameter_count:,} parameters",
            f"frozen        {len(self.frozen)} tensors, {frozen:,} parameters",
            f"statistics    {len(self.statistics)} tensors (BatchNormalization)",
            f"activations   {self.activations}",
            f"loss          {self.loss}",
        ]
        more = (
            ("budget", str(self.memory or "")),
            ("outputs", ", ".join(self.outputs)),
            ("tied", "; ".join(self.tied)),
            ("not reached", ", ".join(self.unreached)),
            ("no gradient", "; ".join(self.without_gradient)),
            ("not on WebGPU", first_of(self.on_cpu)),
            ("note", " ".join(self.notes)),
        )
        return "\n".join([*lines, *(f"{name:14}{one_line(text)}" for name, text in more if text)])

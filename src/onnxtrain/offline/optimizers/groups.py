"""Parameter groups: other settings for the parameters whose names match a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onnxtrain.errors import BlockError, UnknownNameError


@dataclass(frozen=True)
class ParameterGroup:
    """Settings for the parameters whose names match a pattern, or one of several.

    Args:
        pattern: names with `*`, `?` and `[...]`, as in file names: `"*.bias"`.
        weight_decay: overrides that of the optimizer; None keeps it.
        lr_scale: the learning rate of the group is this times that of the step.

    """

    pattern: str | Sequence[str]
    weight_decay: float | None = None
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.weight_decay is not None and self.weight_decay < 0:
            raise BlockError(f"weight_decay of a group is {self.weight_decay}, which is below zero")
        if self.lr_scale < 0:
            raise BlockError(f"lr_scale of a group is {self.lr_scale}, which is below zero")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns as a tuple."""
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)


@dataclass(frozen=True)
class Settings:
    """What a parameter is updated with."""

    weight_decay: float
    lr_scale: float


def settings_of(
    groups: Sequence[ParameterGroup], weight_decay: float, names: Sequence[str]
) -> list[Settings]:
    """Return the settings of each parameter: of the first group that matches, or the default."""
    for group in groups:
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownNameError(
                    f"the parameter group {pattern!r} matches no trainable parameter; there are "
                    f"{', '.join(map(repr, names))}"
                )
    found = []
    for name in names:
        first = next((g for g in groups if any(fnmatchcase(name, p) for p in g.patterns)), None)
        if first is None:
            found.append(Settings(weight_decay, 1.0))
        else:
            own = first.weight_decay
            found.append(Settings(weight_decay if own is None else own, first.lr_scale))
    return found

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
        for name in ("weight_decay", "lr_scale"):
            if (getattr(self, name) or 0) < 0:
                raise BlockError(f"{name} of a group is {getattr(self, name)}, which is below zero")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns as a tuple."""
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)


def settings_of(
    groups: Sequence[ParameterGroup], weight_decay: float, names: Sequence[str]
) -> list[tuple[float, float]]:
    """Return weight decay and rate factor of each parameter, from the first group that matches."""
    for group in groups:
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownNameError(
                    f"the parameter group {pattern!r} matches no trainable parameter; there are "
                    f"{', '.join(map(repr, names))}"
                )
    found = []
    for name in names:
        matching = (g for g in groups if any(fnmatchcase(name, p) for p in g.patterns))
        group = next(matching, ParameterGroup(name))
        own = group.weight_decay
        found.append((weight_decay if own is None else own, group.lr_scale))
    return found

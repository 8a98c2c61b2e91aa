"""Rules for reductions and running sums."""

from __future__ import annotations

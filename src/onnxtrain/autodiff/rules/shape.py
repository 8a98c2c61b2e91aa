"""Rules for operators that only rearrange elements."""

from __future__ import annotations

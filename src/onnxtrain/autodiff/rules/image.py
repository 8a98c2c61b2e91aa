"""Rules for resampling images."""

from __future__ import annotations

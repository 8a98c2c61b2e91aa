"""Rules for quantization, straight-through."""

from __future__ import annotations

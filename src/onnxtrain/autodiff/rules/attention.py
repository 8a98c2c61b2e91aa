"""Rules for attention."""

from __future__ import annotations

"""Rules for activation functions."""

from __future__ import annotations

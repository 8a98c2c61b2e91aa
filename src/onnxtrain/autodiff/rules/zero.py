"""Operators whose gradient is zero, and those that are refused, each with its reason."""

from __future__ import annotations

"""Rules for control flow."""

from __future__ import annotations

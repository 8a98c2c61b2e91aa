"""Rules for normalization."""

from __future__ import annotations

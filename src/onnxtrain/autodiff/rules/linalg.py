"""Rules for matrix products and what belongs to them."""

from __future__ import annotations

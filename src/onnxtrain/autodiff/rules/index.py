"""Rules for operators that pick elements or put them in place."""

from __future__ import annotations

"""Rules for recurrent layers, through Scan."""

from __future__ import annotations

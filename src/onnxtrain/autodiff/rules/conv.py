"""Rules for Conv and ConvTranspose."""

from __future__ import annotations

"""Rules for softmax and the losses built on it."""

from __future__ import annotations

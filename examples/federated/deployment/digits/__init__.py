"""Handwritten digits, learned by clients that keep theirs."""

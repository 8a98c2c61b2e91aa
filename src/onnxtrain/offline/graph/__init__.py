"""Graphs: how they are written, and what is known of their values."""

"""Graphs: writing them, and the types, shapes and constants of their values."""

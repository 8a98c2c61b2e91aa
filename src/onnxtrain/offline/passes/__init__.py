"""Passes: each takes a graph and changes it."""

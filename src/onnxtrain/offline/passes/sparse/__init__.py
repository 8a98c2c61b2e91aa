"""Sparse updates: which channels of which layers train, and how they get into the graph."""

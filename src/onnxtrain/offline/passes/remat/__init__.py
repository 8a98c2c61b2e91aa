"""Fitting a training step into a memory budget, by computing parts of it again."""

"""Checkpoint files: reading, writing, and replacing them atomically."""

"""Quantization-aware training: from a model of floats to one that rounds as integers will."""

"""Blocks: pieces of models written in Python, as upstream's `onnxblock` has them."""

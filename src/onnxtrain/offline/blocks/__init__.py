"""Blocks: parts of models written in Python, as in ONNX Runtime's `onnxblock`."""

"""The device half: load, train, save and export with numpy and onnxruntime alone."""

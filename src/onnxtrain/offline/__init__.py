"""The workstation half: differentiate models and write training artifacts. Needs onnx, onnx_ir."""

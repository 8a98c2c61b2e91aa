"""ONNX files as the contract sees them, read from the protobuf wire format."""

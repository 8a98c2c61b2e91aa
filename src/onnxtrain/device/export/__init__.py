"""Export of inference models, by surgery on the protobuf wire format."""

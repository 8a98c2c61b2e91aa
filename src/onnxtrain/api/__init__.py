"""What runs on the device: numpy, onnxruntime and the standard library, and nothing else."""

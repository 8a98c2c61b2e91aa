"""Running the graphs of the artifacts: signatures, inputs, memory, executors."""

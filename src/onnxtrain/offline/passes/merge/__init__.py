"""Low-rank updates put into the weights of a model, float or quantized."""

"""Low-rank factors beside the layers of a model, to train and to fill in at inference."""

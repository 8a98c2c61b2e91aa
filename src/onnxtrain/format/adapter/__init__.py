"""Adapters: what fine-tuning changed, in files of its own that others load."""

"""How each peer takes a step: `open_step(workload, folder, options, threads)`.

It returns a function of samples and labels (numpy) that takes a whole step (forward pass, loss,
backward pass, AdamW) and returns the loss as a number.
"""

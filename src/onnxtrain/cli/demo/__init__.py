"""The demo: pretrain, prepare, personalize on a device, export and infer, in a minute."""

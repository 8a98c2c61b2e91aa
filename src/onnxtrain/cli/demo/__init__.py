"""The whole story in a minute: pretrain, prepare, personalise on a device, export, infer."""

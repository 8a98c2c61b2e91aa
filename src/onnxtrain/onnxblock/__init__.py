"""Models and training models, written as Python blocks.

    with onnxblock.base(model):
        loss = training_block(*output_names)
        training_model, eval_model = training_block.to_model_proto()

The names are those of `onnxruntime.training.onnxblock`.
"""

from __future__ import annotations

from onnxtrain.offline.blocks.accessor import base, custom_op_library, empty_base
from onnxtrain.offline.blocks.block import Block, ForwardBlock
from onnxtrain.offline.blocks.checkpoint import load_checkpoint_to_model, save_checkpoint
from onnxtrain.offline.blocks.training_block import TrainingBlock
from onnxtrain.onnxblock import blocks, loss, optim

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]

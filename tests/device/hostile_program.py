"""Tries to train from checkpoints that may be broken, and says what came of each.

    hostile_program.py <file>...

Runs in a process of its own, which a broken file might crash. One line of JSON for each file.
"""

import json
import sys
import warnings

from small_runs import open_session, samples

from onnxtrain.api import LinearLRScheduler
from onnxtrain.errors import OnnxTrainError


def attempt(path):
    """Train a step from a checkpoint and save over it; the error, or None."""
    try:
        session = open_session("mlp", path)
        LinearLRScheduler(session.optimizer, 1, 10, 0.1)
        session.step(*samples(8))
        session.eval_step(*samples(8))
        session.save_checkpoint(path)
    except OnnxTrainError as error:
        return [type(error).__name__, str(error)]
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for path in sys.argv[1:]:
        print(json.dumps(attempt(path)), flush=True)

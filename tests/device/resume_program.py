"""A training of 200 steps that can be killed at any moment, and run again to go on.

    resume_program.py <model> <checkpoint> <save every>

Each step is told on the output, so that whoever reads it knows when to kill; after every tenth the
program waits for a line, lest it is over before it is killed. The state at the end is written
beside the checkpoint, with `.end` at the end of the name.
"""

import sys
from pathlib import Path

from small_runs import open_session, samples

from onnxtrain.device.random_state import set_seed
from onnxtrain.device.schedulers import CosineLRScheduler, PlateauLRScheduler

STEPS, STRIDE = 200, 10


def start(model, checkpoint=None):
    """A session with a scheduler; its random numbers follow from a seed."""
    set_seed(7)
    session = open_session(model, checkpoint)
    if model == "head":
        scheduler = PlateauLRScheduler(session.optimizer, patience=3, factor=0.7, initial_lr=0.05)
    else:
        scheduler = CosineLRScheduler(session.optimizer, 10, STEPS, 0.05)
    return session, scheduler


def train(session, scheduler, model, after_step=lambda step: None):
    """Train from where the session is to the end."""
    for step in range(session.optimizer.step_count, STEPS):
        data = samples(16, model, seed=step)
        if step % 3:
            loss = session.step(*data)[0]
        else:  # the other way to take a step
            loss = session.train_step(*data)[0]
            session.optimizer_step()
            session.lazy_reset_grad()
        if isinstance(scheduler, PlateauLRScheduler):
            scheduler.step(float(loss))
        else:
            scheduler.step()
        after_step(step + 1)


def main(model, checkpoint, every) -> None:
    path = Path(checkpoint)
    session, scheduler = start(model, path if path.exists() else None)

    def after_step(step):
        print(step, flush=True)
        if step % int(every) == 0:
            session.save_checkpoint(path)
        if step % STRIDE == 0:
            sys.stdin.readline()

    train(session, scheduler, model, after_step)
    session.save_checkpoint(path.with_name(f"{path.name}.end"))


if __name__ == "__main__":
    main(*sys.argv[1:])

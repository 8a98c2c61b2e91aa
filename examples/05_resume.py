"""Tutorial 5: resume, schedulers, gradient accumulation."""

# %% [markdown]
# # 5. Resume, schedules, accumulation
#
# A device may be switched off at any time, and has little memory. This page interrupts a run and
# continues it, to the bit; changes the learning rate during a run; and trains with large batches in
# little memory.

# %%
import numpy as np
from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain.cli.demo.network import network

pixels, digits = load_digits(return_X_y=True)
images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
train, test = (images[:1400], digits[:1400]), (images[1400:], digits[1400:])
onnxtrain.prepare(network(), "artifacts", loss="cross_entropy", optimizer="adamw")

# %% [markdown]
# ## Interrupt a run
#
# The same function starts a run and resumes it. `SaveCheckpoint` saves the run every ten steps; the
# file is replaced as a whole or not at all.

# %%
from pathlib import Path


def run(saved: Path, callbacks=()) -> onnxtrain.TrainingSession:
    session = onnxtrain.TrainingSession.from_folder(
        "artifacts", checkpoint=saved if saved.exists() else None
    )
    if not saved.exists():
        session.set_learning_rate(3e-3)
    onnxtrain.fit(
        session,
        train,
        epochs=3,
        validation=test,
        metrics=["accuracy"],
        schedule={"name": "cosine", "warmup_ratio": 0.1},
        callbacks=[onnxtrain.SaveCheckpoint(saved, every=10), *callbacks],
        resume=True,
        seed=0,
    )
    return session


whole = run(Path("whole"))

# %% [markdown]
# Now the power fails in the middle of the second epoch. Here, a callback raises an exception:


# %%
class PowerFailure(Exception):
    pass


class Accident:
    def on_step_end(self, run):
        if run.step == 57:
            raise PowerFailure


try:
    run(Path("broken"), callbacks=[Accident()])
except PowerFailure:
    print("power failure after step 57")

# %% [markdown]
# The last checkpoint is that of step 50. The run continues from there, with the optimizer's moments,
# the schedule, and the position in the shuffled data.

# %%
resumed = run(Path("broken"))
same = all(
    np.array_equal(parameter.data, resumed.state.parameters[name].data)
    for name, parameter in whole.state.parameters
)
print("every parameter is the same, to the bit:", same)

# %% [markdown]
# ## Schedules
#
# A schedule is a function from the step to the learning rate. A name, such as `schedule="cosine"`,
# stands for a schedule over the whole run.

# %%
from matplotlib.figure import Figure

from onnxtrain import schedules

curves = {
    "linear": schedules.linear(1e-3, 200, warmup=20),
    "cosine": schedules.cosine(1e-3, 200, warmup=20),
    "onecycle": schedules.onecycle(1e-3, 200),
    "step": schedules.step(1e-3, 60, gamma=0.5),
}
figure = Figure(figsize=(6.4, 2.8), layout="constrained")
axes = figure.subplots()
for name, schedule in curves.items():
    axes.plot([schedule(step) for step in range(200)], label=name)
axes.set(xlabel="step", ylabel="learning rate")
axes.legend(frameon=False)
figure.savefig("schedules.png", dpi=100)

# %% [markdown]
# ## Large batches in little memory
#
# `micro_batch_size=25` computes a batch of 100 in four passes. The update is the same.


# %%
def losses(**options) -> list[float]:
    session = onnxtrain.TrainingSession("artifacts")
    session.set_learning_rate(1e-3)
    return onnxtrain.fit(session, train, batch_size=100, seed=0, progress=False, **options).losses


at_once, in_parts = losses(), losses(micro_batch_size=25)
print(f"{len(at_once)} steps; the losses differ by at most "
      f"{np.abs(np.subtract(at_once, in_parts)).max():.1e}")  # fmt: skip

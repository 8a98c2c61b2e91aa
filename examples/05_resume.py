"""Tutorial 5: resume, schedulers, gradient accumulation."""

# %% [markdown]
# # 5. Resume, schedules, accumulation
#
# A device is switched off at any time, has little memory, and gets one chance. This page interrupts a
# run and goes on, to the bit; changes the learning rate on the way; and makes large batches out of
# small ones.

# %%
import numpy as np
from sklearn.datasets import load_digits

import onnxtrain
from onnxtrain import artifacts
from onnxtrain.cli.demo.network import network

pixels, digits = load_digits(return_X_y=True)
images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
train, test = (images[:1400], digits[:1400]), (images[1400:], digits[1400:])
artifacts.generate_artifacts(
    network(),
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory="artifacts",
    additional_output_names=["scores"],
)

# %% [markdown]
# ## A run that is interrupted
#
# The same function starts a run and resumes it. `SaveCheckpoint` saves it every ten steps; a file is
# replaced as a whole or not at all.

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
# Now the power fails in the middle of the second epoch, here by an exception out of a callback:


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
    print("dark")

# %% [markdown]
# The last checkpoint is of step 50. The run goes on from there, with the optimizer's moments, the
# schedule, the order of the samples and the place in it.

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
# A schedule is a function from the step to the learning rate. As a name, such as `schedule="cosine"`,
# it takes what is not given from the data and the number of epochs.

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
# Four batches of 25 with `accumulate=4` are one of 100: the mean gradient of all samples, one update.


# %%
def losses(**options) -> list[float]:
    session = onnxtrain.TrainingSession.from_folder("artifacts")
    session.set_learning_rate(1e-3)
    return onnxtrain.fit(session, train, shuffle=False, progress=False, **options).losses


at_once, in_parts = losses(batch_size=100), losses(batch_size=25, accumulate=4)
print(f"{len(at_once)} steps; the losses differ by at most "
      f"{np.abs(np.subtract(at_once, in_parts)).max():.1e}")  # fmt: skip

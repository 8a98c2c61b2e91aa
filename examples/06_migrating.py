"""Tutorial 6: from onnxruntime.training to onnxtrain."""

# %% [markdown]
# # 6. Migrating from onnxruntime.training
#
# ONNX Runtime's own training package ended with version 1.19.2. A script written for it runs on the
# stock onnxruntime in one of two ways: unchanged, or with other imports. It needs a model and data:

# %%
import os
from pathlib import Path

import numpy as np
import onnx
from sklearn.datasets import load_digits

from onnxtrain.cli.demo.network import network

pixels, labels = load_digits(return_X_y=True)
np.savez("digits.npz", images=(pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels=labels)
onnx.save(network(), "digits.onnx")

# %% [markdown]
# The script, which does not mention onnxtrain:

# %%
examples = Path(__file__).parent if "__file__" in globals() else Path("examples")
script = (examples / "upstream_script.py").read_text()
print(script)

# %% [markdown]
# ## Run it unchanged
#
# `python -m onnxtrain.compat script.py` runs a script with onnxtrain in place of
# `onnxruntime.training`. In a program of your own, call `onnxtrain.compat.install()`.

# %%
import subprocess
import sys

Path("script.py").write_text(script)
command = [sys.executable, "-m", "onnxtrain.compat", "script.py"]
unchanged = subprocess.run(command, capture_output=True, text=True, check=True)
print(unchanged.stdout)

# %% [markdown]
# ## Change the imports
#
# To migrate for good, change two lines. Names, argument order, defaults and files stay the same.

# %%
changed = script.replace("from onnxruntime.training", "from onnxtrain")
for before, after in zip(script.splitlines(), changed.splitlines(), strict=True):
    if before != after:
        print("-", before)
        print("+", after)
Path("script.py").write_text(changed)
result = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True)
assert result.stdout == unchanged.stdout

# %% [markdown]
# The checkpoint has the format of 1.19.2. The folder also holds `step_model.onnx`, a whole step in
# one graph, which `TrainingSession` uses.

# %%
import onnxtrain

print(sorted(os.listdir("artifacts")))
session = onnxtrain.TrainingSession.from_folder("artifacts", checkpoint="trained")
print(f"continues from step {session.optimizer.step_count}")

# %% [markdown]
# [Coming from onnxruntime-training](../migrating.md) lists the differences. New code is shorter with
# `onnxtrain.prepare` and `onnxtrain.fit`, as in [tutorial 1](01-mnist.md).

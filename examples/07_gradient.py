"""Tutorial 7: only the gradient."""

# %% [markdown]
# # 7. Only the gradient
#
# Some programs need gradients without training: a model computes an energy, and its gradient gives
# the forces. The gradient of an ONNX model is another ONNX model, which any onnxruntime runs.
#
# The energy here is that of a few atoms that attract each other at a distance and repel each other
# when close (Lennard-Jones). It could also be a neural network.

# %%
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def energy_model(atoms: int) -> onnx.ModelProto:
    """E = Σ over pairs of 4 (1/r¹² − 1/r⁶)."""
    first, second = np.triu_indices(atoms, k=1)
    constants = {"first": first, "second": second, "minus3": np.float32(-3), "four": np.float32(4)}
    nodes = [
        helper.make_node("Gather", ["positions", "first"], ["a"]),
        helper.make_node("Gather", ["positions", "second"], ["b"]),
        helper.make_node("Sub", ["a", "b"], ["d"]),
        helper.make_node("ReduceSumSquare", ["d", "axis"], ["r2"], keepdims=0),
        helper.make_node("Pow", ["r2", "minus3"], ["r6"]),
        helper.make_node("Mul", ["r6", "r6"], ["r12"]),
        helper.make_node("Sub", ["r12", "r6"], ["pair"]),
        helper.make_node("ReduceSum", ["pair"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "four"], ["energy"]),
    ]
    graph = helper.make_graph(
        nodes,
        "energy",
        [helper.make_tensor_value_info("positions", TensorProto.FLOAT, [atoms, 2])],
        [helper.make_tensor_value_info("energy", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
        + [numpy_helper.from_array(np.array([1]), "axis")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


onnx.save(energy_model(7), "energy.onnx")

# %% [markdown]
# ## One line

# %%
import onnxruntime

import onnxtrain

model = onnxtrain.gradient("energy.onnx", wrt="positions")
print([output.name for output in model.graph.output])
print(len(model.graph.node), "nodes, of", {node.domain or "ai.onnx" for node in model.graph.node})

# %% [markdown]
# A finite difference in a random direction confirms it:

# %%
session = onnxruntime.InferenceSession(model.SerializeToString())
rng = np.random.default_rng(3)
angles = 2 * np.pi * np.arange(7) / 7
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1)
start = (1.6 * ring + rng.normal(0, 0.15, (7, 2))).astype(np.float32)


def evaluate(positions: np.ndarray) -> tuple[float, np.ndarray]:
    energy, gradient = session.run(None, {"positions": positions.astype(np.float32)})
    return float(energy), gradient


_, gradient = evaluate(start)
direction = rng.normal(size=start.shape)
step = 1e-3
difference = evaluate(start + step * direction)[0] - evaluate(start - step * direction)[0]
print(f"{difference / (2 * step):.3f} {np.vdot(gradient, direction):.3f}")

# %% [markdown]
# ## Forces
#
# Follow the forces until the atoms rest, in a local minimum of the energy.

# %%
positions, path, energies = start.copy(), [start.copy()], []
for _ in range(800):
    energy, gradient = evaluate(positions)
    positions -= np.clip(0.003 * gradient, -0.02, 0.02)
    path.append(positions.copy())
    energies.append(energy)
print(f"energy {energies[0]:.3f} -> {energies[-1]:.3f}, largest force {np.abs(gradient).max():.4f}")

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(7.5, 3.2), layout="constrained")
left, right = figure.subplots(1, 2)
for atom in np.moveaxis(np.array(path), 1, 0):
    left.plot(*atom.T, color="0.75")
left.scatter(*start.T, facecolors="none", edgecolors="C0", label="start")
left.scatter(*positions.T, color="C1", label="rest")
left.set_aspect("equal")
left.legend(frameon=False)
right.plot(energies)
right.set(xlabel="step", ylabel="energy")
figure.savefig("atoms.png", dpi=100)

# %% [markdown]
# `wrt` also takes weights and intermediate values, and `of` names the output to differentiate. For an
# output that is not a scalar, the new model has an input for the cotangent. In a shell:
# `onnxtrain gradient energy.onnx --wrt positions -o forces.onnx`.

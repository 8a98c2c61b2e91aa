"""Optimizer: updates the parameters of a module from their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.device.module import Model, Module
from onnxtrain.device.proximal import Proximal
from onnxtrain.device.run.binding import Binding
from onnxtrain.device.run.executors import require_values
from onnxtrain.device.run.graph_signature import check_updates, momentums_of, proximal_of
from onnxtrain.device.run.variables import Variable
from onnxtrain.device.state import GROUP
from onnxtrain.errors import ArgumentError, CheckpointError, ModelError, StateError
from onnxtrain.format.checkpoint.content import Array, OptimizerGroup, RawTensor, Tensor
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.names import LEARNING_RATE, STEP, UPDATED

DEFAULT_LEARNING_RATE = 0.001
# ONNX Runtime's SGD needs a state that it never reads; it saves zeros for each parameter.
_UNUSED = np.zeros(1, np.float32)
_MOST_STEPS = 2**53  # more than anybody takes; graphs compute with them as floats


class Optimizer:
    """Takes steps with the gradients that a module has accumulated.

    It continues from the optimizer state of the checkpoint, if there is one: moments, the number of
    steps, the learning rate.

    Args:
        optimizer_uri: the optimizer graph: a path, or its bytes.
        module: whose parameters are updated.

    """

    def __init__(self, optimizer_uri: Model, module: Module) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"module is a Module, not {type(module).__name__}")
        self._module = module
        self._state = module.training_state
        with self._state.lock:
            self._graph = module.graph(optimizer_uri)
            self._numbers = StepNumbers()
            self._names = check_updates(self._graph.model, self._state)
            self._moments: dict[str, list[Variable]] = {}
            self._binding: Binding | None = None
            self._scheduler: Any = None
            self._proximal = (
                Proximal(self._state, self._names)
                if proximal_of(self._graph.model, self._names)
                else None
            )
            self._adopt_numbers()
            if self._state.optimizer is not None:
                self._share(self._state.optimizer)
            self.allocate()
            self._state.optimizer = self

    def _adopt_numbers(self) -> None:
        group = self._state.groups.get(GROUP)
        if self._state.saved_learning_rate is not None:
            self._numbers.rate = self._state.saved_learning_rate
        self.initial_lr = DEFAULT_LEARNING_RATE
        if group is not None:
            if not np.isfinite(group.initial_learning_rate) or group.step >= _MOST_STEPS:
                raise CheckpointError(
                    f"the checkpoint has {group.initial_learning_rate} as initial learning rate "
                    f"and {group.step} as number of steps: its optimizer state is damaged"
                )
            self._numbers.count = group.step
            self.initial_lr = group.initial_learning_rate

    def _share(self, earlier: Optimizer) -> None:
        """Share the state of an earlier optimizer of the same parameters."""
        for name, moments in earlier._moments.items():
            wanted = len(momentums_of(self._graph.model, name))
            if wanted != len(moments):
                _refuse(name, wanted, len(moments))
        self._moments, self._numbers = earlier._moments, earlier._numbers
        self._scheduler, self.initial_lr = earlier._scheduler, earlier.initial_lr
        self._proximal = earlier._proximal or self._proximal

    # ---- steps ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Update every parameter that trains, once."""
        with self._state.lock:
            require_values(self._state)
            if self._binding is None:
                self._binding = self._bind()
            self._numbers.begin()
            self._binding.run(())
            self._numbers.finish()

    def _bind(self) -> Binding:
        self.allocate()
        gradients = self._state.make_gradients(self._names)
        state, results = self.bound()
        state |= {f"{name}_grad": gradients[name] for name in self._names}
        if not {f"{name}_grad" for name in self._names} <= {
            v.name for v in self._graph.model.inputs
        }:
            raise StateError(
                f"{self._graph.name} is the graph of a whole step, which takes no gradients: pass "
                "optimizer_model.onnx, or call TrainingSession.step"
            )
        flags = [v for v in self._graph.model.outputs if v.name not in results]
        return Binding(self._graph, state, results, (), flags)

    def bound(self) -> tuple[dict[str, Variable], dict[str, Variable]]:
        """Return the variables that an update reads, and those it writes, by names in the graph."""
        self.allocate()
        state: dict[str, Variable] = {LEARNING_RATE: self._numbers.rates, STEP: self._numbers.steps}
        results: dict[str, Variable] = {}
        for name in self._names:
            tensors = {name: self._state.variable(name)}
            for k, moment in enumerate(self._moments[name]):
                tensors[f"{name}.momentum{k}"] = moment
            state |= tensors
            results |= {f"{n}{UPDATED}": variable for n, variable in tensors.items()}
        if self._proximal is not None:
            state |= self._proximal.bound()
        return state, results

    @property
    def numbers(self) -> StepNumbers:
        """The number of steps taken and the learning rate."""
        return self._numbers

    @property
    def step_count(self) -> int:
        """How many steps were taken so far."""
        return self._numbers.count

    # ---- learning rate -------------------------------------------------------------------------

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the steps to come."""
        try:
            with np.errstate(over="ignore"):
                rate = float(np.float32(learning_rate))
        except (TypeError, ValueError):
            raise ArgumentError(f"a learning rate is a number, not {learning_rate!r}") from None
        if not np.isfinite(rate):
            raise ArgumentError(f"the learning rate {learning_rate!r} is not finite")
        self._numbers.rate = rate

    def get_learning_rate(self) -> float:
        """Return the learning rate, as the float32 that the graph is given."""
        return self._numbers.rate

    # ---- proximal term -------------------------------------------------------------------------

    @property
    def has_proximal(self) -> bool:
        """Whether the artifacts were generated with `proximal=True`."""
        return self._proximal is not None

    def set_proximal(self, mu: float, reference: Mapping[str, Array] | None = None) -> None:
        """Pull the parameters back to a reference in the steps to come, by the strength µ.

        The reference are the present values of all parameters that train, or those given by name.
        It is not saved with a checkpoint: µ is 0 after loading.
        """
        if self._proximal is None:
            if mu == 0:
                return
            raise StateError(
                "the artifacts have no proximal term: generate them with "
                "generate_artifacts(..., proximal=True)"
            )
        with self._state.lock:
            self._proximal.set(mu, reference)

    def saved_scheduler(self, kind: str) -> dict[str, Any] | None:
        """Return what the checkpoint holds for a scheduler of this kind."""
        saved = self._state.saved_scheduler
        if saved is None or saved.get("kind") != kind:
            return None
        state = saved.get("state")
        if not isinstance(state, dict):
            raise CheckpointError("the checkpoint holds a damaged state of a scheduler")
        return state

    def attach(self, scheduler: Any) -> None:
        """Remember the scheduler, whose state is saved with the optimizer's; None for none."""
        self._scheduler = scheduler
        self._state.saved_scheduler = None

    @property
    def scheduler(self) -> Any:
        """The scheduler that sets the learning rate, if any."""
        return self._scheduler

    # ---- state ---------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Make the moments: those of the checkpoint, or zeros."""
        if self._moments or self._state.nominal:
            return
        group = self._state.groups.get(GROUP)
        saved = {} if group is None else group.states
        made = {}
        for name in self._names:
            wanted = momentums_of(self._graph.model, name)
            held = saved.get(name)
            if held is not None and not wanted and _is_unused(held):
                held = []
            if group is not None and (held is None or len(held) != len(wanted)):
                _refuse(name, len(wanted), None if held is None else len(held))
            made[name] = [
                _moment(f"{name}.momentum{k}", value, None if held is None else held[k],
                        self._state.type_of(name)[0], self._state.device)
                for k, value in enumerate(wanted)
            ]  # fmt: skip
        self._moments.update(made)
        # They are in memory that changes now; those of the file are out of date.
        self._state.groups.pop(GROUP, None)

    def group(self) -> OptimizerGroup:
        """Return the state of the optimizer as a checkpoint holds it."""
        self.allocate()
        states: dict[str, list[Tensor]] = {
            name: [moment.array for moment in moments] or [_UNUSED]
            for name, moments in self._moments.items()
        }
        return OptimizerGroup(self._numbers.count, self.initial_lr, states)

    def reset(self, group: OptimizerGroup | None = None) -> None:
        """Start over: no step was taken, all moments are zero. Or continue from a group.

        The learning rate stays. Sessions and memory are kept, so this is cheap.
        """
        with self._state.lock:
            self.allocate()
            states = {} if group is None else group.states
            values: list[tuple[Variable, Array]] = []
            for name, moments in self._moments.items():
                held: list[Tensor] | None = states.get(name)
                if held is not None and not moments and _is_unused(held):
                    held = []
                if group is not None and (held is None or len(held) != len(moments)):
                    _refuse(name, len(moments), None if held is None else len(held))
                for k, moment in enumerate(moments):
                    saved = None if held is None else held[k]
                    label, shape = f"{name}.momentum{k}", moment.shape
                    values.append((moment, _moment_values(label, saved, shape, moment.dtype)))
            for moment, array in values:
                moment.assign(array)
            self._numbers.count = 0 if group is None else group.step
            self._scheduler = None

    def require_same_states(self, model: ModelFile) -> None:
        """Refuse the graph of another optimizer."""
        for name in self._names:
            wanted, own = (len(momentums_of(m, name)) for m in (model, self._graph.model))
            if wanted != own:
                raise ModelError(
                    f"{model.source_name} keeps {wanted} tensors for {name!r}, and "
                    f"{self._graph.name} {own}: they are of different optimizers"
                )

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the state of the scheduler as a checkpoint holds it."""
        if self._scheduler is None:
            return self._state.saved_scheduler
        return {"kind": self._scheduler.kind, "state": self._scheduler.state()}


class StepNumbers:
    """The number of steps and the learning rate, in the memory that graphs are bound to."""

    def __init__(self) -> None:
        self.rates = Variable(np.array([DEFAULT_LEARNING_RATE], np.float32))
        self.steps = Variable(np.array([0], np.int64))
        self.count = 0

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.rates.array[0])

    @rate.setter
    def rate(self, rate: float) -> None:
        self.rates.array[0] = rate

    def begin(self) -> None:
        """Tell the graph which step it takes; the first one is 1."""
        self.steps.array[0] = self.count + 1

    def finish(self) -> None:
        """Count the step, which has been taken."""
        self.count += 1


def _moment_values(
    name: str, saved: Tensor | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """Return the values of a moment: zeros, or the saved ones."""
    if saved is None:
        return np.zeros(shape, dtype)
    if isinstance(saved, RawTensor) or saved.shape != shape or saved.dtype != dtype:
        raise CheckpointError(
            f"{name!r} was saved with another shape or type than the parameter: its optimizer "
            "state is of another model"
        )
    return saved


def _is_unused(held: list[Tensor]) -> bool:
    """Whether this stands for no state: one tensor of zeros, as for SGD without momentum."""
    return len(held) == 1 and not isinstance(held[0], RawTensor) and not held[0].any()


def _moment(
    label: str, declared: Any, held: Tensor | None, shape: tuple[int, ...], device: Any
) -> Variable:
    dtype = ELEMENT_TYPES[declared.element_type].dtype
    if dtype is None:
        raise StateError(f"{label!r} is of a type that numpy does not have")
    if held is None:
        return Variable.zeros(shape, dtype, device)
    array: Array | None = None if isinstance(held, RawTensor) else held
    if array is None or array.dtype != dtype or array.shape != shape:
        raise CheckpointError(
            f"the checkpoint has {label!r} with another shape or type than the parameter: its "
            "optimizer state is of another model"
        )
    return Variable(array, device)


def _refuse(name: str, wanted: int, held: int | None) -> None:
    if held is None:
        raise CheckpointError(
            f"the checkpoint has an optimizer state, but none for the parameter {name!r}: it is of "
            "another model"
        )
    raise CheckpointError(
        f"the optimizer keeps {wanted} tensors for each parameter, and the checkpoint has {held} "
        f"for {name!r}: it was saved with another optimizer. Load the checkpoint without its "
        "optimizer state (save it with include_optimizer_state=False), or use that optimizer"
    )

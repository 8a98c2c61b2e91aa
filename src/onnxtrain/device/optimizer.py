"""Optimizer: updates the parameters of a module from their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from onnxtrain.device.checks import float32
from onnxtrain.device.module import Model, Module
from onnxtrain.device.proximal import Proximal
from onnxtrain.device.run.binding import Binding, Variable
from onnxtrain.device.run.executors import require_values
from onnxtrain.device.run.graph import Graph
from onnxtrain.device.run.graph_signature import check_updates, momentums_of, proximal_of
from onnxtrain.device.state import GROUP
from onnxtrain.errors import (
    ArgumentTypeError,
    CheckpointError,
    ModelError,
    StateError,
)
from onnxtrain.format.checkpoint.content import Array, OptimizerGroup, RawTensor, Tensor
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ModelFile, ValueType
from onnxtrain.format.names import LEARNING_RATE, STEP, UPDATED

DEFAULT_LEARNING_RATE = 0.001
# ONNX Runtime's SGD needs a state that it never reads; it saves zeros for each parameter.
_UNUSED = np.zeros(1, np.float32)
_MOST_STEPS = 2**53  # more than anybody takes; graphs compute with them as floats


class Optimizer:
    """Takes steps with the gradients that a module has accumulated.

    `optimizer_uri` is the optimizer graph: a path, or its bytes. The optimizer continues from the
    state in the module's checkpoint, if there is one: moments, number of steps, learning rate.
    """

    def __init__(self, optimizer_uri: Model, module: Module) -> None:
        if not isinstance(module, Module):
            raise ArgumentTypeError(f"module is a Module, not {type(module).__name__}")
        self._state = module.training_state
        with self._state.lock:
            self._graph = module.graph(optimizer_uri)
            self._names = check_updates(self._graph.model, self._state)
            self._generation = self._graph.model.metadata.generation
            self._checked_graph = self._graph.checked()
            self._bindings: dict[Graph, Binding] = {}
            # Another optimizer of the same parameters has the same memory.
            earlier = self._state.optimizer
            self._memory = OptimizerMemory() if earlier is None else earlier
            wanted = momentums_of(self._graph.model)
            for name, moments in self._memory.moments.items():
                _require_count(name, len(wanted.get(name, ())), len(moments))
            if earlier is None:
                self._adopt_numbers()
            if self._memory.proximal is None and proximal_of(self._graph.model, self._names):
                self._memory.proximal = Proximal(self._names)
            self.allocate()
            self._state.optimizer = self._memory

    def _adopt_numbers(self) -> None:
        group = self._state.groups.get(GROUP)
        if self._state.saved_learning_rate is not None:
            self.numbers.rates.array[0] = self._state.saved_learning_rate
        if group is not None:
            if not np.isfinite(group.initial_learning_rate) or group.step >= _MOST_STEPS:
                raise CheckpointError(
                    f"the checkpoint has {group.initial_learning_rate} as initial learning rate "
                    f"and {group.step} as number of steps: its optimizer state is damaged"
                )
            self.numbers.count = group.step
            self.initial_lr = group.initial_learning_rate

    @property
    def numbers(self) -> StepNumbers:
        """The number of steps and the learning rate."""
        return self._memory.numbers

    @property
    def scheduler(self) -> Any:
        """The scheduler that sets the learning rate; None if there is none."""
        return self._memory.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._memory.scheduler = scheduler

    @property
    def initial_lr(self) -> float:
        """The learning rate that a schedule begins with."""
        return self._memory.initial_lr

    @initial_lr.setter
    def initial_lr(self, rate: float) -> None:
        self._memory.initial_lr = rate

    def close(self) -> None:
        """Free the graph and its memory; what is kept from step to step stays with the state."""
        with self._state.lock:
            self._bindings.clear()
            self._graph.close()
            if self._checked_graph is not None:
                self._checked_graph.close()

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- steps ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Update every parameter that trains, once.

        Nothing changes if a gradient is infinite or NaN, or if all batches since the last reset
        were skipped; the step is counted in `skipped_steps`.
        """
        with self._state.lock:
            require_values(self._state)
            self._graph.require_open()
            if self._state.has_stale_gradients:
                self.numbers.finish(taken=False)
                return
            graph = self._graph
            if self._checked_graph is not None and self._state.has_checked(self._generation):
                graph = self._checked_graph
            binding = self._bindings.get(graph)
            if binding is None:
                binding = self._bindings[graph] = self._bind(graph)
            self.numbers.begin()
            binding.run(())
            self.numbers.finish(taken=binding.passed)

    def _bind(self, graph: Graph) -> Binding:
        gradients = self._state.make_gradients(self._names)
        state, results = self.bound()
        of_gradients = {f"{name}_grad": gradients[name] for name in self._names}
        state |= of_gradients
        if not of_gradients.keys() <= {v.name for v in graph.model.inputs}:
            raise StateError(
                f"{graph.name} is the graph of a whole step, which takes no gradients: pass "
                "optimizer_model.onnx, or call TrainingSession.step"
            )
        flags = [v for v in graph.model.outputs if v.name not in results]
        return Binding(graph, state, results, (), (), flags)

    def bound(self) -> tuple[dict[str, Variable], dict[str, Variable]]:
        """Return the variables that an update reads, and those it writes, by names in the graph."""
        self.allocate()
        state: dict[str, Variable] = {LEARNING_RATE: self.numbers.rates, STEP: self.numbers.steps}
        results: dict[str, Variable] = {}
        for name in self._names:
            tensors = {name: self._state.variable(name)}
            for k, moment in enumerate(self._memory.moments[name]):
                tensors[f"{name}.momentum{k}"] = moment
            state |= tensors
            results |= {f"{n}{UPDATED}": variable for n, variable in tensors.items()}
        if self._memory.proximal is not None:
            state |= self._memory.proximal.bound(self._state)
        return state, results

    @property
    def step_count(self) -> int:
        """How many steps were taken so far."""
        return self.numbers.count

    @property
    def skipped_steps(self) -> int:
        """How many steps changed nothing, because their loss or gradients were not finite."""
        return self.numbers.skipped

    # ---- learning rate -------------------------------------------------------------------------

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the steps to come."""
        self.numbers.rates.array[0] = float32("the learning rate", learning_rate)

    def get_learning_rate(self) -> float:
        """Return the learning rate, as the float32 that the graph is given."""
        return float(self.numbers.rates.array[0])

    @property
    def lasting_rate(self) -> float:
        """The learning rate that a checkpoint holds: that of before a run's own schedule."""
        return self._memory.lasting_rate

    @contextmanager
    def run_schedule(self, schedule: Any) -> Iterator[None]:
        """Let the schedule of a run set the learning rate within, and bring the old rate back.

        Checkpoints that are saved within hold the old rate too, so that a new run from them does
        not begin at the end of a schedule. The caller's own scheduler stays until it is over.
        """
        scheduler, saved = self.scheduler, self._state.saved_scheduler
        is_attached = scheduler is not None and schedule is scheduler
        rate = scheduler.initial_lr if is_attached else self.get_learning_rate()
        self._memory.lasting = rate, None if is_attached else self.scheduler_state()
        try:
            yield
        finally:
            self._memory.lasting = None
            self.scheduler, self._state.saved_scheduler = scheduler, saved
            if is_attached and scheduler.is_over:
                self.attach(None)
            if self.scheduler is not schedule:
                self.set_learning_rate(rate)

    @property
    def has_proximal(self) -> bool:
        """Whether the artifacts were generated with `proximal=True`."""
        return self._memory.proximal is not None

    def set_proximal(self, mu: float, reference: Mapping[str, Array] | None = None) -> None:
        """Pull the parameters back to a reference in the steps to come, by the strength µ.

        The reference are the present values of all parameters that train, or those given by name.
        It is not saved with a checkpoint: µ is 0 after loading.
        """
        if self._memory.proximal is None:
            if mu == 0:
                return
            raise StateError(
                "the artifacts have no proximal term: generate them with "
                "generate_artifacts(..., proximal=True)"
            )
        with self._state.lock:
            self._memory.proximal.set(self._state, mu, reference)

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
        self.scheduler = scheduler
        self._state.saved_scheduler = None

    # ---- state ---------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Make the moments: those of the checkpoint, or zeros."""
        if self._memory.moments or self._state.nominal:
            return
        group, wanted = self._state.groups.get(GROUP), momentums_of(self._graph.model)
        types = {
            name: [
                (self._state.type_of(name)[0], self._moment_type(value))
                for value in wanted.get(name, ())
            ]
            for name in self._names
        }
        saved = {name: _saved_moments(group, name, types[name]) for name in self._names}
        missing = [
            kind
            for name in self._names
            for kind, array in zip(types[name], saved[name], strict=True)
            if array is None
        ]
        zeros = iter(Variable.many_zeros(missing, self._state.device))
        made = {
            name: [
                next(zeros)
                if array is None
                else Variable(array, self._state.device, take=self._state.owns_memory)
                for array in arrays
            ]
            for name, arrays in saved.items()
        }
        self._memory.moments.update(made)
        # They are in memory that changes now; those of the file are out of date.
        self._state.groups.pop(GROUP, None)

    def _moment_type(self, value: ValueType) -> np.dtype[Any]:
        """Return the type of a moment, which has to be one of floats that numpy has."""
        element = ELEMENT_TYPES.get(value.element_type)
        if element is None or element.dtype is None or element.dtype.kind != "f":
            kind = f"type {value.element_type}" if element is None else element.name.lower()
            raise ModelError(
                f"{self._graph.name} keeps {value.name!r} as {kind}: the state of an optimizer is "
                "float, double or float16 on this device. Generate the artifacts anew"
            )
        return element.dtype

    def group(self) -> OptimizerGroup:
        """Return the state of the optimizer as a checkpoint holds it."""
        self.allocate()
        return self._memory.group()

    def reset(self, group: OptimizerGroup | None = None) -> None:
        """Start over: no step was taken, all moments are zero. Or continue from a group.

        The learning rate stays. Sessions and memory are kept, so this is cheap.
        """
        with self._state.lock:
            self.allocate()
            values = {
                name: _saved_moments(group, name, [(m.shape, m.dtype) for m in moments])
                for name, moments in self._memory.moments.items()
            }
            for name, arrays in values.items():
                for moment, array in zip(self._memory.moments[name], arrays, strict=True):
                    moment.assign(np.zeros(moment.shape, moment.dtype) if array is None else array)
            self.numbers.count = 0 if group is None else group.step
            self.scheduler = None

    def require_same_states(self, model: ModelFile) -> None:
        """Refuse the graph of another optimizer."""
        of_graphs = [momentums_of(m) for m in (model, self._graph.model)]
        for name in self._names:
            wanted, own = (len(moments.get(name, ())) for moments in of_graphs)
            if wanted != own:
                raise ModelError(
                    f"{model.source_name} keeps {wanted} tensors for {name!r}, and "
                    f"{self._graph.name} {own}: they are of different optimizers"
                )

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the state of the scheduler as a checkpoint holds it."""
        return self._memory.scheduler_state(self._state.saved_scheduler)


class OptimizerMemory:
    """What lasts from step to step. The state owns it, and it knows neither state nor graph.

    So it outlives its optimizer, and no cycle of references keeps the sessions of onnxruntime.
    """

    def __init__(self) -> None:
        self.numbers = StepNumbers()
        self.moments: dict[str, list[Variable]] = {}
        self.initial_lr = DEFAULT_LEARNING_RATE
        self.scheduler: Any = None
        # While a run's own schedule sets the rate: rate and scheduler of before, which last.
        self.lasting: tuple[float, dict[str, Any] | None] | None = None
        self.proximal: Proximal | None = None

    @property
    def lasting_rate(self) -> float:
        """The learning rate that a checkpoint holds."""
        return float(self.numbers.rates.array[0]) if self.lasting is None else self.lasting[0]

    def scheduler_state(self, saved: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the state of the scheduler as a checkpoint holds it; without one, that `saved`."""
        if self.lasting is not None:
            return self.lasting[1]
        if self.scheduler is None:
            return saved
        return {"kind": self.scheduler.kind, "state": self.scheduler.state()}

    def group(self) -> OptimizerGroup:
        """Return moments and number of steps as a checkpoint holds them."""
        states: dict[str, list[Tensor]] = {
            name: [moment.array for moment in moments] or [_UNUSED]
            for name, moments in self.moments.items()
        }
        return OptimizerGroup(self.numbers.count, self.initial_lr, states)


class StepNumbers:
    """The number of steps and the learning rate, in the memory that graphs are bound to."""

    def __init__(self) -> None:
        self.rates = Variable(np.array([DEFAULT_LEARNING_RATE], np.float32))
        self.steps = Variable(np.array([0], np.int64))
        self.count = self.skipped = 0

    def begin(self) -> None:
        """Tell the graph which step it takes; the first one is 1."""
        self.steps.array[0] = self.count + 1

    def finish(self, *, taken: bool) -> None:
        """Count the step, which has been taken or skipped."""
        self.count += taken
        self.skipped += not taken


def _saved_moments(
    group: OptimizerGroup | None, name: str, types: Sequence[tuple[tuple[int, ...], Any]]
) -> Sequence[Array | None]:
    """Return the moments of a parameter that were saved; None for each without a saved group."""
    if group is None:
        return [None] * len(types)
    held = group.states.get(name)
    if held is None:
        raise CheckpointError(
            f"the checkpoint has an optimizer state, but none for the parameter {name!r}: it is of "
            "another model"
        )
    arrays = [array for array in held if not isinstance(array, RawTensor)]
    if not types and len(arrays) == len(held) == 1 and not arrays[0].any():
        return []  # as SGD without momentum is saved
    _require_count(name, len(types), len(held))
    if [(array.shape, array.dtype) for array in arrays] != types:
        raise CheckpointError(
            f"the checkpoint has moments of {name!r} with another shape or type than the "
            "parameter: its optimizer state is of another model"
        )
    return arrays


def _require_count(name: str, wanted: int, held: int) -> None:
    if held != wanted:
        raise CheckpointError(
            f"the optimizer keeps {wanted} tensors for each parameter, and the checkpoint has "
            f"{held} for {name!r}: it was saved with another optimizer. Load the checkpoint "
            "without its optimizer state (save it with include_optimizer_state=False), or use "
            "that optimizer"
        )

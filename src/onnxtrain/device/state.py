"""CheckpointState: all that training changes and needs to be resumed."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.checks import count_bad
from onnxtrain.device.parameters import Parameters, Properties, checked
from onnxtrain.device.random_state import RandomState
from onnxtrain.device.run.binding import CPU, Device, Variable
from onnxtrain.device.run.graph import Frozen
from onnxtrain.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    NonFiniteError,
    StateError,
)
from onnxtrain.format import strict_json
from onnxtrain.format.checkpoint.content import (
    Array,
    CheckpointContent,
    OptimizerGroup,
    Property,
    RawTensor,
    Tensor,
    merge_properties,
    split_properties,
    tensor_code,
)
from onnxtrain.format.checkpoint.file import Source, read_checkpoint, write_checkpoint
from onnxtrain.format.checkpoint.layout import CheckpointLayout
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.generation import PROPERTY, Generation

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import OptimizerMemory

GROUP = "group0"
_TRAINING = "training"  # the reserved property that holds what the format has no field for


class CheckpointState:
    """The state of a training: parameters, properties, and what the optimizer keeps.

    One state serves one `Module` and one `Optimizer`; they change it in place. It may be used from
    several threads, which take turns.
    """

    def __init__(self, state: CheckpointContent) -> None:
        if not isinstance(state, CheckpointContent):
            raise ArgumentTypeError(
                "a CheckpointState is made with CheckpointState.load_checkpoint, not from "
                f"{type(state).__name__}"
            )
        self._training = TrainingState(state)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: Source, *, verify: bool = True) -> CheckpointState:
        """Load a checkpoint, complete or nominal, from a file or from its bytes.

        Without `verify`, checksums are not computed; see `read_checkpoint`.
        """
        made = cls(read_checkpoint(checkpoint_uri, verify=verify))
        # Nobody else has what was read from a file.
        made._training.owns_memory = isinstance(checkpoint_uri, str | os.PathLike)
        return made

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """Write a state to a file, which is replaced as a whole or not at all.

        With the state of the optimizer, training can be resumed from the file as if it had never
        stopped. Without it the file is smaller, a third with AdamW. A state in which training has
        made something infinite or NaN is refused, unless `allow_nonfinite` is set.
        """
        if not isinstance(state, CheckpointState):
            raise ArgumentTypeError(f"a CheckpointState is saved, not {type(state).__name__}")
        with state._training.lock:
            if not allow_nonfinite:
                state._training.require_finite("nothing was saved", include_optimizer_state)
            write_checkpoint(checkpoint_uri, state._training.content(include_optimizer_state))

    def to_bytes(
        self, include_optimizer_state: bool = False, *, allow_nonfinite: bool = False
    ) -> bytes:
        """Return what `save_checkpoint` would write, where it would be one file."""
        with self._training.lock:
            if not allow_nonfinite:
                self._training.require_finite("nothing was saved", include_optimizer_state)
            content = self._training.content(include_optimizer_state)
            content.has_external_data = False
            layout = CheckpointLayout(content, sort=True, threshold=2**31 - 1, bond=("", ""))
            if layout.external:
                raise CheckpointError("the state is larger than 2 GB: save it to a file")
            file = io.BytesIO()
            layout.write_main(file)
            return file.getvalue()

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return Parameters(self._training)

    @property
    def properties(self) -> Properties:
        """The user's own values, by name."""
        return Properties(self._training.properties)

    @property
    def generation(self) -> str | None:
        """The identifier of the artifacts that the state belongs to, if they have one.

        Graphs of other artifacts are refused, and graphs that were changed. Set it to None to use
        the state with such graphs, on your own responsibility.
        """
        held = self._training.generation
        return None if held is None else held.identifier

    @generation.setter
    def generation(self, value: None) -> None:
        if value is not None:
            raise ArgumentError(f"the generation of a state can be set to None, not to {value!r}")
        self._training.generation = None

    @property
    def nominal(self) -> bool:
        """Whether the checkpoint has names of parameters, and no values."""
        return self._training.nominal

    def has_parameter(self, name: str) -> bool:
        """Whether there is a parameter of this name."""
        return self._training.has(name)

    def __repr__(self) -> str:
        trainable = len(self._training.trainable_names())
        return (
            f"CheckpointState({'nominal, ' if self.nominal else ''}{trainable} trainable and "
            f"{len(self.parameters) - trainable} other parameters, "
            f"{len(self.properties)} properties)"
        )


class TrainingState:
    """What `Module`, `Optimizer` and `fit` read and change in the state of a training.

    It may be used from several threads; `lock` lets one at a time.
    """

    def __init__(self, content: CheckpointContent) -> None:
        self.properties, self._reserved = split_properties(content.properties)
        saved = _training_of(self._reserved.pop(_TRAINING, None))
        self.generation = Generation.from_property(self._reserved.get(PROPERTY))
        self.bases: set[Path] = set()  # the files of bases that were checked
        self.lock = threading.RLock()
        self.nominal = content.nominal
        self.owns_memory = False  # whether training may write into the arrays of the content
        self.device = CPU
        self.frozen = Frozen(dict(content.frozen))
        self.groups = dict(content.optimizer_groups)
        self.optimizer: OptimizerMemory | None = None
        self.random = RandomState(saved.get("random"))
        self.skipped_batches = 0  # whose loss or gradients were not finite
        self.not_finite: tuple[str, ...] = ()  # the gradients because of which the last one was
        self.has_stale_gradients = False  # all batches since the last reset were skipped
        # The generation of the training graph that has computed and checked all gradients, if
        # nothing was added to them since; and whether somebody else may write into their memory.
        self.checked_by, self._shares_gradients = "", False
        self.private: dict[str, Any] = saved.get("private", {})
        self.saved_learning_rate: float | None = saved.get("learning_rate")
        self.saved_scheduler: dict[str, Any] | None = saved.get("scheduler")
        self._trainable: dict[str, Tensor] = dict(content.trainable)
        self._variables: dict[str, Variable] = {}
        self._gradients: dict[str, Variable] = {}
        self._has_external_data = content.has_external_data

    def content(self, include_optimizer_state: bool) -> CheckpointContent:
        """Return the state as plain data; arrays are the memory that training works with."""
        reserved = dict(self._reserved)
        if self.generation is None:
            reserved.pop(PROPERTY, None)
        groups: dict[str, OptimizerGroup] = {}
        if include_optimizer_state and not self.nominal:
            groups = self.groups
            if self.optimizer is not None and self.optimizer.moments:
                groups = {GROUP: self.optimizer.group()}
            reserved[_TRAINING] = strict_json.dumps(self._training())
        return CheckpointContent(
            trainable={name: self.held(name) for name in self._trainable},
            frozen={name: self.held(name) for name in self.frozen.values},
            nominal=self.nominal,
            optimizer_groups=groups,
            properties=merge_properties(self.properties, reserved),
            has_external_data=self._has_external_data,
        )

    def require_finite(self, what: str, include_optimizer_state: bool = False) -> None:
        """Refuse to go on where training has made something infinite or NaN.

        Frozen parameters are not looked at: masks are infinite in many models.
        """
        held = {n: self.held(n) for n in dict.fromkeys((*self._trainable, *self._variables))}
        if include_optimizer_state and self.optimizer is not None:
            for name, tensors in self.optimizer.group().states.items():
                held |= {f"{name}.momentum{k}": tensor for k, tensor in enumerate(tensors)}
        arrays = {n: t for n, t in held.items() if isinstance(t, np.ndarray)}
        bad = [(name, count) for name, array in arrays.items() if (count := count_bad(array))]
        if bad:
            name, count = bad[0]
            raise NonFiniteError(
                f"{name!r} has {count} of {arrays[name].size} elements that are infinite or not a "
                f"number: {what}. Go on from an earlier checkpoint, or pass allow_nonfinite=True.",
                parameters=[name for name, _ in bad],
            )

    def _training(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"random": self.random.saved(), "private": self.private}
        saved |= {"learning_rate": self.saved_learning_rate, "scheduler": self.saved_scheduler}
        if self.optimizer is not None:
            saved["learning_rate"] = self.optimizer.lasting_rate
            saved["scheduler"] = self.optimizer.scheduler_state(self.saved_scheduler)
        return {key: value for key, value in saved.items() if value not in (None, {})}

    def held(self, name: str) -> Tensor:
        """Return the present value of a parameter, as it is stored."""
        variable = self._variables.get(name)
        return self._tensor(name) if variable is None else variable.array

    def _tensor(self, name: str) -> Tensor:
        """Return a parameter as it was loaded, or set since."""
        return self._trainable[name] if name in self._trainable else self.frozen.values[name]

    def _set_tensor(self, name: str, array: Array) -> None:
        (self._trainable if name in self._trainable else self.frozen.values)[name] = array

    # ---- what Parameter asks -------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all parameters, sorted."""
        return sorted((*self._trainable, *self.frozen.values))

    def trainable_names(self) -> list[str]:
        """The names of what trains, in the order of the checkpoint."""
        return list(self._trainable)

    def has(self, name: object) -> bool:
        """Whether there is a parameter of this name."""
        return name in self._trainable or name in self.frozen.values

    def is_trainable(self, name: str) -> bool:
        """Whether a parameter trains."""
        return name in self._trainable

    def value_of(self, name: str) -> Array:
        """Return the live values of a parameter; those of frozen ones cannot be written into."""
        if name in self._trainable or name in self._variables:
            return self.variable(name).array
        tensor = self.frozen.values[name]
        view = (tensor.bits() if isinstance(tensor, RawTensor) else tensor).view()
        view.flags.writeable = False
        return view

    def set_value(self, name: str, value: Any) -> None:
        """Set a parameter; the graphs see it with their next run."""
        with self.lock:
            shape, dtype = self.type_of(name)
            array = checked(name, value, shape, dtype)
            if name in self._trainable or name in self._variables:
                self.variable(name).assign(array)
            else:
                self.frozen.change(name, array)

    def require_changeable(self, values: Mapping[str, Array]) -> None:
        """Refuse values for constants that graphs would not see."""
        for name, array in values.items():
            if name not in self._trainable and name not in self._variables:
                self.frozen.require_changeable(name, array)

    def gradient_of(self, name: str) -> Array | None:
        """Return the live gradient of a parameter, if it has one."""
        gradient = self._gradients.get(name)
        if gradient is None:
            return None
        self._shares_gradients = True
        return gradient.array

    def has_checked(self, generation: str) -> bool:
        """Whether a training graph of this generation has found the gradients finite."""
        return bool(generation) and self.checked_by == generation and not self._shares_gradients

    def set_gradient(self, name: str, value: Any) -> None:
        """Set the accumulated gradient of a parameter."""
        with self.lock:
            gradient = self._gradients.get(name)
            if gradient is None:
                raise StateError(f"the parameter {name!r} has no gradient, or there is no Module")
            gradient.assign(checked(f"{name}_grad", value, gradient.shape, gradient.dtype))
            self.has_stale_gradients, self.checked_by = False, ""

    # ---- what Module and Optimizer ask ---------------------------------------------------------

    def type_of(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and type of a parameter."""
        tensor = self._tensor(name)
        if isinstance(tensor, RawTensor):
            width = max(8, ELEMENT_TYPES[tensor.code].bits)
            return tensor.dims, np.dtype(f"<u{width // 8}")
        return tensor.shape, tensor.dtype

    def code_of(self, name: str) -> int:
        """Return ONNX's number of the element type of a parameter."""
        return tensor_code(self._tensor(name), name)

    def variable(self, name: str) -> Variable:
        """Return the memory of a parameter, which can be changed from then on."""
        if name not in self._variables:
            tensor = self._tensor(name)
            if isinstance(tensor, RawTensor):
                raise StateError(
                    f"the parameter {name!r} is of type {ELEMENT_TYPES[tensor.code].name}, which "
                    "numpy does not have: it cannot change in training on this device"
                )
            self._variables[name] = made = Variable(tensor, self.device, take=self.owns_memory)
            if made.device.is_cpu:
                # The values of the file are not needed any more; these are the only ones.
                self._set_tensor(name, made.array)
        return self._variables[name]

    def move_to(self, device: Device) -> None:
        """Keep what training changes on another device from now on."""
        if device == self.device:
            return
        self.device = device
        for kept in (self._variables, self._gradients):
            for name, variable in list(kept.items()):
                kept[name] = Variable(variable.array, device)

    def make_gradients(self, names: Iterable[str]) -> dict[str, Variable]:
        """Make the memory for gradients, all zero, where there is none yet."""
        wanted = tuple(names)
        missing = [name for name in wanted if name not in self._gradients]
        made = Variable.many_zeros([self.type_of(name) for name in missing], self.device)
        self._gradients.update(zip(missing, made, strict=True))
        return {name: self._gradients[name] for name in wanted}

    def complete(self, values: Mapping[str, Array]) -> None:
        """Give a nominal state its values."""
        self.require_changeable(values)
        self.owns_memory = False  # these are the caller's
        for name, array in values.items():
            self._set_tensor(name, array)
        self.nominal = False
        self.frozen.version += 1


def _training_of(text: Property | None) -> dict[str, Any]:
    """Read the record of training beside the optimizer's tensors, which is not trusted."""
    if text is None:
        return {}
    try:
        saved = strict_json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or not all(
        is_right(saved[key]) for key, is_right in _TRAINING_RECORD.items() if key in saved
    ):
        raise CheckpointError(
            "the checkpoint holds a damaged record of the learning rate, the scheduler or the "
            "random numbers"
        )
    return saved


# What each entry of the record has to be.
_TRAINING_RECORD: dict[str, Callable[[Any], bool]] = {
    "random": lambda value: (
        isinstance(value, dict)
        and all(type(value.get(key)) is int and value[key] >= 0 for key in ("seed", "draws"))
    ),
    "private": lambda value: isinstance(value, dict),
    "learning_rate": lambda value: (
        type(value) in (int, float) and abs(value) <= float(np.finfo(np.float32).max)
    ),
    "scheduler": lambda value: isinstance(value, dict),
}

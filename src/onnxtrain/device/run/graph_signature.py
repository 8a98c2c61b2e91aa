"""The inputs and outputs of a graph, by what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxtrain.device.state import TrainingState
from onnxtrain.errors import CheckpointError, ModelError
from onnxtrain.format.committed_folder import BASE_DATA
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.generation import digest_of
from onnxtrain.format.metadata import FORMAT
from onnxtrain.format.model.file import ExternalTensor, ModelFile, ValueType
from onnxtrain.format.model.source import digest_of_base
from onnxtrain.format.names import (
    ACCUMULATED,
    BUFFER,
    FINITE_CHECK,
    LAZY_RESET,
    LEARNING_RATE,
    MOMENTUM,
    PROXIMAL_MU,
    RANDOM_SEED,
    REFERENCE,
    STEP,
    UPDATED,
    UPDATED_FLAG,
)


@dataclass(frozen=True)
class GraphSignature:
    """The inputs and outputs of a graph by what they are for.

    `parameters` are inputs that the checkpoint has; `trained` are names whose gradient the graph
    accumulates, or which it updates; `updated` are names of what it gives a new value to. `check`
    are the outputs that tell whether a step was finite; earlier versions wrote graphs without.
    """

    inputs: tuple[ValueType, ...]
    outputs: tuple[ValueType, ...]
    parameters: tuple[ValueType, ...]
    trained: tuple[str, ...]
    updated: tuple[str, ...]
    has_seed: bool
    check: tuple[ValueType, ...] = ()


def signature_of(model: ModelFile, state: TrainingState, *, fused: bool = False) -> GraphSignature:
    """Sort the inputs and outputs of a training or evaluation graph, or of a `fused` step."""
    names = {value.name for value in model.inputs}
    trained = tuple(
        name.removesuffix(BUFFER)
        for value in model.inputs
        if (name := value.name).endswith(BUFFER) and name.removesuffix(BUFFER) in names
    )
    parameters = tuple(v for v in model.inputs if state.has(v.name))
    internal = {LAZY_RESET, RANDOM_SEED} | {f"{name}{BUFFER}" for name in trained}
    held = {value.name for value in parameters}
    if fused:
        internal |= {STEP, LEARNING_RATE}
        internal |= proximal_of(model, held)
        internal |= {v.name for v in model.inputs if _parameter_of_momentum(v.name) in held}
    known = held | internal
    updated = tuple(
        v.name.removesuffix(UPDATED)
        for v in model.outputs
        if v.name.endswith(UPDATED) and v.name.removesuffix(UPDATED) in known
    )
    results = {f"{n}{UPDATED}" for n in updated} | {f"{n}{ACCUMULATED}" for n in trained}
    made = {value.name: value for value in model.outputs}
    check = (UPDATED_FLAG, FINITE_CHECK) if {UPDATED_FLAG, FINITE_CHECK} <= made.keys() else ()
    return GraphSignature(
        inputs=tuple(v for v in model.inputs if v.name not in known),
        outputs=tuple(v for v in model.outputs if v.name not in results.union(check)),
        parameters=parameters,
        trained=trained,
        updated=updated,
        has_seed=RANDOM_SEED in names,
        check=tuple(made[name] for name in check),
    )


def _parameter_of_momentum(name: str) -> str | None:
    parameter, found, number = name.rpartition(MOMENTUM)
    is_number = number.isascii() and number.isdecimal() and len(number) < 5
    return parameter if found and is_number else None


def proximal_of(model: ModelFile, parameters: Iterable[str]) -> set[str]:
    """Return the inputs of the proximal term, where the graph has it."""
    names = {value.name for value in model.inputs}
    if PROXIMAL_MU not in names:
        return set()
    return {PROXIMAL_MU} | {n for p in parameters if (n := f"{p}{REFERENCE}") in names}


def momentums_of(model: ModelFile) -> dict[str, list[ValueType]]:
    """Return the states that an optimizer keeps, by parameter, in the order of their numbers."""
    found: dict[str, list[ValueType]] = {}
    for value in model.inputs:
        if (parameter := _parameter_of_momentum(value.name)) is not None:
            found.setdefault(parameter, []).append(value)
    for parameter, values in found.items():
        prefix = len(f"{parameter}{MOMENTUM}")
        values.sort(key=lambda value: int(value.name[prefix:]))
    return found


def check_generation(model: ModelFile, state: TrainingState, earlier: str) -> str:
    """Refuse a graph that was written with other files; return the generation of the graphs.

    `earlier` is the generation of the graphs so far, or "". Graphs and checkpoints of earlier
    versions, of ONNX Runtime or of `onnxblock` have none, and are taken with any.
    """
    if model.metadata.format != FORMAT:
        raise ModelError(
            f"{model.source_name} is of format {model.metadata.format}, and this version of "
            f"onnxtrain knows format {FORMAT}: use a newer one"
        )
    own, held = model.metadata.generation, state.generation
    expected = held.identifier if held is not None else earlier
    if not own or not expected:
        return own or earlier
    if own != expected:
        other = "the checkpoint is" if held is not None else "the other graphs are"
        raise CheckpointError(
            f"{model.source_name} is of generation {own[:8]}, and {other} of {expected[:8]}: they "
            "do not belong together.",
            advice="Use files that one run of prepare wrote. A checkpoint can be taken to other "
            "graphs with `state.generation = None`.",
        )
    # A program may convert graphs to the ORT format by itself.
    digests = [] if held is None else held.digests(".ort" if model.is_ort else ".onnx")
    if digests and digest_of(model.data) not in digests:
        raise ModelError(
            f"{model.source_name} is damaged: its size or checksum is not the one that the "
            "checkpoint has for it.",
            advice="Copy it anew. If you changed it on purpose, set `state.generation = None`.",
        )
    return own


def check_base(model: ModelFile, state: TrainingState) -> None:
    """Refuse the file of a base that is not the one which the graphs were written with."""
    expected = None if state.generation is None else state.generation.files.get(BASE_DATA)
    if model.base is not None and not model.base.is_file():
        raise ModelError(
            f"{model.source_name} takes its base from {model.base.name!r} beside it, which "
            "is not there: copy it too"
        )
    if model.base is None or model.path is None or expected is None or model.base in state.bases:
        return
    if digest_of_base(model.base, model.path, expected[0]) != expected:
        raise ModelError(
            f"{model.base} is damaged, or belongs to other graphs: its size or checksum is not the "
            "one that the checkpoint has for it.",
            advice="Copy it anew. If you changed it on purpose, set `state.generation = None`.",
        )
    state.bases.add(model.base)


def check_belongs(model: ModelFile, state: TrainingState, signature: GraphSignature) -> None:
    """Refuse a graph and a checkpoint that were not made for each other."""
    about, in_base = model.metadata, model.in_base
    stored = {name: tensor for name, tensor in model.external.items() if name not in in_base}
    listed = (*about.trainable, *about.frozen, *about.statistics, *stored)
    missing = [name for name in listed if not state.has(name)]
    if missing:
        raise CheckpointError(
            f"{model.source_name} has the parameter {missing[0]!r}, and the checkpoint does not: "
            "they do not belong together"
        )
    for name in (*model.initializer_names, *about.frozen):
        if state.is_trainable(name):
            raise CheckpointError(
                f"{name!r} is a constant in {model.source_name}, and the checkpoint has it as a "
                "parameter that trains: they do not belong together"
            )
    user_inputs = {value.name for value in signature.inputs}
    _check_trainable(model, state, [n for n in signature.trained if n not in user_inputs])
    held: list[ValueType | ExternalTensor] = [*signature.parameters, *stored.values()]
    for value in held:
        _check_type(model, state, value)


def check_trains(model: ModelFile, state: TrainingState, signature: GraphSignature) -> None:
    """Refuse a training graph that does not train what the checkpoint says it should."""
    absent = [n for n in state.trainable_names() if n not in set(signature.trained)]
    if absent:
        raise CheckpointError(
            f"the checkpoint has {absent[0]!r} as a parameter that trains, and "
            f"{model.source_name} has no gradient of it: they do not belong together"
        )


def check_updates(model: ModelFile, state: TrainingState) -> list[str]:
    """Refuse a graph that does not update what trains, and that alone; return the names."""
    inputs = {value.name: value for value in model.inputs}
    outputs = {value.name for value in model.outputs}
    for number in (LEARNING_RATE, STEP):
        if number not in inputs:
            raise ModelError(
                f"{model.source_name} is not an optimizer graph: it has no input {number!r}"
            )
    names = state.trainable_names()
    for name in names:
        if name not in inputs or f"{name}{UPDATED}" not in outputs:
            raise CheckpointError(
                f"{model.source_name} does not update {name!r}, which the checkpoint has as a "
                "parameter that trains: they do not belong together"
            )
        _check_type(model, state, inputs[name])
    moments = (_parameter_of_momentum(name) for name in inputs)
    _check_trainable(model, state, [name for name in moments if name and state.has(name)])
    return names


def _check_trainable(model: ModelFile, state: TrainingState, names: Sequence[str]) -> None:
    """Refuse a graph that trains what the checkpoint does not."""
    for name in (*names, *model.metadata.trainable):
        if not state.is_trainable(name):
            held = "has as frozen" if state.has(name) else "does not have"
            raise CheckpointError(
                f"{model.source_name} trains {name!r}, which the checkpoint {held}: they do not "
                "belong together"
            )


def _check_type(model: ModelFile, state: TrainingState, value: ValueType | ExternalTensor) -> None:
    name, code, dims = value.name, value.element_type, value.dims
    held_code = state.code_of(name)
    shape = () if state.nominal else state.type_of(name)[0]
    if code != held_code or (not state.nominal and dims is not None and dims != shape):
        raise CheckpointError(
            f"the parameter {name!r} is {_type(code)} {list(dims or ())} in {model.source_name} "
            f"and {_type(held_code)} {list(shape)} in the checkpoint: they do not belong together"
        )


def _type(code: int) -> str:
    return ELEMENT_TYPES[code].name.lower() if code in ELEMENT_TYPES else f"type {code}"

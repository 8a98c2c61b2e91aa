"""The files of the artifact folder: the checkpoint, and graphs that point into it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.checkpoint.content import (
    CheckpointContent,
    RawTensor,
    split_properties,
    tensor_bytes,
    tensor_code,
    tensor_dims,
)
from onnxtrain.format.checkpoint.file import (
    WrittenCheckpoint,
    plan_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from onnxtrain.format.committed_folder import BASE_DATA, INFERENCE_MODEL
from onnxtrain.format.element_types import STRING
from onnxtrain.format.generation import PROPERTY, Generation, digest_of
from onnxtrain.format.metadata import METADATA_KEY, GraphMetadata
from onnxtrain.format.names import BUFFER, GRADIENT, GRADIENTS_CHECKED
from onnxtrain.offline.blocks.accessor import current_library
from onnxtrain.offline.blocks.checkpoint import content_of
from onnxtrain.offline.graph.shapes import FLOATS
from onnxtrain.offline.loss_gradients import LossGradients
from onnxtrain.offline.loss_model import Tensors
from onnxtrain.offline.passes.lora.add import Adapted
from onnxtrain.offline.passes.remat.budget import StepMemory
from onnxtrain.offline.passes.webgpu import Uncovered
from onnxtrain.offline.patterns import STORED_ONCE
from onnxtrain.offline.training_graph import FOLDED, Target
from onnxtrain.offline.writer.base_data import BaseData
from onnxtrain.offline.writer.folder import Folder
from onnxtrain.offline.writer.functions import write_functions
from onnxtrain.offline.writer.shorten_names import names_in, shorten_names

_ORDER = ["training_model", "eval_model", "optimizer_model", "step_model"]


@dataclass(frozen=True)
class Parameters:
    """The tensors of the checkpoint: what trains, what does not, and running statistics."""

    trainable: Tensors
    frozen: Tensors
    statistics: Tensors

    @staticmethod
    def of(source: LossGradients, trains: Collection[str]) -> Parameters:
        """Sort the tensors of a differentiated model."""
        tensors, wanted = source.tensors, set(trains)
        rest = {n: t for n, t in tensors.items() if n not in wanted}
        return Parameters(
            {n: t for n, t in tensors.items() if n in wanted},
            {n: t for n, t in rest.items() if n not in source.updates},
            {n: t for n, t in rest.items() if n in source.updates},
        )

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of elements of each tensor of each kind."""
        return {kind: {n: t.size for n, t in own.items()} for kind, own in vars(self).items()}

    def store(
        self,
        folder: Folder,
        models: Mapping[str, ir.Model],
        described: str,
        adapted: Adapted | None,
        ort_format: bool,
    ) -> StoredTensors:
        """Plan the checkpoint, and let the graphs point into it for what is frozen.

        Where low-rank factors train (`adapted`), what is frozen is in a file of its own instead,
        which the model for inference with slots for these factors shares. With `ort_format` the
        checkpoint leaves room for what `write_ort` adds. The graph that is `described` is kept as
        it is now, before kernels and the file change it.
        """
        models = _in_order(models)
        base = None if adapted is None else BaseData(folder.file(BASE_DATA))
        kept = self.frozen if base is None else {}
        content = content_of(self.trainable, {**kept, **self.statistics})
        # The graphs have offsets into the checkpoint, which has digests of the graphs.
        ends = (".onnx", ".ort") if ort_format else (".onnx",)
        others = () if base is None else (BASE_DATA,)
        empty = Generation.placeholder((*(f"{n}{end}" for end in ends for n in models), *others))
        content.properties = empty.property()
        planned = plan_checkpoint(folder.file("checkpoint"), content)
        for model in models.values():
            if base is not None:
                base.move_out(model, _large(model, self.frozen))
            _point_to_checkpoint(model, planned)
        whole = ir.to_proto(models[described])
        return StoredTensors(self, content, planned, empty, adapted, base, whole)


@dataclass(frozen=True)
class StoredTensors:
    """Where the tensors of the graphs will be: in the checkpoint, or in the file of the base."""

    parameters: Parameters
    content: CheckpointContent
    planned: WrittenCheckpoint
    generation: Generation  # without digests
    adapted: Adapted | None
    base: BaseData | None
    described: onnx.ModelProto

    @property
    def frozen(self) -> Tensors:
        """What is frozen and in the checkpoint."""
        return self.parameters.frozen if self.base is None else {}

    def nominal(self) -> CheckpointContent:
        """Return the content of a checkpoint without data."""
        others = {**self.frozen, **self.parameters.statistics}
        return content_of(self.parameters.trainable, others, nominal=True)


def write_files(
    folder: Folder,
    models: Mapping[str, ir.Model],
    stored: StoredTensors,
    outputs: Sequence[str],
    nominal: bool,
    *,
    called: Collection[str] = (),
    memory: StepMemory | None = None,
    target: Target = "cpu",
    on_cpu: Mapping[str, Sequence[Uncovered]] | None = None,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Write the graphs and the checkpoint, into which they point for what is frozen.

    In the graphs named by `called`, groups of nodes become calls of functions. `on_cpu` lists the
    nodes of each graph that its target has no kernel for. `properties` are the metadata of the
    model, which the evaluation graph keeps for what is exported from it.
    """
    models, parameters, base = _in_order(models), stored.parameters, stored.base
    content, planned, empty = stored.content, stored.planned, stored.generation
    metadata = GraphMetadata(
        checkpoint=planned.path.name,
        loss=outputs[0],
        outputs=tuple(outputs[1:]),
        trainable=tuple(parameters.trainable),
        frozen=tuple(stored.frozen),
        statistics=tuple(parameters.statistics),
        target=target,
        memory=None if memory is None else memory.notes(),
        base="" if base is None else base.path.name,
    )
    forward = names_in(models["eval_model"].graph)
    protos: dict[str, onnx.ModelProto] = {}
    for name, model in models.items():
        functions = write_functions(model, name in called)
        proto = protos[name] = ir.to_proto(model)
        proto.functions.extend(functions)
        gradients = _named_gradients(proto) if name == "training_model" else ()
        if name != "eval_model":
            shorten_names(proto, forward.union(gradients, [GRADIENTS_CHECKED]))
        del proto.metadata_props[:]
        left = [str(node) for node in (on_cpu or {}).get(name, ())[:8]]
        kernels = tuple(function.name for function in functions)
        about = replace(
            metadata, on_cpu=tuple(left), kernels=kernels, gradients=gradients,
            folded=tuple(model.meta.get(FOLDED, ())),
        )  # fmt: skip
        proto.metadata_props.add(key=METADATA_KEY, value=about.to_json())
        if name == "eval_model":
            for key, value in (properties or {}).items():
                if key != METADATA_KEY:
                    proto.metadata_props.add(key=key, value=value)
    if base is not None and stored.adapted is not None:
        more = parameters.trainable.keys() - set(stored.adapted.factors)
        file = folder.file(f"{INFERENCE_MODEL}.onnx")
        stored.adapted.slots.write(file, base, properties or {}, more)
        empty = replace(empty, files={**empty.files, BASE_DATA: base.digest})
    generation = _write_graphs(folder, protos, replace(empty, identifier=_digest(protos, content)))
    content.properties = generation.property()
    write_checkpoint(planned.path, content, sort=False)
    if planned.data_path is not None:
        folder.file("checkpoint.data")
    if nominal:
        content = stored.nominal()
        content.properties = generation.property()
        write_checkpoint(folder.file("nominal_checkpoint"), content, sort=False)


def _in_order(models: Mapping[str, ir.Model]) -> dict[str, ir.Model]:
    return {name: models[name] for name in sorted(models, key=_ORDER.index)}


def _large(model: ir.Model, frozen: Collection[str]) -> list[str]:
    """Return the initializers of a graph that the file of the base is to hold.

    Shape inference reads others, such as the sizes of what an update splits.
    """
    return [
        name
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        and (name in frozen or value.const_value.nbytes >= STORED_ONCE)
    ]


def _digest(protos: Mapping[str, onnx.ModelProto], content: CheckpointContent) -> str:
    """Return the identifier of a generation, which depends on all that is in its files."""
    digest = hashlib.sha256()
    for name, proto in protos.items():
        data = proto.SerializeToString(deterministic=True)
        digest.update(f"{name} {len(data)} ".encode() + data)
    for name, tensor in (*content.trainable.items(), *content.frozen.items()):
        code, dims = tensor_code(tensor, name), tensor_dims(tensor, name)
        digest.update(f"{name in content.trainable} {len(name)} {name} {code} {dims}".encode())
        if code == STRING and not isinstance(tensor, RawTensor):
            digest.update(repr(tensor.tolist()).encode())
        else:
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()[:32]


def _named_gradients(training: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of the gradients in a training graph that a runtime can ask for."""
    inputs = {value.name for value in training.graph.input}
    wanted = {
        f"{name.removesuffix(BUFFER)}{GRADIENT}" for name in inputs if name.endswith(BUFFER)
    } - inputs
    return tuple(n for node in training.graph.node for n in node.output if n in wanted)


def _write_graphs(
    folder: Folder, protos: Mapping[str, onnx.ModelProto], generation: Generation
) -> Generation:
    """Write graphs of a generation; return it with their digests."""
    digests = dict(generation.files)
    for name, proto in protos.items():
        entry = next(entry for entry in proto.metadata_props if entry.key == METADATA_KEY)
        about = GraphMetadata.from_json(entry.value)
        entry.value = replace(about, generation=generation.identifier).to_json()
        data = proto.SerializeToString(deterministic=True)
        digests[f"{name}.onnx"] = digest_of(data)
        file = folder.file(f"{name}.onnx")
        try:
            file.write_bytes(data)
        except OSError as error:
            raise OnnxTrainError(f"{file.name!r} cannot be written: {error}") from None
    return replace(generation, files=digests)


def _point_to_checkpoint(model: ir.Model, written: WrittenCheckpoint) -> None:
    """Let the graph take frozen parameters from the checkpoint file, where they are stored once."""
    for name, value in model.graph.initializers.items():
        tensor, place = value.const_value, written.locations.get(name)
        assert tensor is not None
        # onnxruntime wants what shape inference reads, such as shapes and scales, in the graph.
        most = 64 if tensor.dtype in FLOATS else 1024
        if place is not None and tensor.nbytes > most:
            value.const_value = ir.ExternalTensor(
                place.path.name, place.offset, place.length, tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=place.path.parent,
            )  # fmt: skip
        elif _is_elsewhere(tensor, written.path.parent):
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def _is_elsewhere(tensor: ir.TensorProtocol, folder: Path) -> bool:
    """Whether a tensor is in a file beside the given model, which the artifacts do without."""
    return isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).parent != folder


def find_library(given: str | bytes | os.PathLike[Any] | None) -> str | None:
    """Return the library of custom operators: the given one, or that of the context."""
    library = current_library() if given is None else given
    if library is None:
        return None
    path = os.fsdecode(library)
    if not Path(path).exists():
        raise OnnxTrainError(f"there is no custom_op_library at {path!r}")
    return path


def write_ort(folder: Folder, models: Iterable[str], custom_op_library: Any | None) -> None:
    """Convert each graph to the ORT format, with the list of operators that a small build needs."""
    import onnxruntime as ort

    digests = {}
    for name in models:
        source, target = folder.file(f"{name}.onnx"), folder.file(f"{name}.ort")
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(target)
        # Beyond this level the layout is made for the CPU that happens to convert.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.save_model_format", "ORT")
        try:
            if custom_op_library is not None:
                options.register_custom_ops_library(os.fsdecode(custom_op_library))
            ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
            config = folder.file(f"{name}.required_operators.config")
            _list_operators(target, config)
            digests[f"{name}.ort"] = digest_of(target.read_bytes())
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise OnnxTrainError(
                f"onnxruntime could not convert {source.name!r} to the ORT format: {error}"
            ) from None
    for name in ("checkpoint", "nominal_checkpoint"):
        if (file := folder.file(name)).exists():
            content = read_checkpoint(file)
            _, reserved = split_properties(content.properties)
            generation = Generation.from_property(reserved[PROPERTY])
            assert generation is not None
            generation = replace(generation, files={**generation.files, **digests})
            content.properties = generation.property()
            write_checkpoint(file, content, sort=False)


def _list_operators(model: Path, config: Path) -> None:
    """Write the list of operators with onnxruntime's own tool, which is talkative."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        from onnxruntime.tools.ort_format_model import create_config_from_models

        logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
        create_config_from_models([model], config, False)
    finally:
        root.handlers[:] = handlers  # it sets up logging for the whole program

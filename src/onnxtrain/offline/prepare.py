"""`prepare`: from a model to the folder that a device trains from, in the order of events.

Load the model, add the loss; bring it into canonical form, once; decide what trains; differentiate,
once; fit the result into a memory budget; write the graphs and the checkpoint, all or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnxtrain.offline.add_loss import Loss, add_loss
from onnxtrain.offline.artifacts import Artifacts
from onnxtrain.offline.decide import decide
from onnxtrain.offline.estimated_gradients import loss_gradients
from onnxtrain.offline.forward_model import forward_model
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.limits import Limits, limited
from onnxtrain.offline.loss_gradients import LossGradients
from onnxtrain.offline.named import make_optimizer, require_choice
from onnxtrain.offline.optimizers import Optimizer
from onnxtrain.offline.passes.batch_norm import BatchNormChoice
from onnxtrain.offline.passes.native_kernels import Precision, fit_graphs
from onnxtrain.offline.passes.remat.budget import MemoryBudget, Models, fit_into
from onnxtrain.offline.passes.webgpu import warn_of_uncovered
from onnxtrain.offline.quantize import Quantize, as_quantize
from onnxtrain.offline.selection import Names
from onnxtrain.offline.train_words import Train
from onnxtrain.offline.training_graph import (
    Target,
    evaluation_graph,
    optimizer_graph,
    step_graph,
    training_graph,
)  # fmt: skip
from onnxtrain.offline.writer.files import Parameters, find_library, write_files, write_ort
from onnxtrain.offline.writer.folder import Folder
from onnxtrain.offline.writer.opset_stamp import stamp
from onnxtrain.offline.writer.verify import verify as verify_graphs

StrPath = str | bytes | os.PathLike[Any]


@limited("preparing")
def prepare(
    model: ModelLike,
    output: StrPath | None = "artifacts",
    *,
    train: Train | None = None,
    freeze: Names | None = None,
    loss: Loss | None = "cross_entropy",
    optimizer: str | Optimizer | None = "adamw",
    of: Names | None = None,
    outputs: Names | None = None,
    classes: int | Sequence[str] | None = None,
    after: str | None = None,
    dynamic_batch: bool = False,
    bn: BatchNormChoice | None = "auto",
    tie_weights: bool = True,
    memory_budget: MemoryBudget | None = None,
    sizes: Mapping[str, int] | None = None,
    target: Target = "cpu",
    native: bool = True,
    precision: Precision = "float32",
    proximal: bool = False,
    sample_weight: bool = False,
    prefix: str = "",
    nominal_checkpoint: bool = False,
    ort_format: bool = False,
    custom_op_library: StrPath | None = None,
    quantize: str | Quantize | None = None,
    calibration: Iterable[Any] | None = None,
    verify: bool = True,
    limits: Limits | None = None,
) -> Artifacts:
    """Write the files that a device trains from, and return a description of them.

    Args:
        model: the forward model, or the path to its file; it is not changed.
        output: the folder to write to. It is created.
        train: words ("lora", "bias", "norm", "head", "last:3", "sparse:200MB"), names, patterns, an
            `onnxtrain.Lora` or `Sparse`; by default every weight that the loss depends on trains.
        freeze: names or patterns of parameters that do not train.
        loss: a name ("cross_entropy", "mse", "huber:delta=0.5"), an object of `onnxtrain.losses`,
            a function over block operators, a Block, or an ONNX model; None where the first output
            is the loss already.
        optimizer: a name ("adamw", "sgd:momentum=0.9") or an object of `onnxtrain.optim`; None for
            no optimizer graph. "mezo" needs no gradients, and is slow.
        of: the values that the loss is computed from; the outputs of the model by default.
        outputs: values to return beside the loss; the outputs of the model by default.
        classes: replace the last layer by a new one for so many classes, which alone trains unless
            `train` says more. A list is the names of the classes, which exported models keep.
        after: the value to put that new layer behind.
        dynamic_batch: let a model that was exported for one batch size take any, if it can.
        bn: the statistics of BatchNormalization: those of the "batch", the stored ones ("frozen"),
            or what each node of the "model" says. With "auto" a node whose scale and bias are
            frozen is frozen as a whole, and the others do what the model says.
        tie_weights: whether matrices of equal values train as one parameter, as where an embedding
            is also the output layer. Exporters write such a matrix several times, also transposed.
        memory_budget: what a step may take beside its parameters: a size ("300MB", or bytes), or a
            part ("50%", 0.5) of what it takes otherwise. To keep to it, the backward pass computes
            parts of the forward pass again, which takes time.
        sizes: numbers for symbolic dimensions, by name, that the budget is meant for.
        target: "webgpu" and "cuda" write graphs for GPUs, in browsers and by NVIDIA. They run
            elsewhere too, more slowly. `Artifacts.on_cpu` has what has no WebGPU kernel.
        native: call functions, with plain bodies, where onnxtrain-native has faster kernels.
        precision: what such kernels multiply in; weights, sums and results stay float32.
        proximal: let updates pull the weights back to those of a reference, by a strength that is
            set on the device (FedProx); see `TrainingSession.set_proximal`.
        sample_weight: add an input of a weight for each sample, for `fit(class_weight=...,
            sample_weight=...)`. It multiplies the loss of the sample; the divisor stays as it is.
        prefix: put before each file name.
        nominal_checkpoint: write a checkpoint without data too.
        ort_format: write each graph in the ORT format too.
        custom_op_library: the library of the model's own operators.
        quantize: "int8", "int4-weights" or an `onnxtrain.Quantize`: integers to train and export.
        calibration: batches as training has them, or arrays of samples, for ranges of integers.
        verify: load each graph in onnxruntime before the folder appears; a refusal is an error.
        limits: how much the model may ask for, where the defaults of `Limits` are too low.

    Examples:
        >>> onnxtrain.prepare("mobilenet.onnx", "artifacts", train="fc*", optimizer="sgd")

    """
    require_choice("target", target, ("cpu", "cuda", "webgpu"))
    require_choice("precision", precision, ("float32", "bf16"))
    library, updates = find_library(custom_op_library), make_optimizer(optimizer, proximal)

    # 1. The model, and the loss behind it.
    forward = forward_model(model, of, train, classes, after, dynamic_batch, loss, updates)
    with_loss, names, brought, notes, about = add_loss(
        forward.proto, forward.path, loss, forward.of, outputs, sample_weight=sample_weight
    )
    properties = forward.properties | about.properties()

    # 2. One canonical model, and what of it trains.
    canonical = canonical_model(with_loss, located=True)
    chosen = decide(
        canonical, names[0], brought, forward, freeze, updates, bn, tie_weights,
        as_quantize(quantize), calibration,
    )  # fmt: skip
    trains, frozen, notes = chosen.trains, chosen.frozen, (*forward.notes, *notes, *chosen.notes)

    # 3. Differentiation, once; the training and the step graph are made from the result.
    def gradients(lean: bool = False) -> LossGradients:
        how = {"lean": lean, "on_gpu": target == "cuda"}
        return loss_gradients(canonical, names, trains, frozen, updates, bn=chosen.bn, **how)

    def build(source: LossGradients, early: bool = False, last: bool = False) -> Models:
        made = {"training_model": training_graph(source, target, updates, early=early)}
        if updates is not None:
            how = {"proximal": proximal, "early": early, "last": last}
            made["step_model"] = step_graph(source, updates, target, **how)
        return made

    if memory_budget is None:
        source, memory = gradients(), None
        models = build(source, last=True)
    else:
        source, models, memory = fit_into(memory_budget, gradients, build, sizes, forward.inputs)

    # 4. The files.
    parameters = Parameters.of(source, trains)
    models["eval_model"] = evaluation_graph(canonical, names, source, target, folded=chosen.folded)
    for made in models.values():
        stamp(made)
    if updates is not None:
        models["optimizer_model"] = optimizer_graph(
            updates, parameters.trainable, models["training_model"], target, proximal=proximal
        )
    on_cpu = warn_of_uncovered(models) if target == "webgpu" else {}
    with Folder(output, prefix) as folder:
        stored = parameters.store(folder, models, source.described, forward.adapted, ort_format)
        called = fit_graphs(models, precision) if native and target == "cpu" else ()
        write_files(
            folder, models, stored, names, nominal_checkpoint, called=called, memory=memory,
            target=target, on_cpu=on_cpu, properties=properties,
        )  # fmt: skip
        notes = (*notes, *(verify_graphs(folder, models, library) if verify else ()))
        if ort_format:
            write_ort(folder, models, library)
        files = folder.publish()
    return Artifacts(
        directory=folder.directory,
        files=files,
        **parameters.counts(),
        unreached=chosen.found.unreached,
        without_gradient=chosen.without_gradient,
        tied=tuple(map(str, chosen.tied)),
        loss=names[0],
        outputs=tuple(names[1:]),
        memory=memory,
        on_cpu=tuple(item for items in on_cpu.values() for item in items),
        notes=notes,
        _graph=stored.described,
        _inputs=forward.inputs,
    )

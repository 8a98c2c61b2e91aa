"""What a model holds, as training sees it, before anything is written.

`inspect` answers what would train, what stands in the way, and how much memory a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnxtrain.offline.choices import step_memory, weigh
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.load import ModelLike, read_model
from onnxtrain.offline.graph.limits import Limits, limited
from onnxtrain.offline.inspect_notes import notes_on
from onnxtrain.offline.passes.batch_norm import BatchNormMode
from onnxtrain.offline.passes.feature_values import feature_values
from onnxtrain.offline.passes.quantize.summary import find_integer_operators
from onnxtrain.offline.passes.tie_weights import find_tied
from onnxtrain.offline.quantize import Quantize, as_quantize
from onnxtrain.offline.report import Report, type_of
from onnxtrain.offline.selection import Role, output_named, survey
from onnxtrain.offline.train_words import Train


@limited("inspecting")
def inspect(
    model: ModelLike,
    of: str | None = None,
    *,
    bn: BatchNormMode | None = None,
    tie_weights: bool = True,
    sizes: Mapping[str, int] | None = None,
    train: Iterable[Train] = (),
    quantize: str | Quantize | None = None,
    limits: Limits | None = None,
) -> Report:
    """Tell what of a model would train, and what stands in the way.

    Args:
        model: the model, or the path to its file.
        of: the output that the loss will be computed from; the first one by default.
        bn: the mode of BatchNormalization, as for training.
        tie_weights: whether matrices of equal values train as one parameter, as for training.
        sizes: numbers for symbolic dimensions, by name, for the estimate of memory. The report
            says what was assumed for others.
        train: what `prepare` takes as `train`, several of them: `choices` of the report tells how
            many parameters each would train, and how much memory it takes.
        quantize: what `prepare` takes as `quantize`: `integers` of the report tells how many
            operators will run on integers, which will not, and why.
        limits: how much the model may ask for, where the defaults of `Limits` are too low.

    Examples:
        >>> print(onnxtrain.inspect("mobilenet.onnx", train=["lora", "bias", ["last:3", "norm"]]))

    """
    settings = as_quantize(quantize)
    proto, _ = read_model(model)
    canonical = canonical_model(model)
    graph = canonical.graph
    for value in [v for v in graph.inputs if v.name in graph.initializers]:
        graph.inputs.remove(value)  # a weight is trained, not fed
    output = output_named(graph, of)
    found = survey(canonical, output)
    counts = {role: found.counts(found.names(role)) for role in Role}
    tied = find_tied(found) if tie_weights else ()
    copies = {name for group in tied for name in group.copies}
    for name in copies:
        counts[Role.WEIGHT].pop(name, None)
    unreached = tuple(name for name in found.unreached if name not in copies)
    weights = [graph.initializers[n] for n in counts[Role.WEIGHT]]
    trains = [v for v in weights if v.name not in found.blocked]
    known = {name for node in proto.graph.node for name in node.output}
    features = {str(v.name): type_of(v) for v in feature_values(output) if v.name in known}
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    return Report(
        outputs=tuple(value.name or "" for value in graph.outputs),
        weights=counts[Role.WEIGHT],
        tied=tuple(map(str, tied)),
        statistics=counts[Role.STATISTIC],
        constants=counts[Role.CONSTANT],
        unreached=unreached,
        without_gradient=found.without_gradient(),
        parameter_bytes=sum(v.const_value.nbytes for v in weights if v.const_value is not None),
        opset=canonical.opset_imports[""],
        inputs={str(v.name): type_of(v) for v in graph.inputs},
        output_types={str(v.name): type_of(v) for v in graph.outputs},
        file_opset=opsets.get("", opsets.get("ai.onnx", canonical.opset_imports[""])),
        ir_version=proto.ir_version,
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        tensors=found.findings,
        blocked=tuple(n for n in counts[Role.WEIGHT] if n in found.blocked),
        features=features,
        notes=tuple(notes_on(graph, output, found)),
        cut_by=found.cut_by if unreached or not weights else (),
        choices=tuple(
            weigh(model, of, choice, bn=bn, tie_weights=tie_weights, sizes=sizes)
            for choice in train
        ),
        activations=step_memory(canonical, of, trains, bn, sizes) if trains else None,
        integers=None if settings is None else find_integer_operators(model, settings),
    )

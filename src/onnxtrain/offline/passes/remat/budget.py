"""A budget for the memory of a training step, and what it takes to keep to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir

from onnxtrain.errors import ArgumentError, ArgumentTypeError, MemoryBudgetError
from onnxtrain.offline.graph.infer import skeleton
from onnxtrain.offline.graph.subgraphs import values_of
from onnxtrain.offline.memory import Tensor, likely_sizes, megabytes, require_symbols, shapes_of
from onnxtrain.offline.passes.remat.arena import resident_bytes
from onnxtrain.offline.passes.remat.flow import Flow, execution_order
from onnxtrain.offline.passes.remat.layers import Layers
from onnxtrain.offline.passes.remat.plan import Plan, Planner

if TYPE_CHECKING:
    from onnxtrain.offline.loss_gradients import LossGradients

MemoryBudget = int | float | str
Models = dict[str, ir.Model]
_LIKELY_BATCH = 32
_ROUNDS = 8
_INSIDE_OPERATORS = 1.05  # what operators take for themselves while they run; measured
_MARGIN = 0.97  # of the budget is aimed at, as an estimate is one


@dataclass(frozen=True)
class StepMemory:
    """What a step takes beside its parameters, in bytes, as estimated from its graph."""

    budget: int  # what it may take
    without: int  # what it takes if nothing is computed again
    peak: int  # what it takes now
    sizes: dict[str, int] = field(default_factory=dict)  # of symbolic dimensions
    assumed: tuple[str, ...] = ()  # those of them that nobody gave
    copies: int = 0  # how many nodes run again
    more_time: float = 0.0  # by which part a step takes longer, roughly

    def __str__(self) -> str:
        """Return the estimate as a line of text."""
        sizes = f"{_for_sizes(self.sizes)}{' (assumed)' if self.assumed else ''}"
        change = (
            f"{megabytes(self.peak)} instead of {megabytes(self.without)}: {self.copies} nodes run "
            f"again, about {self.more_time:.0%} of the time of a step"
            if self.copies
            else f"{megabytes(self.peak)}: nothing has to be computed again"
        )
        return f"at most {megabytes(self.budget)}{sizes}, estimated {change}"

    def notes(self) -> dict[str, object]:
        """Return what the artifacts say of it."""
        return {
            "budget": self.budget,
            "estimate": self.peak,
            "without": self.without,
            "sizes": self.sizes,
        }


_SMALL_GRADIENTS = 0.1  # of a budget: updates of adapters need not hurry
_MANY_NODES = 2000
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*(%|[kmg]?b)?")
_UNITS = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30}


def parse_budget(budget: object, argument: str = "memory_budget") -> int | float:
    """Return a budget as a number of bytes (an integer), or as a fraction of at most 1.

    Takes bytes, a fraction, or a text such as "300MB", "50%" or "0.5". `argument` is what it was
    given as.
    """
    if isinstance(budget, str):
        found = _SIZE.fullmatch(budget.strip().lower())
        if found is None:
            raise ArgumentError(
                f"{argument} is a size such as 300MB, or a part such as 50%, not {budget!r}"
            )
        budget = float(found[1])
        if found[2] is not None:
            budget = budget / 100 if found[2] == "%" else int(budget * _UNITS[found[2]])
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ArgumentTypeError(
            f"{argument} is a number of bytes, or a fraction of what a step takes without one, "
            f"such as 0.5, not {budget!r}"
        )
    if not budget > 0:
        raise ArgumentError(f"{argument} is {budget}; it has to be above zero")
    return int(budget) if budget > 1 else budget


def fit_into(
    budget: MemoryBudget,
    differentiate: Callable[[bool], LossGradients],
    build: Callable[[LossGradients, bool], Models],
    sizes: Mapping[str, int] | None = None,
    inputs: Collection[str] | None = None,
) -> tuple[LossGradients, Models, StepMemory]:
    """Return gradients and graphs whose activations fit into a budget, and what they take.

    `differentiate(True)` returns gradients that take less memory and more time; `build` makes the
    graphs of gradients, with True for updates that do not wait for each other. `sizes` has numbers
    for symbolic dimensions, which can be chosen for `inputs`.
    """
    wanted = parse_budget(budget)
    source = differentiate(False)
    models = build(source, False)
    numbers, assumed = _numbers(models["training_model"].graph, wanted, sizes, inputs)
    scale = _Scale(models, numbers)
    without = scale.weigh(models)
    limit = wanted if isinstance(wanted, int) else int(wanted * without)
    if without <= limit:
        return source, models, StepMemory(limit, without, without, numbers, assumed)

    # Small gradients may as well wait for each other, where the graph is so large that it matters:
    # updates that do not wait are a chain, along which all that is weighed is weighed again.
    is_small = _gradient_bytes(source) <= limit * _SMALL_GRADIENTS
    found = None
    if is_small and _node_count(source) >= _MANY_NODES:
        found = _search(source, models, scale, lambda gradients: build(gradients, False), limit)

    def build_early(gradients: LossGradients) -> Models:
        return build(gradients, True)

    if found is None or found.peak > limit:
        models = build_early(source)
        found = _search(source, models, _Scale(models, numbers), build_early, limit)
    if found.peak > limit:
        # Only now: so far the numbers are the same to the bit, lean gradients differ by rounding.
        lean = differentiate(True)
        if _node_count(lean) != _node_count(source):
            models = build_early(lean)
            found = _search(lean, models, _Scale(models, numbers), build_early, limit)
    if found.peak > limit:
        raise MemoryBudgetError(_out_of_reach(limit, found.peak, without, numbers))
    memory = StepMemory(
        limit, without, found.peak, numbers, assumed, found.plan.copies, found.more_time
    )
    return found.source, found.models, memory


def _gradient_bytes(source: LossGradients) -> int:
    return sum(source.tensors[n].nbytes for n in source.gradients if n in source.tensors)


def _node_count(source: LossGradients) -> int:
    return sum(1 for _ in source.model.graph.all_nodes())


def _numbers(
    graph: ir.Graph,
    budget: float,
    sizes: Mapping[str, int] | None,
    inputs: Collection[str] | None,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return a number for each symbolic dimension of the inputs, and which were assumed."""
    symbols, given = likely_sizes(graph.inputs, inputs), dict(sizes or {})
    require_symbols(given, symbols)
    batch = next(iter(symbols), None)
    if batch is not None:
        symbols[batch] = _LIKELY_BATCH
    assumed = tuple(name for name in symbols if name not in given)
    if assumed and isinstance(budget, int):
        raise ArgumentError(
            f"how many bytes a step takes depends on {', '.join(map(repr, assumed))}: say for "
            f"which sizes memory_budget is meant, such as sizes={{{assumed[0]!r}: 32}} (on the "
            f"command line --size {assumed[0]}=32), or give a fraction such as 0.5"
        )
    return {**symbols, **given}, assumed


class _Scale:
    """Weighs graphs: all are made from one model, so their values have the same names."""

    def __init__(self, models: Models, numbers: Mapping[str, int]) -> None:
        training, step = models["training_model"], models.get("step_model")
        self.tensors: dict[str, Tensor] = shapes_of(skeleton(training), numbers)
        if step is not None:
            # Inference over the optimizer takes long, and its shapes are declared.
            self.tensors = _declared(step.graph, numbers) | self.tensors
        self.sizes = {name: tensor.nbytes for name, tensor in self.tensors.items()}

    def weigh(self, models: Models, copies: Mapping[str, str] | None = None) -> int:
        """Return what the largest of the graphs takes, gaps between values included."""
        sizes = {**self.sizes, **{n: self.sizes.get(o, 0) for n, o in (copies or {}).items()}}
        flows = (Flow.of(model.graph) for model in models.values())
        taken = max(resident_bytes(flow, execution_order(flow.steps), sizes) for flow in flows)
        return int(taken * _INSIDE_OPERATORS)


def _declared(graph: ir.Graph, numbers: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the values whose shape the graph tells, with numbers for symbolic dimensions."""
    found = {}
    for value in values_of(graph):
        if value.dtype is not None and value.shape is not None:
            dims = [d if isinstance(d, int) else numbers.get(str(d.value), -1) for d in value.shape]
            if -1 not in dims:
                found[str(value.name)] = Tensor(tuple(dims), value.dtype.itemsize)
    return found


class _Found(NamedTuple):
    source: LossGradients
    models: Models
    plan: Plan
    peak: int
    more_time: float


def _search(
    source: LossGradients,
    models: Models,
    scale: _Scale,
    build: Callable[[LossGradients], Models],
    limit: int,
) -> _Found:
    """Plan, build and weigh, until what was built fits; or return the leanest that was built."""
    limit = int(limit * _MARGIN)
    flow = Flow.of(models.get("step_model", models["training_model"]).graph).without_shapes()
    layers = Layers(flow, source.forward, source.data, scale.sizes)
    shapes = {name: tensor.dims for name, tensor in scale.tensors.items()}
    planner, target = Planner(flow, layers, shapes, scale.sizes), limit
    best: _Found | None = None
    misses = 0
    kept: frozenset[str] | None = None
    for left in reversed(range(_ROUNDS)):
        plan = planner.search(target, kept)
        misses += plan.peak_bytes > target
        kept, peak = plan.kept, int(planner.resident(plan.kept) * _INSIDE_OPERATORS)
        if peak > limit and not misses and left:
            target = _lower(target, plan, peak, limit)
            continue  # it would not fit: that is known before it is built
        smaller, copies = source.rematerialized(plan.kept, scale.sizes)
        built = build(smaller)
        peak = scale.weigh(built, copies)
        if best is None or peak < best.peak:
            best = _Found(smaller, built, plan, peak, plan.seconds / planner.seconds)
        if peak <= limit or misses > 1:
            break
        target = _lower(target, plan, peak, limit)
    assert best is not None
    return best


def _lower(target: int, plan: Plan, peak: int, limit: int) -> int:
    """Return what to aim at next, where a plan takes more than the limit."""
    return min(target, plan.peak_bytes) - max((peak - limit) // 2, limit // 50)


def _out_of_reach(limit: int, peak: int, without: int, numbers: Mapping[str, int]) -> str:
    return (
        f"memory_budget={limit} ({megabytes(limit)}) cannot be reached{_for_sizes(numbers)}: with "
        f"all that helps computed again, a step takes about {megabytes(peak)} beside its "
        f"parameters ({megabytes(without)} if nothing is computed again). Give "
        f"memory_budget={peak + peak // 32 + 4096} or more, or train with smaller batches: "
        "fit(..., micro_batch_size=n) makes the same update in smaller passes"
    )


def _for_sizes(numbers: Mapping[str, int]) -> str:
    known = ", ".join(f"{name} = {number}" for name, number in numbers.items())
    return f" for {known}" if known else ""

"""A budget for the memory of a training step, and what it takes to keep to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import onnx
import onnx_ir as ir

from onnxtrain.errors import ArgumentError, ArgumentTypeError, MemoryBudgetError
from onnxtrain.offline.blocks.values import without_weights
from onnxtrain.offline.memory import Tensor, likely_sizes, require_symbols, shapes_of, sizes_of
from onnxtrain.offline.passes.remat.arena import resident_bytes
from onnxtrain.offline.passes.remat.flow import Flow, execution_order
from onnxtrain.offline.passes.remat.layers import Layers
from onnxtrain.offline.passes.remat.plan import Plan, Planner
from onnxtrain.offline.passes.remat.rewrite import Recomputation
from onnxtrain.offline.training_graph import TrainingGraphs

Budget = int | float
Build = Callable[..., TrainingGraphs]
_LIKELY_BATCH = 32
_ROUNDS = 8
_INSIDE_OPERATORS = 1.05  # what operators take for themselves while they run; measured
_MARGIN = 0.97  # of the budget is aimed at, as an estimate is one


@dataclass(frozen=True)
class StepMemory:
    """What a step takes beside its parameters, in bytes, as estimated from its graph.

    Attributes:
        budget: what it may take.
        without: what it takes if nothing is computed again.
        peak: what it takes now.
        sizes: the numbers of symbolic dimensions that this holds for.
        assumed: those of them that nobody gave.
        copies: how many nodes run again.
        more_time: by which part a step takes longer, roughly.

    """

    budget: int
    without: int
    peak: int
    sizes: dict[str, int] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    copies: int = 0
    more_time: float = 0.0

    def __str__(self) -> str:
        """Return the estimate as a line of text."""
        known = ", ".join(f"{name} = {number}" for name, number in self.sizes.items())
        sizes = f" for {known}{' (assumed)' if self.assumed else ''}" if known else ""
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


def megabytes(size: int) -> str:
    """Write a number of bytes."""
    return f"{size / 2**20:,.1f} MB"


def check_budget(budget: object) -> None:
    """Refuse what cannot be a budget."""
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ArgumentTypeError(
            "memory_budget is a number of bytes, or a fraction of what a step takes without one, "
            f"such as 0.5, not {budget!r}"
        )
    if not budget > 0:
        raise ArgumentError(f"memory_budget is {budget}; it has to be above zero")


def fit_into(
    budget: Budget,
    graphs: TrainingGraphs,
    build: Build,
    sizes: Mapping[str, int] | None = None,
    inputs: Collection[str] | None = None,
) -> tuple[TrainingGraphs, StepMemory]:
    """Return graphs whose activations fit into a budget, and what they take.

    Args:
        budget: bytes, or a fraction (at most 1) of what the given graphs take.
        graphs: the graphs that keep everything.
        build: builds them anew, with `recompute` and `lean` of `build_training_graphs`.
        sizes: numbers for symbolic dimensions, by their names.
        inputs: the inputs whose symbolic dimensions can be chosen.

    """
    check_budget(budget)
    numbers, assumed = _numbers(graphs.training.graph, budget, sizes, inputs)
    weigher = _Weigher(graphs, numbers)
    without = weigher.peak(graphs)
    limit = int(budget) if _is_bytes(budget) else int(budget * without)
    if without <= limit:
        return graphs, StepMemory(limit, without, without, numbers, assumed)
    found, plan, peak = _search(weigher, build, limit)
    lean = graphs if peak <= limit else build(lean=True)
    if lean.training != graphs.training:
        # Only now: so far the numbers are the same to the bit, these differ by rounding.
        weigher = _Weigher(lean, numbers)
        found, plan, peak = _search(weigher, partial(build, lean=True), limit)
    if peak > limit:
        raise MemoryBudgetError(_out_of_reach(limit, peak, without, numbers))
    return found, StepMemory(
        limit, without, peak, numbers, assumed, plan.copies, weigher.more_time(plan)
    )


def _is_bytes(budget: Budget) -> bool:
    return isinstance(budget, int) or budget > 1


def _numbers(
    graph: onnx.GraphProto,
    budget: Budget,
    sizes: Mapping[str, int] | None,
    inputs: Collection[str] | None,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return a number for each symbolic dimension of the inputs, and which were assumed."""
    symbols, given = likely_sizes(graph, inputs), dict(sizes or {})
    require_symbols(given, symbols)
    batch = next(iter(symbols), None)
    if batch is not None:
        symbols[batch] = _LIKELY_BATCH
    assumed = tuple(name for name in symbols if name not in given)
    if assumed and _is_bytes(budget):
        raise ArgumentError(
            f"how many bytes a step takes depends on {', '.join(map(repr, assumed))}: say for "
            f"which sizes memory_budget is meant, such as sizes={{{assumed[0]!r}: 32}} (on the "
            f"command line --size {assumed[0]}=32), or give a fraction such as 0.5"
        )
    return {**symbols, **given}, assumed


class _Weigher:
    """Tells what graphs take: all are made from one model, so their values have the same names."""

    def __init__(self, graphs: TrainingGraphs, numbers: Mapping[str, int]) -> None:
        self._graphs = graphs
        self._numbers = numbers
        self._tensors: dict[str, Tensor] = shapes_of(without_weights(graphs.training), numbers)
        if graphs.step is not None:
            # Inference over the optimizer takes long, and its shapes are declared.
            self._tensors = declared(graphs.step.graph, numbers) | self._tensors
        self.sizes = sizes_of(self._tensors)

    def peak(self, graphs: TrainingGraphs, copies: Mapping[str, str] | None = None) -> int:
        """Return what the largest of the graphs takes, gaps between values included."""
        sizes = {**self.sizes, **{n: self.sizes.get(o, 0) for n, o in (copies or {}).items()}}
        models = [m for m in (graphs.training, graphs.step) if m is not None]
        flows = (Flow.of(model.graph) for model in models)
        taken = max(resident_bytes(flow, execution_order(flow.steps), sizes) for flow in flows)
        return int(taken * _INSIDE_OPERATORS)

    def planner(self) -> Planner:
        """Return a planner for the graph that runs."""
        graphs = self._graphs
        model = graphs.training if graphs.step is None else graphs.step
        flow = Flow.of(model.graph).without_shapes()
        layers = Layers(flow, graphs.forward, graphs.data, self.sizes)
        shapes = {name: tensor.dims for name, tensor in self._tensors.items()}
        self._planner = Planner(flow, layers, shapes, self.sizes)
        return self._planner

    def more_time(self, plan: Plan) -> float:
        """Return by which part a step takes longer."""
        return plan.seconds / self._planner.seconds


def declared(graph: onnx.GraphProto, numbers: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the values whose shape the graph tells, with numbers for symbolic dimensions."""
    found = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        dims = [
            d.dim_value if d.HasField("dim_value") else numbers.get(d.dim_param, -1)
            for d in kind.shape.dim
        ]
        if kind.elem_type and kind.HasField("shape") and -1 not in dims:
            found[info.name] = Tensor(tuple(dims), ir.DataType(kind.elem_type).itemsize)
    return found


def _search(weigher: _Weigher, build: Build, limit: int) -> tuple[TrainingGraphs, Plan, int]:
    """Plan, build and weigh, until what was built fits; or return the leanest that was built."""
    limit = int(limit * _MARGIN)
    planner, target = weigher.planner(), limit
    best: tuple[TrainingGraphs, Plan, int] | None = None
    misses = 0
    for _ in range(_ROUNDS):
        plan = planner.search(target)
        misses += plan.peak_bytes > target
        recompute = Recomputation(plan.kept, weigher.sizes)
        graphs = build(recompute=recompute)
        peak = weigher.peak(graphs, recompute.copies)
        if best is None or peak < best[2]:
            best = graphs, plan, peak
        if peak <= limit or misses > 1:
            break
        target = min(target, plan.peak_bytes) - max((peak - limit) // 2, limit // 50)
    assert best is not None
    return best


def _out_of_reach(limit: int, peak: int, without: int, numbers: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{name} = {number}" for name, number in numbers.items())
    return (
        f"memory_budget={limit} ({megabytes(limit)}) cannot be reached"
        f"{f' for {sizes}' if sizes else ''}: with all that helps computed again, a step takes "
        f"about {megabytes(peak)} beside its parameters ({megabytes(without)} if nothing is "
        f"computed again). Give memory_budget={peak + (1 << 20)} or more, or train with smaller "
        "batches: fit(..., micro_batch=k) makes the same update from k smaller passes"
    )

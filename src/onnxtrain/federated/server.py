"""The server: it sends the weights of the artifacts to clients and averages what they learn."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum, Result, Strategy

from onnxtrain.device.checks import at_least
from onnxtrain.device.loop import evaluate as evaluate_session
from onnxtrain.device.session import TrainingSession
from onnxtrain.device.state import CheckpointState
from onnxtrain.errors import ArgumentError, OnnxTrainError, StateError
from onnxtrain.federated.arguments import check_export, checked_outputs, made_by, write_export
from onnxtrain.federated.arrays import from_arrays, read_record, to_arrays
from onnxtrain.federated.bundle import Bundle, Source, open_artifacts
from onnxtrain.federated.checks import Checks
from onnxtrain.federated.compression import Compression
from onnxtrain.federated.files import explained_damage
from onnxtrain.federated.guard import Guarded, Settings, least_nodes, setting_of
from onnxtrain.federated.local import LocalGrid
from onnxtrain.federated.progress import (
    CENTRAL,
    EVALUATE,
    TRAIN,
    Progress,
    capture,
    kind_of,
    locked,
    restore,
    settings_of,
)
from onnxtrain.federated.rounds import MU, PASSED_ON, Round
from onnxtrain.federated.selection import Which, checked_which, variances
from onnxtrain.federated.stragglers import DeadlineGrid, GridProxy
from onnxtrain.format.checkpoint.content import Array

_log = logging.getLogger("flwr")
Finish = Callable[..., None]
Weights = Source | Mapping[str, Array] | Callable[[dict[str, tuple[int, ...]]], Mapping[str, Array]]


def server_app(
    artifacts: Source | Bundle,
    strategy: Strategy | str | Callable[[Context], Strategy | str] | None = None,
    *,
    num_rounds: int | None = None,
    weights: Weights | None = None,
    which: Which = "changing",
    config: Settings | None = None,
    evaluate: Any = None,
    metrics: Any = (),
    batch_size: int = 256,
    export: Source | None = None,
    outputs: Iterable[str] = (),
    state: Source | None = None,
    resume: bool = True,
    timeout: float = 3600,
    patience: float | None = None,
    wait_for: int = 0,
    threads: int | None = None,
    check_version: bool = True,
    checks: Checks | None = None,
    finish: Finish | None = None,
    prefix: str = "",
) -> ServerApp:
    """Return a Flower `ServerApp` that trains artifacts with the connected clients.

    Args:
        artifacts: the artifact folder, or a file that `pack` wrote.
        strategy: any of Flower's, or the name of a mean that hostile clients cannot move far:
            "trimmed-mean:0.3" leaves out 30 % of the values at either end, "median", "krum:3" takes
            the update that is closest to others and expects 3 hostile clients. Or a function of the
            `Context` that returns one; FedAvg by default.
        num_rounds: the number of rounds; `num-server-rounds` of the run's configuration by
            default, or 3.
        weights: initial weights other than those of the artifacts: a checkpoint file, arrays by
            name, or a function from shapes by name to arrays.
        which: the parameters to share; the others stay on the clients. See `to_arrays`.
        config: settings of rounds (`learning-rate`, `local-epochs`, `batch-size`, `seed`,
            `clip-norm`, `compression`), or a function of the number of the round. They take
            precedence over the run's configuration.
        evaluate: data for evaluation on the server, or a function of the `Context` that returns
            them.
        metrics: metrics beside the loss, as for `onnxtrain.evaluate`.
        batch_size: the batch size of that evaluation.
        export: the file of the inference model, written at the end.
        outputs: the outputs of that model.
        state: a folder that is written after each round. A restarted server continues from it.
        resume: False to start anew in that folder.
        timeout: how many seconds a round waits for replies.
        patience: once enough clients have answered for the strategy, wait at most so many times as
            long as the slowest of them took. Without it a round waits for a dead client until
            Flower misses its heartbeats, which takes a minute.
        wait_for: the number of clients to wait for before the first round.
        threads: the number of threads for evaluation; all cores by default.
        check_version: whether clients need identical graphs. Clients with graphs in the ORT
            format, for instance, do not have them.
        checks: what is checked in the replies of clients; see `Checks`.
        finish: called at the end with Flower's result, the session with the final weights, and the
            `Context` if it takes three arguments.
        prefix: the prefix of the file names in the artifact folder.

    """
    names = checked_outputs(export, outputs)
    _require_number("patience", patience, 1)
    _require_number("timeout", timeout, 0)
    _require_number("wait_for", wait_for, 0)
    _require_strategy(strategy)
    if checks is not None and not isinstance(checks, Checks):
        raise ArgumentError(f"checks is onnxtrain.federated.Checks(...), not {checks!r}")
    ending = None if finish is None else _ending(finish)
    shared = checked_which(which)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        bundle = artifacts if isinstance(artifacts, Bundle) else open_artifacts(artifacts, prefix)
        chosen = strategy(context) if callable(strategy) else strategy
        settings = _settings(config, context)
        data = made_by(evaluate, context)
        rounds = (
            context.run_config.get("num-server-rounds", 3) if num_rounds is None else num_rounds
        )
        server = Server(
            bundle,
            named_strategy(chosen) if isinstance(chosen, str) else chosen or FedAvg(),
            rounds=at_least(1, "the number of rounds", rounds),
            weights=weights,
            which=shared,
            folder=None if state is None else Path(state),
            resume=resume,
            threads=threads,
            check_version=check_version,
            checks=checks,
        )
        if export is not None:
            check_export(server.session, export, names)
        measure = None if data is None else (data, metrics, batch_size)
        _wait_for(grid, wait_for)
        if patience is not None:
            grid = DeadlineGrid(grid, patience, least_nodes(server.strategy))
        result = server.run(grid, settings, measure, timeout)
        if export is not None:
            write_export(server.session, export, names)
        if ending is not None:
            ending(result, server.session, context)

    return app


class Server:
    """A federation from its first round, or the one after a restart, to its last."""

    def __init__(
        self,
        bundle: Bundle,
        strategy: Strategy,
        *,
        rounds: int,
        weights: Weights | None = None,
        which: Which = "changing",
        folder: Path | None = None,
        resume: bool = True,
        threads: int | None = None,
        check_version: bool = True,
        checks: Checks | None = None,
    ) -> None:
        self.bundle = bundle
        self._checks_version, self._checks = check_version, checks
        self.session = bundle.session(threads)
        if weights is not None:
            self.session.load_parameters(_weights(weights, self.session))
        if self.session.state.nominal:
            raise StateError(
                "the artifacts have no weights to begin with: give the server the artifact folder "
                "with its checkpoint, or weights=..."
            )
        self.strategy, self._rounds, self._folder = strategy, rounds, folder
        self._first = to_arrays(self.session, which)
        held = self.session.module.training_state
        self._initial = {  # of any type: a packed client has no weights at all
            name: np.array(held.value_of(name)) for name in held.names() if name not in self._first
        }
        self._fixed = settings_of(strategy)
        self._has_weights = weights is not None
        mu, optimizer = setting_of(strategy, "proximal_mu", 0.0), self.session.optimizer
        if mu and optimizer is not None and not optimizer.has_proximal:
            raise ArgumentError(
                f"the strategy has proximal_mu={mu}, but the artifacts have no proximal term: "
                "generate them with generate_artifacts(..., proximal=True)"
            )
        self.progress = self._begin(resume)
        self.guarded: Guarded | None = None

    def _begin(self, resume: bool) -> Progress:
        saved = Progress.read(self._folder) if resume and self._folder is not None else None
        if saved is None:
            return Progress(self.bundle.version, arrays=read_record(self._first))
        if saved.version != self.bundle.version or set(saved.arrays) != set(self._first):
            raise StateError(
                f"the folder {str(self._folder)!r} has a federation of other artifacts, or one "
                "that shares other parameters: use another folder, or resume=False to start anew"
            )
        kind = kind_of(self.strategy)
        if saved.kind and saved.kind != kind:
            raise StateError(
                f"the federation in {str(self._folder)!r} was run with {saved.kind}, not with "
                f"{kind}: use the same strategy, another folder, or resume=False"
            )
        _log.info("resuming after round %d, from %s", saved.round, self._folder)
        if self._has_weights:
            _log.warning("weights=... is ignored: the federation continues with its own")
        with explained_damage(f"the federation in {str(self._folder)!r}"):
            restore(self.strategy, saved.strategy)
        return saved

    def run(
        self,
        grid: Grid,
        config: Settings | None = None,
        measure: tuple[Any, Any, int] | None = None,
        timeout: float = 3600,
    ) -> Result:
        """Run the remaining rounds; afterwards the session has the final weights."""
        _require_nodes(grid, self.strategy)
        progress, done = self.progress, self.progress.round
        central = None if measure is None else partial(self._measure, measure, done)
        guarded = self.guarded = Guarded(
            self.strategy,
            config=config,
            name=progress.name,
            version=self.bundle.version if self._checks_version else None,
            initial=self._initial,
            rounds=self._rounds,
            done=done,
            variances=variances(self.session),
            statistics=self.session.module.statistics,
            checks=self._checks,
            after_round=self._save,
            after_evaluation=lambda n, m: progress.note(EVALUATE, n, m, self._folder),
        )
        with locked(self._folder):
            if done and not progress.has(EVALUATE, done):
                # The server stopped before the clients evaluated the last round.
                record = progress.record()
                messages = list(guarded.configure_evaluate(0, record, ConfigRecord(), grid))
                if messages:
                    guarded.aggregate_evaluate(0, grid.send_and_receive(messages, timeout=timeout))
            if done < self._rounds:
                guarded.start(
                    grid,
                    progress.record(),
                    num_rounds=self._rounds - done,
                    timeout=timeout,
                    train_config=ConfigRecord(),
                    evaluate_config=ConfigRecord(),
                    evaluate_fn=central,
                )
                if not guarded.updates:
                    _log.error("no round had an update: the weights have not changed")
            else:
                _log.info("all %d rounds are done", self._rounds)
                if central is not None and not progress.has(CENTRAL, done):
                    central(0, progress.record())
        from_arrays(self.session, progress.record())
        return progress.result()

    def _measure(
        self, given: tuple[Any, Any, int], done: int, number: int, arrays: ArrayRecord
    ) -> MetricRecord | None:
        """Evaluate on the server; `number` counts the rounds since this run began."""
        data, metrics, batch_size = given
        from_arrays(self.session, arrays)
        try:
            values = evaluate_session(self.session, data, metrics, batch_size=batch_size)
        except OnnxTrainError as error:
            if number + done == 0:  # nothing is lost yet, and it would fail in every round
                raise
            _log.warning("round %d: evaluation on the server failed: %s", number + done, error)
            return None
        made = MetricRecord({k: v for k, v in values.items() if isinstance(v, int | float)})
        self.progress.note(CENTRAL, number + done, made, self._folder)
        return made

    def _save(self, number: int, arrays: ArrayRecord, metrics: MetricRecord) -> None:
        progress = self.progress
        progress.round, progress.arrays = number, read_record(arrays)
        progress.note(TRAIN, number, metrics, self._folder)
        if self._folder is None:
            return
        progress.kind = kind_of(self.strategy)
        progress.strategy = capture(self.strategy, self._fixed)
        progress.write(self._folder)


def _weights(given: Weights, session: TrainingSession) -> Mapping[str, Array]:
    if isinstance(given, Mapping):
        return given
    if callable(given):
        names = session.module.training_state.names()
        return given({name: session.module.shape_of(name) for name in names})
    state = CheckpointState.load_checkpoint(given)
    return {name: parameter.data for name, parameter in state.parameters}


def _wait_for(grid: Grid, clients: int) -> None:
    shown = -1
    while (found := len(list(grid.get_node_ids()))) < clients:
        if found != shown:
            _log.info("waiting for clients: %d of %d are connected", found, clients)
        shown = found
        time.sleep(0.5)


def _settings(given: Settings | None, context: Context) -> Callable[[int], dict[str, Any]]:
    """Return a function from a round to its settings: the given ones, then those of the run."""
    of_run = {key: context.run_config[key] for key in PASSED_ON if key in context.run_config}

    def settings(number: int) -> dict[str, Any]:
        own = given(number) if callable(given) else given or {}
        if not isinstance(own, Mapping):
            raise ArgumentError(f"config returned {own!r} for round {number}, not a dictionary")
        made = {**of_run, **{key: _plain(key, value) for key, value in own.items()}}
        Compression.read(Round.read(made).compression)  # fail here, not on every client
        return made

    for key in {} if given is None or callable(given) else given:
        meant = str(key).replace("_", "-")
        if meant != key and meant in (*PASSED_ON, MU):
            _log.warning("clients do not know the setting %r; did you mean %r?", key, meant)
    return settings


def _plain(key: str, value: Any) -> Any:
    """Return a setting in a type that Flower sends."""
    value = value.item() if isinstance(value, np.generic) else value
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, bool | int | float | str | bytes) for item in items):
        raise ArgumentError(f"the setting {key!r} is {value!r}, not a number, a string or a list")
    return value


# ---- arguments -----------------------------------------------------------------------------------


def _require_number(name: str, value: Any, least: int) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= least):
        raise ArgumentError(f"{name} is a number from {least}, not {value!r}")


def named_strategy(given: str) -> Strategy:
    """Return the strategy of a name: that of a mean that few clients cannot move far."""
    name, _, number = given.partition(":")
    with suppress(ValueError):
        if given in ("fedavg", "median"):
            return FedAvg() if given == "fedavg" else FedMedian()
        if name == "trimmed-mean":
            return FedTrimmedAvg(beta=float(number or 0.2))
        if name == "krum" and int(number) >= 0:
            return Krum(num_malicious_nodes=int(number))
    raise ArgumentError(
        "a strategy is one of Flower's, or the name of one: 'fedavg', 'median', 'trimmed-mean:0.3' "
        f"with the part to leave out at either end, 'krum:3' with the number of hostile clients, "
        f"not {given!r}"
    )


def _require_strategy(given: Any) -> None:
    if isinstance(given, str):
        named_strategy(given)
        return
    is_class = isinstance(given, type)
    if is_class or not (given is None or isinstance(given, Strategy) or callable(given)):
        hint = f"{given.__name__}()" if is_class else "FedAvg()"
        raise ArgumentError(
            f"strategy is one of Flower's, such as {hint}, or a function of the Context that "
            f"returns one, not {given!r}"
        )


def _ending(finish: Finish) -> Finish:
    """Return a function of three arguments that calls one of two or three."""
    for count in (3, 2):
        with suppress(TypeError):
            inspect.signature(finish).bind(*[None] * count)
            return lambda *given: finish(*given[:count])
    raise ArgumentError("finish takes Flower's result, the session and, optionally, the Context")


def _require_nodes(grid: Grid, strategy: Strategy) -> None:
    """Raise an error for a local federation with fewer clients than the strategy waits for."""
    while isinstance(grid, GridProxy):
        grid = grid.inner
    least = least_nodes(strategy)
    if isinstance(grid, LocalGrid) and len(grid.contexts) < least:
        raise ArgumentError(
            f"there are {len(grid.contexts)} clients, and the strategy waits for {least}: lower "
            "its min_available_nodes, min_train_nodes and min_evaluate_nodes"
        )

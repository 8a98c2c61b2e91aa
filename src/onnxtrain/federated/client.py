"""The client: it receives weights, trains on its own data, and sends weights back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from onnxtrain.device.checks import at_least
from onnxtrain.device.loop import evaluate as evaluate_session
from onnxtrain.device.loop import fit
from onnxtrain.device.loop.batches import make_source
from onnxtrain.device.loop.callbacks import as_callbacks
from onnxtrain.device.optimizer import Optimizer
from onnxtrain.device.random_state import RandomState
from onnxtrain.errors import ArgumentError, StateError
from onnxtrain.federated.arguments import ClientExport, Data, checked_outputs, data_of, samples_in
from onnxtrain.federated.arrays import to_record
from onnxtrain.federated.bundle import Bundle, SharedSession, Source, borrowed, require_path
from onnxtrain.federated.client_state import ClientState, ClientStateStore, client_number
from onnxtrain.federated.compression import Compression, clip
from onnxtrain.federated.failures import Stage, without_text
from onnxtrain.federated.messages import contents
from onnxtrain.federated.round_limits import Deadline, RoundLimits
from onnxtrain.federated.rounds import (
    COMPRESSION,
    FEDERATION,
    LAST,
    MU,
    PASSED_ON,
    RATE,
    ROUND,
    TOKEN,
    VERSION,
    Round,
)
from onnxtrain.federated.task import (
    Task,
    compressed,
    explained_state,
    received_weights,
    replied,
    set_parameters,
)


def client_app(
    artifacts: Source | Bundle,
    data: Data,
    evaluate: Data = None,
    *,
    metrics: Any = (),
    mods: Sequence[Any] = (),
    keep_optimizer: bool = False,
    state: Source | None = None,
    threads: int | None = None,
    export: Source | None = None,
    outputs: Iterable[str] = (),
    prefix: str = "",
    defaults: Mapping[str, Any] | None = None,
    fit_options: Mapping[str, Any] | None = None,
    limits: RoundLimits | None = None,
) -> ClientApp:
    """Return a Flower `ClientApp` that trains artifacts on its own data.

    The settings of a round come with its message: `learning-rate`, `local-epochs`, `batch-size`,
    `seed`, `proximal-mu`, `clip-norm` and `compression`.

    Args:
        artifacts: the artifact folder, or a file that `pack` wrote.
        data: the training data, as for `onnxtrain.fit`, or a function of Flower's `Context` that
            returns them. A function that returns an iterator is called for each epoch.
        evaluate: the same for evaluation; None for clients that do not evaluate.
        metrics: metrics beside the loss, as for `onnxtrain.evaluate`.
        mods: Flower's mods, the outermost first. They apply to training, not to evaluation.
            Compression follows after all of them.
        keep_optimizer: continue with the optimizer state of the client's last round in this
            federation, instead of zeros.
        state: a folder for the client's state; without one it lasts as long as the node. The
            node's configuration may name another one, as `state-dir`. The `client-name` or
            `partition-id` of the nodes distinguishes clients that share a folder.
        threads: the number of threads; OMP_NUM_THREADS by default, or all cores.
        export: the file of the inference model, written when the client evaluates the last round:
            a name in the folder `state`, or a path. A client with a `client-name` or
            `partition-id` appends it: "mine.onnx" becomes "mine-3.onnx", unless the node's
            configuration has a `state-dir`. Or say where it belongs: "{client}/mine.onnx".
        outputs: the outputs of that model.
        prefix: the prefix of the file names in the artifact folder.
        defaults: settings of a round that apply where the server sends none.
        fit_options: further arguments of `onnxtrain.fit`, such as `schedule`.
        limits: the most that a server may ask for; see `RoundLimits`.

    """
    chosen = list(mods) if isinstance(mods, Iterable) else [None]
    if not all(map(callable, chosen)):
        raise ArgumentError(f"mods is a list of Flower's mods, not {mods!r}")
    client = Client(
        artifacts,
        data,
        evaluate,
        metrics=metrics,
        keep_optimizer=keep_optimizer,
        state=state,
        threads=threads,
        export=export,
        outputs=outputs,
        prefix=prefix,
        defaults=defaults,
        fit_options=fit_options,
        limits=limits,
    )
    app = ClientApp(mods=None)
    app.train(mods=[client.compressing, *chosen])(client.train)
    app.evaluate()(client.evaluate)
    return app


class Client:
    """The functions of the `ClientApp` that `client_app` returns; its arguments are the same."""

    def __init__(
        self,
        artifacts: Source | Bundle,
        data: Data,
        evaluate: Data = None,
        *,
        metrics: Any = (),
        keep_optimizer: bool = False,
        state: Source | None = None,
        threads: int | None = None,
        export: Source | None = None,
        outputs: Iterable[str] = (),
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
        limits: RoundLimits | None = None,
    ) -> None:
        if not isinstance(artifacts, Bundle):
            require_path("artifacts", artifacts)
        self._artifacts, self._prefix = artifacts, prefix
        self._data, self._evaluation = data, evaluate
        self._metrics = metrics
        self._keep_optimizer = keep_optimizer
        self._state = None if state is None else require_path("state", state)
        self._threads = None if threads is None else at_least(1, "threads", threads)
        names = checked_outputs(export, outputs)
        self._export = None if export is None else ClientExport(export, names)
        self._defaults = _checked_settings("defaults", defaults)
        self._fit_options = _checked_settings("fit_options", fit_options)
        if limits is not None and not isinstance(limits, RoundLimits):
            raise ArgumentError(f"limits is onnxtrain.federated.RoundLimits(...), not {limits!r}")
        self._limits = limits or RoundLimits()

    def train(self, message: Message, context: Context) -> Message:
        """Train on the client's data; the reply has weights, loss and `num-examples`."""
        return replied(message, lambda stage: self._train(self._task(message, context, stage)))

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate on the client's data; the reply has the loss, metrics and `num-examples`."""
        return replied(message, lambda stage: self._evaluate(self._task(message, context, stage)))

    def _task(self, message: Message, context: Context, stage: Stage) -> Task:
        """Return what a message asks for: the server's settings, then the client's, then the run's.

        The identity of the round is the server's alone. The run's settings count as far as a server
        passes them on: if a strategy sends no µ, there is none.
        """
        arrays, config = contents(message)
        servers = (ROUND, LAST, FEDERATION, TOKEN)
        own = {key: value for key, value in self._defaults.items() if key not in servers}
        of_run = {key: value for key, value in context.run_config.items() if key in PASSED_ON}
        settings = Round.read(config, own, of_run, at=stage.at)
        stage.at("client")
        limits = self._limits.on_node(context.node_config)
        limits.check(settings, stage.at)
        given = context.node_config.get("state-dir", self._state)
        folder = None if given is None else Path(str(given))
        store = ClientStateStore(context, folder)
        return Task(arrays, config, settings, context, folder, store, limits, stage)

    @contextmanager
    def _borrowed(self, task: Task) -> Iterator[SharedSession]:
        """Lend the session of the artifacts, which must be those of the server."""
        task.stage.at("artifacts")
        threads = self._threads
        if threads is None:
            given = os.environ.get("OMP_NUM_THREADS", "")
            threads = int(given) if given.isdecimal() and int(given) > 0 else None
        with borrowed(self._artifacts, self._prefix, threads) as shared:
            task.stage.at("artifacts version")
            wanted, own = task.config.get(VERSION), shared.bundle.version
            if wanted is not None and wanted != own:
                raise StateError(
                    f"this client has artifacts of version {own}, and the server has {wanted}: "
                    "install the server's artifacts here"
                )
            yield shared

    def _train(self, task: Task) -> RecordDict:
        settings, stage = task.settings, task.stage
        seed = settings.seed_of(client_number(task.context))
        stage.at("training data")
        data = data_of(self._data, task.context, "to train with")
        options = dict(self._fit_options)
        callbacks = [*as_callbacks(options.pop("callbacks", ())), Deadline(task.limits)]
        with self._borrowed(task) as shared:
            session = shared.session
            if self._export is not None:
                stage.at("export")
                self._export.check(session, task.context, task.folder)
            stage.at("client state")
            state = task.store.before_round(settings.identity)
            received = received_weights(shared, task)
            set_parameters(shared, received, state, task)
            optimizer = self._set_optimizer(shared, state, seed, task)
            stage.at("training")
            began = time.perf_counter()
            history = fit(
                session,
                data,
                settings.epochs,
                batch_size=settings.batch_size,
                seed=seed,
                progress=False,
                callbacks=callbacks,
                **options,
            )
            seconds = time.perf_counter() - began
            shared.state.require_finite("the update was not sent")
            trained = {name: np.array(shared.state.value_of(name)) for name in received}
            if settings.clip_norm is not None:
                clip(trained, received, settings.clip_norm)
            own = [name for name in shared.changing if name not in received]
            stage.at("client state")
            task.store.write(
                ClientState(
                    local={name: np.array(shared.state.value_of(name)) for name in own},
                    frozen={n: array for n, array in state.frozen.items() if n not in received},
                    optimizer=optimizer.group() if self._keep_optimizer else None,
                    residual=state.residual,
                    round=settings.identity,
                    previous=state.as_previous(),
                )
            )
        last = history.epochs[-1]
        numbers = {"num-examples": last.samples, "train_loss": float(last.loss)}
        metrics = MetricRecord({**numbers, "train_seconds": seconds})
        return task.signed(RecordDict({"arrays": to_record(trained), "metrics": metrics}))

    def _set_optimizer(
        self, shared: SharedSession, state: ClientState, seed: int | None, task: Task
    ) -> Optimizer:
        """Set everything that a round begins with besides the parameters.

        The session is lent to one client after the other, and an earlier round may have failed at
        any point: what the server does not set is the artifacts' own.
        """
        optimizer, settings = shared.session.optimizer, task.settings
        task.stage.at("artifacts")
        if optimizer is None:
            raise StateError("the artifacts have no optimizer: generate them with one")
        task.stage.at("client state")
        with explained_state(task.store):
            optimizer.reset(state.optimizer if self._keep_optimizer else None)
        task.stage.at(f"setting {RATE}")
        rate = settings.learning_rate
        optimizer.set_learning_rate(shared.learning_rate if rate is None else rate)
        task.stage.at(f"setting {MU}")
        optimizer.set_proximal(settings.mu)
        shared.session.module.train()
        shared.session.lazy_reset_grad()
        shared.state.random = RandomState(None if seed is None else {"seed": seed, "draws": 0})
        shared.state.private.clear()
        return optimizer

    def _evaluate(self, task: Task) -> RecordDict:
        settings, stage = task.settings, task.stage
        with self._borrowed(task) as shared:
            session = shared.session
            stage.at("client state")
            state = task.store.current(settings.identity)
            set_parameters(shared, received_weights(shared, task), state, task)
            if settings.is_last and self._export is not None:
                stage.at("export")
                self._export.write(session, task.context, task.folder)
            stage.at("evaluation data")
            data = data_of(self._evaluation, task.context, "to evaluate with")
            if not isinstance(data, Mapping | tuple | list | np.ndarray):
                inputs = session.input_types(training=False)
                source = make_source(data, inputs, batch_size=settings.batch_size, what="data")
                data = [tuple(batch.values) for batch in source.epoch(0)]  # to be counted
            stage.at("evaluation")
            values = evaluate_session(
                session, data, self._metrics, batch_size=max(settings.batch_size, 32)
            )
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
        metrics = MetricRecord({**numbers, "num-examples": samples_in(data)})
        return task.signed(RecordDict({"metrics": metrics}))

    def compressing(
        self, message: Message, context: Context, call_next: Callable[..., Message]
    ) -> Message:
        """Compress the update of a reply, if the round asks for it: the outermost mod."""

        def answer(stage: Stage) -> Message | RecordDict:
            task = self._task(message, context, stage)
            stage.at(f"setting {COMPRESSION}")
            compression = Compression.read(task.settings.compression)
            stage.at("mods")
            reply = call_next(message, context)
            if reply.has_error():
                return without_text(message, reply)
            stage.at("compression")
            content = reply.content
            return task.signed(
                content if compression is None else compressed(content, compression, task)
            )

        return replied(message, answer)


def _checked_settings(name: str, given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"{name} is a dictionary of settings by name, not {given!r}")
    return dict(given or {})

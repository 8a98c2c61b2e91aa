"""The client: it receives weights, trains on its own data, and sends weights back."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from onnxtrain.device.checks import at_least
from onnxtrain.device.loop import evaluate as evaluate_session
from onnxtrain.device.loop import fit
from onnxtrain.device.loop.batches import make_source
from onnxtrain.device.optimizer import Optimizer
from onnxtrain.device.random_state import RandomState
from onnxtrain.errors import ArgumentError, OnnxTrainError, StateError
from onnxtrain.federated.arguments import ClientExport, Data, checked_outputs, data_of, samples_in
from onnxtrain.federated.arrays import fitting, read_record, to_record
from onnxtrain.federated.bundle import Bundle, SharedSession, Source, borrowed, require_path
from onnxtrain.federated.client_state import ClientState, ClientStateStore, client_number
from onnxtrain.federated.compression import Compression, clip
from onnxtrain.federated.files import unpack_arrays
from onnxtrain.federated.messages import contents, error_reply
from onnxtrain.federated.rounds import FEDERATION, INITIAL, LAST, PASSED_ON, ROUND, VERSION, Round
from onnxtrain.format.checkpoint.content import Array

_log = logging.getLogger(__name__)


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

    def train(self, message: Message, context: Context) -> Message:
        """Train on the client's data; the reply has weights, loss and `num-examples`."""
        return _reply(message, lambda: self._train(self._task(message, context)))

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate on the client's data; the reply has the loss, metrics and `num-examples`."""
        return _reply(message, lambda: self._evaluate(self._task(message, context)))

    def _task(self, message: Message, context: Context) -> _Task:
        """Return what a message asks for: the server's settings, then the client's, then the run's.

        The identity of the round is the server's alone. The run's settings count as far as a server
        passes them on: if a strategy sends no µ, there is none.
        """
        arrays, config = contents(message)
        servers = (ROUND, LAST, FEDERATION)
        own = {key: value for key, value in self._defaults.items() if key not in servers}
        of_run = {key: value for key, value in context.run_config.items() if key in PASSED_ON}
        given = context.node_config.get("state-dir", self._state)
        folder = None if given is None else Path(str(given))
        store = ClientStateStore(context, folder)
        return _Task(arrays, config, Round.read(config, own, of_run), context, folder, store)

    @contextmanager
    def _borrowed(self, config: Mapping[str, Any]) -> Iterator[SharedSession]:
        """Lend the session of the artifacts, which must be those of the server."""
        threads = self._threads
        if threads is None:
            given = os.environ.get("OMP_NUM_THREADS", "")
            threads = int(given) if given.isdecimal() and int(given) > 0 else None
        with borrowed(self._artifacts, self._prefix, threads) as shared:
            wanted, own = config.get(VERSION), shared.bundle.version
            if wanted is not None and wanted != own:
                raise StateError(
                    f"this client has artifacts of version {own}, and the server has {wanted}: "
                    "install the server's artifacts here"
                )
            yield shared

    def _train(self, task: _Task) -> RecordDict:
        settings, number = task.settings, client_number(task.context)
        seed = settings.seed_of(number)
        data = data_of(self._data, task.context, "to train with")
        with self._borrowed(task.config) as shared:
            session = shared.session
            if self._export is not None:
                self._export.check(session, task.context, task.folder)
            state = task.store.before_round(settings.identity)
            received = fitting(session, read_record(task.arrays))
            _set_parameters(shared, received, state, task)
            optimizer = self._set_optimizer(shared, state, seed, task)
            began = time.perf_counter()
            history = fit(
                session,
                data,
                settings.epochs,
                batch_size=settings.batch_size,
                seed=seed,
                progress=False,
                **self._fit_options,
            )
            seconds = time.perf_counter() - began
            shared.state.require_finite("the update was not sent")
            trained = {name: np.array(shared.state.value_of(name)) for name in received}
            if settings.clip_norm is not None:
                clip(trained, received, settings.clip_norm)
            own = [name for name in shared.changing if name not in received]
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
        about = ConfigRecord({"client": number})
        return RecordDict({"arrays": to_record(trained), "metrics": metrics, "onnxtrain": about})

    def _set_optimizer(
        self, shared: SharedSession, state: ClientState, seed: int | None, task: _Task
    ) -> Optimizer:
        """Set everything that a round begins with besides the parameters."""
        optimizer, settings = shared.session.optimizer, task.settings
        if optimizer is None:
            raise StateError("the artifacts have no optimizer: generate them with one")
        with _explained(task.store):
            optimizer.reset(state.optimizer if self._keep_optimizer else None)
        if settings.learning_rate is not None:
            optimizer.set_learning_rate(settings.learning_rate)
        optimizer.set_proximal(settings.mu)
        shared.state.random = RandomState(None if seed is None else {"seed": seed, "draws": 0})
        shared.state.private.clear()
        return optimizer

    def _evaluate(self, task: _Task) -> RecordDict:
        settings = task.settings
        with self._borrowed(task.config) as shared:
            session = shared.session
            received = fitting(session, read_record(task.arrays))
            _set_parameters(shared, received, task.store.current(settings.identity), task)
            if settings.is_last and self._export is not None:
                self._export.write(session, task.context, task.folder)
            data = data_of(self._evaluation, task.context, "to evaluate with")
            if not isinstance(data, Mapping | tuple | list | np.ndarray):
                inputs = session.input_types(training=False)
                source = make_source(data, inputs, batch_size=settings.batch_size, what="data")
                data = [tuple(batch.values) for batch in source.epoch(0)]  # to be counted
            values = evaluate_session(
                session, data, self._metrics, batch_size=max(settings.batch_size, 32)
            )
        numbers: dict[str, Any] = {"num-examples": samples_in(data)}
        numbers |= {k: v for k, v in values.items() if isinstance(v, int | float)}
        return RecordDict({"metrics": MetricRecord(numbers)})

    def compressing(
        self, message: Message, context: Context, call_next: Callable[..., Message]
    ) -> Message:
        """Compress the update of a reply, if the round asks for it: the outermost mod."""
        try:
            task = self._task(message, context)
            compression = Compression.read(task.settings.compression)
        except OnnxTrainError as error:
            return error_reply(message, error.message)
        reply = call_next(message, context)
        if compression is None or reply.has_error():
            return reply
        return _reply(message, lambda: _compressed(reply.content, compression, task))


@dataclass(frozen=True)
class _Task:
    """A message to the client, and where the client's files and state are."""

    arrays: ArrayRecord
    config: ConfigRecord
    settings: Round
    context: Context
    folder: Path | None
    store: ClientStateStore


def _reply(message: Message, answer: Callable[[], RecordDict]) -> Message:
    """Reply with the answer or with an error, which does not end the round."""
    try:
        return Message(answer(), reply_to=message)
    except OnnxTrainError as error:
        # Not `advice`: it is for the caller of `fit`, and the server cannot follow it.
        reason = " ".join([error.message, *getattr(error, "__notes__", ())])
    except Exception as error:  # the user's own functions may raise anything
        reason = f"{type(error).__name__}: {error}"
        _log.exception("the client could not answer")
    _log.error("the client could not answer: %s", reason)
    return error_reply(message, reason)


def _compressed(content: RecordDict, compression: Compression, task: _Task) -> RecordDict:
    """Compress the arrays of a reply, and store what is left of them for the next one."""
    key, arrays = next(iter(content.array_records.items()))
    update = _update(read_record(arrays), read_record(task.arrays))
    identity, bounded = task.settings.identity, task.settings.bounded
    before, state = task.store.before_round(identity), task.store.current(identity)
    if state.round != identity:  # training had nothing to store
        state = replace(before, round=identity, previous=before.as_previous())
    content[key], lost = compression.encode(update, before.residual, bounded=bounded)
    if (compression.has_memory or bounded) and (lost or state.residual):
        state.residual = lost
        task.store.write(state)
    return content


def _set_parameters(
    shared: SharedSession, received: Mapping[str, Array], state: ClientState, task: _Task
) -> None:
    """Set all parameters: the server's, then the client's own, then the initial ones."""
    session = shared.session
    if INITIAL in task.config:
        sent = unpack_arrays(bytes(task.config[INITIAL]), "the initial values from the server")
        _take_initial(shared, state, fitting(session, sent))
    with _explained(task.store):
        own = fitting(session, {**state.frozen, **state.local})
    values = {**shared.initial, **own, **received}
    # A session without weights of its own may hold another client's values.
    missing = [n for n in shared.state.names() if n not in values] if shared.nominal else []
    if missing:
        raise StateError(
            f"this client has no values for {missing[0]!r}, which the server does not share: its "
            "artifacts have no weights, and the initial values did not arrive or were lost"
        )
    shared.load(values)


def _take_initial(shared: SharedSession, state: ClientState, sent: Mapping[str, Array]) -> None:
    """Put the server's initial values into the client's state.

    Values that training changes stay the client's own if it has them; frozen values are always the
    server's. They are stored, as they are sent once, unless the artifacts hold the same.
    """
    changing = set(shared.changing)
    first = {name: array for name, array in sent.items() if name in changing}
    frozen = {name: array for name, array in sent.items() if name not in changing}
    own = {name: array for name, array in state.local.items() if name not in frozen}
    state.local = {**first, **own}
    earlier = {name: array for name, array in state.frozen.items() if name not in frozen}
    state.frozen = {**earlier, **{n: a for n, a in frozen.items() if not shared.has(n, a)}}


@contextmanager
def _explained(store: ClientStateStore) -> Iterator[None]:
    """Add to errors that the client's state is of other artifacts, and how to reset it."""
    try:
        yield
    except OnnxTrainError as error:
        error.add_note(
            "This is the client's state from earlier rounds, with other artifacts: "
            f"{store.how_to_reset} to start anew."
        )
        raise


def _update(trained: Mapping[str, Array], sent: Mapping[str, Array]) -> dict[str, Array]:
    """Return the difference to the received weights; mods may have changed the trained ones."""
    for name, array in trained.items():
        if name not in sent or array.shape != sent[name].shape:
            raise ArgumentError(
                f"a mod replies with {name!r} of the shape {list(array.shape)}, which the server "
                "did not send: with compression, mods must not change names and shapes of arrays"
            )
    return {name: array.astype(np.float64) - sent[name] for name, array in trained.items()}


def _checked_settings(name: str, given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"{name} is a dictionary of settings by name, not {given!r}")
    return dict(given or {})

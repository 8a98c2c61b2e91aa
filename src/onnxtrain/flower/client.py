"""The client: it takes weights from the server, trains on its own data, and sends weights back."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from onnxtrain.api.checkpoint_content import Array
from onnxtrain.api.fit import evaluate as evaluate_session
from onnxtrain.api.fit import fit
from onnxtrain.api.fit.batches import count_samples, make_source
from onnxtrain.api.random_state import RandomState
from onnxtrain.api.session import TrainingSession
from onnxtrain.errors import ArgumentError, OnnxTrainError, StateError
from onnxtrain.flower.arrays import fitting, read_record, to_record
from onnxtrain.flower.bundle import Bundle, Source, Workplace, borrowed
from onnxtrain.flower.compression import Compression
from onnxtrain.flower.files import unpack_arrays
from onnxtrain.flower.keeping import Keeper, Kept, client_number
from onnxtrain.flower.rounds import FEDERATION, INITIAL, VERSION, Round

_log = logging.getLogger(__name__)
_RAISED = 2  # Flower's number for an app that could not do what it was asked to
Data = Any | Callable[[Context], Any]


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

    Learning rate, local epochs, batch size and seed come with the round (`learning-rate`,
    `local-epochs`, `batch-size`, `seed`), as do `proximal-mu`, `clip-norm` and `compression`.

    Args:
        artifacts: the folder of artifacts, or a file that `pack` wrote.
        data: what to train with, as for `onnxtrain.fit`, or a function of Flower's `Context` that
            returns it.
        evaluate: the same for evaluation; None for clients that do not evaluate.
        metrics: what to measure beside the loss, as for `onnxtrain.evaluate`.
        mods: Flower's mods, the outermost first; updates are made smaller behind all of them.
        keep_optimizer: go on with the moments of the client's last round, instead of zeros.
        state: a folder for what stays on the client. Without it that is kept while the node is up.
            The node's configuration may name another one, as `state-dir`.
        threads: how many threads to train with; what OMP_NUM_THREADS says by default, or all cores.
        export: where the client writes its model for inference after the last round (it has to
            take part in its evaluation). A name in the folder `state`, or a path.
        outputs: what that model gives out.
        prefix: what the names of the files in the folder of artifacts begin with.
        defaults: settings of a round for what the server does not say.
        fit_options: further arguments of `onnxtrain.fit`, such as `scheduler`.

    """
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
    app.train(mods=[client.compressing, *mods])(client.train)
    app.evaluate()(client.evaluate)
    return app


class Client:
    """What a `ClientApp` of `client_app` calls; arguments as there."""

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
        self._artifacts, self._prefix = artifacts, prefix
        self._data, self._evaluation = data, evaluate
        self._metrics = metrics
        self._keep_optimizer = keep_optimizer
        self._state, self._threads = state, threads
        self._export, self._outputs = export, list(outputs)
        if export is not None and not self._outputs:
            raise ArgumentError("export needs outputs=[...]: what the model is to give out")
        self._defaults = dict(defaults or {})
        self._fit_options = dict(fit_options or {})

    # ---- messages ------------------------------------------------------------------------------

    def train(self, message: Message, context: Context) -> Message:
        """Train on the data of this client; the reply has weights, loss and `num-examples`."""
        return self._reply(message, lambda: self._train(message, context))

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate on the data of this client; the reply has the loss, metrics, `num-examples`."""
        return self._reply(message, lambda: self._evaluate(message, context))

    def _reply(self, message: Message, answer: Callable[[], RecordDict]) -> Message:
        """Answer, or say why not: an error of one client is a reply, not the end of the round."""
        try:
            return Message(answer(), reply_to=message)
        except OnnxTrainError as error:
            reason = " ".join(str(part) for part in (error, *getattr(error, "__notes__", ())))
        except Exception as error:  # what the user's own functions raise
            reason = f"{type(error).__name__}: {error}"
            _log.exception("the client could not answer")
        _log.error("the client could not answer: %s", reason)
        return Message(Error(code=_RAISED, reason=reason), reply_to=message)

    # ---- training ------------------------------------------------------------------------------

    def _train(self, message: Message, context: Context) -> RecordDict:
        arrays, config = _contents(message)
        now = Round.read(config, self._defaults, context.run_config)
        data = _data(self._data, context, "to train with")
        keeper = self._keeper(context)
        with self._workplace() as place:
            _require_version(place, config)
            session = place.session
            kept = keeper.read(_identity(config, now))
            received = fitting(session, read_record(arrays))
            self._set(place, received, kept, config)
            self._prepare(session, now, kept, client_number(context))
            began = time.perf_counter()
            history = fit(
                session,
                data,
                now.epochs,
                batch_size=now.batch_size,
                seed=now.seed_of(client_number(context)),
                progress=False,
                **self._fit_options,
            )
            seconds = time.perf_counter() - began
            trained = {name: np.array(session.state.value_of(name)) for name in received}
            if now.clip_norm is not None:
                _clip(trained, received, now.clip_norm)
            self._keep(keeper, place, received, kept, _identity(config, now))
        last = history.epochs[-1]
        numbers = {
            "num-examples": last.samples,
            "train_loss": float(last.loss),
            "train_seconds": seconds,
        }
        return RecordDict(
            {
                "arrays": to_record(trained),
                "metrics": MetricRecord(numbers),
                "onnxtrain": ConfigRecord({"client": client_number(context)}),
            }
        )

    def _prepare(self, session: TrainingSession, now: Round, kept: Kept, client: int) -> None:
        """Set all that a round begins with beside the parameters."""
        optimizer = session.optimizer
        if optimizer is None:
            raise StateError("the artifacts have no optimizer: generate them with one")
        optimizer.reset(kept.optimizer if self._keep_optimizer else None)
        if now.learning_rate is not None:
            optimizer.set_learning_rate(now.learning_rate)
        optimizer.set_proximal(now.mu)
        seed = now.seed_of(client)
        session.state.random = RandomState(None if seed is None else {"seed": seed, "draws": 0})
        session.state.private.clear()

    def _keep(
        self,
        keeper: Keeper,
        place: Workplace,
        received: Mapping[str, Array],
        kept: Kept,
        identity: str,
    ) -> None:
        state = place.session.state
        changing = [*state.trainable_names(), *place.session.module.statistics]
        names = dict.fromkeys([*kept.local, *(n for n in changing if n not in received)])
        now = Kept(residual=kept.residual, round=identity)
        now.local = {n: np.array(state.value_of(n)) for n in names if n not in received}
        if self._keep_optimizer and place.session.optimizer is not None:
            now.optimizer = place.session.optimizer.group()
        if now.local or now.optimizer is not None or now.residual:
            now.before = replace(kept, before=None)
            keeper.write(now)

    # ---- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, message: Message, context: Context) -> RecordDict:
        arrays, config = _contents(message)
        now = Round.read(config, self._defaults, context.run_config)
        with self._workplace() as place:
            _require_version(place, config)
            received = fitting(place.session, read_record(arrays))
            self._set(place, received, self._keeper(context).read(), config)
            if now.is_last and self._export is not None:
                self._write_model(place.session, context)
            data = _data(self._evaluation, context, "to evaluate with")
            if not isinstance(data, Mapping | tuple | list | np.ndarray):
                names = place.session.input_names(training=False)
                source = make_source(data, names, batch_size=now.batch_size, what="data")
                data = [tuple(batch.values) for batch in source.epoch(0)]  # to be counted
            values = evaluate_session(
                place.session, data, self._metrics, batch_size=max(now.batch_size, 32)
            )
        numbers: dict[str, Any] = {"num-examples": _samples(data)}
        numbers |= {k: v for k, v in values.items() if isinstance(v, int | float)}
        return RecordDict({"metrics": MetricRecord(numbers)})

    def _write_model(self, session: TrainingSession, context: Context) -> None:
        assert self._export is not None
        folder = self._folder(context)
        path = Path(self._export) if folder is None else folder / self._export
        path.parent.mkdir(parents=True, exist_ok=True)
        session.export_model_for_inferencing(path, self._outputs)

    # ---- parameters ----------------------------------------------------------------------------

    def _set(
        self, place: Workplace, received: Mapping[str, Array], kept: Kept, config: ConfigRecord
    ) -> None:
        """Set all parameters: the server's, then the client's own, then what they began with."""
        session = place.session
        if INITIAL in config:
            sent = unpack_arrays(bytes(config[INITIAL]), "what the server sent to begin with")
            kept.local = {**fitting(session, sent), **kept.local}
        values = {**place.initial, **_own(session, kept), **received}
        if place.nominal:
            # The session may hold another client's values, which are none of this one's.
            missing = [name for name in session.state.names() if name not in values]
            if missing:
                raise StateError(
                    f"this client has no values for {missing[0]!r}, which the server does not "
                    "share: its artifacts were packed without weights, and the first values did "
                    "not arrive or were lost"
                )
        session.load_parameters(values)

    def _workplace(self) -> Any:
        threads = self._threads
        if threads is None:
            given = os.environ.get("OMP_NUM_THREADS", "")
            threads = int(given) if given.isdecimal() and int(given) > 0 else None
        return borrowed(self._artifacts, self._prefix, threads)

    def _folder(self, context: Context) -> Path | None:
        given = context.node_config.get("state-dir", self._state)
        return None if given is None else Path(str(given))

    def _keeper(self, context: Context) -> Keeper:
        return Keeper(context, self._folder(context))

    # ---- compression ---------------------------------------------------------------------------

    def compressing(
        self, message: Message, context: Context, call_next: Callable[..., Message]
    ) -> Message:
        """Make the update of a reply smaller, if the round asks for it: a mod, the outermost."""
        wanted = None
        try:
            _, config = _contents(message)
            now = Round.read(config, self._defaults, context.run_config)
            wanted, identity = Compression.read(now.compression), _identity(config, now)
        except OnnxTrainError as error:
            return Message(Error(code=_RAISED, reason=str(error)), reply_to=message)
        reply = call_next(message, context)
        if wanted is None or reply.has_error():
            return reply

        def smaller() -> RecordDict:
            sent = read_record(_contents(message)[0])
            content = reply.content
            key, arrays = next(iter(content.array_records.items()))
            update = {name: array - sent[name] for name, array in read_record(arrays).items()}
            keeper = self._keeper(context)
            kept = keeper.read()
            if kept.round != identity:  # training had nothing to keep
                kept = replace(kept, round=identity, before=replace(kept, before=None))
            assert kept.before is not None
            content[key], lost = wanted.encode(update, kept.before.residual)
            if wanted.has_memory:
                kept.residual = lost
                keeper.write(kept)
            return content

        return self._reply(message, smaller)


def _own(session: TrainingSession, kept: Kept) -> dict[str, Array]:
    """Return what the client keeps; what does not fit the artifacts is an error."""
    try:
        return fitting(session, kept.local)
    except OnnxTrainError as error:
        error.add_note(
            "This is what the client kept from earlier rounds, with other artifacts: delete its "
            "file to start anew."
        )
        raise


def _contents(message: Message) -> tuple[ArrayRecord, ConfigRecord]:
    """Return the one record of arrays of a message, and its configuration."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ArgumentError(f"a message has one record of arrays, not {len(records)}")
    configs = list(message.content.config_records.values())
    return records[0], configs[0] if configs else ConfigRecord()


def _identity(config: Mapping[str, Any], now: Round) -> str:
    """Return what tells a round of a federation from all others; a repeated one has the same."""
    return f"{config.get(FEDERATION, '')}/{now.number}"


def _require_version(place: Workplace, config: Mapping[str, Any]) -> None:
    wanted, own = config.get(VERSION), place.bundle.version
    if wanted is not None and wanted != own:
        raise StateError(
            f"this client has artifacts of version {own}, and the server has {wanted}: install "
            "the server's artifacts here"
        )


def _data(given: Data, context: Context, purpose: str) -> Any:
    data = given(context) if callable(given) else given
    if data is None or _samples(data) == 0:
        raise ArgumentError(f"this client has no data {purpose}")
    return data


def _samples(data: Any) -> int:
    """Return how many samples there are; data that can be gone through once are not touched."""
    if isinstance(data, Mapping):
        return count_samples(list(data.values()))
    if isinstance(data, tuple):
        return count_samples(list(data)) if data else 0
    if isinstance(data, np.ndarray):
        return len(data)
    if isinstance(data, list):
        return sum(_samples(tuple(b) if isinstance(b, list) else b) for b in data)
    return 1


def _clip(trained: dict[str, Array], received: Mapping[str, Array], largest: float) -> None:
    """Scale the update of all parameters together, so that its norm is not above `largest`."""
    updates = {name: trained[name].astype(np.float64) - received[name] for name in trained}
    norm = float(np.sqrt(sum(float(np.square(u).sum()) for u in updates.values())))
    if norm > largest:
        for name, update in updates.items():
            clipped = received[name] + update * (largest / norm)
            trained[name] = clipped.astype(trained[name].dtype)

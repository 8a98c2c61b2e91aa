"""The client: it takes weights from the server, trains on its own data, and sends weights back."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from onnxtrain.device.checks import at_least
from onnxtrain.device.loop import evaluate as evaluate_session
from onnxtrain.device.loop import fit
from onnxtrain.device.loop.batches import make_source
from onnxtrain.device.random_state import RandomState
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import ArgumentError, OnnxTrainError, StateError
from onnxtrain.federated.arrays import fitting, read_record, to_record
from onnxtrain.federated.bundle import Bundle, Source, Workplace, borrowed, require_path
from onnxtrain.federated.client_state import (
    Keeper,
    Kept,
    claim,
    client_name,
    client_number,
    given_name,
)
from onnxtrain.federated.compression import Compression, clip
from onnxtrain.federated.exporting import check_export, checked_outputs
from onnxtrain.federated.files import unpack_arrays
from onnxtrain.federated.given_data import Data, data_of, samples_in
from onnxtrain.federated.rounds import FEDERATION, INITIAL, LAST, PASSED_ON, ROUND, VERSION, Round
from onnxtrain.format.checkpoint.content import Array

_log = logging.getLogger(__name__)
_RAISED = 2  # Flower's number for an app that could not do what it was asked to
_NAME = "{client}"  # what stands for the client's name in `export`


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
            returns it. One that gives an iterator, such as a generator, is called for each epoch.
        evaluate: the same for evaluation; None for clients that do not evaluate.
        metrics: what to measure beside the loss, as for `onnxtrain.evaluate`.
        mods: Flower's mods, the outermost first. They are for messages that ask for training, as
            that is where updates are; evaluation goes past them. Updates are made smaller behind
            all of them.
        keep_optimizer: go on with the moments of the client's last round, instead of zeros. Those
            of another federation are not gone on with.
        state: a folder for what stays on the client. Without it that is kept while the node is up.
            The node's configuration may name another one, as `state-dir`. Clients that share a
            folder are told apart by the `client-name` or `partition-id` of their nodes.
        threads: how many threads to train with; what OMP_NUM_THREADS says by default, or all cores.
        export: where the client writes its model for inference after the last round (it has to
            take part in its evaluation). A name in the folder `state`, or a path. A client with a
            name of its own (`client-name` or `partition-id`) puts it behind that: "mine.onnx"
            becomes "mine-3.onnx"; unless the node's configuration gives it a folder of its own, as
            `state-dir`. Or say where it belongs: "{client}/mine.onnx".
        outputs: what that model gives out.
        prefix: what the names of the files in the folder of artifacts begin with.
        defaults: settings of a round for what the server does not say.
        fit_options: further arguments of `onnxtrain.fit`, such as `scheduler`.

    """
    chosen = _checked_mods(mods)
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
        if not isinstance(artifacts, Bundle):
            require_path("artifacts", artifacts)
        self._artifacts, self._prefix = artifacts, prefix
        self._data, self._evaluation = data, evaluate
        self._metrics = metrics
        self._keep_optimizer = keep_optimizer
        self._state = None if state is None else require_path("state", state)
        self._threads = None if threads is None else at_least(1, "threads", threads)
        self._export = None if export is None else str(require_path("export", export))
        self._outputs, self._is_checked = checked_outputs(export, outputs), False
        self._defaults = _checked_settings("defaults", defaults)
        self._fit_options = _checked_settings("fit_options", fit_options)

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
            # Not `advice`: it is for the caller of `fit`, and the server cannot follow it.
            reason = " ".join([error.message, *getattr(error, "__notes__", ())])
        except Exception as error:  # what the user's own functions raise
            reason = f"{type(error).__name__}: {error}"
            _log.exception("the client could not answer")
        _log.error("the client could not answer: %s", reason)
        return Message(Error(code=_RAISED, reason=reason), reply_to=message)

    def _round(self, config: Mapping[str, Any], context: Context) -> Round:
        """Return the settings of a round: the server's, then the client's own, then the run's.

        Which round it is only the server knows. Of the run's settings those count that a server
        passes on: a strategy that sends no µ means none.
        """
        own = {key: value for key, value in self._defaults.items() if key not in (ROUND, LAST)}
        of_run = {key: value for key, value in context.run_config.items() if key in PASSED_ON}
        return Round.read(config, own, of_run)

    # ---- training ------------------------------------------------------------------------------

    def _train(self, message: Message, context: Context) -> RecordDict:
        arrays, config = _contents(message)
        now = self._round(config, context)
        identity = _identity(config, now)
        data = data_of(self._data, context, "to train with")
        keeper = self._keeper(context)
        with self._workplace() as place:
            _require_version(place, config)
            session = place.session
            self._check_export(session, context)
            kept = keeper.begin(identity)
            received = fitting(session, read_record(arrays))
            self._set(place, received, kept, config, keeper)
            self._prepare(session, now, kept, client_number(context), keeper)
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
                clip(trained, received, now.clip_norm)
            self._keep(keeper, place, received, kept, identity)
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

    def _prepare(
        self, session: TrainingSession, now: Round, kept: Kept, client: int, keeper: Keeper
    ) -> None:
        """Set all that a round begins with beside the parameters."""
        optimizer = session.optimizer
        if optimizer is None:
            raise StateError("the artifacts have no optimizer: generate them with one")
        with _explained(keeper):
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
        own = [name for name in place.changing if name not in received]
        now = Kept(
            local={name: np.array(state.value_of(name)) for name in own},
            frozen={n: array for n, array in kept.frozen.items() if n not in received},
            residual=kept.residual,
            round=identity,
            before=kept.as_before(),
        )
        if self._keep_optimizer and place.session.optimizer is not None:
            now.optimizer = place.session.optimizer.group()
        keeper.write(now)

    # ---- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, message: Message, context: Context) -> RecordDict:
        arrays, config = _contents(message)
        now = self._round(config, context)
        keeper = self._keeper(context)
        with self._workplace() as place:
            _require_version(place, config)
            received = fitting(place.session, read_record(arrays))
            kept = keeper.present(_identity(config, now))
            self._set(place, received, kept, config, keeper)
            if now.is_last and self._export is not None:
                self._write_model(place.session, context)
            data = data_of(self._evaluation, context, "to evaluate with")
            if not isinstance(data, Mapping | tuple | list | np.ndarray):
                names = place.session.input_names(training=False)
                source = make_source(data, names, batch_size=now.batch_size, what="data")
                data = [tuple(batch.values) for batch in source.epoch(0)]  # to be counted
            values = evaluate_session(
                place.session, data, self._metrics, batch_size=max(now.batch_size, 32)
            )
        numbers: dict[str, Any] = {"num-examples": samples_in(data)}
        numbers |= {k: v for k, v in values.items() if isinstance(v, int | float)}
        return RecordDict({"metrics": MetricRecord(numbers)})

    def _write_model(self, session: TrainingSession, context: Context) -> None:
        path = self._model_file(context)
        claim(path, context, f"give each a folder of its own, or put {_NAME!r} into export")
        path.parent.mkdir(parents=True, exist_ok=True)
        session.export_model_for_inferencing(path, self._outputs)

    def _model_file(self, context: Context) -> Path:
        """Return where the model goes: clients that share a folder have a file each."""
        assert self._export is not None
        folder, name = self._folder(context), given_name(context)
        path = Path(self._export.replace(_NAME, client_name(context)))
        shares = _NAME not in self._export and "state-dir" not in context.node_config
        if name is not None and shares:
            path = path.with_name(f"{path.stem}-{name}{path.suffix}")
        return path if folder is None else folder / path

    def _check_export(self, session: TrainingSession, context: Context) -> None:
        if self._export is not None and not self._is_checked:
            check_export(session, self._model_file(context), self._outputs)
            self._is_checked = True

    # ---- parameters ----------------------------------------------------------------------------

    def _set(
        self,
        place: Workplace,
        received: Mapping[str, Array],
        kept: Kept,
        config: ConfigRecord,
        keeper: Keeper,
    ) -> None:
        """Set all parameters: the server's, then the client's own, then what they began with."""
        session = place.session
        if INITIAL in config:
            sent = unpack_arrays(bytes(config[INITIAL]), "what the server sent to begin with")
            _begin_with(place, kept, fitting(session, sent))
        with _explained(keeper):
            own = fitting(session, {**kept.frozen, **kept.local})
        values = {**place.initial, **own, **received}
        if place.nominal:
            # The session may hold another client's values, which are none of this one's.
            missing = [name for name in session.state.names() if name not in values]
            if missing:
                raise StateError(
                    f"this client has no values for {missing[0]!r}, which the server does not "
                    "share: its artifacts were packed without weights, and the first values did "
                    "not arrive or were lost"
                )
        place.load(values)

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
        try:
            sent, config = _contents(message)
            now = self._round(config, context)
            wanted, identity = Compression.read(now.compression), _identity(config, now)
        except OnnxTrainError as error:
            return Message(Error(code=_RAISED, reason=str(error)), reply_to=message)
        reply = call_next(message, context)
        if wanted is None or reply.has_error():
            return reply

        def smaller() -> RecordDict:
            content = reply.content
            key, arrays = next(iter(content.array_records.items()))
            update = _update(read_record(arrays), read_record(sent))
            keeper = self._keeper(context)
            began, kept = keeper.begin(identity), keeper.present(identity)
            if kept.round != identity:  # training had nothing to keep
                kept = replace(began, round=identity, before=began.as_before())
            content[key], lost = wanted.encode(update, began.residual, bounded=now.bounded)
            if (wanted.has_memory or now.bounded) and (lost or kept.residual):
                kept.residual = lost
                keeper.write(kept)
            return content

        return self._reply(message, smaller)


def _begin_with(place: Workplace, kept: Kept, sent: Mapping[str, Array]) -> None:
    """Take what the server sends to begin with.

    What training changes is the client's own if it has it; what is frozen is always the server's.
    It is kept, as it is not sent again, unless the artifacts have the same.
    """
    changing = set(place.changing)
    first = {name: array for name, array in sent.items() if name in changing}
    frozen = {name: array for name, array in sent.items() if name not in changing}
    own = {name: array for name, array in kept.local.items() if name not in frozen}
    kept.local = {**first, **own}
    earlier = {name: array for name, array in kept.frozen.items() if name not in frozen}
    kept.frozen = {**earlier, **{n: a for n, a in frozen.items() if not place.has(n, a)}}


@contextmanager
def _explained(keeper: Keeper) -> Iterator[None]:
    """Say where it comes from, if what the client keeps does not fit the artifacts."""
    try:
        yield
    except OnnxTrainError as error:
        error.add_note(
            "This is what the client kept from earlier rounds, with other artifacts: "
            f"{keeper.way_out} to start anew."
        )
        raise


def _update(trained: Mapping[str, Array], sent: Mapping[str, Array]) -> dict[str, Array]:
    """Return the difference to what was sent; mods may have changed what was trained."""
    for name, array in trained.items():
        if name not in sent or array.shape != sent[name].shape:
            raise ArgumentError(
                f"a mod of this client replies with {name!r} of the shape {list(array.shape)}, "
                "which was not sent like this: with compression, mods have to leave names and "
                "shapes of arrays as they are"
            )
    return {name: array.astype(np.float64) - sent[name] for name, array in trained.items()}


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


# ---- arguments -----------------------------------------------------------------------------------


def _checked_mods(mods: Any) -> list[Any]:
    chosen: list[Any] = list(mods) if isinstance(mods, Iterable) else [None]
    if not all(callable(mod) for mod in chosen):
        raise ArgumentError(f"mods is a list of Flower's mods, not {mods!r}")
    return chosen


def _checked_settings(name: str, given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"{name} is a dictionary of settings by name, not {given!r}")
    return dict(given or {})

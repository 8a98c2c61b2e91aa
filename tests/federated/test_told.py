"""What leaves a device when something fails: a kind and a place, and not one byte of data."""

import logging
import os
import re

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, LOG, rows
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.serde import message_to_proto

from onnxtrain.errors import InputError, OnnxTrainError
from onnxtrain.federated import LocalGrid, client_app, open_artifacts, to_arrays
from onnxtrain.federated.failures import PLACES, told

SECRET = "Ms4Kx9-Erika-Mustermann"
X, Y = rows(0, 40)


class Odd(Exception):
    def __str__(self):
        raise RuntimeError(SECRET)

    def __repr__(self):
        return SECRET


def named_secret():
    return type(SECRET.replace("-", ""), (LookupError,), {"__module__": "builtins"})


def chained():
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ValueError("of a row") from error


def noted():
    error = OnnxTrainError("a row", advice=SECRET)
    error.add_note(SECRET)
    raise error


def group():
    raise ExceptionGroup(SECRET, [ValueError(SECRET)])


def raising(error):
    def raise_it():
        raise error

    return raise_it


FAILURES = {
    "text": (lambda: float(SECRET), "ValueError"),
    "key": (lambda: {}[SECRET], "KeyError"),
    "attribute": (lambda: getattr(object(), SECRET), "AttributeError"),
    "file": (lambda: np.load(f"/{SECRET}/rows.npz"), "FileNotFoundError"),
    "codec": (lambda: SECRET.encode("utf-16").decode("ascii"), "UnicodeDecodeError"),
    "own class": (raising(named_secret()("x")), "LookupError"),
    "no text": (raising(Odd()), "Exception"),
    "chain": (chained, "ValueError"),
    "notes": (noted, "OnnxTrainError"),
    "group": (group, "ExceptionGroup"),
    "ours": (raising(InputError(SECRET)), "InputError"),
    "assertion": (raising(AssertionError(SECRET)), "AssertionError"),
    "stop": (raising(StopIteration(SECRET)), "StopIteration"),
    "os": (raising(OSError(5, SECRET, SECRET)), "OSError"),
    "import": (raising(ModuleNotFoundError(SECRET, name=SECRET)), "ModuleNotFoundError"),
}


def content(**config):
    record = to_arrays(open_artifacts(GOLDEN / "mlp").session())
    settings = {**FAST, "onnxtrain-reply": "t" * 32, **config}
    return RecordDict({"arrays": record, "config": ConfigRecord(settings)})


def ask(app, kind="train", node=None, **config):
    """Ask as Flower does, which would send the text of whatever is raised."""
    grid = LocalGrid(app, [node or {}])
    message = grid.create_message(content(**config), kind, 1, "1")
    return app(message, Context(1, 1, node or {}, RecordDict(), {}))


def check(reply, said=None) -> str:
    """Check every byte of a reply, and return what is told."""
    assert reply.has_error()
    data = message_to_proto(reply).SerializeToString()
    for secret in (SECRET, SECRET.replace("-", ""), "Erika", "Mustermann", "Ms4Kx9"):
        assert secret.encode() not in data
        assert secret.encode("utf-16-le") not in data
    place = re.fullmatch(r"[A-Za-z]+ at ([a-z -]+)", reply.error.reason)[1]
    assert place in PLACES
    assert said is None or reply.error.reason == said
    return reply.error.reason


@pytest.mark.parametrize("name", FAILURES)
def test_the_user_s_functions_may_raise_anything(name, caplog) -> None:
    fails, kind = FAILURES[name]
    caplog.set_level(logging.DEBUG)

    def data(context):
        fails()

    def batches(context):
        yield X[:20], Y[:20]
        fails()

    def metric(outputs, labels):
        fails()

    def mod(message, context, call_next):
        call_next(message, context)
        fails()

    class Callback:
        def on_epoch_end(self, run):
            fails()

    mlp, good = GOLDEN / "mlp", (X, Y)
    in_generator = "RuntimeError" if name == "stop" else kind  # as Python has it
    check(ask(client_app(mlp, data)), f"{kind} at training data")
    check(ask(client_app(mlp, batches)), f"{in_generator} at training")
    check(ask(client_app(mlp, good, data), "evaluate"), f"{kind} at evaluation data")
    check(ask(client_app(mlp, good, good, metrics=[metric]), "evaluate"), f"{kind} at evaluation")
    check(ask(client_app(mlp, good, mods=[mod])), f"{kind} at mods")
    fit_options = {"callbacks": [Callback()]}
    check(ask(client_app(mlp, good, fit_options=fit_options)), f"{kind} at training")
    assert "Traceback" in LOG.texts[-1]  # the client's own log has it all
    if name in ("text", "key", "chain", "notes", "ours"):
        assert SECRET in LOG.texts[-1]
    # Flower's logger may be sent to the SuperLink; ours stays.
    assert all(SECRET not in r.getMessage() for r in caplog.records if r.name.startswith("flwr"))


def test_a_mod_that_replies_with_a_text() -> None:
    def saying(text):
        def mod(message, context, call_next):
            return Message(Error(7, text), reply_to=message)

        return client_app(GOLDEN / "mlp", (X, Y), mods=[mod])

    for text in (
        SECRET,
        f"ValueError at {SECRET}",
        f"{SECRET} at training",
        None,
        "ValueError at home",
    ):
        reply = ask(saying(text))
        check(reply, "Exception at mods")
        assert reply.error.code == 7
    check(ask(saying("NonFiniteError at training")), "NonFiniteError at training")


def test_data_that_do_not_fit_are_not_told() -> None:
    labels = Y.copy()
    labels[7] = 90210
    x = X.copy()
    x[3, 3] = np.nan
    texts = np.array([[SECRET] * 8] * 40)
    bad = [
        (X, labels), (x, Y), (X[:, :5], Y), (texts, Y), (X, Y[:5]), [(X, Y), SECRET], SECRET,
        {SECRET: X, "labels": Y}, {"input": X, "labels": [SECRET] * 40},
    ]  # fmt: skip
    for data in bad:
        reason = check(ask(client_app(GOLDEN / "mlp", data)))
        assert not any(c.isdigit() for c in reason)


def test_paths_are_not_told(tmp_path) -> None:
    folder = tmp_path / SECRET
    folder.write_text("no folder")
    app = client_app(GOLDEN / "mlp", (X, Y), state=folder / "state", keep_optimizer=True)
    check(ask(app))
    check(ask(client_app(GOLDEN / "mlp", (X, Y), keep_optimizer=True),
              node={"state-dir": str(folder)}))  # fmt: skip
    check(ask(client_app(tmp_path / f"{SECRET}.json", (X, Y))), "ModelError at artifacts")
    exports = client_app(
        GOLDEN / "mlp", (X, Y), (X, Y), export=folder / "m.onnx", outputs=["output"]
    )
    check(ask(exports, "evaluate", **{"last-round": True}))
    own = tmp_path / f"state-{SECRET}"
    kept = client_app(GOLDEN / "mlp", (X, Y), state=own, keep_optimizer=True)
    assert not ask(kept, node={"client-name": SECRET}).has_error()
    (file,) = own.iterdir()
    file.write_bytes(os.urandom(500))
    check(ask(kept, node={"client-name": SECRET}), "StateError at client state")
    assert str(file) in LOG.texts[-1]


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"config": ConfigRecord({})}), None])
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_messages_of_any_form_are_answered(kind, content) -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), (X, Y))
    message = LocalGrid(app, 1).create_message(content or RecordDict(), kind, 1, "1")
    check(app(message, Context(1, 1, {}, RecordDict(), {})), "ArgumentError at message")


def test_a_good_reply_has_the_metrics_and_nothing_else_in_words() -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), (X, Y), metrics=["accuracy"])
    trained = ask(app, node={"client-name": SECRET, "state-dir-2": SECRET})
    assert set(trained.content) == {"arrays", "metrics", "onnxtrain"}
    assert dict(trained.content["onnxtrain"]) == {"client": 1, "reply": "t" * 32}
    assert SECRET.encode() not in message_to_proto(trained).SerializeToString()


def test_every_failure_has_a_kind() -> None:
    for error in (KeyboardInterrupt(), Exception(), Odd(), named_secret()()):
        assert re.fullmatch(r"[A-Za-z]+ at client", told(error, "client"))

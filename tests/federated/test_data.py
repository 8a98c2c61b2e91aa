"""The kinds of data that clients have, and what they say of them."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, rows
from flwr.app import ConfigRecord, RecordDict

from onnxtrain.federated import LocalGrid, client_app, open_artifacts, to_arrays

X, Y = rows(0, 50)


def batches():
    return [(X[:20], Y[:20]), (X[20:40], Y[20:40]), (X[40:], Y[40:])]


KINDS = {
    "tuple": (X, Y),
    "dictionary": {"labels": Y, "input": X},
    "batches": batches(),
    "lists in batches": [list(batch) for batch in batches()],
    "dictionaries in batches": [{"input": x, "labels": y} for x, y in batches()],
    "function of the context": lambda context: (X, Y),
    "function that makes a generator": lambda context: lambda: iter(batches()),
    "function of the epoch": lambda context: lambda epoch: iter(batches()),
}


def ask(app, kind: str):
    grid = LocalGrid(app, 1)
    content = RecordDict(
        {
            "arrays": to_arrays(open_artifacts(GOLDEN / "mlp").session()),
            "config": ConfigRecord(dict(FAST)),
        }
    )
    (reply,) = grid.send_and_receive([grid.create_message(content, kind, 1, "1")])
    assert not reply.has_error(), reply.error.reason
    return dict(reply.content["metrics"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_takes_what_fit_takes_and_counts_it(kind) -> None:
    app = client_app(GOLDEN / "mlp", KINDS[kind], KINDS[kind], metrics=["accuracy", "confusion"])
    trained, evaluated = ask(app, "train"), ask(app, "evaluate")
    assert trained["num-examples"] == evaluated["num-examples"] == 50
    assert {"train_loss", "train_seconds"} < set(trained)
    assert set(evaluated) == {"num-examples", "eval_loss", "accuracy"}
    whole = ask(client_app(GOLDEN / "mlp", (X, Y), (X, Y), metrics=["accuracy"]), "evaluate")
    np.testing.assert_allclose(evaluated["eval_loss"], whole["eval_loss"], rtol=1e-5)
    assert evaluated["accuracy"] == pytest.approx(whole["accuracy"])


def test_further_arguments_of_fit() -> None:
    app = client_app(GOLDEN / "mlp", (X, Y), fit_options={"drop_last": True, "schedule": "cosine"})
    assert ask(app, "train")["num-examples"] == 48  # three batches of 16

"""The JSON in a checkpoint is strict: any parser reads it, and numbers survive."""

import json
import math

import pytest
from small_runs import open_session, reopened

from onnxtrain.errors import OnnxTrainError
from onnxtrain.format import strict_json
from onnxtrain.format.checkpoint.content import RESERVED_PREFIX
from onnxtrain.format.checkpoint.file import read_checkpoint

NUMBERS = {"values": [math.inf, -math.inf, 0.1, 5e-324, 2**64 - 1], "nested": {"word": "nan"}}


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_numbers_that_json_lacks_are_strings() -> None:
    text = strict_json.dumps(NUMBERS)
    plain = json.loads(text, parse_constant=refuse)
    assert plain["values"][:2] == ["Infinity", "-Infinity"]
    assert strict_json.loads(text) == NUMBERS
    assert strict_json.dumps((math.nan,)) == '["NaN"]'
    assert math.isnan(strict_json.loads('{"a": ["NaN"]}')["a"][0])


def test_the_bare_words_of_old_checkpoints_are_read() -> None:
    assert strict_json.loads(json.dumps(NUMBERS)) == NUMBERS


def test_a_checkpoint_has_strict_json_and_gives_the_numbers_back() -> None:
    session = open_session()
    session.state._training.private["mine"] = NUMBERS
    content = read_checkpoint(session.state.to_bytes(include_optimizer_state=True))
    json.loads(content.properties[f"{RESERVED_PREFIX}training"], parse_constant=refuse)
    assert reopened(session).state._training.private["mine"] == NUMBERS


@pytest.mark.parametrize("word", ['"NaN"', '"Infinity"', "NaN"])
def test_a_learning_rate_that_is_not_finite_is_refused(word: str) -> None:
    state = open_session().state
    state._training._reserved["training"] = f'{{"learning_rate": {word}}}'
    with pytest.raises(OnnxTrainError, match="damaged record of the learning rate"):
        type(state).load_checkpoint(state.to_bytes())

"""The page that says what happens to data names tests for each event, and they are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data-safety.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/.]+)::([^`]+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=str)
def test_a_test_that_the_page_names_is_there(file, name) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    wanted = f"def {name}(" if file.endswith(".py") else f'test("{name}"'
    assert wanted in text


def test_every_event_has_tests() -> None:
    promised, tests = re.split(r"^## The tests$", PAGE, flags=re.MULTILINE)
    events = re.findall(r"^\| (.*?) \|", promised, re.MULTILINE)[1:]
    assert len(events) > 10 and len(NAMED) > 25
    assert len(re.findall(r"^\| (.*?) \|", tests, re.MULTILINE)) > 10

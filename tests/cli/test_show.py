"""``rayway show``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rayway.cli.show import show
from rayway.errors import SpecError

FINISHED, RUNNING = "digits-20260131-120000-aaaa", "digits-20260131-130000-bbbb"
Ask = Callable[..., Result]


def test_json_has_the_promised_keys(ask: Ask) -> None:
    result = ask(show, FINISHED, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    expected = {
        "run_id": FINISHED,
        "state": "FINISHED",
        "reason": None,
        "step": 3,
        "steps": 3,
        "attempts": 2,
        "metrics": {},
        "weights_sha256": "ab" * 32,
    }
    assert {key: facts[key] for key in expected} == expected
    (checkpoint,) = facts["checkpoints"]
    expected = {"step": 2, "committed_at": 5.0, "bytes": 1000}
    assert {key: checkpoint[key] for key in expected} == expected
    assert result.stderr == ""


def test_a_page_for_people(ask: Ask) -> None:
    result = ask(show, RUNNING)
    assert result.stdout.startswith(f"RUNNING {RUNNING}\n")
    assert "2 of 3 (66 %)" in result.stdout


def test_a_run_may_be_named_by_its_folder(ask: Ask, storage: Path) -> None:
    assert ask(show, str(storage / FINISHED)).stdout.startswith("FINISHED")


def test_a_run_that_is_not_there_is_refused_with_the_nearest(ask: Ask) -> None:
    result = ask(show, "digits-20260131-120000-aaab")
    assert isinstance(result.exception, SpecError)
    assert FINISHED in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [[], ["a", "b"]])
def test_one_run_is_asked_for(ask: Ask, arguments: list[str]) -> None:
    assert ask(show, *arguments).exit_code == 2

"""``rayway checkpoints``."""

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from rayway.cli.checkpoints import checkpoints

FINISHED, RUNNING = "digits-20260131-120000-aaaa", "digits-20260131-130000-bbbb"
Ask = Callable[..., Result]


def test_json_is_one_object_a_checkpoint(ask: Ask) -> None:
    (line,) = ask(checkpoints, FINISHED, "--json").stdout.splitlines()
    checkpoint = json.loads(line)
    assert (checkpoint["step"], checkpoint["attempt"]) == (2, 1)
    assert (checkpoint["committed_at"], checkpoint["weights_sha256"]) == (5.0, "ab" * 32)


def test_a_table_for_people(ask: Ask) -> None:
    rows = [line.split() for line in ask(checkpoints, FINISHED).stdout.splitlines()]
    assert rows[0] == ["checkpoint", "attempt", "committed", "size", "weights"]
    assert (rows[-1][0], rows[-1][-1]) == ("2", "ab" * 6)


def test_one_with_a_damaged_marker_is_named_and_left_out(ask: Ask, storage: Path) -> None:
    (marker,) = (storage / FINISHED / "checkpoints").glob("*/COMMITTED")
    marker.write_text("{")
    result = ask(checkpoints, FINISHED, "--json")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "step-00000002.attempt-001 is left out: COMMITTED is not" in result.stderr


def test_none_is_said_on_stderr(ask: Ask) -> None:
    result = ask(checkpoints, RUNNING)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no committed checkpoint yet" in result.stderr

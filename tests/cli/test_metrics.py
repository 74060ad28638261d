"""``rayway metrics``."""

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import Result

from rayway.cli.metrics import metrics
from rayway.storage.runs import RunFolder

FINISHED, RUNNING = "digits-20260131-120000-aaaa", "digits-20260131-130000-bbbb"
Ask = Callable[..., Result]


def test_json_is_one_line_a_step_with_exactly_the_promised_keys(ask: Ask) -> None:
    result = ask(metrics, FINISHED, "--json")
    lines = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in result.stdout.splitlines()
    ]
    keys = ["step", "loss", "loss_hex", "lr", "grad_norm", "attempt", "ids"]
    assert [list(line) for line in lines] == [keys] * 3
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 1), (2, 1), (3, 2)]
    assert lines[0]["loss"] == float.fromhex(lines[0]["loss_hex"]) == 0.5
    assert lines[2]["loss"] is None
    assert math.isnan(float.fromhex(lines[2]["loss_hex"]))
    assert lines[2]["ids"] == [3]


def test_a_table_for_people(ask: Ask) -> None:
    rows = [line.split() for line in ask(metrics, RUNNING).stdout.splitlines()]
    assert rows[0] == ["step", "attempt", "loss", "lr", "grad", "norm"]
    assert rows[2:] == [["1", "1", "0.25", "0.1", "1"], ["2", "1", "0.25", "0.1", "1"]]


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_a_run_without_steps_prints_nothing(ask: Ask, storage: Path, flag: list[str]) -> None:
    RunFolder.create(str(storage / "new"), "{}", now=datetime.now(UTC))
    result = ask(metrics, "new", *flag)
    assert (result.exit_code, result.stdout) == (0, "")
    assert ("has not finished a step" in result.stderr) == (not flag)

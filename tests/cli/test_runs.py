"""``rayway runs``."""

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner, Result

from rayway.cli.runs import runs

FINISHED, RUNNING = "digits-20260131-120000-aaaa", "digits-20260131-130000-bbbb"
Ask = Callable[..., Result]


def test_all_runs_newest_first(ask: Ask) -> None:
    result = ask(runs)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert rows[2] == [RUNNING, "RUNNING", "2/3", "0.25"]
    assert rows[3] == [FINISHED, "FINISHED", "3/3", "nan"]


def test_json_is_one_object_a_run(ask: Ask) -> None:
    found = [json.loads(line) for line in ask(runs, "--json").stdout.splitlines()]
    assert [(each["run_id"], each["state"]) for each in found] == [
        (RUNNING, "RUNNING"),
        (FINISHED, "FINISHED"),
    ]


def test_a_run_that_cannot_be_read_is_named_and_the_others_shown(ask: Ask, storage: Path) -> None:
    (storage / FINISHED / "run.json").write_text("{")
    result = ask(runs)
    assert result.exit_code == 0
    assert RUNNING in result.stdout
    assert FINISHED not in result.stdout
    assert f"{FINISHED} is left out: run.json is not valid JSON" in result.stderr


def test_no_run_is_said_on_stderr(tmp_path: Path) -> None:
    result = CliRunner().invoke(runs, ["--storage", str(tmp_path / "nowhere")])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "There is no run in" in result.stderr

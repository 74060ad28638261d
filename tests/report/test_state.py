"""The state of a run, as a table."""

from typing import Any

import pytest

from rayway.report.state import decide_state
from rayway.telemetry.alive import Place

NOW = 1_000_000.0
HERE = Place(host="here", pid_space="pid:[1]", pid=1, pid_since=0.0)


def sign(age_s: float, host: str = "here", pid: int = 42) -> dict[str, Any]:
    return {
        "host": host,
        "pid_space": "pid:[1]",
        "pid": pid,
        "pid_since": 500.0,
        "t": NOW - age_s,
    }


def only_42(pid: int) -> float | None:
    return 500.0 if pid == 42 else None


@pytest.mark.parametrize(
    ("end", "alive", "state", "reason"),
    [
        ({"state": "FINISHED", "reason": ""}, None, "FINISHED", None),
        ({"state": "FINISHED"}, sign(1), "FINISHED", None),
        ({"state": "STOPPED", "reason": "SIGTERM"}, sign(9999), "STOPPED", "SIGTERM"),
        ({"state": "FAILED", "reason": "user code: x"}, None, "FAILED", "user code: x"),
        ({}, sign(5), "RUNNING", "process 42 on here gave a sign of life"),
        (None, sign(29), "RUNNING", "process 42 on here gave a sign of life"),
        ({"state": "of the future"}, sign(5), "RUNNING", "process 42 on here gave a sign of life"),
        (None, sign(40), "INTERRUPTED", "no sign of life from process 42 on here for 40 s"),
        (None, sign(1, pid=43), "INTERRUPTED", "its process 43 on this host is gone"),
        (None, sign(9, "far", 43), "RUNNING", "process 43 on far gave a sign of life"),
        (
            None,
            sign(50, "far"),
            "INTERRUPTED",
            "no sign of life from process 42 on far for 50 s",
        ),
        (
            None,
            sign(-40, "far"),
            "RUNNING",
            "process 42 on far gave a sign of life, when is not known: its clock is 40 s ahead",
        ),
        (None, {}, "INTERRUPTED", "it never gave a sign of life"),
        (None, None, "INTERRUPTED", "no attempt was started"),
    ],
)
def test_the_state_of_a_run(
    end: dict[str, Any] | None, alive: dict[str, Any] | None, state: str, reason: str | None
) -> None:
    decided = decide_state(end, alive, now=NOW, here=HERE, started_at=only_42)
    assert decided == (state, reason)

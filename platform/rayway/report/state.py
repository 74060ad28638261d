"""What state a run is in: a pure function of what its folder says and of where the reader is."""

from collections.abc import Callable, Mapping
from typing import Any

from rayway.telemetry.alive import Place, judge_life, process_started_at

ENDINGS = ("FINISHED", "STOPPED", "FAILED")
"""The states a run says of itself. The others, RUNNING and INTERRUPTED, are seen from outside."""


def decide_state(
    end: Mapping[str, Any] | None,
    sign: Mapping[str, Any] | None,
    *,
    now: float,
    here: Place,
    started_at: Callable[[int], float | None] = process_started_at,
) -> tuple[str, str | None]:
    """Return the state of a run and the reason for it.

    Args:
        end: How the newest attempt ended, from ``end.json``; None if it does not say.
        sign: The newest sign of life of the run's driver; None if it never gave one.
        now: Unix seconds, by this host's clock.
        here: Where the reader runs.
        started_at: Tells when a process of this host started.

    Returns:
        One of FINISHED, STOPPED, FAILED, RUNNING, INTERRUPTED, and the reason. A run that is over
        and gave no reason has None.
    """
    if end is not None and end.get("state") in ENDINGS:
        return end["state"], end.get("reason") or None
    if sign is None:
        return "INTERRUPTED", "no attempt was started"
    verdict = judge_life(sign, now=now, here=here, started_at=started_at)
    return ("RUNNING" if verdict.alive else "INTERRUPTED"), verdict.because

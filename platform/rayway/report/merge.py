"""One history out of the logs of several attempts.

Each attempt starts from a checkpoint and repeats the steps that the one before it did after that
checkpoint. The history is the line of steps that leads to the weights the run has now: what an
attempt did beyond the start of a later one is replaced, each step is there once, none is missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayway.report.sentences import lower_is_better
from rayway.telemetry.events import Record


def merge_attempts(logs: Mapping[int, Sequence[Record]], kind: str) -> list[Record]:
    """Return the events of one kind, one for each step, oldest step first.

    Args:
        logs: The events of each attempt in the order written, by the attempt's number. An attempt
            whose ``start`` event is lost is taken to start right before its first step.
        kind: The type of event, one that has a ``step``: ``step``, ``evaluate``, ...

    Returns:
        The events, each with the number of its ``attempt``.
    """
    merged: dict[int, Record] = {}
    for attempt in sorted(logs):
        started = False
        for record in logs[attempt]:
            step = record.get("step")
            if record["type"] == "start":
                merged = _up_to(record.get("from_step", 0), merged)
                started = True
            elif isinstance(step, int):
                if not started and record["type"] == "step":
                    merged = _up_to(step - 1, merged)
                    started = True
                if record["type"] == kind:
                    merged[step] = {**record, "attempt": attempt}
    return [merged[step] for step in sorted(merged)]


def _up_to(last: int, merged: dict[int, Record]) -> dict[int, Record]:
    return {step: record for step, record in merged.items() if step <= last}


def missing_steps(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Return the gaps in ascending step numbers that should begin at 1, as (first, last)."""
    gaps = []
    before = 0
    for step in steps:
        if step > before + 1:
            gaps.append((before + 1, step - 1))
        before = step
    return gaps


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best value a metric had."""

    value: float
    """The value."""

    step: int
    """The step it was found at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What the logs of all attempts say, merged."""

    steps: list[Record]
    """The step events, one a step."""

    evaluations: list[Record]
    """The evaluate events, one a step."""

    starts: list[Record]
    """The start events, one an attempt."""

    end: Record | None
    """The newest attempt's end event."""

    warnings: list[str]
    """Messages of the runs, then what is missing or damaged."""


def merge_history(
    logs: Mapping[int, Sequence[Record]], damaged: Mapping[int, Sequence[int]]
) -> History:
    """Return one history out of the logs of all attempts.

    Args:
        logs: The events of each attempt, by the attempt's number.
        damaged: Line numbers that could not be read, by the attempt's number.
    """
    steps = merge_attempts(logs, "step")
    events = [(attempt, record) for attempt in sorted(logs) for record in logs[attempt]]
    warnings = [
        str(record.get("message", "")) for _, record in events if record["type"] == "warning"
    ]
    for attempt, lines in damaged.items():
        if lines:
            where = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
            warnings.append(f"The log of attempt {attempt} is damaged in line {where}.")
    for first, last in missing_steps(record["step"] for record in steps):
        which = f"step {first} is" if first == last else f"steps {first} to {last} are"
        warnings.append(f"The log has a gap: {which} missing.")
    newest = max(logs, default=None)
    ends = [r for attempt, r in events if r["type"] == "end" and attempt == newest]
    return History(
        steps=steps,
        evaluations=merge_attempts(logs, "evaluate"),
        starts=[{"attempt": attempt, **r} for attempt, r in events if r["type"] == "start"],
        end=ends[-1] if ends else None,
        warnings=warnings,
    )


def find_best(evaluations: Sequence[Record]) -> dict[str, Best]:
    """Return the best value of each metric and the first step it was found at; NaN never is."""
    best: dict[str, Best] = {}
    for record in evaluations:
        for name, value in record.get("metrics", {}).items():
            sign = -1 if lower_is_better(name) else 1
            if value != value:  # NaN  # noqa: PLR0124
                continue
            if name not in best or sign * value > sign * best[name].value:
                best[name] = Best(value=value, step=record["step"])
    return best

"""One history, whatever crashed: no gap, no double, and it is the line that led to the weights."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.report.merge import find_best, merge_attempts, merge_history, missing_steps
from rayway.telemetry.events import Record, decode, encode


def step(number: int, loss: float = 0.5) -> Record:
    return {"type": "step", "step": number, "loss": loss}


def start(from_step: int) -> Record:
    return {"type": "start", "from_step": from_step}


@dataclass(frozen=True)
class Life:
    """One attempt as it was: where it started and how far it got."""

    from_step: int
    last: int
    knows_start: bool
    rewritten: int


@st.composite
def crashes(draw: st.DrawFn) -> list[Life]:
    """Any pattern of crash and resume; a resume starts at or before what was reached."""
    lives: list[Life] = []
    reached = 0
    for _ in range(draw(st.integers(0, 6))):
        from_step = draw(st.integers(0, reached))
        last = from_step + draw(st.integers(0, 12))
        lost = draw(st.booleans()) and last > from_step  # its start event was torn
        lives.append(Life(from_step, last, not lost, draw(st.integers(0, 3))))
        reached = last
    return lives


def logs_of(lives: list[Life]) -> dict[int, list[Record]]:
    """Return what the attempts wrote; the loss tells which attempt wrote a step."""
    logs = {}
    for number, life in enumerate(lives, start=1):
        records = [step(i, loss=float(number)) for i in range(life.from_step + 1, life.last + 1)]
        records += records[-life.rewritten :] if life.rewritten else []  # storage failed amid it
        logs[number] = [start(life.from_step)] * life.knows_start + records
    return logs


@given(crashes())
def test_any_pattern_of_crash_and_resume_has_no_gap_and_no_double(lives: list[Life]) -> None:
    merged = merge_attempts(logs_of(lives), "step")
    last = lives[-1].last if lives else 0
    assert [record["step"] for record in merged] == list(range(1, last + 1))
    assert missing_steps(record["step"] for record in merged) == []


@given(crashes())
def test_each_step_is_of_the_last_attempt_that_did_it(lives: list[Life]) -> None:
    merged = merge_attempts(logs_of(lives), "step")
    owner: dict[int, int] = {}
    for number, life in enumerate(lives, start=1):
        for i in range(life.from_step + 1, life.last + 1):
            owner[i] = number
    for record in merged:
        assert record["attempt"] == record["loss"] == owner[record["step"]]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=5), st.data())
def test_logs_cut_off_at_any_byte_beyond_their_last_checkpoint_leave_no_gap(
    lives: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Killed at any byte; only what was flushed before a commit is sure to be in the log."""
    logs = {}
    committed = 0
    for number, (until_save, after_save) in enumerate(lives, start=1):
        steps = range(committed + 1, committed + until_save + after_save + 1)
        lines = [encode(each, t=1.0) for each in [start(committed), *map(step, steps)]]
        flushed = len(b"".join(lines[: until_save + 1])) if until_save else 0
        log = b"".join(lines)
        decoded = decode(log[: data.draw(st.integers(flushed, len(log)))])
        assert decoded.damaged == ()
        logs[number] = decoded.records
        committed += until_save
    numbers = [record["step"] for record in merge_attempts(logs, "step")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= committed


def test_a_resume_that_did_no_step_yet_still_ends_the_line_before_it() -> None:
    logs = {1: [start(0), step(1), step(2), step(3)], 2: [start(1)]}
    assert [record["step"] for record in merge_attempts(logs, "step")] == [1]


def test_attempts_are_ordered_by_number_not_by_place() -> None:
    logs = {10: [start(0), step(1, 10.0)], 9: [start(0), step(1, 9.0), step(2, 9.0)]}
    merged = merge_attempts(logs, "step")
    assert [(r["step"], r["attempt"]) for r in merged] == [(1, 10)]


def test_steps_are_in_order_even_if_threads_logged_them_in_another() -> None:
    merged = merge_attempts({1: [start(0), step(2), step(1), step(3)]}, "step")
    assert [record["step"] for record in merged] == [1, 2, 3]


def test_evaluations_of_a_replaced_line_go_with_it() -> None:
    def evaluate(number: int, accuracy: float) -> Record:
        return {"type": "evaluate", "step": number, "metrics": {"accuracy": accuracy}}

    logs = {
        1: [start(0), step(1), evaluate(1, 0.1), step(2), evaluate(2, 0.9)],
        2: [start(1), step(2), step(3), evaluate(3, 0.3)],
    }
    assert [r["step"] for r in merge_attempts(logs, "evaluate")] == [1, 3]


@pytest.mark.parametrize(
    ("steps", "gaps"),
    [([], []), ([1, 2, 3], []), ([2], [(1, 1)]), ([1, 4, 5, 8], [(2, 3), (6, 7)])],
)
def test_gaps_are_found(steps: list[int], gaps: list[tuple[int, int]]) -> None:
    assert missing_steps(steps) == gaps


def test_the_history_warns_of_gaps_and_damage() -> None:
    logs = {1: [start(0), step(1), {"type": "warning", "message": "slow disk"}, step(4), step(6)]}
    history = merge_history(logs, {1: list(range(1, 8))})
    assert history.warnings == [
        "slow disk",
        "The log of attempt 1 is damaged in line 1, 2, 3, 4, 5, ....",
        "The log has a gap: steps 2 to 3 are missing.",
        "The log has a gap: step 5 is missing.",
    ]


def test_only_the_newest_attempt_says_how_the_run_ended() -> None:
    end = {"type": "end", "state": "FAILED", "step": 1}
    assert merge_history({1: [start(0), end]}, {}).end == end
    assert merge_history({1: [start(0), end], 2: [start(0)]}, {}).end is None


def test_the_best_of_a_metric_is_found() -> None:
    values = [
        {"accuracy": 0.5, "val_loss": 2.0},
        {"accuracy": math.nan, "val_loss": 1.0},
        {"accuracy": 0.9, "val_loss": math.inf},
        {"accuracy": 0.9},
    ]
    best = find_best([{"step": i, "metrics": m} for i, m in enumerate(values)])
    assert (best["accuracy"].value, best["accuracy"].step) == (0.9, 2)
    assert (best["val_loss"].value, best["val_loss"].step) == (1.0, 1)


def test_a_metric_that_always_was_nan_has_no_best() -> None:
    assert find_best([{"step": 1, "metrics": {"accuracy": math.nan}}]) == {}

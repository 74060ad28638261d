"""Progress: readable at 80 columns, quiet in a pipe, harmless whatever a message holds."""

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rayway.telemetry.console import LINE_S, REDRAW_S, Progress, block, describe_event
from rayway.telemetry.events import Record
from rayway.telemetry.status import Status

RUN_ID = "digits-20261130-201700-ab12"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal, of 80 columns, and can be cut off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.gone = False
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("NO_COLOR", raising=False)

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        if self.gone:
            raise BrokenPipeError
        return super().write(text)


def event(kind: str, t: float, **values: Any) -> Record:
    return {"type": kind, "t": t, **values}


def train(progress: Progress, clock: Clock, *, steps: int, step_s: float) -> None:
    """Feed a whole run: an evaluation and a checkpoint after half of it."""
    values = {"attempt": 1, "world_size": 2, "device": "cpu", "from_step": 0, "steps": steps}
    progress.feed(event("start", clock.now, **values))
    for number in range(1, steps + 1):
        clock.now += step_s
        numbers = {"step": number, "loss": 2.0 / number, "lr": 1e-3, "rows": 64}
        progress.feed(event("step", clock.now, **numbers))
        if number == steps // 2:
            saved = {"step": number, "bytes": 1_234_567, "seconds": 0.08}
            progress.feed(event("checkpoint", clock.now, **saved))
            found = {"metrics": {"accuracy": 0.9712}, "rows": 360}
            progress.feed(event("evaluate", clock.now, step=number, **found))
    progress.feed(event("end", clock.now, state="FINISHED", step=steps))
    progress.close()


def rows_of(status: Status, width: int, now: float = 1010.0) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(block(status, run_id=RUN_ID, now=now))
    return capture.get().splitlines()


def test_a_pipe_gets_few_plain_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    train(Progress(RUN_ID, stream=stream, clock=clock), clock, steps=2000, step_s=0.01)
    lines = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]

    assert "\x1b" not in stream.getvalue()
    assert lines[0] == "attempt 1 starts from the beginning, 2 workers on cpu"
    assert "checkpoint 1,000 committed, 1.2 MB in 0.1 s" in lines
    assert "step 1,000 evaluated: accuracy 0.9712  (360 rows)" in lines
    assert lines[-1] == "FINISHED at step 2,000"
    of_steps = [line for line in lines if line.startswith("step") and "/2,000" in line]
    assert len(of_steps) <= 1 + 2000 * 0.01 / LINE_S
    assert of_steps[1].endswith("(25 %)  loss 0.003984  lr 0.001  6,400 rows/s  ETA 15 s")


def test_a_terminal_gets_one_block_redrawn_a_few_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, clock = Terminal(monkeypatch), Clock()
    train(Progress(RUN_ID, stream=terminal, clock=clock), clock, steps=2000, step_s=0.001)
    shown = terminal.getvalue()
    events, pictures = 4, 2.0 / REDRAW_S
    assert shown.count("lr 0.001") <= events + pictures
    assert "accuracy 0.9712" in shown
    assert "\x1b[?25l" in shown  # the cursor was hidden
    assert shown.rstrip().endswith("\x1b[?25h")  # and is back


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(monkeypatch), Clock()
    monkeypatch.setenv("TERM", "dumb")
    train(Progress(RUN_ID, stream=terminal, clock=clock), clock, steps=10, step_s=1.0)
    assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_block_is_four_rows_that_fit(width: int) -> None:
    status = Status(steps=5_000_000)
    start = {"attempt": 3, "world_size": 128, "device": "cuda", "from_step": 0}
    status.take(event("start", 1000.0, **start))
    for number in range(4_000_000, 4_000_010):
        values = {"step": number, "loss": 1.23456789e-7, "lr": 1.23456e-4, "rows": 65536}
        status.take(event("step", 1000.0 + number % 10, **values))
    status.take(event("checkpoint", 1000.0, step=4_000_000, bytes=10))
    metrics = {"accuracy": 0.97123, "a-very-long-metric-name": -123456.789}
    status.take(event("evaluate", 1000.0, step=4_000_000, metrics=metrics))
    rows = rows_of(status, width)
    assert len(rows) == 4
    assert max(map(cell_len, rows)) <= width


def test_the_block_says_where_the_run_is() -> None:
    status = Status()
    start = {"attempt": 1, "world_size": 2, "device": "cpu", "from_step": 0, "steps": 100}
    status.take(event("start", 1000.0, **start))
    for number in range(1, 51):
        values = {"step": number, "loss": 0.5, "lr": 0.1, "rows": 8}
        status.take(event("step", 1000.0 + number, **values))
    status.take(event("checkpoint", 1040.0, step=40, bytes=10))
    head, bar, numbers, saved = rows_of(status, 80, now=1050.0)
    assert head.rstrip() == f"RUNNING {RUN_ID}  attempt 1, 2 workers on cpu"
    assert bar.startswith("step 50/100 ")
    assert bar.endswith(" 50 %  ETA 50 s")
    assert numbers.rstrip() == "loss 0.5  lr 0.1  8 rows/s"
    assert saved.rstrip() == "checkpoint 40 committed 10 s ago"


def test_the_block_of_a_run_that_said_nothing_yet_is_empty_but_whole() -> None:
    head, bar, *rest = rows_of(Status(), 80)
    assert head.rstrip() == f"STARTING {RUN_ID}"
    assert bar.rstrip() == "step 0"
    assert [row.strip() for row in rest] == ["", ""]


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    terminal, clock = Terminal(monkeypatch), Clock()
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    train(Progress(RUN_ID, stream=terminal, clock=clock), clock, steps=10, step_s=1.0)
    assert "FINISHED" in terminal.getvalue()
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())) is not no_color


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"type": "start", "attempt": 2, "from_step": 1500, "world_size": 1}, "step 1,500, 1 work"),
        ({"type": "warning", "message": "a\nb \x1b[2J [red]"}, "warning: a\\nb \\x1b[2J [red]"),
        ({"type": "end", "state": "FAILED", "step": 3, "reason": "NaN"}, "FAILED at step 3: NaN"),
        ({"type": "evaluate", "step": 1, "metrics": {"a\n": float("nan")}}, "evaluated: a\\n nan"),
        ({"type": "checkpoint", "step": 1, "bytes": 5}, "checkpoint 1 committed, 5 B"),
    ],
)
def test_an_event_is_one_safe_line(record: Record, line: str) -> None:
    described = describe_event(record)
    assert described is not None
    assert line in described


@pytest.mark.parametrize("record", [{"type": "step", "step": 1}, {"type": "of the future"}])
def test_other_events_are_no_line(record: Record) -> None:
    assert describe_event(record) is None


@pytest.mark.parametrize("on_terminal", [False, True])
def test_messages_cannot_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    terminal = Terminal(monkeypatch, is_terminal=on_terminal)
    with Progress("evil\x1b[2J", stream=terminal, clock=Clock()) as progress:
        progress.note("also \x1b[2J [bold]evil[/bold]\rx")
    assert "\x1b[2J" not in terminal.getvalue()
    assert "also \\x1b[2J [bold]evil[/bold]\\rx" in terminal.getvalue()


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_reader_who_went_away_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    terminal, clock = Terminal(monkeypatch, is_terminal=on_terminal), Clock()
    progress = Progress(RUN_ID, stream=terminal, clock=clock)
    terminal.gone = True
    train(progress, clock, steps=10, step_s=1.0)
    assert progress.status.state == "FINISHED"

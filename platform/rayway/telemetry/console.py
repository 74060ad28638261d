"""Progress of a run on stderr: one live block on a terminal, plain lines in a pipe or a file."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayway.telemetry.events import Record
from rayway.telemetry.printable import printable
from rayway.telemetry.status import Status, describe_workers
from rayway.units import format_bytes, format_duration

REDRAW_S = 0.25
"""Seconds between two pictures of the live block."""

LINE_S = 5.0
"""Seconds between two step lines in a pipe."""

_STYLES = {"FINISHED": "green", "FAILED": "bold red", "STOPPED": "yellow", "RUNNING": "cyan"}


class _PatientConsole(Console):
    """A console whose reader may go away. Rich would close stdout and end the process."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True


class Progress:
    """Shows a run while it goes.

    Args:
        run_id: Shown with the state.
        steps: Steps of the whole run, if known; a ``start`` event may tell it later.
        stream: Where to show it; stderr if None.
        clock: Unix seconds.
    """

    def __init__(
        self,
        run_id: str,
        *,
        steps: int | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.status = Status(steps=steps)
        self._run_id = run_id
        self._stream = stream or sys.stderr
        self._console = _PatientConsole(file=self._stream, highlight=False)
        self._clock = clock
        self._due_at = 0.0
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                auto_refresh=False,  # a thread would redraw while nothing is new
                redirect_stdout=sys.stdout.isatty(),  # what a script reads is left alone
            )
            self._live.start()

    def feed(self, record: Record) -> None:
        """Show one event of the run. Cheap: what comes too fast to be read is not drawn."""
        self.status.take(record)
        line = describe_event(record)
        if line and (self._live is None or record["type"] != "checkpoint"):
            self._print(line, t=record.get("t"))
        self.refresh()

    def note(self, text: str) -> None:
        """Show one line of text."""
        self._print(printable(text))

    def refresh(self) -> None:
        """Bring the picture up to date, if it is old enough."""
        now = self._clock()
        if now < self._due_at:
            return
        if self._live is not None:
            self._due_at = now + REDRAW_S
            self._draw()
        elif self.status.loss is not None and self.status.state == "RUNNING":
            self._due_at = now + LINE_S
            self._print(describe_step(self.status), t=self.status.heard_at)

    def close(self) -> None:
        """Draw the last picture and give the terminal back. A second call does nothing."""
        if self._live is not None:
            self._draw()
            with suppress(OSError, ValueError):
                self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _draw(self) -> None:
        picture = block(self.status, run_id=self._run_id, now=self._clock())
        with suppress(OSError, ValueError):  # nobody looks any more: no reason to stop training
            if self._live is not None:
                self._live.update(picture, refresh=True)

    def _print(self, line: str, t: float | None = None) -> None:
        time_of_day = datetime.fromtimestamp(self._clock() if t is None else t).strftime("%H:%M:%S")
        # RuntimeError: a signal's handler prints while the same thread is amid printing.
        with suppress(OSError, ValueError, RuntimeError):
            if self._live is not None:
                self._console.print(Text(time_of_day, style="dim"), Text(line), soft_wrap=True)
            else:
                print(time_of_day, line, file=self._stream, flush=True)


def describe_event(record: Record) -> str | None:
    """Return the line an event is worth, None for a step."""
    step = record.get("step", 0)
    match record["type"]:
        case "start":
            begin = record.get("from_step", 0)
            whence = f"step {begin:,}" if begin else "the beginning"
            attempt = record.get("attempt", 1)
            return printable(f"attempt {attempt} starts from {whence}, {describe_workers(record)}")
        case "evaluate":
            found = describe_numbers(record.get("metrics", {}))
            rows = f"  ({record['rows']:,} rows)" if record.get("rows") else ""
            return f"step {step:,} evaluated: {found}{rows}"
        case "checkpoint":
            took = f" in {record['seconds']:.1f} s" if "seconds" in record else ""
            return f"checkpoint {step:,} committed, {format_bytes(record.get('bytes', 0))}{took}"
        case "warning":
            return printable(f"warning: {record.get('message', '')}")
        case "end":
            reason = f": {record['reason']}" if record.get("reason") else ""
            return printable(f"{record.get('state', 'ENDED')} at step {step:,}{reason}")
        case _:
            return None


def describe_numbers(numbers: object) -> str:
    """Return ``{"accuracy": 0.9712}`` as ``accuracy 0.9712``; several side by side."""
    if not isinstance(numbers, dict):
        return ""
    return "  ".join(f"{printable(name)} {format_number(value)}" for name, value in numbers.items())


def format_number(value: object) -> str:
    """Return a loss or a metric with four digits; ``-`` if there is none."""
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def describe_step(status: Status) -> str:
    """Return the line that says how far the run is and how fast it goes."""
    of = f"/{status.steps:,} ({_percent(status)})" if status.steps else ""
    return "  ".join([f"step {status.step:,}{of}", *_speed(status)])


def block(status: Status, *, run_id: str, now: float) -> RenderableType:
    """Return the live picture, four lines that fit into 80 columns.

    Args:
        status: What is known.
        run_id: Shown with the state.
        now: Unix seconds.
    """
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"{status.state} ", style=_STYLES.get(status.state, "cyan"))
    head.append(printable(run_id), style="bold")
    if status.workers:
        head.append(printable(f"  attempt {status.attempt or 1}, {status.workers}"), style="dim")

    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    of = f"/{status.steps:,}" if status.steps else ""
    picture = ProgressBar(total=status.steps, completed=status.step) if status.steps else Text()
    eta = f"{_percent(status)}{_eta(status)}" if status.steps else ""
    bar.add_row(f"step {status.step:,}{of}", picture, eta)

    numbers = Text("  ".join(_speed(status, eta=False)), no_wrap=True, overflow="ellipsis")
    return Group(head, bar, numbers, _saved_and_found(status, now))


def _saved_and_found(status: Status, now: float) -> Text:
    parts = []
    if status.checkpoint is not None:
        age_s = max(now - status.checkpoint.get("t", now), 0.0)
        step = status.checkpoint.get("step", 0)
        parts.append(f"checkpoint {step:,} committed {format_duration(age_s)} ago")
    if status.metrics_step is not None:
        parts.append(f"{describe_numbers(status.metrics)} at step {status.metrics_step:,}")
    return Text("  ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")


def _speed(status: Status, *, eta: bool = True) -> list[str]:
    parts = []
    if status.loss is not None:
        parts.append(f"loss {format_number(status.loss)}")
    if status.lr is not None:
        parts.append(f"lr {status.lr:.3g}")
    if status.rows_per_s is not None:
        parts.append(f"{status.rows_per_s:,.0f} rows/s")
    if eta and status.eta_s is not None:
        parts.append(f"ETA {format_duration(status.eta_s)}")
    return parts


def _percent(status: Status) -> str:
    return f"{100 * status.step // status.steps} %" if status.steps else ""


def _eta(status: Status) -> str:
    return "" if status.eta_s is None else f"  ETA {format_duration(status.eta_s)}"

"""How far ``rayway data prepare`` is, on stderr: a bar on a terminal, plain lines in a pipe."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayway.data.sources import Source
from rayway.telemetry.console import LINE_S, REDRAW_S
from rayway.telemetry.printable import printable
from rayway.units import format_bytes, format_duration


class PrepareScreen:
    """Shows a source being prepared.

    Args:
        src: As the user gave it.
        dst: As the user gave it.
        stream: Where to show it; stderr if None.
        clock: Seconds.
    """

    def __init__(
        self,
        src: str,
        dst: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._src, self._dst = printable(src), printable(dst)
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream, highlight=False)
        self._clock = clock
        self._live: Live | None = None
        self._what = ""
        self._weights: list[int] = []
        self._at_work: dict[int, int] = {}
        self._done: set[int] = set()
        self._rows = 0
        self._begun_at: float | None = None
        self._due_at = 0.0
        self._begun_with = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            with suppress(OSError, ValueError):
                self._live.stop()
            self._live = None

    def found(self, source: Source, *, shards: int, done: int) -> None:
        """Say what the source is."""
        size = format_bytes(sum(file.size for file in source.files))
        before = f"; {done} are done already" if done else ""
        self._print(
            f"{self._src}: {_count(len(source.files), 'file')} ({source.format}, {size}) -> "
            f"{_count(shards, 'shard')} in {self._dst}{before}"
        )
        for names, why in ((source.ignored, "ignored"), (source.empty, "empty, left out")):
            if names:
                some = ", ".join(map(printable, names[:3])) + (", ..." if len(names) > 3 else "")
                self._print(f"{_count(len(names), 'file')} {why}: {some}")

    def phase(self, what: str, weights: Sequence[int], *, done: Collection[int] = ()) -> None:
        """Begin to count: the bytes of each task of a phase, and which are done already."""
        self._what, self._weights = what, [max(weight, 1) for weight in weights]
        self._done, self._at_work, self._rows = set(done), {}, 0
        self._todo = [place for place in range(len(weights)) if place not in self._done]
        self._begun_at, self._begun_with = None, self._read()
        self._due_at = 0.0 if self._live is not None else self._clock() + LINE_S
        self._refresh()

    def tick(self, at_work: dict[int, int]) -> None:
        """Take what the tasks at work have read; they are numbered among those not done."""
        self._at_work = {self._todo[place]: read for place, read in at_work.items()}
        self._refresh()

    def step(self, place: int, *, rows: int) -> None:
        """Take that a task is done."""
        self._done.add(self._todo[place])
        self._rows += rows
        self._refresh()

    def _read(self) -> int:
        done = sum(self._weights[place] for place in self._done)
        return done + sum(
            min(read, self._weights[place])
            for place, read in self._at_work.items()
            if place not in self._done
        )

    def _refresh(self) -> None:
        now = self._clock()
        if self._begun_at is None and self._read() > self._begun_with:
            self._begun_at = now  # the start of tasks is not their speed
        if now < self._due_at:
            return
        if self._live is not None:
            self._due_at = now + REDRAW_S
            line = Table.grid(padding=(0, 1), expand=True)
            line.add_column(no_wrap=True)
            line.add_column(ratio=1)
            line.add_column(no_wrap=True, justify="right")
            share = self._read() / sum(self._weights)
            bar = ProgressBar(total=1.0, completed=share)
            line.add_row(f"{self._what} {self._shards()}", bar, "  ".join(self._speed(now)))
            with suppress(OSError, ValueError):
                self._live.update(line, refresh=True)
        else:
            self._due_at = now + LINE_S
            self._print("  ".join([f"{self._what} {self._shards()}", *self._speed(now)]))

    def _shards(self) -> str:
        return f"{len(self._done)}/{len(self._weights)}"

    def _speed(self, now: float) -> list[str]:
        if self._begun_at is None:
            return ["starting tasks"]
        read, total, took = self._read(), sum(self._weights), now - self._begun_at
        words = [f"{100 * read // total} %"]
        if self._rows:
            words.append(f"{self._rows:,} rows")
        rate = (read - self._begun_with) / took if took > 1 else 0
        if rate:
            words.append(f"{format_bytes(round(rate))}/s")
            words.append(f"ETA {format_duration((total - read) / rate)}")
        return words

    def _print(self, line: str) -> None:
        time_of_day = datetime.fromtimestamp(self._clock()).strftime("%H:%M:%S")
        with suppress(OSError, ValueError, RuntimeError):
            if self._live is not None:
                self._console.print(Text(time_of_day, style="dim"), Text(line), soft_wrap=True)
            else:
                print(time_of_day, line, file=self._stream, flush=True)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")

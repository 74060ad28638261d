"""Pages fit a terminal, are whole in a pipe, and never fail for want of a character."""

import io
import re
from datetime import datetime

import pytest
from rich.table import Table
from rich.text import Text

from rayway.report.paper import print_page, when


class Stream(io.TextIOWrapper):
    """A stream of any encoding that may say it is a terminal."""

    def __init__(self, encoding: str = "utf-8", *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def text(self) -> str:
        self.seek(0)
        return self.read()


def table() -> Table:
    found = Table(box=None)
    found.add_column("run")
    found.add_row(Text("x" * 300, style="red"))
    found.add_row("short, so it is padded")
    return found


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_pipe_gets_whole_lines_without_colour_or_trailing_blanks() -> None:
    stream = Stream()
    print_page(table(), stream)
    lines = stream.text().splitlines()
    assert any("x" * 300 in line for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in stream.text()


def test_a_terminal_gets_its_width_and_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(is_terminal=True)
    print_page(table(), stream)
    assert "\x1b[31m" in stream.text()

    monkeypatch.setenv("NO_COLOR", "1")
    plain = Stream(is_terminal=True)
    print_page(table(), plain)
    text = re.sub(r"\x1b\[1m|\x1b\[0m", "", plain.text())  # bold is no colour
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_the_encoding_lacks_is_spelled_out(is_terminal: bool) -> None:
    stream = Stream("ascii", is_terminal=is_terminal)
    print_page(Text("naïve 日"), stream)
    print_page(table(), stream)
    assert "na\\xefve \\u65e5" in stream.text()


def test_markup_in_a_text_is_only_text() -> None:
    stream = Stream()
    print_page("[bold]a[/bold] :smile:", stream)
    assert stream.text() == "[bold]a[/bold] :smile:\n"


@pytest.mark.parametrize(
    ("moment", "shown"),
    [(None, "-"), ("tomorrow", "tomorrow"), (float("nan"), "nan"), (1e300, "1e+300")],
)
def test_a_moment_that_is_none_is_shown_as_it_is(moment: object, shown: str) -> None:
    assert when(moment) == shown


def test_seconds_are_shown_as_local_time() -> None:
    moment = datetime(2026, 1, 31, 23, 59, 59)
    assert when(moment.timestamp()) == "2026-01-31 23:59:59"

"""Pages on a stream: in colour on a terminal, plain and uncut in a pipe."""

import io
from datetime import datetime
from typing import TextIO

from rich.console import Console, RenderableType

_NO_LIMIT = 1000


def print_page(page: RenderableType, stream: TextIO) -> None:
    """Write a page to a stream.

    On a terminal it fits the terminal's width. In a pipe nothing is cut off and lines have no
    trailing blanks. What the stream's encoding lacks is spelled out instead of an error.
    """
    on_terminal = stream.isatty()
    encoding = stream.encoding or "utf-8"
    paper = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    console = Console(
        file=paper,
        force_terminal=on_terminal,
        width=Console(file=stream).width if on_terminal else _NO_LIMIT,
        highlight=False,
        emoji=False,
        markup=False,
    )
    console.print(page)
    paper.seek(0)
    text = paper.read()
    if not on_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    stream.write(text)
    stream.flush()


def when(moment: object) -> str:
    """Return unix seconds as local time to the second; what is no moment is shown as it is."""
    if not isinstance(moment, int | float):
        return "-" if moment is None else str(moment)
    try:
        return datetime.fromtimestamp(moment).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return str(moment)

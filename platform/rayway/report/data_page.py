"""What people get to see of a data set: its facts, its columns and what is wrong with it."""

from collections.abc import Callable, Sequence
from datetime import datetime

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rayway.data.check import Finding
from rayway.data.index import Index
from rayway.data.keys import Int64s
from rayway.data.scan import Rules, Scan
from rayway.data.values import Values
from rayway.telemetry.console import format_number
from rayway.telemetry.printable import printable
from rayway.units import format_bytes

_MOST = 20
_STYLES = {"problem": "bold red", "advice": "yellow"}


def data_page(
    scan: Scan, index: Index | None, findings: Sequence[Finding], rules: Rules
) -> RenderableType:
    """Return the page of a data set that was read."""
    page: list[RenderableType] = [_facts(scan, index, rules), Text(), _columns(scan)]
    page += [Text()] if findings else []
    for level in _STYLES:
        texts = [finding.text for finding in findings if finding.level == level]
        page += [_finding(level, text) for text in texts[:_MOST]]
        if len(texts) > _MOST:
            page.append(_finding(level, f"... and {len(texts) - _MOST} more: see --json"))
    return Group(*page, Text(), verdict(findings))


def verdict(findings: Sequence[Finding]) -> Text:
    """Return the last line: whether the data set can be trained on."""
    problems = sum(finding.level == "problem" for finding in findings)
    advice = len(findings) - problems
    if problems:
        return Text(f"not fit for training: {_count(problems, 'problem')}", "bold red")
    tail = f", {_count(advice, 'piece')} of advice" if advice else ""
    return Text(f"fit for training{tail}", "green")


def _facts(scan: Scan, index: Index | None, rules: Rules) -> Table:
    rows = np.array([count for footer in scan.footers.values() for count in footer.rows])
    sizes = np.array([size for footer in scan.footers.values() for size in footer.group_bytes])
    stored = sum(file.size for file in scan.files)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("data", printable(scan.place.url))
    table.add_row(
        "size", f"{rows.sum():,} rows in {_count(len(scan.files), 'file')}, {format_bytes(stored)}"
    )
    if len(rows):
        read = f", {scan.groups_read:,} of them read" if scan.groups_read < len(rows) else ""
        table.add_row(
            "row groups",
            f"{len(rows):,} of {_spread(rows, '{:,}'.format)} rows, "
            f"{_spread(sizes, lambda size: format_bytes(int(size)))} in memory{read}",
        )
    if rules.job and index is not None:
        row = index.group_bytes / int(index.rows.max())
        table.add_row(
            "micro-batch",
            f"{rules.micro_batch:,} rows, {format_bytes(round(row * rules.micro_batch))} as stored",
        )
    checksums = {True: "in all pages looked at", False: "not in all pages", None: "not looked at"}
    table.add_row("checksums", checksums[scan.checksums])
    table.add_row("fingerprint", "-" if index is None else index.fingerprint)
    return table


def _columns(scan: Scan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("column", overflow="fold", min_width=12)
    table.add_column("type", overflow="fold", min_width=13)
    for name in ("nulls", "NaN", "inf"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("values", justify="right", min_width=14)
    table.add_column("length", justify="right")
    for field in scan.schema:
        values = scan.values.get(field.name, Values())
        table.add_row(
            printable(field.name),
            printable(_kind(str(field.type))),
            *(_bad(each.count) for each in (values.null, values.nan, values.infinite)),
            _from_to(values.low, values.high),
            _from_to(values.shortest, values.longest),
        )
    return table


def _finding(level: str, text: str) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=_STYLES[level], no_wrap=True, min_width=7)
    table.add_column(overflow="fold")
    table.add_row(level, printable(text))
    return table


def _kind(kind: str) -> str:
    """Return a type's name without what all types of its kind have."""
    return kind.replace("element: ", "").replace("item: ", "").replace("fixed_size_list", "list")


def _bad(count: int) -> Text:
    return Text(f"{count:,}", "bold red") if count else Text("0", "dim")


def _from_to(low: object, high: object) -> str:
    if low is None:
        return ""
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: object) -> str:
    if isinstance(value, datetime):
        return value.date().isoformat()
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return format_number(value) if isinstance(value, float) else printable(value)


def _spread(numbers: Int64s, show: Callable[[int], str]) -> str:
    """Return the median, and the extremes if there are others."""
    low, middle, high = (int(n) for n in (numbers.min(), np.median(numbers), numbers.max()))
    return show(middle) if low == high else f"{show(middle)} ({show(low)} to {show(high)})"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"

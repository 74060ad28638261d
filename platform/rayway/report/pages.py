"""What people get to see of a run: its page, its summary, the table of all runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rayway.checkpoint.catalog import Committed
from rayway.report.facts import RunFacts
from rayway.report.merge import Best
from rayway.report.paper import when
from rayway.report.sentences import time_sentence
from rayway.telemetry.console import format_number
from rayway.telemetry.events import Record
from rayway.telemetry.printable import printable, printable_lines
from rayway.telemetry.status import describe_workers
from rayway.units import format_bytes

STYLES = {"FINISHED": "green", "FAILED": "bold red", "STOPPED": "yellow", "RUNNING": "cyan"}


def run_page(facts: RunFacts) -> RenderableType:
    """Return the page of one run."""
    rows = [*_progress(facts), *_results(facts)]
    if facts.weights_sha256:
        rows.append(("weights sha256", Text(printable(facts.weights_sha256), overflow="fold")))
    rows.append(("folder", Text(printable(facts.url), overflow="fold")))
    rows += [("warning", Text(printable_lines(text))) for text in _few(facts.warnings)]
    page: list[RenderableType] = [_title(facts), _facts(rows)]
    if facts.checkpoints:
        page += [Text(), checkpoint_table(facts.checkpoints)]
    return Group(*page)


def summary(facts: RunFacts, *, see: str) -> RenderableType:
    """Return what to say at the end of a run.

    Args:
        facts: The run.
        see: The command that shows it again.
    """
    rows = [*_progress(facts), *_results(facts)]
    if facts.checkpoints:
        newest = facts.checkpoints[-1]
        count = len(facts.checkpoints)
        which = "1 checkpoint, of" if count == 1 else f"{count} checkpoints, the newest of"
        text = f"{which} step {newest.step:,} ({format_bytes(newest.bytes)})"
    else:
        text = "no checkpoint"
    folder = Text(f"{text}, in {printable(facts.url)}", overflow="fold")
    rows += [("saved", folder), ("see", Text(printable(see), overflow="fold"))]
    return Group(_title(facts), _facts(rows))


def runs_table(runs: Sequence[RunFacts]) -> RenderableType:
    """Return one row a run. Its id is never cut off, it is there to be copied."""
    return _RunsTable(runs)


@dataclass(frozen=True, slots=True)
class _RunsTable:
    """A table that makes room for ids first; rich would take room from the widest column."""

    runs: Sequence[RunFacts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        id_width = max(options.max_width - 52, 28)  # 52 is enough for the other columns
        table = _table("run", "state", "step", "loss", "metrics")
        for column in table.columns[2:4]:
            column.justify = "right"
        table.columns[4].no_wrap = False
        for run in self.runs:
            run_id = printable(run.run_id)
            parts = [run_id[i : i + id_width] for i in range(0, len(run_id), id_width)]
            of = f"/{run.steps:,}" if run.steps else ""
            metrics = " ".join(f"{printable(k)}={format_number(v)}" for k, v in run.metrics.items())
            table.add_row(
                Text("\n".join(parts)),
                _state(run.state),
                f"{run.step:,}{of}",
                format_number(run.loss),
                Text(metrics),
            )
        yield table


def checkpoint_table(checkpoints: Sequence[Committed]) -> RenderableType:
    """Return one row a checkpoint."""
    table = _table("checkpoint", "attempt", "committed", "size", "weights")
    for column in (table.columns[0], table.columns[1], table.columns[3]):
        column.justify = "right"
    for checkpoint in checkpoints:
        table.add_row(
            f"{checkpoint.step:,}",
            str(checkpoint.attempt),
            when(checkpoint.committed_at),
            format_bytes(checkpoint.bytes),
            checkpoint.weights_sha256[:12],
        )
    return table


def steps_table(steps: Sequence[Record], *, rows: int) -> RenderableType:
    """Return a table of at most ``rows`` steps, evenly spread; first and last are among them.

    Args:
        steps: Step events.
        rows: 2 or more.
    """
    table = _table("step", "attempt", "loss", "lr", "grad norm")
    for column in table.columns:
        column.justify = "right"
    rows = min(rows, len(steps))
    apart = (len(steps) - 1) / max(rows - 1, 1)
    for record in (steps[round(i * apart)] for i in range(rows)):
        table.add_row(
            f"{record['step']:,}",
            str(record.get("attempt", "-")),
            format_number(record.get("loss")),
            format_number(record.get("lr")),
            format_number(record.get("grad_norm")),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _facts(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(printable(name)), value)
    return table


def _state(state: str) -> Text:
    return Text(state, style=STYLES.get(state, "magenta"))


def _title(facts: RunFacts) -> Text:
    return Text.assemble(_state(facts.state), " ", (printable(facts.run_id), "bold"))


def _progress(facts: RunFacts) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    if facts.reason:
        rows.append(("reason", Text(printable_lines(facts.reason))))
    of = f" of {facts.steps:,} ({100 * facts.step // facts.steps} %)" if facts.steps else ""
    rows.append(("step", Text(f"{facts.step:,}{of}")))
    for start in facts.starts[-4:]:
        begin = start.get("from_step", 0)
        whence = f"from step {begin:,}" if begin else "from the beginning"
        line = f"{whence}, {describe_workers(start)}, {when(start.get('t'))}"
        rows.append((f"attempt {start.get('attempt')}", Text(printable(line))))
    return rows


def _results(facts: RunFacts) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    if facts.loss is not None:
        rows.append(("training loss", Text(f"{format_number(facts.loss)} in the last step")))
    for name, value in facts.metrics.items():
        rows.append((name, Text(format_number(value) + _best(facts.best.get(name), value))))
    told = time_sentence(facts.clock, facts.data)
    if told:
        rows.append(("time", Text(told)))
    if facts.data.get("left_out"):
        left_out = facts.data["left_out"]
        rows.append(("left out", Text(f"{left_out:,} rows with invalid values, newest attempt")))
    return rows


def _best(best: Best | None, value: float) -> str:
    if best is None:
        return ""
    if best.value == value:
        return ", the best"
    return f", best {format_number(best.value)} at step {best.step:,}"


def _few(warnings: Sequence[str], most: int = 5) -> list[str]:
    shown = list(warnings[-most:])
    if len(warnings) > most:
        shown.insert(0, f"{len(warnings) - most} earlier warnings are in the log")
    return shown

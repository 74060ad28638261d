"""The pages: what people read first, at 80 columns and wider."""

import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from rayway.checkpoint.catalog import Committed
from rayway.report.facts import RunFacts
from rayway.report.merge import Best
from rayway.report.pages import checkpoint_table, run_page, runs_table, steps_table, summary
from rayway.report.paper import when

RUN_ID = "digits-20261130-201700-ab12"
FACTS = RunFacts(
    run_id=RUN_ID,
    url=f"/home/somebody/runs/{RUN_ID}",
    name="digits",
    state="FINISHED",
    reason=None,
    step=5000,
    steps=5000,
    attempts=2,
    starts=[
        {"attempt": 1, "from_step": 0, "world_size": 2, "device": "cpu"},
        {"attempt": 2, "from_step": 1500, "world_size": 1, "device": "cpu"},
    ],
    loss=0.046213,
    metrics={"accuracy": 0.97123, "val_loss": 0.1123},
    best={"accuracy": Best(value=0.98, step=4000), "val_loss": Best(value=0.1123, step=5000)},
    checkpoints=[
        Committed(step=step, committed_at=0.0, bytes=1_234_567, attempt=2, weights_sha256="ab" * 32)
        for step in (4000, 5000)
    ],
    weights_sha256="ab" * 32,
    clock={"step_s": 9.0, "data_wait_s": 1.0},
)


def lines_of(page: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(page)
    return [line.rstrip() for line in capture.get().splitlines()]


def rows_of(page: RenderableType, width: int = 80) -> list[list[str]]:
    """Return the page's rows as cells."""
    lines = [line.replace(",  ", ", ") for line in lines_of(page, width)]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_the_page_of_a_run() -> None:
    rows = rows_of(run_page(FACTS))
    assert rows[0] == [f"FINISHED {RUN_ID}"]
    assert ["step", "5,000 of 5,000 (100 %)"] in rows
    assert ["attempt 1", "from the beginning, 2 workers on cpu, -"] in rows
    assert ["attempt 2", "from step 1,500, 1 worker on cpu, -"] in rows
    assert ["training loss", "0.04621 in the last step"] in rows
    assert ["accuracy", "0.9712, best 0.98 at step 4,000"] in rows
    assert ["val_loss", "0.1123, the best"] in rows
    assert ["time", "Of 10 s, 90 % computing and 10 % waiting for data."] in rows
    assert ["weights sha256", "ab" * 32] in rows
    assert ["folder", FACTS.url] in rows
    assert rows[-1] == ["5,000", "2", when(0.0), "1.2 MB", "abababababab"]


def test_the_summary_says_where_the_checkpoints_are_and_what_shows_the_run() -> None:
    rows = rows_of(summary(FACTS, see=f"rayway show {RUN_ID}"), 200)
    assert rows[0] == [f"FINISHED {RUN_ID}"]
    saved = f"2 checkpoints, the newest of step 5,000 (1.2 MB), in {FACTS.url}"
    assert rows[-2:] == [["saved", saved], ["see", f"rayway show {RUN_ID}"]]
    one = rows_of(summary(replace(FACTS, checkpoints=FACTS.checkpoints[:1]), see="x"), 200)
    assert one[-2][1].startswith("1 checkpoint, of step 4,000")
    none = rows_of(summary(replace(FACTS, checkpoints=[]), see="x"), 200)
    assert none[-2] == ["saved", f"no checkpoint, in {FACTS.url}"]


def test_a_run_that_did_nothing_yet_has_a_page() -> None:
    nothing = RunFacts(
        run_id="x", url="/x", name=None, state="RUNNING", reason="y", step=0, steps=None, attempts=0
    )
    assert lines_of(run_page(nothing)) == ["RUNNING x", "reason  y", "step    0", "folder  /x"]


def test_a_reason_of_many_lines_keeps_them_and_hides_controls() -> None:
    failed = replace(FACTS, state="FAILED", reason="user code\n  File \x1b[2J", checkpoints=[])
    lines = lines_of(run_page(failed))
    assert lines[1].split() == ["reason", "user", "code"]
    assert lines[2].strip() == "File \\x1b[2J"


def test_many_warnings_are_cut_to_the_newest() -> None:
    rows = rows_of(run_page(replace(FACTS, warnings=[f"w{i}" for i in range(9)], checkpoints=[])))
    shown = [row[1] for row in rows if row[0] == "warning"]
    assert shown == ["4 earlier warnings are in the log", "w4", "w5", "w6", "w7", "w8"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_fits_the_width(width: int) -> None:
    long = replace(FACTS, run_id="a-very-long-name" * 6, url="/x" * 100, reason="word " * 60)
    pages = [run_page(long), summary(long, see="rayway show " + "x" * 100), runs_table([long])]
    for page in [*pages, checkpoint_table(FACTS.checkpoints), steps_table(steps(3), rows=20)]:
        assert max(map(cell_len, lines_of(page, width))) <= width


def test_the_table_of_runs_keeps_the_id_whole_at_80_columns() -> None:
    running = replace(FACTS, state="INTERRUPTED", step=2480, steps=None, loss=None, metrics={})
    long = replace(FACTS, run_id="a-very-long-name" * 5)
    lines = lines_of(runs_table([long, FACTS, running]))
    text = "\n".join(lines)
    assert text.count(RUN_ID) == 2
    assert "".join(line[:28].strip() for line in lines[2:5]) == long.run_id
    assert lines[0].split() == ["run", "state", "step", "loss", "metrics"]
    assert "5,000/5,000  0.04621  accuracy=0.9712" in text
    assert lines[-1].split() == [RUN_ID, "INTERRUPTED", "2,480", "-"]


def steps(count: int) -> list[dict[str, Any]]:
    return [{"step": i, "attempt": 1, "loss": 1 / i, "lr": 0.1} for i in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 5000])
def test_the_table_of_steps_is_evenly_spread_from_first_to_last(count: int) -> None:
    shown = [
        int(row[0].replace(",", "")) for row in rows_of(steps_table(steps(count), rows=20))[2:]
    ]
    assert len(shown) == min(count, 20)
    assert (shown[0], shown[-1]) == (1, count)
    gaps = {after - before for before, after in pairwise(shown)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1

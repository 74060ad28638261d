"""``rayway metrics``: the steps of one run."""

import sys
from typing import Any

import click

from rayway.report.facts import steps_merged, to_strict_json
from rayway.report.pages import steps_table
from rayway.report.paper import print_page
from rayway.storage.runs import find_run
from rayway.telemetry.events import Record

_ROWS = 20
_KEYS = ("step", "loss", "loss_hex", "lr", "grad_norm", "attempt")


@click.command()
@click.argument("run")
@click.option("--storage", default="./runs", metavar="URL", help="Where RUN is. [./runs]")
@click.option("--json", "as_json", is_flag=True, help="Print every step, one JSON object a line.")
def metrics(run: str, storage: str, as_json: bool) -> None:
    """Show loss, learning rate and gradient norm of RUN by step, over all its attempts.

    A table shows about 20 steps. JSON has them all: step, loss, loss_hex (the exact bits), lr,
    grad_norm, attempt, and ids, the samples of the step, if the job traces. A number that is NaN
    or infinite is null; loss_hex tells which.

    Exits 0, 2 if there is no such run, 5 if it cannot be read.
    """
    steps = steps_merged(find_run(run, storage))
    if as_json:
        click.echo("".join(f"{to_strict_json(_line(record))}\n" for record in steps), nl=False)
    elif steps:
        print_page(steps_table(steps, rows=_ROWS), sys.stdout)
    else:
        click.echo("The run has not finished a step yet.", err=True)


def _line(record: Record) -> dict[str, Any]:
    line = {key: record.get(key) for key in _KEYS}
    if "ids" in record:
        line["ids"] = record["ids"]
    return line

"""``rayway runs``: all runs in a storage."""

import sys

import click

from rayway.errors import RaywayError
from rayway.report.facts import RunFacts, read_run
from rayway.report.pages import runs_table
from rayway.report.paper import print_page
from rayway.storage.runs import find_run, list_runs
from rayway.telemetry.printable import printable


@click.command()
@click.option("--storage", default="./runs", metavar="URL", help="Where to look. [./runs]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run.")
def runs(storage: str, as_json: bool) -> None:
    """List the runs in a storage, newest first.

    Exits 0, also if there is none; 5 if the storage cannot be read.
    """
    found = []
    for run_id in list_runs(storage):
        try:
            found.append(read_run(find_run(run_id, storage), whole=False))
        except RaywayError as error:  # the others can still be shown
            click.echo(f"{printable(run_id)} is left out: {printable(error)}", err=True)
    found.sort(key=_made_at, reverse=True)
    if as_json:
        for run in found:
            click.echo(run.to_json())
    elif found:
        print_page(runs_table(found), sys.stdout)
    else:
        click.echo(f"There is no run in {printable(storage)}.", err=True)


def _made_at(run: RunFacts) -> tuple[float, str]:
    return run.created_at or 0.0, run.run_id

"""``rayway runs``: all runs in a storage."""

import sys
from functools import partial

import click

from rayway.errors import RaywayError
from rayway.report.facts import RunFacts, read_run
from rayway.report.pages import runs_table
from rayway.report.paper import print_page
from rayway.storage.background import in_order
from rayway.storage.objects import Objects
from rayway.storage.runs import RunFolder, list_runs
from rayway.telemetry.printable import printable

_AT_ONCE = 16
"""Runs that are read together: an object store answers many questions as fast as one."""


@click.command()
@click.option("--storage", default="./runs", metavar="URL", help="Where to look. [./runs]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run.")
def runs(storage: str, as_json: bool) -> None:
    """List the runs in a storage, newest first.

    Exits 0, also if there is none; 5 if the storage cannot be read.
    """
    found = []
    objects = Objects(storage)
    ids = list_runs(objects)
    reads = (partial(_read, objects.at(run_id)) for run_id in ids)
    for run_id, facts in zip(ids, in_order(reads, at_once=_AT_ONCE), strict=True):
        if isinstance(facts, RunFacts):
            found.append(facts)
        else:  # the others can still be shown
            click.echo(f"{printable(run_id)} is left out: {printable(facts)}", err=True)
    found.sort(key=_made_at, reverse=True)
    if as_json:
        for run in found:
            click.echo(run.to_json())
    elif found:
        print_page(runs_table(found), sys.stdout)
    else:
        click.echo(f"There is no run in {printable(storage)}.", err=True)


def _read(run: Objects) -> RunFacts | RaywayError:
    try:
        return read_run(RunFolder.open(run), whole=False)
    except RaywayError as error:
        return error


def _made_at(run: RunFacts) -> tuple[float, str]:
    return run.created_at or 0.0, run.run_id

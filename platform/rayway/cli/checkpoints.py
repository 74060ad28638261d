"""``rayway checkpoints``: what one run can be resumed from."""

import sys
from dataclasses import asdict

import click

from rayway.checkpoint.catalog import committed, find
from rayway.report.facts import to_strict_json
from rayway.report.pages import checkpoint_table
from rayway.report.paper import print_page
from rayway.storage.runs import find_run
from rayway.telemetry.printable import printable


@click.command()
@click.argument("run")
@click.option("--storage", default="./runs", metavar="URL", help="Where RUN is. [./runs]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a checkpoint.")
def checkpoints(run: str, storage: str, as_json: bool) -> None:
    """List the committed checkpoints of RUN, oldest first. Their files are not verified.

    Exits 0, also if there is none; 2 if there is no such run, 5 if it cannot be read.
    """
    folder = find_run(run, storage)
    found = committed(folder)
    for damaged in find(folder):
        if damaged.problem is not None:
            click.echo(f"{damaged.folder} is left out: {printable(damaged.problem)}", err=True)
    if as_json:
        for checkpoint in found:
            click.echo(to_strict_json(asdict(checkpoint)))
    elif found:
        print_page(checkpoint_table(found), sys.stdout)
    else:
        click.echo("The run has no committed checkpoint yet.", err=True)

"""``rayway show``: one run."""

import sys

import click

from rayway.report.facts import read_run
from rayway.report.pages import run_page
from rayway.report.paper import print_page
from rayway.storage.runs import find_run


@click.command()
@click.argument("run")
@click.option("--storage", default="./runs", metavar="URL", help="Where RUN is. [./runs]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(run: str, storage: str, as_json: bool) -> None:
    """Show the state, results and checkpoints of RUN, a run id or a run folder.

    Exits 0 whatever state the run is in, 2 if there is no such run, 5 if it cannot be read.
    """
    facts = read_run(find_run(run, storage))
    if as_json:
        click.echo(facts.to_json())
    else:
        print_page(run_page(facts), sys.stdout)

"""``rayway resume``: go on with a run."""

import sys

import click

from rayway.cli.ending import report_ending


@click.command()
@click.argument("run")
@click.option("--workers", type=int, help="Worker processes; as before if not given.")
@click.option("--storage", default="./runs", metavar="URL", help="Where RUN is. [./runs]")
def resume(run: str, workers: int | None, storage: str) -> None:
    """Go on with RUN, a run id or a run folder, from its newest checkpoint.

    A run that is finished is left as it is. Exits like rayway run.
    """
    from rayway.launch.fit import resume as resume_run  # noqa: PLC0415 - Arrow takes half a second

    result = resume_run(run, storage=storage, workers=workers, on_start=click.echo)
    sys.exit(report_ending(result.url, state=result.state, storage=storage))

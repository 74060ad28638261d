"""``rayway run``: train a job."""

import sys
from pathlib import Path

import click

from rayway.cli.ending import report_ending
from rayway.errors import SpecError
from rayway.spec.describe import describe, describe_json
from rayway.spec.load import load_job


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change one field.")
@click.option(
    "--config",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Change fields by a YAML file; --set wins over it.",
)
@click.option("--workers", type=int, help="Worker processes; 0 trains in this one.")
@click.option("--storage", default="./runs", metavar="URL", help="Where runs are kept. [./runs]")
@click.option("--run-id", help="Name of the run. [job name, time, four letters]")
@click.option("--dry-run", is_flag=True, help="Print the resolved job and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print it as JSON.")
def run(
    job_file: Path,
    overrides: tuple[str, ...],
    config: tuple[Path, ...],
    workers: int | None,
    storage: str,
    run_id: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train the job in JOB_FILE and follow it to its end.

    The run id goes to stdout, alone; everything else to stderr. Ctrl-C saves a checkpoint and
    stops; rayway resume goes on from there.

    Exits 0 when done, 2 if the job or its data is wrong, 3 if Ray does not start, 4 if training
    failed, 5 if the run's folder cannot be written, 130 if it was stopped.
    """
    if workers is not None:
        overrides = (*overrides, f"scale.workers={workers}")
    resolved = load_job(job_file, config=config, overrides=overrides)
    if dry_run:
        ranks = max(resolved.job.scale.workers, 1)
        describe_it = describe_json if as_json else describe
        click.echo(describe_it(resolved, dp_size=ranks))
        return
    if as_json:
        raise SpecError("--json prints the resolved job: use it with --dry-run.")
    from rayway.launch.fit import run as run_job  # noqa: PLC0415 - Arrow takes half a second

    result = run_job(resolved, storage=storage, run_id=run_id, on_start=click.echo)
    sys.exit(report_ending(result.url, state=result.state, storage=storage))

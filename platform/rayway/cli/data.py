"""``rayway data``: what a data set holds, whether it is fit for training, and making one."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rayway.cli.data_prepare import prepare
from rayway.errors import SpecError, StorageError
from rayway.report.facts import to_strict_json
from rayway.report.paper import print_page
from rayway.spec.load import load_job
from rayway.telemetry.printable import printable
from rayway.units import format_bytes

if TYPE_CHECKING:
    from rayway.data.check import Finding
    from rayway.data.index import Index
    from rayway.data.scan import Rules, Scan
    from rayway.spec.job import Job


@click.group()
def data() -> None:
    """Index a data set, check it, or make one from raw files."""


data.add_command(prepare)


@data.command()
@click.argument("url")
@click.option(
    "--write/--no-write", default=None, help="Store it beside the data. [if that can be written]"
)
@click.option("--out", type=click.Path(path_type=Path), help="Store it in this file instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def index(url: str, write: bool | None, out: Path | None, as_json: bool) -> None:
    """Read the footers of all Parquet files at URL: a folder, a 'glob' or a file.

    The index goes to URL/_rayway/index.parquet, where every run finds it and reads no footers as
    long as the files stay as they are.

    Exits 0 when done, 2 if the data is missing or damaged, 5 if the index cannot be stored.
    """
    from rayway.data.files import find_files  # noqa: PLC0415 - Arrow takes half a second
    from rayway.data.index import build_index, refuse_unfinished  # noqa: PLC0415 - as above
    from rayway.launch.index_data import read_many_footers  # noqa: PLC0415 - and Ray a whole one

    def read(folder: str, files: Sequence[Any]) -> Iterator[Any]:
        with _progress("footers") as tell:
            for done, footer in enumerate(read_many_footers(folder, files), 1):
                tell(done, len(files))
                yield footer

    refuse_unfinished(*find_files(url))
    made = build_index(url, read=read, stored=False)
    if out is not None:
        try:
            out.write_bytes(made.to_bytes())
        except OSError as error:
            raise StorageError(f"the index cannot be written: {error}") from error
        at: str | None = str(out)
    else:
        at = _stored(made, write)
    click.echo(to_strict_json(_facts(made, at)) if as_json else _lines(made, at), nl=as_json)


def _stored(made: "Index", write: bool | None) -> str | None:
    """Store an index beside its data, if that is asked for or else possible; says where."""
    from rayway.data.index import write_index  # noqa: PLC0415 - Arrow takes half a second

    if write is False or (write is None and made.pattern):
        return None
    try:
        return write_index(made)
    except StorageError as error:
        if write:
            raise
        click.echo(f"the index is not stored beside the data: {printable(error)}", err=True)
        return None


@data.command()
@click.argument("url", required=False)
@click.option("--job", "job_file", type=click.Path(path_type=Path), help="Check for this job.")
@click.option(
    "--range", "ranges", multiple=True, metavar="COLUMN=LOW:HIGH", help="Values that may be."
)
@click.option("--sample", type=click.IntRange(min=1), help="Read only so many row groups.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a data set.")
def check(
    url: str | None,
    job_file: Path | None,
    ranges: tuple[str, ...],
    sample: int | None,
    as_json: bool,
) -> None:
    """Read all rows of the data set at URL and tell everything that is wrong with it.

    With --job, its columns, padding, batch and policy for invalid rows are asked for too, and
    without URL all its places are checked.

    Exits 0 if it is fit for training, also with advice; 2 if there is a problem.
    """
    from rayway.data.judge import judge  # noqa: PLC0415 - Arrow takes half a second
    from rayway.data.scan import scan  # noqa: PLC0415 - as above
    from rayway.report.data_page import data_page  # noqa: PLC0415 - as above

    job = None if job_file is None else load_job(job_file).job
    if url is None and job is None:
        raise SpecError("nothing to check: give the URL of a data set, or --job JOB.")
    fit = True
    for number, place in enumerate([url] if url is not None else _places(job)):
        rules = _rules(job, place, ranges)
        with _progress("files") as tell:
            found = scan(place, rules, sample=sample, on_progress=tell)
        made, findings = judge(found, rules)
        fit = fit and not any(finding.level == "problem" for finding in findings)
        if as_json:
            click.echo(to_strict_json(_report(found, made, findings)))
        else:
            click.echo("\n" * min(number, 1), nl=False)
            print_page(data_page(found, made, findings, rules), sys.stdout)
    if not fit:
        sys.exit(SpecError.exit_code)


def _places(job: "Job | None") -> list[str]:
    assert job is not None
    return [*job.data.sources, *([job.data.validation] if job.data.validation else [])]


def _rules(job: "Job | None", place: str, ranges: Sequence[str]) -> "Rules":
    """Return what a job asks of one of its places."""
    from rayway.data.scan import Rules  # noqa: PLC0415 - Arrow takes half a second

    within = dict(map(_range, ranges))
    if job is None:
        return Rules(ranges=within)
    asked, workers = job.data, max(job.scale.workers, 1)
    weights = asked.sources
    share = weights.get(place, 1.0) / sum(weights.values()) if place in weights else 1.0
    fills = asked.cover == "all" or place == asked.validation
    return Rules(
        columns=asked.columns,
        pad=asked.pad,
        ranges=within,
        invalid=asked.invalid,
        transform=asked.transform is not None,
        job=True,
        global_batch=1 if fills else math.floor(job.batch.global_batch * share),
        micro_batch=job.batch.micro_batch or max(1, job.batch.global_batch // workers),
        workers=workers,
    )


def _range(text: str) -> tuple[str, tuple[float | None, float | None]]:
    column, _, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        if not column or not colon:
            raise ValueError
        least, most = float(low) if low else None, float(high) if high else None
        given = [limit for limit in (least, most) if limit is not None]
        if any(map(math.isnan, given)) or given != sorted(given):
            raise ValueError
        return column, (least, most)
    except ValueError:
        raise SpecError(
            f"--range {text} is not COLUMN=LOW:HIGH. E.g. label=0:9, or x=0: for no upper limit."
        ) from None


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal while work takes longer than a moment."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _facts(made: "Index", at: str | None) -> dict[str, Any]:
    return {
        "url": made.place.url,
        "rows": made.total,
        "files": len(made.paths),
        "row_groups": len(made.rows),
        "bytes": sum(made.sizes),
        "row_group_bytes": made.group_bytes,
        "columns": {field.name: str(field.type) for field in made.schema},
        "fingerprint": made.fingerprint,
        "ignored": made.ignored_count,
        "index": at,
    }


def _lines(made: "Index", at: str | None) -> str:
    facts = {
        "data": printable(made.place.url),
        "size": f"{made.total:,} rows in {len(made.paths):,} file(s), "
        f"{format_bytes(sum(made.sizes))}",
        "row groups": f"{len(made.rows):,}, up to {format_bytes(made.group_bytes)} in memory",
        "fingerprint": made.fingerprint,
        "index": printable(at) if at else "not stored",
    }
    if made.ignored_count:
        names = ", ".join(map(printable, made.ignored[:5]))
        more = f" and {made.ignored_count - 5} more" if made.ignored_count > 5 else ""
        facts["left out"] = f"{names}{more}"
    return "".join(f"{name:<13}{text}\n" for name, text in facts.items())


def _report(found: "Scan", made: "Index | None", findings: Sequence["Finding"]) -> dict[str, Any]:
    """Return all that the page shows, and more exactly."""
    problems = sum(finding.level == "problem" for finding in findings)
    columns = {
        name: json.loads(json.dumps(asdict(values), default=str))
        for name, values in found.values.items()
    }
    return {
        "url": found.place.url,
        "fit": problems == 0,
        "problems": problems,
        "rows": sum(sum(footer.rows) for footer in found.footers.values()),
        "files": len(found.files),
        "row_groups": sum(len(footer.rows) for footer in found.footers.values()),
        "row_groups_read": found.groups_read,
        "bytes": sum(file.size for file in found.files),
        "checksums": found.checksums,
        "fingerprint": made.fingerprint if made else None,
        "types": {field.name: str(field.type) for field in found.schema},
        "columns": columns,
        "findings": [asdict(finding) for finding in findings],
    }

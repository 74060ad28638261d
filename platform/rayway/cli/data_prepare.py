"""``rayway data prepare``: raw files to a training set."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rayway.telemetry.printable import printable
from rayway.units import format_bytes

if TYPE_CHECKING:
    from rayway.launch.prepare_data import PreparedData


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--transform", metavar="MOD:FN", help="Your function from pyarrow.Table to Table.")
@click.option(
    "--format",
    type=click.Choice(["auto", "parquet", "csv", "jsonl", "images", "text"]),
    help="What the files are. [auto: by their names]",
)
@click.option("--text-by", type=click.Choice(["line", "file"]), help="A row of a text. [line]")
@click.option("--image-size", metavar="N|WxH", help="Decode pictures and scale them to it.")
@click.option(
    "--types", multiple=True, metavar="COLUMN:TYPE", help="Type of a CSV or JSONL column."
)
@click.option("--pack", metavar="COLUMN:T", help="Pack its lists of tokens into rows of T.")
@click.option("--rows-per-group", type=int, help="Rows of a row group. [about 1 MB of them]")
@click.option("--shards", type=int, help="How many files to make. [about 64 MB each]")
@click.option("--workers", type=int, help="Tasks at a time; 0 works in this process. [all CPUs]")
@click.option("--overwrite", is_flag=True, help="Remove what was prepared in DST before.")
@click.option("--json", "as_json", is_flag=True, help="Print what was made as JSON.")
def prepare(
    src: str, dst: str, workers: int | None, overwrite: bool, as_json: bool, **given: Any
) -> None:
    """Make a training set in DST from the files that SRC means: a file, folder or 'glob'.

    SRC and DST are paths or URLs. DST goes to stdout, alone; everything else to stderr. Stopped or
    killed, the same command goes on where it was.

    Exits 0 when done, 2 if an option, the source or DST is wrong, 3 if Ray does not start, 4 if
    the transform raised, 5 if DST cannot be written, 130 if it was stopped.
    """
    from rayway.launch.prepare_data import prepare_data  # noqa: PLC0415 - Arrow takes half a second

    options = {name: value for name, value in given.items() if value not in (None, ())}
    made = prepare_data(src, dst, workers=workers, overwrite=overwrite, **options)
    print(_summary(made), file=sys.stderr)  # noqa: T201
    click.echo(json.dumps(asdict(made)) if as_json else made.url)


def _summary(made: "PreparedData") -> str:
    lines = [
        f"{made.rows:,} rows ({made.rows_read:,} read) in {made.shards} shard(s), "
        f"{format_bytes(made.bytes)}"
    ]
    if made.fill is not None:
        lines.append(
            f"packed: {100 * made.fill:.1f} % of the rows are tokens; "
            f"{made.empty_documents:,} documents without a token left out"
        )
    width = max(map(len, made.columns))
    lines += [f"  {printable(name):{width}}  {kind}" for name, kind in made.columns.items()]
    return "\n".join(lines)

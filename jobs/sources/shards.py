"""Write a data set as Parquet shards that appear all at once, or not at all."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayway.errors import DataError


def write_splits(
    folder: str, splits: Mapping[str, pa.Table], *, shard_rows: int, group_rows: int
) -> None:
    """Write each split into its own folder below ``folder``, as ``part-00000.parquet``, ....

    The data is written beside ``folder`` and renamed, so that nobody sees half of it. Of two
    processes that write at once, the first to rename wins and the other drops its copy. The same
    tables give the same bytes, as long as pyarrow is the same.

    Args:
        folder: The local folder to make. One that holds all splits already is left as it is.
        splits: The rows of each split, in the order to write them, by the split's name.
        shard_rows: Most rows in a file.
        group_rows: Most rows in a row group.

    Raises:
        DataError: ``folder`` is not local, or is there but lacks a split.
    """
    if "://" in folder:
        raise DataError(
            f"{folder} is not a local folder, and this data set is only written to local ones. "
            "Prepare it locally and copy it, or use a local path for data.train."
        )
    target = Path(folder)
    if _is_complete(target, splits):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        whole = Path(scratch, target.name)
        for name, table in splits.items():
            _write_shards(whole / name, table, shard_rows=shard_rows, group_rows=group_rows)
        _move_into_place(whole, target, splits)


def _write_shards(folder: Path, table: pa.Table, *, shard_rows: int, group_rows: int) -> None:
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, table.num_rows, shard_rows)):
        with (folder / f"part-{number:05d}.parquet").open("wb") as file:
            pq.write_table(table.slice(start, shard_rows), file, row_group_size=group_rows)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the bytes it stands for


def _move_into_place(whole: Path, target: Path, splits: Mapping[str, pa.Table]) -> None:
    try:
        whole.rename(target)  # replaces an empty folder, refuses any other
    except OSError as error:
        if not _is_complete(target, splits):
            raise DataError(
                f"{target} cannot be made ({error.strerror}): it must be a new or an empty folder, "
                f"or hold {' and '.join(splits)} already. Remove it, or name another in data.train."
            ) from error


def _is_complete(target: Path, splits: Mapping[str, pa.Table]) -> bool:
    return all((target / name).is_dir() for name in splits)

"""Writing a data set: all of it or nothing, also with two writers or an unwilling folder."""

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayway.errors import DataError
from sources.shards import write_splits

SPLITS = {
    "train": pa.table({"x": list(range(1000))}),
    "test": pa.table({"x": list(range(1000, 1100))}),
}


def write(folder: Path | str) -> None:
    write_splits(str(folder), SPLITS, shard_rows=300, group_rows=100)


def write_after(barrier: Barrier, folder: str) -> None:
    barrier.wait()
    write(folder)


def test_rows_come_back_in_order_from_shards_of_the_asked_size(tmp_path: Path) -> None:
    write(tmp_path / "new" / "data")
    files = sorted((tmp_path / "new/data/train").iterdir())
    assert [pq.read_metadata(file).num_rows for file in files] == [300, 300, 300, 100]
    assert pq.read_metadata(files[0]).num_row_groups == 3
    assert pq.read_table(tmp_path / "new/data/train") == SPLITS["train"]


def test_nothing_else_is_left_beside_the_data(tmp_path: Path) -> None:
    write(tmp_path / "data")
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_a_writer_that_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    unwritable = pa.table({"x": pa.nulls(3, pa.month_day_nano_interval())})
    splits = SPLITS | {"test": unwritable}  # train is written whole before this is refused
    with pytest.raises(pa.ArrowNotImplementedError):
        write_splits(str(tmp_path / "data"), splits, shard_rows=300, group_rows=100)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_make_one_whole_data_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    writers = [
        context.Process(target=write_after, args=(barrier, str(tmp_path / "data")))
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    assert pq.read_table(tmp_path / "data/train") == SPLITS["train"]
    assert pq.read_table(tmp_path / "data/test") == SPLITS["test"]


def test_data_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "data")
    before = (tmp_path / "data/train/part-00000.parquet").stat()
    write(tmp_path / "data")
    assert (tmp_path / "data/train/part-00000.parquet").stat() == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    write(tmp_path)
    assert pq.read_table(tmp_path / "test") == SPLITS["test"]


def test_a_folder_with_something_else_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"(?s)data cannot be made.*Remove it, or name another"):
        write(tmp_path / "data")
    assert sorted(entry.name for entry in (tmp_path / "data").iterdir()) == ["notes.txt", "train"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_a_remote_folder_is_refused() -> None:
    with pytest.raises(DataError, match=r"s3://bucket/data is not a local folder"):
        write("s3://bucket/data")

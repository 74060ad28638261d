"""Footers read by tasks on Ray."""

import shutil
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayway.data.index import build_index
from rayway.errors import DataError
from rayway.launch import index_data
from rayway.launch.cluster import local_cluster
from rayway.launch.index_data import read_many_footers

on_ray = partial(read_many_footers, many=1, cpus=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """More files than a task reads at a time."""
    for number in range(3):
        table = pa.table({"x": list(range(number + 1))})
        pq.write_table(table, tmp_path / f"{number:04}.parquet")
    for number in range(3, index_data.CHUNK + 20):
        shutil.copy(tmp_path / f"{number % 3:04}.parquet", tmp_path / f"{number:04}.parquet")
    return tmp_path


@pytest.mark.ray
@pytest.mark.slow
def test_tasks_give_the_index_that_threads_give(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert build_index(folder.name, read=on_ray).to_bytes() == build_index(folder.name).to_bytes()
    with local_cluster(cpus=1, start_timeout_s=60):
        assert build_index(str(folder), read=on_ray).total == build_index(str(folder)).total
        (folder / f"{index_data.CHUNK + 3:04}.parquet").write_bytes(b"")
        with pytest.raises(DataError, match=r"0503\.parquet is empty"):
            build_index(str(folder), read=on_ray)


def test_few_footers_are_read_here(folder: Path) -> None:
    index = build_index(str(folder), read=read_many_footers)
    assert index.to_bytes() == build_index(str(folder)).to_bytes()

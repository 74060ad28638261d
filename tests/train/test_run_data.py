"""The indexes in a run's folder: written once, compared at a resume."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_project import write_rows

from rayway.data.index import build_index
from rayway.errors import DataError
from rayway.spec.job import DataSpec
from rayway.storage.runs import DATA_KEY, RunFolder, index_key
from rayway.train.run_data import (
    RunData,
    check_alike,
    check_run_data,
    read_run_data,
    write_run_data,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path / "run"), '{"schema": 1}', now=datetime.now(UTC))


@pytest.fixture
def data(tmp_path: Path) -> RunData:
    places = {"a": 12, "b": 7, "held-out": 5}
    a, b, held_out = (
        build_index(str(write_rows(tmp_path / name, rows, seed=rows)))
        for name, rows in places.items()
    )
    return RunData(train=(a, b), validation=held_out)


def test_the_indexes_come_back_as_they_were_written(folder: RunFolder, data: RunData) -> None:
    write_run_data(folder, data)
    found = read_run_data(folder)
    assert [each.fingerprint for each in found.all] == [each.fingerprint for each in data.all]
    assert [each.total for each in found.train] == [12, 7]
    assert found.validation is not None
    assert found.validation.total == 5
    check_run_data(folder)


def test_without_validation_data_there_is_none(folder: RunFolder, data: RunData) -> None:
    write_run_data(folder, RunData(train=data.train[:1]))
    assert read_run_data(folder).validation is None
    assert len(read_run_data(folder).all) == 1


@pytest.mark.parametrize("place", ["a", "b", "held-out"])
def test_a_change_in_any_place_is_named(
    folder: RunFolder, data: RunData, tmp_path: Path, place: str
) -> None:
    write_run_data(folder, data)
    pq.write_table(pa.table({"x": [1]}), tmp_path / place / "part-0.parquet")
    with pytest.raises(DataError, match=rf"{place}.*changed: part-0\.parquet"):
        check_run_data(folder)


def test_an_index_that_another_took_the_place_of_is_refused(
    folder: RunFolder, data: RunData
) -> None:
    write_run_data(folder, data)
    folder.objects.put(index_key("train-0"), folder.objects.get(index_key("train-1")))
    with pytest.raises(DataError, match=r"data/train-0\.parquet .* is not the index"):
        read_run_data(folder)


def test_a_record_of_another_version_is_refused(folder: RunFolder, data: RunData) -> None:
    write_run_data(folder, data)
    record = json.loads(folder.objects.get(DATA_KEY))
    folder.objects.put(DATA_KEY, json.dumps({**record, "schema_version": 9}).encode())
    with pytest.raises(DataError, match="schema_version=9; this rayway reads 2"):
        read_run_data(folder)


def test_a_mixture_of_places_with_other_columns_is_refused(tmp_path: Path) -> None:
    for name, columns in {"a": {"x": [1], "y": [1]}, "b": {"x": [1.0], "y": [1]}}.items():
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(columns), tmp_path / name / "part-0.parquet")
    both = [build_index(str(tmp_path / name)) for name in ("a", "b")]
    spec = DataSpec(train={str(tmp_path / "a"): 1, str(tmp_path / "b"): 1})
    with pytest.raises(DataError, match=r"'x' is double in .*b but int64 in .*a"):
        check_alike(both, spec)
    chosen = [build_index(str(tmp_path / name), columns=["y"]) for name in ("a", "b")]
    check_alike(chosen, DataSpec(train="a", columns=("y",)))

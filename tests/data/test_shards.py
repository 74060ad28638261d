from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayway.data.index import Index, build_index
from rayway.data.plan import Unit, plan_order
from rayway.data.shards import Reader, SampleRng
from rayway.errors import DataError, TrainingError


def unit_of(*spans: tuple[int, int, int], epoch: int = 0) -> Unit:
    rows = sum(high - low for _, low, high in spans)
    return Unit(epoch=epoch, lane=0, first=0, rows=rows, spans=spans, order_key=1)


@pytest.fixture(scope="session")
def index(uneven: Path) -> Index:
    return build_index(str(uneven))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Index]:
    """Writes one shard per table and indexes them."""

    def write(*tables: dict[str, Any]) -> Index:
        for number, table in enumerate(tables):
            pq.write_table(pa.table(table), tmp_path / f"{number}.parquet")
        return build_index(str(tmp_path))

    return write


def test_a_unit_is_read_as_its_spans_in_stored_order(index: Index) -> None:
    spans = ((3, 0, int(index.rows[3])), (0, 1, int(index.rows[0])), (5, 0, 1))
    unit = unit_of(*spans)
    columns = Reader(index)(unit)
    ids = unit.stored_ids(index)
    assert columns["id"].tolist() == ids.tolist()
    np.testing.assert_array_equal(columns["x"], ids[:, None] + np.arange(4))
    assert columns["b"].tolist() == (ids % 3 == 0).tolist()


def test_only_the_chosen_columns_are_read(index: Index) -> None:
    assert Reader(index, columns=["x"])(unit_of((0, 0, 1))).keys() == {"x"}


def test_a_row_group_in_memory_is_not_read_again(index: Index) -> None:
    reads: list[int] = []
    reader = Reader(index, on_read=reads.append)
    for unit in (unit_of((0, 0, 1), (2, 0, 1)), unit_of((2, 0, 1)), unit_of((1, 0, 1))):
        reader(unit)
    assert reads == [0, 2, 1]


def test_reading_costs_one_request_a_row_group_and_one_a_footer(uneven: Path, bucket: Any) -> None:
    for file in uneven.iterdir():
        bucket.objects[f"set/{file.name}"] = file.read_bytes()
    index = build_index("s3://bucket/set")
    bucket.requests.clear()
    reader, local = Reader(index), Reader(build_index(str(uneven)))
    groups = [g for g in range(len(index.rows)) if index.shard[g] < 2]
    for group in groups:
        unit = unit_of((group, 0, int(index.rows[group])))
        assert reader(unit)["id"].tolist() == local(unit)["id"].tolist()
    assert len(bucket.requests) == len(groups) + 2
    assert all(request.startswith("GET") for request in bucket.requests)


def test_a_transform_gets_the_unit_and_may_write_to_it(index: Index) -> None:
    seen: list[int] = []

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        seen.extend(columns["id"].tolist())
        columns["x"] += 1
        return {"x": columns["x"], "ids": rng.ids, "arrow": pa.array(columns["id"])}

    reader, unit = Reader(index, transform=transform), unit_of((0, 0, 1), (4, 0, 1))
    ids = unit.stored_ids(index)
    for _ in range(2):  # what is in memory is not what the transform wrote to
        columns = reader(unit)
        np.testing.assert_array_equal(columns["x"], ids[:, None] + np.arange(4) + 1)
        assert columns["ids"].tolist() == columns["arrow"].tolist() == ids.tolist()
    assert seen == ids.tolist() * 2
    alone = unit_of((0, 0, 1))
    assert reader(alone)["x"].tolist() == reader(alone)["x"].tolist()


def test_draws_depend_on_sample_epoch_and_seed_and_not_on_the_unit(index: Index) -> None:
    def draws(unit: Unit, seed: int = 7) -> list[float]:
        reader = Reader(index, transform=lambda _, rng: {"u": rng.uniform(3)}, seed=seed)
        return reader(unit)["u"].tolist()

    both = draws(unit_of((0, 0, 1), (4, 0, 1)))
    assert both == draws(unit_of((0, 0, 1))) + draws(unit_of((4, 0, 1)))
    assert draws(unit_of((4, 0, 1))) != draws(unit_of((4, 0, 1), epoch=1))
    assert draws(unit_of((4, 0, 1))) != draws(unit_of((4, 0, 1)), seed=8)


def test_an_error_in_the_transform_names_the_rows_and_shows_the_users_frames(index: Index) -> None:
    def decode(columns: dict[str, Any]) -> None:
        raise KeyError("pixels")

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        decode(columns)
        return columns

    with pytest.raises(TrainingError) as caught:
        Reader(index, transform=transform)(unit_of((0, 0, 1)))
    text = str(caught.value)
    assert f"failed on 1 rows of {index.where(0)}" in text
    assert "in transform" in text
    assert "in decode" in text
    assert text.endswith("KeyError: 'pixels'")
    assert "_transformed" not in text


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"x": np.zeros(2)}, r"2 rows of column 'x' for 1 rows .*may not add or drop rows"),
        ({"x": np.float32(1)}, "0 rows of column 'x'"),
        (None, "gave NoneType None"),
        ({}, "gave dict"),
        ({"x": np.array(["a"])}, r"column 'x' is of type <U1 .* no tensor can be made"),
        ({"x": pa.array(["a"])}, "column 'x' is of type string"),
    ],
)
def test_what_a_transform_may_not_return_is_refused(index: Index, result: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Reader(index, transform=lambda *_: result)(unit_of((0, 0, 1)))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["a", "b"], "is of type string"),
        ([1, None], r"has 1 null\(s\)"),
        ([[1], [1, 2]], "has lists of 1 to 2 values"),
    ],
)
def test_a_column_that_is_no_tensor_is_refused_by_shard_and_column(
    folder: Callable[..., Index], values: list[Any], reason: str
) -> None:
    index = folder({"id": [0, 1], "text": values})
    with pytest.raises(DataError, match=rf"'text' {reason} in .*0\.parquet .*data\.columns"):
        Reader(index)(unit_of((0, 0, 2)))
    Reader(index, columns=["id"])(unit_of((0, 0, 2)))
    kept = Reader(index, transform=lambda rows, _: {"n": np.array(list(map(str, rows["text"])))})
    with pytest.raises(DataError, match="column 'n' is of type <U"):
        kept(unit_of((0, 0, 2)))


def test_lists_of_unlike_length_in_two_row_groups_are_refused(
    folder: Callable[..., Index],
) -> None:
    index = folder({"x": [[1, 2], [3, 4]]}, {"x": [[1, 2, 3]]})
    with pytest.raises(DataError, match=r"shape \(3,\) in .*1\.parquet .* but \(2,\) in .*0\.par"):
        Reader(index)(unit_of((0, 0, 2), (1, 0, 1)))

    def lengths(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        return {"n": columns["x"].value_lengths()}

    got = Reader(index, transform=lengths)(unit_of((0, 0, 2), (1, 0, 1)))
    assert got["n"].tolist() == [2, 2, 3]


def test_a_shard_that_changed_since_it_was_indexed_is_named(folder: Callable[..., Index]) -> None:
    index = folder({"x": [1, 2, 3]}, {"x": [1]})
    file = Path(index.root) / "0.parquet"
    content = file.read_bytes()
    fewer = replace(index, rows=np.array([2, 1]))
    with pytest.raises(DataError, match=r"0\.parquet .* has 3 rows and had 2 when"):
        Reader(fewer)(unit_of((0, 0, 2)))
    file.write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"0\.parquet \(row group 0\) cannot be read"):
        Reader(index)(unit_of((0, 0, 1)))
    file.unlink()
    with pytest.raises(DataError, match=r"0\.parquet \(row group 0\) cannot be read"):
        Reader(index)(unit_of((0, 0, 1)))
    Reader(index)(unit_of((1, 0, 1)))


def test_a_damaged_page_is_named(folder: Callable[..., Index]) -> None:
    index = folder({"x": list(range(1000))})
    file = Path(index.root) / "0.parquet"
    content = bytearray(file.read_bytes())
    content[4:60] = b"\xff" * 56
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"0\.parquet \(row group 0\) cannot be read"):
        Reader(index)(unit_of((0, 0, 1)))


def test_a_reader_reads_what_the_plan_asks_for(index: Index) -> None:
    plan, reader = plan_order(index, global_batch=16, seed=0, lanes=4), Reader(index)
    for unit in plan.units(stop=plan.steps_per_epoch):
        assert reader(unit)["id"].tolist() == unit.stored_ids(index).tolist()

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayway.data.index import Index, build_index
from rayway.data.plan import plan_order
from rayway.data.shards import Reader
from rayway.data.stages import Stages
from rayway.data.stream import Unit
from rayway.data.transforms import SampleRng
from rayway.errors import DataError, TrainingError


def unit_of(*spans: tuple[int, int, int], epoch: int = 0) -> Unit:
    rows = sum(high - low for _, low, high in spans)
    return Unit(stream=0, epoch=epoch, lane=0, first=0, rows=rows, spans=spans, order_key=1)


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
    columns = Reader([index])(unit).columns
    ids = unit.stored_ids(index)
    assert columns["id"].tolist() == ids.tolist()
    np.testing.assert_array_equal(columns["x"], ids[:, None] + np.arange(4))
    assert columns["b"].tolist() == (ids % 3 == 0).tolist()


def test_only_the_chosen_columns_are_read(index: Index) -> None:
    assert Reader([index], columns=["x"])(unit_of((0, 0, 1))).columns.keys() == {"x"}


def test_a_row_group_in_memory_is_not_read_again(index: Index) -> None:
    reads: list[int] = []
    reader = Reader([index], on_read=lambda stream, group: reads.append(group))
    for unit in (unit_of((0, 0, 1), (2, 0, 1)), unit_of((2, 0, 1)), unit_of((1, 0, 1))):
        reader(unit)
    assert reads == [0, 2, 1]


def test_reading_costs_one_request_a_row_group_and_one_a_footer(uneven: Path, bucket: Any) -> None:
    for file in uneven.iterdir():
        bucket.objects[f"set/{file.name}"] = file.read_bytes()
    index = build_index("s3://bucket/set")
    bucket.requests.clear()
    reader, local = Reader([index]), Reader([build_index(str(uneven))])
    groups = [g for g in range(len(index.rows)) if index.shard[g] < 2]
    for group in groups:
        unit = unit_of((group, 0, int(index.rows[group])))
        assert reader(unit).columns["id"].tolist() == local(unit).columns["id"].tolist()
    assert len(bucket.requests) == len(groups) + 2
    assert all(request.startswith("GET") for request in bucket.requests)


def test_a_transform_gets_the_unit_and_may_write_to_it(index: Index) -> None:
    seen: list[int] = []

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        seen.extend(columns["id"].tolist())
        columns["x"] += 1
        return {"x": columns["x"], "ids": rng.ids, "arrow": pa.array(columns["id"])}

    reader, unit = Reader([index], transform=transform), unit_of((0, 0, 1), (4, 0, 1))
    ids = unit.stored_ids(index)
    for _ in range(2):  # what is in memory is not what the transform wrote to
        columns = reader(unit).columns
        np.testing.assert_array_equal(columns["x"], ids[:, None] + np.arange(4) + 1)
        assert columns["ids"].tolist() == columns["arrow"].tolist() == ids.tolist()
    assert seen == ids.tolist() * 2
    alone = unit_of((0, 0, 1))
    assert reader(alone).columns["x"].tolist() == reader(alone).columns["x"].tolist()


def test_draws_depend_on_sample_epoch_and_seed_and_not_on_the_unit(index: Index) -> None:
    def draws(unit: Unit, seed: int = 7) -> list[float]:
        reader = Reader([index], transform=lambda _, rng: {"u": rng.uniform(3)}, seed=seed)
        return reader(unit).columns["u"].tolist()

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
        Reader([index], transform=transform)(unit_of((0, 0, 1)))
    text = str(caught.value)
    assert f"failed on row 0 of {index.where(0)}:\n" in text
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
        Reader([index], transform=lambda *_: result)(unit_of((0, 0, 1)))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["a", "b"], "is of type string"),
        ([[1], [1, 2]], "has lists of 1 to 2 values"),
    ],
)
def test_a_column_that_is_no_tensor_is_refused_by_shard_and_column(
    folder: Callable[..., Index], values: list[Any], reason: str
) -> None:
    index = folder({"id": [0, 1], "text": values})
    with pytest.raises(DataError, match=rf"'text' {reason} in .*0\.parquet .*data\.columns"):
        Reader([index])(unit_of((0, 0, 2)))
    Reader([index], columns=["id"])(unit_of((0, 0, 2)))
    kept = Reader([index], transform=lambda rows, _: {"n": np.array(list(map(str, rows["text"])))})
    with pytest.raises(DataError, match="column 'n' is of type <U"):
        kept(unit_of((0, 0, 2)))


def test_lists_of_unlike_length_in_two_row_groups_are_refused(
    folder: Callable[..., Index],
) -> None:
    index = folder({"x": [[1, 2], [3, 4]]}, {"x": [[1, 2, 3]]})
    with pytest.raises(DataError, match=r"shape \(3,\) in .*1\.parquet .* but \(2,\) in .*0\.par"):
        Reader([index])(unit_of((0, 0, 2), (1, 0, 1)))

    def lengths(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        return {"n": columns["x"].value_lengths()}

    got = Reader([index], transform=lengths)(unit_of((0, 0, 2), (1, 0, 1)))
    assert got.columns["n"].tolist() == [2, 2, 3]


def test_a_damaged_page_is_named(folder: Callable[..., Index]) -> None:
    index = folder({"x": list(range(1000))})
    file = Path(index.root) / "0.parquet"
    content = bytearray(file.read_bytes())
    content[4:60] = b"\xff" * 56
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"0\.parquet \(row group 0\) cannot be read"):
        Reader([index])(unit_of((0, 0, 1)))


def test_a_transforms_failing_row_is_named_across_spans(folder: Callable[..., Index]) -> None:
    index = folder({"x": range(5)}, {"x": [5, 6, 7, -1, -2]})

    def check(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        if (columns["x"] < 0).any():
            raise ValueError(f"{columns['x'].min()} is no class")
        return columns

    with pytest.raises(TrainingError) as caught:
        Reader([index], transform=check)(unit_of((0, 2, 5), (1, 1, 5)))
    assert f"failed on row 3 of {index.where(1)}:" in str(caught.value)
    assert str(caught.value).endswith("ValueError: -1 is no class")


def test_rows_that_fail_together_are_named_as_a_range(folder: Callable[..., Index]) -> None:
    index = folder({"x": range(8)})

    def check(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        if len(rng.ids) > 3:
            raise MemoryError("too many at once")
        return columns

    with pytest.raises(TrainingError, match=r"failed on 4 rows together, from row 0 of .*0\.parq"):
        Reader([index], transform=check)(unit_of((0, 0, 8)))


def test_units_of_several_data_sets_are_told_apart(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"x": range(first, first + 9)}), tmp_path / name / "0.parquet")
    indexes = [build_index(str(tmp_path / name)) for name in "ab"]
    reads: list[tuple[int, int]] = []

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        return {**columns, "id": rng.ids}

    for transforms in (None, transform):
        reader = Reader(indexes, transform=transforms, on_read=lambda *group: reads.append(group))
        for stream in (0, 1, 0):
            unit = replace(unit_of((0, 2, 5)), stream=stream)
            columns = reader(unit).columns
            assert columns["x"].tolist() == [100 * stream + i for i in (2, 3, 4)]
            if transforms is not None:
                assert columns["id"].tolist() == [(stream << 48) + i for i in (2, 3, 4)]
    assert reads == [(0, 0), (1, 0)] * 2


def test_a_transform_may_take_and_give_tables(index: Index) -> None:
    def batch(table: pa.Table, rng: SampleRng) -> pa.RecordBatch:
        return table.select(["x", "id"]).combine_chunks().to_batches()[0]

    def table(rows: pa.Table, rng: SampleRng) -> pa.Table:
        return rows.drop_columns("b")

    unit = unit_of((0, 0, 1), (0, 3, 9))
    want = Reader([index], columns=["id", "x"])(unit).columns
    for transform in (batch, table):
        got = Reader([index], transform=transform)(unit).columns
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
            assert got[name].dtype == want[name].dtype

    def twice(rows: pa.Table, rng: SampleRng) -> pa.Table:
        return rows.append_column("x", rows["x"])

    with pytest.raises(DataError, match="two columns of one name"):
        Reader([index], transform=twice)(unit)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pa.array([1, 2], pa.decimal128(5, 2)), r"decimal128\(5, 2\) .* float64, or an integer"),
        (pa.array([1, 2], pa.timestamp("us", "UTC")), r"timestamp\[us, tz=UTC\] .* int64"),
        (pa.array([1, 2], pa.date32()), r"date32\[day\] .* int32 of days"),
        (pa.array([1, 2], pa.time64("us")), r"time64\[us\] .* int64"),
        (pa.array([1, 2], pa.duration("ns")), r"duration\[ns\] .* int64"),
        (pa.array(["1", "2"]), "string .* make numbers of it"),
        (pa.array([b"1", b"22"]), "binary .* Decode it"),
        (pa.array(["1", "2"]).dictionary_encode(), "dictionary.* Store the values"),
        (pa.array([["1"], ["2"]]), "string .* make numbers of it"),
        (pa.array([[1], [2, 3]]), "lists of 1 to 2 values .* data.pad"),
        (pa.array([{"a": 1}, {"a": 2}]), "struct"),
        (pa.nulls(2), "of type null"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
@pytest.mark.parametrize("invalid", ["error", "skip", "fill"])
def test_types_that_no_tensor_has_are_refused_with_advice_and_never_become_floats(
    folder: Callable[..., Index], values: pa.Array, words: str, invalid: Any
) -> None:
    index, unit = folder({"v": values}), unit_of((0, 0, 2))
    with pytest.raises(DataError, match=rf"'v' .*{words}"):
        Reader([index], invalid=invalid)(unit)
    with pytest.raises(DataError, match=r"'v' .* as data\.transform gave it.*"):
        Reader([index], invalid=invalid, transform=lambda columns, _: columns)(unit)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.uint32, np.uint16, np.float64, np.bool_])
def test_wide_values_are_exact_to_the_tensor(folder: Callable[..., Index], kind: Any) -> None:
    most = True if kind is np.bool_ else np.finfo(kind).max if kind is np.float64 else None
    values = np.array([0, 1, np.iinfo(kind).max if most is None else most], dtype=kind)
    index = folder(
        {"v": values, "w": pa.array([values.tolist()] * 3, pa.list_(pa.array(values).type))}
    )
    for transform in (None, lambda columns, _: columns):
        got = Reader([index], transform=transform)(unit_of((0, 0, 3))).columns
        for array, want in ((got["v"], values), (got["w"][2], values)):
            tensor = torch.from_numpy(array.copy())
            np.testing.assert_array_equal(tensor.numpy(), want)
            assert tensor.numpy().dtype == kind


@pytest.mark.parametrize("bad", [np.longdouble, np.complex64, "datetime64[s]", object])
def test_numpy_types_that_torch_has_not_are_refused(index: Index, bad: Any) -> None:
    with pytest.raises(DataError, match=r"column 'x' is of type .* no tensor can be made"):
        Reader([index], transform=lambda *_: {"x": np.zeros(1, bad)})(unit_of((0, 0, 1)))


def test_foreign_byte_order_becomes_this_machines(index: Index) -> None:
    def foreign(*_: Any) -> dict[str, Any]:
        return {"x": np.array([258], ">i4"), "f": np.array([1.5], ">f8")}

    got = Reader([index], transform=foreign)(unit_of((0, 0, 1))).columns
    assert torch.from_numpy(got["x"]).tolist() == [258]
    assert torch.from_numpy(got["f"]).tolist() == [1.5]


def test_where_time_goes_is_told(index: Index) -> None:
    stages = Stages()

    def slow(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        time.sleep(0.05)
        return columns

    Reader([index], transform=slow, stages=stages)(unit_of((0, 0, 1)))
    assert stages.seconds()["transform"] > 0.04
    assert 0 < stages.seconds()["decode"] < 0.04


def test_threads_that_need_one_group_read_it_once_and_see_the_same(index: Index) -> None:
    reads: list[int] = []

    def on_read(stream: int, group: int) -> None:
        time.sleep(0.02)
        reads.append(group)

    reader, unit = Reader([index], on_read=on_read), unit_of((0, 0, 1), (3, 1, 4))
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(reader, [unit] * 16))
    assert sorted(reads) == [0, 3]
    for rows in got:
        assert rows.columns["id"].tolist() == unit.stored_ids(index).tolist()


def test_what_is_kept_in_memory_is_bounded_by_bytes(index: Index) -> None:
    reads: list[int] = []
    units = [unit_of((g, 0, int(n))) for g, n in enumerate(index.rows)] * 3
    for cache_bytes, times in ((0, 3), (1 << 20, 1)):
        reads.clear()
        reader = Reader([index], on_read=lambda _, g: reads.append(g), cache_bytes=cache_bytes)
        for unit in units:
            reader(unit)
        assert len(reads) == times * len(index.rows)


def test_nothing_is_kept_of_data_that_does_not_fit_unless_asked(tmp_path: Path) -> None:
    wide = pa.array(np.zeros((20, 1 << 20), np.float32).ravel())
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(wide, 1 << 20)})  # 80 MiB
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=2)
    index, reads = build_index(str(tmp_path)), list[int]()
    for cache_bytes, times in ((None, 2), (1 << 30, 1)):
        reads.clear()
        reader = Reader([index], on_read=lambda _, g: reads.append(g), cache_bytes=cache_bytes)
        for _ in range(2):
            reader(unit_of((3, 0, 2)))
        assert reads == [3] * times


def test_a_reader_reads_what_the_plan_asks_for(index: Index) -> None:
    plan, reader = plan_order(index, global_batch=16, seed=0, lanes=4), Reader([index])
    for unit in plan.units(stop=plan.steps_per_epoch):
        assert reader(unit).columns["id"].tolist() == unit.stored_ids(index).tolist()

"""Rows come out of a table as they went in."""

import io
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from rayway.data.columns import Rows
from rayway.data.wire import Parcel, from_table, to_table
from rayway.errors import DataError, TrainingError

KINDS = ["<i4", "<i8", "|u1", "|i1", "<f2", "<f4", "<f8", "|b1"]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(0, 5))
    columns = {}
    for name in draw(st.lists(st.text(max_size=3), min_size=1, max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        kind = np.dtype(draw(st.sampled_from(KINDS)))
        columns[name] = draw(st_numpy.arrays(kind, (count, *shape)))
    valid = draw(st.none() | st_numpy.arrays(np.bool_, count))
    return Rows(columns, valid)


def sent(table: pa.Table) -> pa.Table:
    """Return the table as another process sees it."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def check_same(got: Rows, want: Rows) -> None:
    assert list(got.columns) == list(want.columns)
    for name, column in want.columns.items():
        assert got.columns[name].dtype == column.dtype
        assert got.columns[name].shape == column.shape
        assert got.columns[name].tobytes() == column.tobytes()
    assert (got.valid is None) == (want.valid is None)
    if want.valid is not None:
        assert got.valid is not None
        assert got.valid.dtype == np.bool_
        assert got.valid.tolist() == want.valid.tolist()


@settings(max_examples=100, deadline=None)
@given(
    units=st.lists(rows(), max_size=4),
    seconds=st.dictionaries(st.sampled_from(["read", "decode"]), st.floats(0, 10)),
    chunks=st.sampled_from(["as sent", "merged", "cut"]),
)
def test_rows_of_any_shape_come_back(
    units: list[Rows], seconds: dict[str, float], chunks: str
) -> None:
    table = sent(to_table(Parcel(units, seconds)))
    if chunks != "as sent":
        table = table.combine_chunks()
    if chunks == "cut":
        table = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    got = from_table(table)
    assert got.seconds == seconds
    assert got.error is None
    for one, other in zip(got.units, units, strict=True):
        check_same(one, other)


def test_every_table_has_the_same_schema() -> None:
    one = to_table(Parcel([Rows({"x": np.zeros((3, 2))})], {"read": 1.0}))
    other = to_table(Parcel([], {}, DataError("gone")))
    assert one.schema == other.schema
    assert one.schema.metadata is None


def test_nothing_is_copied_on_the_way() -> None:
    x = np.arange(1000)
    table = to_table(Parcel([Rows({"x": x, "strided": x[::2]})], {}))
    back = from_table(table).units[0].columns
    assert np.shares_memory(back["x"], x)
    assert back["strided"].tolist() == x[::2].tolist()


def test_an_error_comes_behind_the_rows_before_it() -> None:
    first = Rows({"x": np.arange(3)})
    got = from_table(to_table(Parcel([first], {}, DataError("a.parquet is cut off"))))
    check_same(got.units[0], first)
    assert type(got.error) is DataError
    assert str(got.error) == "a.parquet is cut off"


def test_a_foreign_error_says_where_it_came_from() -> None:
    try:
        {}["absent"]
    except KeyError as error:
        got = from_table(to_table(Parcel([], {}, error))).error
    assert type(got) is KeyError
    assert "test_wire.py" in got.__notes__[0]


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("no")


class TwoArgumentsError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize("error", [UnpicklableError("bad luck"), TwoArgumentsError("bad", "luck")])
def test_an_error_that_cannot_travel_is_told_in_words(error: Exception) -> None:
    got = from_table(to_table(Parcel([], {}, error))).error
    assert type(got) is TrainingError
    assert "bad luck" in str(got)

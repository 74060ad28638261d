import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.index import build_index
from rayway.data.padding import TooLongError, padded
from rayway.data.shards import Reader
from rayway.data.stream import Unit
from rayway.errors import DataError

KINDS = [pa.int32(), pa.uint64(), pa.float32(), pa.float16(), pa.bool_(), pa.int64()]


def number(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_boolean(kind):
        return st.booleans()
    whole = st.integers(0, 9)
    return whole.map(np.float16) if kind == pa.float16() else whole


@st.composite
def columns(draw: st.DrawFn, *, nulls: bool = True, longest: int = 5) -> pa.Array:
    kind = draw(st.sampled_from(KINDS))
    value = st.none() | number(kind) if nulls else number(kind)
    listed = st.lists(value, max_size=longest)
    rows = draw(st.lists(st.none() | listed if nulls else listed, min_size=1, max_size=8))
    return pa.array(rows, draw(st.sampled_from([pa.list_, pa.large_list]))(kind))


@given(column=columns(), length=st.integers(1, 6), cut=st.integers(0, 3))
def test_it_is_what_padding_row_by_row_gives(column: pa.Array, length: int, cut: int) -> None:
    column = column[cut:]
    rows = column.to_pylist()
    long = [at for at, row in enumerate(rows) if row is not None and len(row) > length]
    if long:
        with pytest.raises(TooLongError) as caught:
            padded(column, length)
        assert caught.value.row == long[0]
        assert caught.value.length == len(rows[long[0]])
        assert caught.value.longest == max(len(row) for row in rows if row is not None)
        return
    got = padded(column, length)
    dtype = np.dtype(column.type.value_type.to_pandas_dtype())
    assert got.values.shape == got.mask.shape == (len(rows), length)
    assert (got.values.dtype, got.mask.dtype) == (dtype, np.bool_)
    for at, row in enumerate(rows):
        there = len(row or [])
        assert got.mask[at].tolist() == [True] * there + [False] * (length - there)
        assert got.values[at, there:].tolist() == [0] * (length - there)
        bad = [False] * length
        for place, value in enumerate(row or []):
            bad[place] = value is None
            assert value is None or got.values[at, place] == value
        if row is None:
            bad[0] = True
        assert (np.zeros(length) if got.nulls is None else got.nulls[at]).tolist() == bad


@settings(deadline=None, max_examples=40)
@given(column=columns(nulls=False), shape=st.sampled_from(["array", "rows", "object", "lists"]))
def test_what_a_transform_may_return_is_padded_alike(column: pa.Array, shape: str) -> None:
    dtype = np.dtype(column.type.value_type.to_pandas_dtype())
    rows = [np.array(row, dtype) for row in column.to_pylist()]
    want = padded(column, 5)
    given: Any = rows
    if shape == "array":
        given = np.array([np.resize(row, 3) for row in rows], dtype)
        want = padded(pa.array(given.tolist(), pa.list_(column.type.value_type)), 5)
    elif shape == "object":
        given = np.empty(len(rows), object)
        given[:] = rows
    elif shape == "lists":
        given = [row if len(row) else [] for row in rows]
        if not any(len(row) for row in rows):
            with pytest.raises(ValueError, match="return arrays"):
                padded(given, 5)
            return
    got = padded(given, 5)
    np.testing.assert_array_equal(got.values, want.values)
    np.testing.assert_array_equal(got.mask, want.mask)
    assert got.values.dtype == dtype


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1, 2]), "is of type int64 and holds no lists"),
        (pa.array([["a"]]), "is of type string"),
        (pa.array([[[1]]]), "lists of lists"),
        (np.zeros(3), "one value a row"),
        (np.zeros((3, 2, 2)), "lists of lists"),
        ([np.zeros((2, 2))], "lists of lists"),
        ([1, 2], "holds no lists"),
        ([np.zeros(2), np.zeros(2, np.int32)], "rows of type float64 and int32"),
        ([["a"]], "of type <U1"),
    ],
)
def test_what_cannot_be_padded_is_refused_with_the_reason(column: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        padded(column, 4)


def test_fixed_size_lists_are_padded_too() -> None:
    column = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int8(), 2))
    got = padded(column, 3)
    assert got.values[0].tolist() == [1, 2, 0]
    assert got.mask.sum(axis=1).tolist() == [2, 0, 2]
    assert got.nulls is not None
    assert np.argwhere(got.nulls).tolist() == [[1, 0], [2, 1]]


UNIT = Unit(0, 0, 0, 0, 4, ((0, 0, 2), (1, 0, 2)), None)


def folder(path: Path, **columns: Any) -> Any:
    pq.write_table(pa.table(columns), path / "a.parquet", row_group_size=2)
    return build_index(str(path))


def test_a_reader_pads_and_gives_masks(tmp_path: Path) -> None:
    index = folder(tmp_path, x=[[1], [2, 3, 4], [], [5, 6]], n=[1, 2, 3, 4])
    want = [[1, 0, 0, 0], [2, 3, 4, 0], [0, 0, 0, 0], [5, 6, 0, 0]]
    for transform in (None, lambda columns, _: columns):
        got = Reader([index], pad={"x": 4}, transform=transform)(UNIT).columns
        assert got["x"].tolist() == want
        assert got["x_mask"].sum(axis=1).tolist() == [1, 3, 0, 2]
        assert got["n"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ["raw", "transform"])
def test_a_row_that_is_too_long_is_named(tmp_path: Path, where: str) -> None:
    index = folder(tmp_path, x=[[1], [2], [3, 3, 3], [4] * 7])
    transform = None if where == "raw" else lambda columns, _: columns
    with pytest.raises(DataError) as caught:
        Reader([index], pad={"x": 2}, transform=transform)(UNIT)
    assert str(caught.value) == (
        f"column 'x' has a list of 3 values in row 0 of {tmp_path}/a.parquet (row group 1); "
        f"data.pad allows 2. Set data.pad to 7 or more, or cut the lists in data.prepare or "
        f"data.transform."
    )


@pytest.mark.parametrize(
    ("pad", "words"),
    [
        ({"y": 2}, r"names column 'y', and .* has no such column. It has: x, n, deep, n_mask"),
        ({"n": 2}, "column 'n', which is int64 .* holds no lists"),
        ({"deep": 2}, "column 'deep', .* lists of lists cannot be padded"),
        ({"x": 2}, "makes a column 'x_mask'"),
    ],
)
def test_a_pad_that_cannot_be_is_refused_before_anything_is_read(
    tmp_path: Path, pad: dict[str, int], words: str
) -> None:
    mask = "x_mask" if "x" in pad else "n_mask"  # a column of that name is in the way
    index = folder(tmp_path, x=[[1], [2, 3]], n=[1, 2], deep=[[[1]], [[2]]], **{mask: [1, 2]})
    with pytest.raises(DataError, match=words):
        Reader([index], pad=pad)
    if "n" not in pad and "deep" not in pad:
        unit = Unit(0, 0, 0, 0, 2, ((0, 0, 2),), None)
        with pytest.raises(DataError, match=words):
            Reader([index], pad=pad, transform=lambda columns, _: columns)(unit)


@pytest.mark.parametrize("invalid", ["error", "skip", "fill"])
def test_nulls_in_padded_lists_follow_the_policy(tmp_path: Path, invalid: Any) -> None:
    index = folder(tmp_path, x=[[1.0, 2.0], [None, 3.0], None, [math.nan]])
    reader = Reader([index], pad={"x": 3}, invalid=invalid)
    if invalid == "error":
        with pytest.raises(DataError, match=r"column 'x' has null in row 1 of .*row group 0"):
            reader(UNIT)
        return
    got = reader(UNIT)
    if invalid == "skip":
        assert got.valid is not None
        assert got.valid.tolist() == [True, False, False, False]
        assert got.columns["x"].tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
        assert not got.columns["x_mask"][1:].any()
        return
    assert got.valid is None
    assert got.columns["x"].tolist() == [[1, 2, 0], [0, 3, 0], [0, 0, 0], [0, 0, 0]]
    assert got.columns["x_mask"].sum(axis=1).tolist() == [2, 2, 0, 1]

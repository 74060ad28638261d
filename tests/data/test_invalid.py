import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rayway.data.columns import to_numpy
from rayway.data.index import build_index
from rayway.data.invalid import Fault, all_finite, clean
from rayway.data.shards import Reader
from rayway.data.stream import Unit
from rayway.errors import DataError

FLOATS = [pa.float16(), pa.float32(), pa.float64()]
WHOLE = [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.int64(), pa.uint64()]
FACTS = {None: Fault.NULL, math.nan: Fault.NAN, math.inf: Fault.INFINITE}


def dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return np.dtype(kind.to_pandas_dtype())


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type; in lists too, some are null, NaN or infinite."""
    if pa.types.is_floating(kind):
        good: st.SearchStrategy[Any] = st.integers(-9, 9).map(float)
        bad = st.sampled_from([None, math.nan, math.inf, -math.inf])
    elif pa.types.is_boolean(kind):
        good, bad = st.booleans(), st.none()
    elif pa.types.is_fixed_size_binary(kind):
        good, bad = st.binary(min_size=2, max_size=2), st.none()
    elif hasattr(kind, "value_type"):
        size = getattr(kind, "list_size", 2)
        good = st.lists(values_of(kind.value_type), min_size=size, max_size=size)
        bad = st.none()
    else:
        most = 2 ** (8 * dtype_of(kind).itemsize - 1) - 1
        good, bad = st.sampled_from([0, 1, most]), st.none()
    return st.integers(0, 11).flatmap(lambda which: bad if which == 0 else good)


KINDS = [
    *WHOLE,
    *FLOATS,
    pa.bool_(),
    pa.binary(2),
    pa.list_(pa.float32(), 3),
    pa.list_(pa.int16(), 2),
    pa.list_(pa.bool_(), 2),
    pa.list_(pa.list_(pa.float64(), 2), 2),
    pa.list_(pa.float32()),
    pa.large_list(pa.int64()),
    pa.list_(pa.list_(pa.float16())),
]


def worst(value: Any) -> int:
    """The oracle: what is wrong with one row's value."""
    if isinstance(value, list):
        return max(map(worst, value), default=0)
    if value is None:
        return Fault.NULL
    if isinstance(value, float) and not math.isfinite(value):
        return Fault.NAN if math.isnan(value) else Fault.INFINITE
    return 0


def filled(value: Any, shape: tuple[int, ...]) -> Any:
    """The oracle: one row's value with 0 for what is invalid."""
    if isinstance(value, bytes):
        return list(value)
    if value is None and shape:
        return [filled(None, shape[1:])] * shape[0]
    if isinstance(value, list):
        return [filled(item, shape[1:]) for item in value]
    return 0 if worst(value) else value


def shape_of(kind: pa.DataType) -> tuple[int, ...]:
    if pa.types.is_fixed_size_binary(kind):
        return (2,)
    if not hasattr(kind, "value_type"):
        return ()
    return (getattr(kind, "list_size", 2), *shape_of(kind.value_type))


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    rows = draw(st.integers(1, 9))
    columns = {}
    for number, kind in enumerate(kinds):
        values = draw(st.lists(values_of(kind), min_size=rows, max_size=rows))
        if kind in FLOATS[:1]:
            values = [None if value is None else np.float16(value) for value in values]
        columns[f"c{number}"] = pa.array(values, kind)
    return pa.table(columns)


@settings(
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(table=tables(), invalid=st.sampled_from(["error", "skip", "fill"]), data=st.data())
def test_every_row_is_treated_as_the_policy_says(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, invalid: Any, data: st.DataObject
) -> None:
    for name in table.column_names:  # a row group without a list has no length of its own
        kind = table.schema.field(name).type
        for at in range(0, table.num_rows, 3):
            if not pa.types.is_fixed_size_list(kind) and shape_of(kind) and kind != pa.binary(2):
                values = table[name][at : at + 3].to_pylist()
                assume(not _has_unknown_length(values, shape_of(kind)))
    folder = tmp_path_factory.mktemp("set")
    pq.write_table(table, folder / "a.parquet", row_group_size=3)
    index = build_index(str(folder))
    low = data.draw(st.integers(0, int(index.rows[0]) - 1))
    spans = ((0, low, int(index.rows[0])), *((g, 0, int(n)) for g, n in enumerate(index.rows) if g))
    unit = Unit(0, 0, 0, 0, table.num_rows - low, spans, None)
    rows = table.slice(low).to_pydict()
    faults = {name: [worst(value) for value in values] for name, values in rows.items()}
    bad = [row for row in range(unit.rows) if any(codes[row] for codes in faults.values())]
    reader = Reader([index], invalid=invalid)
    if invalid == "error" and bad:
        column = next(name for name, codes in faults.items() if codes[bad[0]])
        words = Fault(faults[column][bad[0]]).words
        group, row = divmod(low + bad[0], 3)
        found = f"column '{column}' has {words} in row {row} of {index.where(group)}. Leave"
        with pytest.raises(DataError, match="rayway data check") as caught:
            reader(unit)
        assert str(caught.value).startswith(found)
        return
    for _ in range(2):  # what is kept in memory is not what was changed
        got = reader(unit)
        if got.valid is None:
            assert not bad or invalid == "fill"
        else:
            assert np.flatnonzero(~got.valid).tolist() == bad
        for name, values in rows.items():
            kind = table.schema.field(name).type
            want = [filled(value, shape_of(kind)) for value in values]
            if invalid == "skip":
                for row in bad:
                    want[row] = filled(None, shape_of(kind)) if shape_of(kind) else 0
            assert got.columns[name].dtype == (np.uint8 if kind == pa.binary(2) else dtype_of(kind))
            np.testing.assert_array_equal(
                got.columns[name], np.array(want).reshape(len(want), *shape_of(kind))
            )


def _has_unknown_length(values: list[Any], shape: tuple[int, ...]) -> bool:
    there = [value for value in values if value is not None]
    if not there:
        return True
    inner = [item for value in there for item in value]
    return len(shape) > 1 and _has_unknown_length(inner, shape[1:])


@pytest.mark.parametrize("where", ["raw", "transform"])
@pytest.mark.parametrize(
    ("bad", "words"), [(None, "null"), (math.nan, "NaN"), (-math.inf, "an infinite value")]
)
def test_an_invalid_value_is_named_by_file_row_group_row_and_column(
    tmp_path: Path, where: str, bad: float | None, words: str
) -> None:
    y = [1.0] * 10
    y[7] = bad  # type: ignore[call-overload]
    pq.write_table(pa.table({"x": range(10), "y": y}), tmp_path / "a.parquet", row_group_size=5)
    index = build_index(str(tmp_path))
    same = None if where == "raw" else lambda columns, _: columns
    reader = Reader([index], transform=same)
    unit = Unit(0, 0, 0, 0, 6, ((0, 2, 5), (1, 0, 3)), None)
    after = "" if same is None else " after data.transform"
    with pytest.raises(DataError) as caught:
        reader(unit)
    assert str(caught.value) == (
        f"column 'y' has {words} in row 2 of {tmp_path}/a.parquet (row group 1){after}. Leave such "
        f"rows out with data.invalid='skip', put 0 there with 'fill', or clean them in "
        f"data.prepare; `rayway data check {tmp_path}` lists all."
    )
    reader(Unit(0, 0, 0, 0, 2, ((1, 0, 2),), None))  # rows that are not asked for do no harm


def test_a_transform_is_given_the_nulls_and_may_mend_them(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, None, 3]}), tmp_path / "a.parquet")
    unit = Unit(0, 0, 0, 0, 3, ((0, 0, 3),), None)

    def mend(columns: dict[str, Any], _: object) -> dict[str, Any]:
        assert isinstance(columns["x"], pa.Array)
        return {"x": columns["x"].fill_null(9)}

    def mask(columns: dict[str, Any], _: object) -> dict[str, Any]:
        values = columns["x"].fill_null(7).to_numpy().astype(np.int32)
        return {"x": np.ma.array(values, mask=[False, True, False])}

    index = build_index(str(tmp_path))
    assert Reader([index], transform=mend)(unit).columns["x"].tolist() == [1, 9, 3]
    got = Reader([index], transform=mask, invalid="skip")(unit)
    assert got.columns["x"].tolist() == [1, 0, 3]
    assert got.columns["x"].dtype == np.int32
    assert got.valid is not None
    assert got.valid.tolist() == [True, False, True]


@given(st.sampled_from([np.float16, np.float32, np.float64]), st.data())
def test_finite_is_what_numpy_calls_finite(kind: Any, data: st.DataObject) -> None:
    largest = float(np.finfo(kind).max)
    some = st.sampled_from([0.0, 1.5, largest, -largest, float(np.finfo(kind).smallest_subnormal)])
    odd = st.sampled_from([math.nan, math.inf, -math.inf])
    values = np.array(data.draw(st.lists(some, max_size=300)), dtype=kind)
    assert all_finite(values)
    assert clean(values, None)[0] is values
    if len(values):
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(odd)
        assert not all_finite(values)
        assert not all_finite(values[::-1].reshape(1, -1, 1))


def test_what_lies_under_a_null_is_of_no_account() -> None:
    values, nulls = np.array([math.nan, 1, math.inf]), np.array([True, False, False])
    got, faults = clean(values, nulls)
    assert got.tolist() == [0, 1, 0]
    assert faults is not None
    assert faults.tolist() == [Fault.NULL, 0, Fault.INFINITE]
    assert np.isnan(values[0])


def test_columns_without_a_fault_are_not_copied() -> None:
    column = pa.array(range(100), pa.int64())
    values = to_numpy(column)
    assert clean(values, None)[0] is values
    assert values.ctypes.data == column.buffers()[1].address
    none = np.zeros(100, np.bool_)
    assert clean(values, none)[0] is values
    assert clean(values, none)[1] is None

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.checked import Checked, ColumnError, check, join, settle
from rayway.data.invalid import Fault


@given(st.lists(st.lists(st.none() | st.integers(0, 5), min_size=1), min_size=1), st.booleans())
def test_parts_joined_are_what_the_whole_is(parts: list[list[int | None]], skip: bool) -> None:
    def checked(values: list[int | None]) -> Checked:
        return check({"a": pa.array(values, pa.int64()), "b": np.ones(len(values))}, {})

    everything = [value for part in parts for value in part]
    got = settle(join([checked(part) for part in parts], [""] * len(parts)), skip=skip)
    want = settle(checked(everything), skip=skip)
    for name in ("a", "b"):
        np.testing.assert_array_equal(got.columns[name], want.columns[name])
    there = np.array([value is not None for value in everything])
    for rows in (got, want):
        if skip and not there.all():
            np.testing.assert_array_equal(rows.valid, there)
            assert not rows.columns["b"][~there].any()
        else:
            assert rows.valid is None


def test_some_of_the_rows_have_some_of_the_faults() -> None:
    checked = check({"a": pa.array([None, 1.0, float("nan")]), "b": np.array([1, np.inf, 1])}, {})
    assert checked.first_fault() == (0, "a", Fault.NULL)
    assert checked[1:].first_fault() == (0, "b", Fault.INFINITE)
    assert checked[2:].first_fault() == (0, "a", Fault.NAN)
    assert not check({"a": np.ones(3)}, {})[1:].faults
    assert checked[1:2].faults.keys() == {"b"}


def test_a_single_part_and_sound_rows_are_not_copied() -> None:
    values = np.ones(4)
    checked = check({"a": values}, {})
    assert join([checked], [""]).columns["a"] is values
    assert settle(checked, skip=True).columns["a"] is values
    assert checked[1:3].columns["a"].base is values
    assert checked.bytes == 32


def test_parts_of_unlike_shape_are_refused_by_name() -> None:
    parts = [check({"a": np.ones((2, n))}, {}) for n in (3, 3, 4)]
    with pytest.raises(ColumnError, match=r"rows of shape \(4,\) in third but \(3,\)") as caught:
        join(parts, ["first", "second", "third"])
    assert caught.value.column == "a"
    assert "data.pad" in caught.value.advice

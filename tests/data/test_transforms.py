import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.stages import TRANSFORM, Stages
from rayway.data.transforms import FailedError, SampleRng, run, wants_table


class BadRowError(Exception):
    pass


def tried(
    transform: Callable[..., Any], rows: int, *, as_table: bool = False
) -> tuple[int, int, Exception]:
    """Return the rows that a transform is said to fail on, and its error."""
    table = pa.table({"i": range(100, 100 + rows)})
    with pytest.raises(FailedError) as caught:
        run(transform, table, rng_of(rows), as_table=as_table, stages=Stages())
    cause = caught.value.__cause__
    assert isinstance(cause, Exception)
    return caught.value.low, caught.value.high, cause


def rng_of(rows: int) -> Callable[[int, int], SampleRng]:
    return lambda low, high: SampleRng(np.arange(rows)[low:high], seed=1, epoch=2)


@given(st.integers(1, 200), st.data())
def test_the_first_row_that_fails_is_found_with_few_calls(rows: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    calls = 0

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        for value, number in zip(columns["i"].tolist(), rng.ids.tolist(), strict=True):
            assert value - 100 == number, "rows keep their ids"
            if number in bad:
                raise BadRowError(f"row {number}")
        columns["i"] += 1000  # what it writes to is its own
        return columns

    low, high, error = tried(transform, rows)
    assert (low, high) == (min(bad), min(bad) + 1)
    assert str(error) == f"row {min(bad)}"
    assert calls - 1 <= 2 * math.ceil(math.log2(rows)) if rows > 1 else calls == 1


@given(st.integers(2, 100), st.data())
def test_rows_that_fail_only_together_are_named_together(rows: int, data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=2, max_size=2)))

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        if {first, second} <= set(rng.ids.tolist()):
            raise BadRowError
        return columns

    low, high, _ = tried(transform, rows)
    assert low <= first < second < high


def test_draws_of_a_row_do_not_change_while_it_is_looked_for() -> None:
    seen: dict[int, set[float]] = {}

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        draws = rng.uniform(0)
        for number, draw in zip(rng.ids.tolist(), draws.tolist(), strict=True):
            seen.setdefault(number, set()).add(draw)
        if (draws > 0.9).any():
            raise BadRowError
        return columns

    low, high, _ = tried(transform, 64)
    assert all(len(draws) == 1 for draws in seen.values())
    wanted = next(number for number in range(64) if max(seen[number]) > 0.9)
    assert (low, high) == (wanted, wanted + 1)


def test_another_error_of_a_smaller_part_is_not_taken_for_it() -> None:
    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        if len(rng.ids) < 8:
            raise ValueError("too few rows to scale by")
        raise BadRowError("always")

    low, high, error = tried(transform, 16)
    assert (low, high) == (0, 8)
    assert isinstance(error, BadRowError)


def test_an_error_that_does_not_come_again_names_all_rows() -> None:
    calls = 0

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise BadRowError
        return columns

    assert tried(transform, 16)[:2] == (0, 16)
    assert calls == 3


def takes_table(table: pa.Table, rng: SampleRng) -> pa.Table:
    return table


def takes_table_by_text(table: "pa.Table", rng: "SampleRng") -> Any:
    return table


class TakesTable:
    def __call__(self, table: pa.Table, rng: SampleRng) -> pa.Table:
        return table


def takes_dict(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
    return columns


def takes_something(columns: "NotThere", rng: SampleRng) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return columns


@pytest.mark.parametrize(
    ("transform", "wanted"),
    [
        (takes_table, True),
        (takes_table_by_text, True),
        (TakesTable(), True),
        (TakesTable().__call__, True),
        (takes_dict, False),
        (takes_something, False),
        (lambda columns, rng: columns, False),
        (max, False),
        (dict, False),
    ],
)
def test_a_transform_asks_for_a_table_by_its_annotation(transform: Any, wanted: bool) -> None:
    assert wants_table(transform) == wanted


def test_a_table_is_given_where_one_is_asked_for_also_when_looking_for_a_row() -> None:
    def transform(table: pa.Table, rng: SampleRng) -> pa.Table:
        assert isinstance(table, pa.Table)
        if 105 in table["i"].to_pylist():
            raise BadRowError
        return table

    assert tried(transform, 16, as_table=True)[:2] == (5, 6)


def test_its_time_is_told() -> None:
    stages = Stages()
    run(takes_dict, pa.table({"i": [1]}), rng_of(1), as_table=False, stages=stages)
    assert stages.seconds()[TRANSFORM] > 0

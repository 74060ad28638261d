import math
from functools import reduce
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayway.data.values import Values, look

numbers = st.one_of(st.none(), st.floats(width=32))
columns = st.one_of(
    st.lists(numbers, min_size=1).map(lambda rows: pa.array(rows, pa.float32())),
    st.lists(st.one_of(st.none(), st.lists(numbers, max_size=4)), min_size=1).map(
        lambda rows: pa.array(rows, pa.list_(pa.float32()))
    ),
    st.lists(st.one_of(st.none(), st.lists(numbers, min_size=2, max_size=2)), min_size=1).map(
        lambda rows: pa.array(rows, pa.list_(pa.float32(), 2))
    ),
)


@given(column=columns, cuts=st.lists(st.integers(0, 20), max_size=3), data=st.data())
def test_pieces_in_any_order_say_what_the_whole_says(
    column: pa.Array, cuts: list[int], data: Any
) -> None:
    edges = sorted({0, len(column), *(cut for cut in cuts if cut < len(column))})
    asked: dict[str, Any] = {"within": (-1, 2.5), "longest": 2}
    pieces = [look(column[low:high], (3, 1, low), **asked) for low, high in pairwise(edges)]
    whole = look(column, (3, 1, 0), **asked)
    joined = reduce(Values.plus, data.draw(st.permutations(pieces)))
    assert repr(joined) == repr(whole)


@given(column=columns)
def test_the_counts_are_those_of_a_plain_loop(column: pa.Array) -> None:
    found = look(column, (0, 0, 0), within=(-1, 2.5))
    rows = [row if isinstance(row, list) else [row] for row in column.to_pylist()]
    flat = [(at, value) for at, row in enumerate(rows) for value in row]
    kinds = {
        "null": [at for at, value in flat if value is None],
        "nan": [at for at, value in flat if value is not None and math.isnan(value)],
        "infinite": [at for at, v in flat if v is not None and abs(v) == float("inf")],
        "outside": [at for at, v in flat if v is not None and (v < -1 or v > 2.5)],
    }
    for kind, places in kinds.items():
        bad = getattr(found, kind)
        assert bad.count == len(places)
        assert bad.first == ((0, 0, places[0]) if places else None)


@pytest.mark.parametrize(
    ("column", "low", "high"),
    [
        (pa.array([2**62 + 1, 2**62], pa.int64()), 2**62, 2**62 + 1),
        (pa.array([1.0, 2.0]).cast(pa.float16()), 1.0, 2.0),
        (pa.array([True, True]), True, True),
        (pa.array(["b", "a"]).dictionary_encode(), None, None),
        (pa.array([{"a": 1}]), None, None),
        (pa.array([], pa.float32()), None, None),
        (pa.array([b"ab"], pa.binary(2)), None, None),
    ],
)
def test_types_with_an_order_have_ends(column: pa.Array, low: Any, high: Any) -> None:
    found = look(column, (0, 0, 0))
    assert (found.low, found.high) == (low, high)


def test_a_limit_compares_exactly_with_large_integers() -> None:
    column = pa.array([2**53, 2**53 + 1], pa.int64())
    assert look(column, (0, 0, 0), within=(None, float(2**53))).outside.count == 1

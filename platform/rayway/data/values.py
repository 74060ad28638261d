"""What a column's values are: how many nulls, NaN and infinite ones, from where to where.

Each fact can be joined with that of other rows, in any order, with the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayway.data.columns import is_list

Spot = tuple[int, int, int]
"""A file's number, a row group's in it, a row's in that."""
Range = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Bad:
    """Values of one kind that should not be."""

    count: int = 0
    first: Spot | None = None
    example: Any = None

    def plus(self, other: "Bad") -> "Bad":
        """Return both together."""
        if other.first is None or (self.first is not None and self.first <= other.first):
            first, example = self.first, self.example
        else:
            first, example = other.first, other.example
        return Bad(self.count + other.count, first, example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What some rows of a column hold."""

    null: Bad = field(default_factory=Bad)
    nan: Bad = field(default_factory=Bad)
    infinite: Bad = field(default_factory=Bad)
    outside: Bad = field(default_factory=Bad)
    """Outside the range that was asked for."""
    long: Bad = field(default_factory=Bad)
    """Lists longer than what they are padded to."""
    low: Any = None
    """The smallest finite value. ``None``: there is none, or the type has no order."""
    high: Any = None
    shortest: int | None = None
    """Of the lists, if it is a column of lists."""
    longest: int | None = None

    def plus(self, other: "Values") -> "Values":
        """Return what both hold together."""
        return Values(
            null=self.null.plus(other.null),
            nan=self.nan.plus(other.nan),
            infinite=self.infinite.plus(other.infinite),
            outside=self.outside.plus(other.outside),
            long=self.long.plus(other.long),
            low=_either(min, self.low, other.low),
            high=_either(max, self.high, other.high),
            shortest=_either(min, self.shortest, other.shortest),
            longest=_either(max, self.longest, other.longest),
        )


def look(
    column: pa.Array, first: Spot, *, within: Range = (None, None), longest: int | None = None
) -> Values:
    """Return what a piece of a column holds.

    Args:
        column: Some rows.
        first: Where the first of them is.
        within: The smallest and the largest value that may be.
        longest: The longest list that may be.
    """
    values, rows, absent = _flat(column)

    def bad(mask: npt.NDArray[np.bool_], of: npt.NDArray[np.int64], what: Any = None) -> Bad:
        if not mask.any():
            return Bad()
        at = int(np.argmax(mask))
        example = None if what is None else what[at].as_py()
        return Bad(int(mask.sum()), (first[0], first[1], first[2] + int(of[at])), example)

    every_row = np.arange(len(column))
    null = bad(_mask(pc.is_null(values)), rows).plus(bad(absent, every_row))
    found: dict[str, Any] = {"null": null}
    if is_list(column.type):
        lengths = pc.list_value_length(column)
        ends = pc.min_max(lengths).as_py()
        found |= {"shortest": ends["min"], "longest": ends["max"]}
        if longest is not None:
            found["long"] = bad(_mask(pc.greater(lengths, longest)), every_row, lengths)
    if pa.types.is_floating(values.type):
        if pa.types.is_float16(values.type):
            values = values.cast(pa.float32())
        found["nan"] = bad(_mask(pc.is_nan(values)), rows)
        found["infinite"] = bad(_mask(pc.is_inf(values)), rows)
    if not _ordered(values.type):
        return Values(**found)
    finite = values.filter(pc.is_finite(values)) if pa.types.is_floating(values.type) else values
    ends = pc.min_max(finite).as_py()
    outside = np.zeros(len(values), dtype=np.bool_)
    for limit, beyond in zip(within, (pc.less, pc.greater), strict=True):
        if limit is not None:
            outside |= _mask(beyond(values, _as(limit, values.type)))
    return Values(**found, low=ends["min"], high=ends["max"], outside=bad(outside, rows, values))


def _flat(
    column: pa.Array,
) -> tuple[pa.Array, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the values of lists end to end, the row of each, and which rows have no list."""
    rows = np.arange(len(column))
    absent = np.zeros(len(column), dtype=np.bool_)
    while True:
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        elif pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif is_list(column.type):
            if column.null_count:
                there = _mask(pc.is_valid(column))
                absent[rows[~there]] = True
                column, rows = column.filter(pa.array(there)), rows[there]
            rows = np.repeat(rows, pc.list_value_length(column).to_numpy())
            column = column.flatten()
        else:
            return column, rows, absent


def _mask(found: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(found.fill_null(False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _ordered(kind: pa.DataType) -> bool:
    types = pa.types
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    moment = types.is_temporal(kind) and not types.is_duration(kind)  # Arrow orders no durations
    return bool(number or moment or types.is_boolean(kind))


def _as(limit: float, kind: pa.DataType) -> pa.Scalar:
    """Return a limit so that it compares exactly with integers, as far as it is one."""
    whole = float(limit).is_integer() and pa.types.is_integer(kind)
    return pa.scalar(int(limit)) if whole else pa.scalar(float(limit))


def _either(pick: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return pick(one, other)

"""Pads lists of differing length to one length, and says which values are real."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rayway.data.columns import Array, Bools, Lists, is_list, lists, plain


class TooLongError(ValueError):
    """A list is longer than the length that it is to be padded to."""

    def __init__(self, row: int, length: int, longest: int) -> None:
        super().__init__(f"has a list of {length} values")
        self.row, self.length, self.longest = row, length, longest
        """The first such row, its values, and those of the longest list of all rows."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A column of lists, each padded with zeros at its end."""

    values: Array
    """Shape (rows, length)."""
    nulls: Bools | None
    """Which values are null, shape (rows, length). ``None``: none of them."""
    mask: Bools
    """Which values are real, nulls among them, shape (rows, length)."""


def mask_name(name: str) -> str:
    """Return the name of the column that says which values of ``name`` are real."""
    return f"{name}_mask"


def padded(column: Any, length: int) -> Padded:
    """Return a column of lists with every row padded to ``length`` values.

    A row that is null itself counts as one null: in its first place, without a real value.

    Args:
        column: An Arrow array of lists, an array of shape (rows, values), or a sequence with an
            array of shape (values,) for each row.
        length: At least 1.

    Raises:
        TooLongError: A row has more values.
        ValueError: The rows are no lists of numbers; the text says in what.
    """
    found = _lists_of(column)
    if found.values.ndim > 1:
        raise ValueError("has lists of lists, which data.pad cannot pad")
    longest = int(found.lengths.max(initial=0))
    if longest > length:
        row = int(np.argmax(found.lengths > length))
        raise TooLongError(row, int(found.lengths[row]), longest)
    mask = np.arange(length) < found.lengths[:, None]
    values = np.zeros(mask.shape, found.values.dtype)
    values[mask] = found.values
    nulls: Bools | None = None
    if found.nulls is not None or found.absent is not None:
        nulls = np.zeros(mask.shape, np.bool_)
        if found.nulls is not None:
            nulls[mask] = found.nulls
        if found.absent is not None:
            nulls[found.absent, 0] = True
    return Padded(values, nulls, mask)


def _lists_of(column: Any) -> Lists:
    if isinstance(column, pa.Array):
        if not is_list(column.type):
            raise ValueError(f"is of type {column.type} and holds no lists")
        return lists(column)
    if isinstance(column, np.ndarray) and column.dtype.kind != "O":
        if column.ndim < 2:
            raise ValueError("has one value a row and holds no lists")
        flat = plain(column.reshape(-1, *column.shape[2:]))
        return Lists(flat, None, np.full(len(column), column.shape[1], dtype=np.int64), None)
    return _lists_of_rows(column)


def _lists_of_rows(column: Sequence[Any]) -> Lists:
    rows = [np.asarray(row) for row in column]
    # an empty Python list has no type of its own; numpy would call it float64
    typed = [
        row
        for row, given in zip(rows, column, strict=True)
        if len(row.shape) != 1 or len(row) or isinstance(given, np.ndarray)
    ]
    if not typed:
        raise ValueError("has no value in any row, so its type is not known: return arrays")
    if any(row.ndim != 1 for row in typed):
        raise ValueError(
            "holds no lists"
            if all(row.ndim == 0 for row in typed)
            else "has lists of lists, which data.pad cannot pad"
        )
    kinds = sorted({str(row.dtype) for row in typed})
    if len(kinds) > 1:
        raise ValueError(f"has rows of type {' and '.join(kinds)}")
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return Lists(plain(np.concatenate(typed)), None, lengths, None)

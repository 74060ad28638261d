"""From columns as they were read, or as a transform gave them, to rows that tensors are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rayway.data.columns import Array, Bools, Columns, Rows, dense, plain, whole
from rayway.data.invalid import Fault, Faults, clean
from rayway.data.padding import TooLongError, mask_name, padded

Invalid = Literal["error", "skip", "fill"]
"""What becomes of a row with an invalid value; see ``data.invalid``."""

_ALIKE = "Leave it out with data.columns, or make its rows alike in data.prepare."
_PAD = (
    "Give it a length in data.pad, leave it out with data.columns, or make its rows alike in "
    "data.prepare."
)
_ADVICE = {
    "has lists of lists": _ALIKE,
    "has rows of shape": _PAD,
    "has lists of": _PAD,
    "dictionary": "Store the values themselves, in data.prepare.",
    "decimal": "Make it a float64, or an integer of its smallest unit, in data.prepare.",
    "timestamp": "Make it an int64, or a float64 of seconds, in data.prepare or data.transform.",
    "date": "Make it an int32 of days in data.prepare or data.transform.",
    "time": "Make it an int64 in data.prepare or data.transform.",
    "duration": "Make it an int64 in data.prepare or data.transform.",
    "string": "Leave it out with data.columns, or make numbers of it in data.prepare or "
    "data.transform.",
    "binary": "Decode it in data.prepare or data.transform, or leave it out with data.columns.",
}
"""What is in the reason why a column is no tensor -> what to do; the first that fits."""


class ColumnError(ValueError):
    """No tensor can be made of a column; the text says why."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column
        """Its name."""
        self.advice = next((do for part, do in _ADVICE.items() if part in reason), _ALIKE)
        """What to do."""


class LongRowError(ValueError):
    """A list is longer than ``data.pad`` allows."""

    def __init__(self, column: str, pad: int, found: TooLongError) -> None:
        super().__init__(str(found))
        self.column, self.pad, self.found = column, pad, found
        """The column's name, what it is padded to, and the row."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Columns of one number of rows, with 0 for invalid values, and the faults that were there."""

    columns: Columns
    """Arrays of shape (rows, ...)."""
    faults: dict[str, Faults]
    """Column -> what is wrong with each row, shape (rows,); only columns with a fault."""

    @property
    def bytes(self) -> int:
        """What it holds, in bytes."""
        return sum(a.nbytes for part in (self.columns, self.faults) for a in part.values())

    def __getitem__(self, rows: slice) -> "Checked":
        """Return some of the rows, as views."""
        columns = {name: array[rows] for name, array in self.columns.items()}
        faults = {name: codes[rows] for name, codes in self.faults.items()}
        return Checked(columns, {name: codes for name, codes in faults.items() if codes.any()})

    def first_fault(self) -> tuple[int, str, Fault]:
        """Return row, column and kind of the first row's first fault. There must be one."""
        row, name = min(
            ((int(np.flatnonzero(codes)[0]), name) for name, codes in self.faults.items()),
            key=lambda fault: fault[0],
        )
        return row, name, Fault(self.faults[name][row])


def check(columns: Mapping[str, Any], pad: Mapping[str, int]) -> Checked:
    """Return columns as arrays, padded, with 0 in place of what no model can learn from.

    Args:
        columns: Arrow arrays, or what numpy makes an array of; all with the same number of rows.
        pad: Column -> values a row; each is one of ``columns``.

    Raises:
        ColumnError: A column cannot be an array of numbers of shape (rows, ...).
        LongRowError: A list is longer than its column's ``pad``.
    """
    made: Columns = {}
    faults: dict[str, Faults] = {}
    for name, given in columns.items():
        column = whole(given) if isinstance(given, pa.ChunkedArray) else given
        try:
            if name in pad:
                found = padded(column, pad[name])
                values, nulls = found.values, found.nulls
            else:
                values, nulls = _values(column)
        except TooLongError as error:
            raise LongRowError(name, pad[name], error) from error
        except (ValueError, TypeError) as error:
            raise ColumnError(name, str(error)) from error
        made[name], wrong = clean(values, nulls)
        if name in pad:
            made[mask_name(name)] = found.mask
        if wrong is not None:
            faults[name] = wrong
    return Checked(made, faults)


def join(parts: Sequence[Checked], where: Sequence[str]) -> Checked:
    """Return parts, which have the same columns, as one; a single part as it is.

    Args:
        parts: At least one.
        where: The words for each part in a message.

    Raises:
        ColumnError: A column's rows have another shape in a later part than in the first.
    """
    if len(parts) == 1:
        return parts[0]
    columns: Columns = {}
    for name, first in parts[0].columns.items():
        arrays = [part.columns[name] for part in parts]
        for array, place in zip(arrays, where, strict=True):
            if array.shape[1:] != first.shape[1:]:
                raise ColumnError(
                    name, f"has rows of shape {array.shape[1:]} in {place} but {first.shape[1:]}"
                )
        columns[name] = np.concatenate(arrays)
    rows = [len(next(iter(part.columns.values()))) for part in parts]
    faults = {
        name: np.concatenate(
            [p.faults.get(name, np.zeros(n, np.uint8)) for p, n in zip(parts, rows, strict=True)]
        )
        for name in columns
        if any(name in part.faults for part in parts)
    }
    return Checked(columns, faults)


def settle(checked: Checked, *, skip: bool) -> Rows:
    """Return the rows, with 0 in place of invalid values or, if ``skip``, out of all count."""
    if not skip or not checked.faults:
        return Rows(checked.columns)
    valid: Bools = np.logical_and.reduce([codes == 0 for codes in checked.faults.values()])
    columns = {name: array.copy() for name, array in checked.columns.items()}
    for array in columns.values():
        array[~valid] = 0
    return Rows(columns, valid)


def _values(column: Any) -> tuple[Array, Bools | None]:
    """Return values and nulls of anything that a transform may return for a column."""
    if isinstance(column, pa.Array):
        return dense(column)
    if isinstance(column, np.ma.MaskedArray):
        masked = np.ma.getmaskarray(column)
        return plain(column.data), masked if masked.any() else None
    return plain(np.asarray(column)), None

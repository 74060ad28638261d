"""Rows on their way between processes: what a task read, as one Arrow table, and back.

The table has one column of bytes. Its first value says what the others are; each of these is the
memory of one numpy array, which is copied neither here nor there. All tables have one schema, and
units whose rows differ in shape may share a table: the one who asked for them says what is wrong.
"""

import json
import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayway.data.columns import Array, Rows
from rayway.errors import RaywayError, TrainingError

_COLUMN = "parts"


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a task sends: the rows of its units, up to the first that failed."""

    units: list[Rows]
    seconds: Mapping[str, float]
    """Stage -> seconds that the task spent in it."""
    error: BaseException | None = None
    """What the unit after ``units`` failed with."""


def to_table(parcel: Parcel) -> pa.Table:
    """Return a parcel as an Arrow table that shares its arrays' memory."""
    arrays: list[Array] = []
    units = []
    for rows in parcel.units:
        columns = {name: _kind(column) for name, column in rows.columns.items()}
        units.append({"columns": columns, "valid": rows.valid is not None})
        arrays += rows.columns.values()
        if rows.valid is not None:
            arrays.append(rows.valid)
    head = {"units": units, "seconds": dict(parcel.seconds), "failed": parcel.error is not None}
    parts = [_part(json.dumps(head).encode()), *map(_part, arrays)]
    if parcel.error is not None:
        parts.append(_part(_pickled(parcel.error)))
    return pa.table({_COLUMN: pa.chunked_array(parts, pa.large_binary())})


def from_table(table: pa.Table) -> Parcel:
    """Return the parcel that :func:`to_table` made a table of; its arrays are read-only views."""
    parts = _parts(table)
    head = json.loads(next(parts).to_pybytes())
    units = []
    for unit in head["units"]:
        columns = {name: _array(next(parts), *kind) for name, kind in unit["columns"].items()}
        valid = np.frombuffer(next(parts), np.bool_) if unit["valid"] else None
        units.append(Rows(columns, valid))
    # sent by a task of our own cluster, which runs the same code
    error = pickle.loads(next(parts).to_pybytes()) if head["failed"] else None  # noqa: S301
    return Parcel(units, head["seconds"], error)


def _kind(column: Array) -> tuple[str, tuple[int, ...]]:
    return column.dtype.str, column.shape


def _part(content: "Array | bytes") -> pa.Array:
    """Return an Arrow array of one value that is the memory of ``content``."""
    if isinstance(content, np.ndarray):
        content = np.ascontiguousarray(content)
    data = pa.py_buffer(content)
    offsets = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])


def _parts(table: pa.Table) -> Iterator[pa.Buffer]:
    for chunk in table.column(_COLUMN).chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            yield data.slice(begin, end - begin) if end > begin else pa.py_buffer(b"")


def _array(data: pa.Buffer, dtype: str, shape: Sequence[int]) -> Array:
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def _pickled(error: BaseException) -> bytes:
    """Return an exception such that it can be raised elsewhere, in other words if need be."""
    if not isinstance(error, RaywayError):  # these say by themselves where they come from
        error.add_note(_trace(error))
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # noqa: S301 - made in the line above
    except Exception:  # noqa: BLE001 - user code defines what happens when its errors are pickled
        return pickle.dumps(TrainingError(f"a data task failed: {_trace(error)}"))
    return content


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()

"""Arrow columns as numpy arrays of shape (rows, ...), where every row has the same size."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[np.generic]
Columns = dict[str, Array]
"""Column name -> array of shape (rows, ...); the same number of rows in each."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows as tensors can be made of them."""

    columns: Columns
    """Arrays of shape (rows, ...), maybe read-only; 0 in all of a row that does not count."""
    valid: npt.NDArray[np.bool_] | None = None
    """Which rows count, shape (rows,). ``None``: all of them."""


def to_numpy(column: pa.Array) -> Array:
    """Return a column as an array of shape (rows, ...), without a copy where Arrow allows it.

    Numbers, booleans, fixed-size lists and tensors of them, lists that happen to be of one length
    (rows, length), and fixed-size binary as uint8 (rows, bytes).

    Raises:
        ValueError: The rows differ in size or have no number type; the text says in what.
    """
    kind = column.type
    if column.null_count:
        raise ValueError(f"has {column.null_count} null(s)")
    if isinstance(kind, pa.FixedShapeTensorType):
        values = to_numpy(column.storage)
        return values.reshape(len(column), *kind.shape)
    if pa.types.is_fixed_size_list(kind):
        values = to_numpy(column.flatten())
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.diff(column.offsets.to_numpy())
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            raise ValueError(f"has lists of {lengths.min()} to {lengths.max()} values")
        values = to_numpy(column.flatten())
        return values.reshape(len(column), length, *values.shape[1:])
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        buffer, begin = column.buffers()[1], column.offset * width
        values = np.frombuffer(buffer, np.uint8, len(column) * width, begin)
        return values.reshape(len(column), width)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"is of type {kind}")
    values = column.to_numpy(zero_copy_only=False)
    return np.asarray(values)

"""Arrow columns as numpy arrays of shape (rows, ...), where every row has the same size."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[np.generic]
Bools = npt.NDArray[np.bool_]
Columns = dict[str, Array]
"""Column name -> array of shape (rows, ...); the same number of rows in each."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows as tensors can be made of them."""

    columns: Columns
    """Arrays of shape (rows, ...), maybe read-only; 0 in all of a row that does not count."""
    valid: Bools | None = None
    """Which rows count, shape (rows,). ``None``: all of them."""


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists, laid end to end."""

    values: Array
    """Shape (values, ...)."""
    nulls: Bools | None
    """Which values are null, shape as ``values``. ``None``: none of them."""
    lengths: npt.NDArray[np.int64]
    """Of each row's list, shape (rows,); 0 where there is none."""
    absent: Bools | None
    """Which rows have no list at all but a null, shape (rows,). ``None``: none of them."""


def to_numpy(column: pa.Array) -> Array:
    """Return a column as an array of shape (rows, ...), without a copy where Arrow allows it.

    Numbers, booleans, fixed-size lists and tensors of them, lists that happen to be of one length
    (rows, length), and fixed-size binary as uint8 (rows, bytes).

    Raises:
        ValueError: The rows differ in size, have no number type or a null; the text says in what.
    """
    if column.null_count:
        raise ValueError(f"has {column.null_count} null(s)")
    values, nulls = dense(column)
    if nulls is not None:
        raise ValueError(f"has {nulls.sum()} null(s) in its rows")
    return values


def dense(column: pa.Array) -> tuple[Array, Bools | None]:
    """Return a column's values (rows, ...) and which of them are null, in the same shape.

    The type is the column's, nulls or not; the value under a null is anything. ``None`` instead of
    the second: no null.

    Raises:
        ValueError: The rows differ in size or have no number type; the text says in what.
    """
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensors(column)
    if is_list(kind):
        return _listed(column)
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        buffer, begin = column.buffers()[1], column.offset * width
        values = np.frombuffer(buffer or b"", np.uint8, len(column) * width, begin)
        values = values.reshape(len(column), width)
        return values, _spread(_nulls(column), values.shape)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"is of type {kind}")
    nulls = _nulls(column)
    if nulls is not None:  # with its nulls, numpy would turn integers into floats
        buffers = [None, column.buffers()[1]]
        column = pa.Array.from_buffers(kind, len(column), buffers, offset=column.offset)
    return np.asarray(column.to_numpy(zero_copy_only=False)), nulls


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a chunked column as one array, without a copy where it has one chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds a list in each row."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def lists(column: pa.Array) -> Lists:
    """Return a column of lists, which :func:`is_list`, laid end to end.

    Raises:
        ValueError: As :func:`dense`, of what the lists hold.
    """
    absent = _nulls(column)
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.full(len(column), column.type.list_size, dtype=np.int64)
    else:
        lengths = np.diff(column.offsets.to_numpy()).astype(np.int64, copy=False)
    if absent is not None:
        lengths = np.where(absent, 0, lengths)
    values, nulls = dense(column.flatten())  # leaves out what lies under a null
    return Lists(values, nulls, lengths, absent)


def plain(array: Array) -> Array:
    """Return an array in this machine's byte order, of a type that torch has.

    Raises:
        ValueError: Torch has no such type; the text names it.
    """
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"is of type {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _tensors(column: pa.ExtensionArray) -> tuple[Array, Bools | None]:
    kind, (values, nulls) = column.type, dense(column.storage)
    axes = [0, *(1 + axis for axis in kind.permutation or range(len(kind.shape)))]

    def shaped(flat: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return flat.reshape(len(column), *kind.shape).transpose(axes)

    return shaped(values), None if nulls is None else shaped(nulls).astype(np.bool_, copy=False)


def _listed(column: pa.Array) -> tuple[Array, Bools | None]:
    """Return lists of one length as :func:`dense` does."""
    found = lists(column)
    lengths = found.lengths if found.absent is None else found.lengths[~found.absent]
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
    else:
        size = int(lengths[0]) if len(lengths) else 0
        if (lengths != size).any():
            raise ValueError(f"has lists of {lengths.min()} to {lengths.max()} values")
    shape = (len(lengths), size, *found.values.shape[1:])
    values = found.values.reshape(shape)
    nulls = None if found.nulls is None else found.nulls.reshape(shape)
    if found.absent is None:
        return values, nulls
    there = ~found.absent
    shape = (len(column), *shape[1:])
    all_values, all_nulls = np.zeros(shape, values.dtype), np.ones(shape, np.bool_)
    all_values[there] = values
    all_nulls[there] = False if nulls is None else nulls
    return all_values, all_nulls


def _nulls(column: pa.Array) -> Bools | None:
    if not column.null_count:
        return None
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False), dtype=np.bool_)


def _spread(rows: Bools | None, shape: tuple[int, ...]) -> Bools | None:
    """Return a mask of rows as one of all their values."""
    if rows is None:
        return None
    return np.broadcast_to(rows.reshape(-1, *[1] * (len(shape) - 1)), shape)

"""Runs the user's transform on the rows of a unit, and finds the row that it fails on."""

import inspect
import os
import traceback
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayway.data.columns import Array, to_numpy, whole
from rayway.data.keys import Int64s, sample_keys, uniforms
from rayway.data.stages import Stages


class SampleRng:
    """Random draws for the rows of one unit, keyed by (seed, epoch, sample id).

    A sample gets the same draws in an epoch wherever and whenever it is read.
    """

    def __init__(self, ids: Int64s, *, seed: int, epoch: int, training: bool = True) -> None:
        self.ids = ids
        """The sample ids, shape (rows,)."""
        self.training = training
        """False while evaluating: decode the rows, but leave them as they are."""
        self._keys = sample_keys(ids, seed=seed, epoch=epoch)

    def uniform(self, draw: int) -> npt.NDArray[np.float64]:
        """Return draw number ``draw`` of each row, uniform in [0, 1), shape (rows,)."""
        return uniforms(self._keys, draw)


Transform = Callable[[Any, SampleRng], "Mapping[str, Any] | pa.Table | pa.RecordBatch"]
"""Columns of some rows -> columns of the same rows, in the same order.

It is given a dict of column name -> array of shape (rows, ...) where all rows have one size, an
Arrow array elsewhere; or a ``pyarrow.Table`` if its first parameter is annotated so. It returns a
dict of arrays (rows, ...) or Arrow arrays, or a table.
"""


class FailedError(Exception):
    """The transform raised; ``__cause__`` is its own error.

    Args:
        low: The first row of the fewest rows that it fails on, of those it was given.
        high: The row after the last of them.
    """

    def __init__(self, low: int, high: int) -> None:
        super().__init__(f"rows {low} to {high - 1}")
        self.low, self.high = low, high


def wants_table(transform: Transform) -> bool:
    """Return whether the transform's first parameter is annotated as a ``pyarrow.Table``."""
    try:
        signature = inspect.signature(transform)
    except (TypeError, ValueError):  # some builtins have none
        return False
    first = next(iter(signature.parameters.values()), None)
    if first is None:
        return False
    owner = transform if inspect.isroutine(transform) else type(transform).__call__
    try:
        return typing.get_type_hints(owner).get(first.name) is pa.Table
    except Exception:  # noqa: BLE001 - an annotation may be any text; another one is not our matter
        return first.annotation is pa.Table


def for_user(table: pa.Table) -> dict[str, "Array | pa.Array"]:
    """Return a table's columns as a transform takes them: arrays that the user may write to."""
    return {
        name: _for_user(column.chunks, column)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _for_user(chunks: list[pa.Array], column: pa.ChunkedArray) -> "Array | pa.Array":
    try:
        arrays = [to_numpy(chunk) for chunk in chunks]
    except ValueError:
        arrays = []
    if arrays and all(array.shape[1:] == arrays[0].shape[1:] for array in arrays):
        return np.concatenate(arrays)
    return whole(column)


def run(
    transform: Transform,
    table: pa.Table,
    rng_of: Callable[[int, int], SampleRng],
    *,
    as_table: bool,
    stages: Stages,
) -> Any:
    """Return what the transform makes of a table's rows.

    If it raises, it is called again with ever fewer rows, at most 2 log2(rows) + 2 times, to find
    the first row that it fails on. Rows keep their draws.

    Args:
        transform: The user's.
        table: The rows.
        rng_of: Returns the draws of the rows [low, high).
        as_table: Whether it is given a table; else the columns of :func:`for_user`.
        stages: Told how long the transform takes.

    Raises:
        FailedError: The transform raised, for the rows that the error names.
    """

    def call(low: int, high: int) -> Any:
        rows = table.slice(low, high - low)
        given, rng = rows if as_table else for_user(rows), rng_of(low, high)
        with stages.transforming():
            return transform(given, rng)

    try:
        return call(0, table.num_rows)
    except Exception as error:  # noqa: BLE001 - whatever the user's function raises is told as that
        found: Exception = error

    def fails(low: int, high: int) -> bool:
        nonlocal found
        try:
            call(low, high)
        except Exception as error:  # noqa: BLE001 - the smallest part's is raised below
            if type(error) is type(found):
                found = error
                return True
        return False

    low, high = 0, table.num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if fails(low, middle):
            high = middle
        elif fails(middle, high):
            low = middle
        else:
            break
    raise FailedError(low, high) from found


def user_frames(error: BaseException) -> str:
    """Return the traceback below our own call, as Python prints it."""
    own = os.path.dirname(__file__)
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if os.path.dirname(frame.filename) != own] or frames[-1:]
    lines = traceback.format_list(user) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()

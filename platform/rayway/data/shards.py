"""Reads units: row groups as columns, run through the user's transform, checked and padded.

Rows come in stored order, the unit's own order is applied where batches are gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from rayway.data.cache import Cache
from rayway.data.checked import Checked, ColumnError, Invalid, LongRowError, check, join, settle
from rayway.data.columns import Rows, is_list
from rayway.data.groups import Groups
from rayway.data.index import Index
from rayway.data.padding import mask_name
from rayway.data.stages import Stages
from rayway.data.stream import Unit
from rayway.data.transforms import FailedError, SampleRng, Transform, run, user_frames, wants_table
from rayway.errors import DataError, TrainingError

_CACHE_BYTES = 64 << 20


class Reader:
    """Reads the units of a plan's data sets. Any number of threads may call one reader.

    Args:
        indexes: The data sets; ``unit.stream`` is the place of a unit's.
        columns: What to read. ``None``: the indexes' columns.
        transform: The user's; see :data:`rayway.data.transforms.Transform`.
        seed: Of the transform's draws.
        training: Whether the rows are for training, which the transform is told.
        invalid: What becomes of a row with a null, NaN or infinite value, as stored or, if there
            is a transform, as that returns it: an error; not counted, see :class:`Rows`; 0 there.
        pad: List column -> values a row. Shorter rows get zeros, and a column ``COLUMN_mask`` says
            what is real. It is what the transform returns that is padded, if there is one.
        on_read: Told stream and row group of each read from storage; for tests and records.
        stages: Told how long reading, decoding and the transform take.
        cache_bytes: What the row groups used last may hold in memory. ``None``: 64 MiB where all
            the data fits, else nothing, since an order that is new in each epoch comes back to a
            row group only after all the others.

    Raises:
        DataError: A column that is to be padded is not there or holds no lists.
    """

    def __init__(  # noqa: PLR0913 - what reading is made of, each a fact of its own
        self,
        indexes: Sequence[Index],
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        seed: int = 0,
        training: bool = True,
        invalid: Invalid = "error",
        pad: Mapping[str, int] | None = None,
        on_read: Callable[[int, int], None] | None = None,
        stages: Stages | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self._indexes, self._transform, self._on_read = list(indexes), transform, on_read
        self._seed, self._training = seed, training
        self._invalid, self._pad = invalid, dict(pad or {})
        self._stages = stages or Stages()
        self._as_table = transform is not None and wants_table(transform)
        names = [list(index.schema.names if columns is None else columns) for index in indexes]
        self._groups = [Groups(i, n) for i, n in zip(self._indexes, names, strict=True)]
        if transform is None:
            for index, chosen in zip(self._indexes, names, strict=True):
                _check_pad(self._pad, {n: index.schema.field(n).type for n in chosen}, index.root)
        if cache_bytes is None:
            cache_bytes = _CACHE_BYTES if sum(map(_all_bytes, indexes)) <= _CACHE_BYTES else 0
        self._tables = Cache[tuple[int, int], pa.Table](cache_bytes, _buffer_bytes)
        self._ready = Cache[tuple[int, int], Checked](cache_bytes, lambda checked: checked.bytes)

    def __call__(self, unit: Unit) -> Rows:
        """Return the unit's rows in stored order.

        Raises:
            DataError: A shard cannot be read or changed; a column is no tensor, or a list of it
                too long; a row is invalid, and that is to be an error.
            TrainingError: The transform failed; the text names the row and ends with its frames.
        """
        if self._transform is None:
            checked = self._raw(unit)
        else:
            checked = self._transformed(self._transform, unit)
        if self._invalid == "error" and checked.faults:
            raise self._invalid_row(checked, unit)
        return settle(checked, skip=self._invalid == "skip")

    def _raw(self, unit: Unit) -> Checked:
        """Return the unit's rows as they are stored."""
        parts = []
        for group, low, high in unit.spans:
            read = partial(self._read_ready, unit.stream, group)
            parts.append(self._ready.get((unit.stream, group), read)[low:high])
        index = self._indexes[unit.stream]
        try:
            return join(parts, [index.where(group) for group, _, _ in unit.spans])
        except ColumnError as error:
            raise self._no_tensor(error, unit) from error

    def _read_ready(self, stream: int, group: int) -> Checked:
        table = self._read(stream, group)
        whole_group = Unit(stream, 0, 0, 0, table.num_rows, ((group, 0, table.num_rows),), None)
        with self._stages.reading():
            return self._check(_columns(table), whole_group)

    def _read(self, stream: int, group: int) -> pa.Table:
        with self._stages.reading():
            table = self._groups[stream](group)
        if self._on_read is not None:
            self._on_read(stream, group)
        return table

    def _transformed(self, transform: Transform, unit: Unit) -> Checked:
        """Return what the transform makes of the unit's rows."""
        parts = []
        for group, low, high in unit.spans:
            read = partial(self._read, unit.stream, group)
            table = self._tables.get((unit.stream, group), read)
            parts.append(table.slice(low, high - low))
        ids = unit.stored_ids(self._indexes[unit.stream])

        def rng_of(low: int, high: int) -> SampleRng:
            return SampleRng(
                ids[low:high], seed=self._seed, epoch=unit.epoch, training=self._training
            )

        table = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        try:
            result = run(transform, table, rng_of, as_table=self._as_table, stages=self._stages)
        except FailedError as error:
            raise self._failed(error, unit) from error.__cause__
        columns = self._result(result, unit)
        with self._stages.reading():
            return self._check(columns, unit)

    def _result(self, result: Any, unit: Unit) -> Mapping[str, Any]:
        """Return the columns of what the transform returned, once they fit the unit."""
        where = self._where(unit)
        if isinstance(result, pa.RecordBatch | pa.Table):
            if len(set(result.schema.names)) < len(result.schema.names):
                raise DataError(f"data.transform gave two columns of one name for {where}.")
            result = _columns(result)
        if not isinstance(result, Mapping) or not result:
            raise DataError(
                f"data.transform gave {type(result).__name__} {result!r:.60} for {where}. Return "
                f"a dict of column name -> array with one entry per row, or a pyarrow.Table."
            )
        for name, column in result.items():
            try:
                rows = len(column)
            except TypeError:  # a single value has none
                rows = 0
            if rows != unit.rows:
                raise DataError(
                    f"data.transform gave {rows} rows of column {name!r} for {unit.rows} rows of "
                    f"{where}. It may not add or drop rows; do that in data.prepare."
                )
        _check_pad(self._pad, dict.fromkeys(result), "what data.transform returns")
        return result

    def _check(self, columns: Mapping[str, Any], unit: Unit) -> Checked:
        try:
            return check(columns, self._pad)
        except ColumnError as error:
            raise self._no_tensor(error, unit) from error
        except LongRowError as error:
            found = error.found
            raise DataError(
                f"column {error.column!r} has a list of {found.length} values in "
                f"{self._where(unit, found.row)}; data.pad allows {error.pad}. Set data.pad to "
                f"{found.longest} or more, or cut the lists in data.prepare or data.transform."
            ) from error

    def _no_tensor(self, error: ColumnError, unit: Unit) -> DataError:
        given = "" if self._transform is None else ", as data.transform gave it"
        return DataError(
            f"column {error.column!r} {error} in {self._where(unit)}{given}: no tensor can be "
            f"made of it. {error.advice}"
        )

    def _failed(self, error: FailedError, unit: Unit) -> TrainingError:
        assert error.__cause__ is not None
        rows = (
            f"{error.high - error.low} rows together, from " if error.high - error.low > 1 else ""
        )
        where = self._where(unit, error.low)
        return TrainingError(
            f"data.transform failed on {rows}{where}:\n{user_frames(error.__cause__)}"
        )

    def _invalid_row(self, checked: Checked, unit: Unit) -> DataError:
        row, column, fault = checked.first_fault()
        where, words = self._where(unit, row), fault.words
        given = "" if self._transform is None else " after data.transform"
        return DataError(
            f"column {column!r} has {words} in {where}{given}. Leave such rows out with "
            f"data.invalid='skip', put 0 there with 'fill', or clean them in data.prepare; "
            f"`rayway data check {self._indexes[unit.stream].root}` lists all."
        )

    def _where(self, unit: Unit, row: int | None = None) -> str:
        """Return the words for the unit's row number ``row``, or for where the unit begins."""
        index = self._indexes[unit.stream]
        if row is None:
            return index.where(unit.spans[0][0])
        for group, low, high in unit.spans:
            if row < high - low:
                return f"row {low + row} of {index.where(group)}"
            row -= high - low
        raise AssertionError("a row of the unit is in one of its spans")


def _check_pad(pad: Mapping[str, int], columns: Mapping[str, pa.DataType | None], of: str) -> None:
    """Refuse to pad what is not there or, where the type is known, holds no lists."""
    for name in pad:
        if name not in columns:
            raise DataError(
                f"data.pad names column {name!r}, and {of} has no such column. "
                f"It has: {', '.join(columns)}."
            )
        kind = columns[name]
        if kind is not None and not is_list(kind):
            raise DataError(
                f"data.pad names column {name!r}, which is {kind} in {of} and holds no lists. "
                f"Leave it out of data.pad."
            )
        if kind is not None and is_list(kind.value_type):
            raise DataError(
                f"data.pad names column {name!r}, which is {kind} in {of}: lists of lists cannot "
                f"be padded. Make one list of each row in data.prepare or data.transform."
            )
        if mask_name(name) in columns:
            raise DataError(
                f"data.pad of column {name!r} makes a column {mask_name(name)!r}, and {of} has "
                f"one of that name. Leave it out with data.columns, or rename it."
            )


def _columns(table: "pa.Table | pa.RecordBatch") -> dict[str, Any]:
    return dict(zip(table.schema.names, table.columns, strict=True))


def _all_bytes(index: Index) -> int:
    """Return about what all of a data set holds in memory, in bytes."""
    return int(index.group_bytes / index.rows.max() * index.total)


def _buffer_bytes(table: pa.Table) -> int:
    return int(table.get_total_buffer_size())

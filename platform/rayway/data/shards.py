"""Reads units: row groups as columns, run through the user's transform.

A row group is one ranged read; its shard's footer is read once. Rows come in stored order, the
unit's own order is applied where batches are gathered.
"""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as pads

from rayway.data.columns import Array, Columns, Rows, to_numpy
from rayway.data.files import filesystem_for
from rayway.data.index import Index
from rayway.data.keys import Int64s, sample_keys, uniforms
from rayway.data.plan import Unit
from rayway.data.stages import Stages
from rayway.errors import DataError, TrainingError

_CACHE_BYTES = 64 << 20
_FOOTERS = 256
_REPAIR = "Leave it out with data.columns, or make its rows alike in data.prepare."


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


Transform = Callable[[dict[str, "Array | pa.Array"], SampleRng], Mapping[str, "Array | pa.Array"]]
"""Columns of some rows -> columns of the same rows, in the same order.

A column is an array of shape (rows, ...) where all rows have one size, an Arrow array elsewhere.
"""


class Reader:
    """Reads the units of a plan's data sets. Any number of threads may call one reader.

    Args:
        indexes: The data sets; ``unit.stream`` is the place of a unit's.
        columns: What to read. ``None``: the index's columns.
        transform: The user's; see :data:`Transform`.
        seed: Of the transform's draws.
        training: Whether the rows are for training, which the transform is told.
        invalid: What becomes of a row with a null, NaN or infinite value.
        pad: List column -> values a row; see ``data.pad``.
        on_read: Told stream and row group of each read from storage; for tests and records.
        stages: Told how long reading, decoding and the transform take.
        cache_bytes: What row groups may hold in memory after they were used.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        seed: int = 0,
        training: bool = True,
        invalid: Literal["error", "skip", "fill"] = "error",
        pad: Mapping[str, int] | None = None,
        on_read: Callable[[int, int], None] | None = None,
        stages: Stages | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        (index,) = indexes  # several, invalid and pad follow
        self._index, self._transform, self._seed, self._on_read = index, transform, seed, on_read
        self._training = training
        self._columns = list(index.schema.names if columns is None else columns)
        self._filesystem, self._folder = filesystem_for(index.root)
        self._format = pads.ParquetFileFormat(
            default_fragment_scan_options=pads.ParquetFragmentScanOptions(pre_buffer=True)
        )
        self._shard = lru_cache(_FOOTERS)(self._open_shard)
        self._group = lru_cache(_CACHE_BYTES // max(index.group_bytes, 1))(self._read_group)

    def __call__(self, unit: Unit) -> Rows:
        return Rows(self._columns_of(unit))

    def _columns_of(self, unit: Unit) -> Columns:
        """Return the unit's rows in stored order, each column of shape (unit.rows, ...).

        Raises:
            DataError: A shard cannot be read, changed, or has a column that is no tensor.
            TrainingError: The transform failed; the text ends with its own frames.
        """
        groups = [(self._group(group), low, high) for group, low, high in unit.spans]
        pieces = {
            name: [columns[name][low:high] for columns, low, high in groups]
            for name in self._columns
        }
        if self._transform is None:
            return {
                name: self._joined(name, [self._tensor(name, piece, unit) for piece in parts], unit)
                for name, parts in pieces.items()
            }
        columns = {
            name: _joined_for_transform(parts, self._index.schema.field(name).type)
            for name, parts in pieces.items()
        }
        return self._transformed(columns, unit)

    def _open_shard(self, number: int) -> pads.ParquetFileFragment:
        # the known size saves a request that opening by path alone would make
        path = f"{self._folder}/{self._index.paths[number]}"
        fragment = self._format.make_fragment(
            path, self._filesystem, file_size=self._index.sizes[number]
        )
        fragment.ensure_complete_metadata()
        return fragment

    def _read_group(self, group: int) -> dict[str, "Array | pa.Array"]:
        index = self._index
        try:
            shard = self._shard(int(index.shard[group]))
            part = shard.subset(row_group_ids=[int(index.ordinal[group])])
            table = part.to_table(columns=self._columns, use_threads=False)
        except (OSError, IndexError, pa.ArrowException) as error:
            raise DataError(
                f"{index.where(group)} cannot be read: {error}. If the file was changed since "
                f"this run began, put it back; else write it again."
            ) from error
        if table.num_rows != index.rows[group]:
            raise DataError(
                f"{index.where(group)} has {table.num_rows} rows and had {index.rows[group]} when "
                f"this run began. Put the data back, or start a new run."
            )
        if self._on_read is not None:
            self._on_read(0, group)
        return {
            name: _array_or_arrow(column.combine_chunks())
            for name, column in zip(table.column_names, table.columns, strict=True)
        }

    def _tensor(self, name: str, column: "Array | pa.Array", unit: Unit) -> Array:
        """Return a column as an array that a tensor can be made of."""
        try:
            array = to_numpy(column) if isinstance(column, pa.Array) else np.asarray(column)
            if array.dtype.kind not in "biuf":
                raise ValueError(f"is of type {array.dtype}")
        except ValueError as error:
            where = self._index.where(unit.spans[0][0])
            raise DataError(
                f"column {name!r} {error} in {where}: no tensor can be made of it. {_REPAIR}"
            ) from error
        return array

    def _joined(self, name: str, parts: list[Array], unit: Unit) -> Array:
        """Return the pieces of the unit's spans as one column."""
        for part, (group, _, _) in zip(parts, unit.spans, strict=True):
            if part.shape[1:] != parts[0].shape[1:]:
                raise DataError(
                    f"column {name!r} has rows of shape {part.shape[1:]} in "
                    f"{self._index.where(group)} but {parts[0].shape[1:]} in "
                    f"{self._index.where(unit.spans[0][0])}. {_REPAIR}"
                )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _transformed(self, columns: dict[str, "Array | pa.Array"], unit: Unit) -> Columns:
        assert self._transform is not None
        where = self._index.where(unit.spans[0][0])
        rng = SampleRng(
            unit.stored_ids(self._index),
            seed=self._seed,
            epoch=unit.epoch,
            training=self._training,
        )
        try:
            result = self._transform(columns, rng)
        except Exception as error:
            raise TrainingError(
                f"data.transform failed on {unit.rows} rows of {where}:\n{_user_frames(error)}"
            ) from error
        if not isinstance(result, Mapping) or not result:
            raise DataError(
                f"data.transform gave {type(result).__name__} {result!r:.60} for {where}. Return "
                f"a dict of column name -> array with one entry per row."
            )
        made = {name: self._tensor(name, column, unit) for name, column in result.items()}
        for name, column in made.items():
            rows = len(column) if column.ndim else 0
            if rows != unit.rows:
                raise DataError(
                    f"data.transform gave {rows} rows of column {name!r} for {unit.rows} rows of "
                    f"{where}. It may not add or drop rows; do that in data.prepare."
                )
        return made


def _array_or_arrow(column: pa.Array) -> "Array | pa.Array":
    try:
        return to_numpy(column)
    except ValueError:
        return column


def _joined_for_transform(
    parts: Sequence["Array | pa.Array"], kind: pa.DataType
) -> "Array | pa.Array":
    """Return a unit's pieces as one column that the user may write to."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    return pa.concat_arrays(
        [pa.array(list(p), kind) if isinstance(p, np.ndarray) else p for p in parts]
    )


def _user_frames(error: Exception) -> str:
    """Return the traceback below our own call, as Python prints it."""
    own = os.path.dirname(__file__)
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if os.path.dirname(frame.filename) != own] or frames[-1:]
    lines = traceback.format_list(user) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()

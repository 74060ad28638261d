"""Reads row groups as Arrow tables. A row group is one ranged read; a shard's footer is read once.

A shard that changed, is cut off or damaged is an error at once, page checksums where the writer
made them. What a remote store may do better the next time is tried again.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rayway.data.files import explain, filesystem_for
from rayway.data.index import Index
from rayway.errors import DataError

_FOOTERS = 256
_PAUSES_S = (0.2, 1.0)
_FINAL = re.compile(  # a damaged page, or a store that Arrow has waited for long enough
    r"Timeout was reached|"
    r"CRC checksum|[Cc]orrupt|thrift|end of stream|magic bytes|decompress|[Cc]odec"
)


@dataclass(frozen=True, slots=True)
class _Shard:
    """An open shard."""

    fragment: pads.ParquetFileFragment
    stamp: tuple[int, int, int] | None
    """Size, time of writing and inode of a local file."""


class Groups:
    """Reads one data set's row groups. Any number of threads may call it.

    Args:
        index: The data set.
        columns: What to read.
        sleep: Waits some seconds between two tries.
    """

    def __init__(
        self, index: Index, columns: Sequence[str], *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._index, self._columns, self._sleep = index, list(columns), sleep
        self._types = [index.schema.field(name).type for name in self._columns]
        self._filesystem, self._folder = filesystem_for(index.root)
        self._local = isinstance(self._filesystem, pafs.LocalFileSystem)
        options = pads.ParquetFragmentScanOptions(pre_buffer=True, page_checksum_verification=True)
        self._format = pads.ParquetFileFormat(default_fragment_scan_options=options)
        self._shard = lru_cache(_FOOTERS)(self._open)

    def __call__(self, group: int) -> pa.Table:
        """Return row group ``group``: the chosen columns, in their order.

        Raises:
            DataError: It cannot be read, is damaged, or is not what was indexed.
        """
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._checked(group, self._read(group))
            except DataError:
                raise
            except Exception as error:  # fsspec's filesystems raise errors of their own
                again = not self._local and isinstance(error, OSError)
                if pause_s is None or not again or _FINAL.search(str(error)):
                    raise self._unreadable(group, error, tries=pause_s is None) from error
            self._sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def _open(self, number: int) -> _Shard:
        # the known size saves a request that opening by path alone would make
        path, size = f"{self._folder}/{self._index.paths[number]}", self._index.sizes[number]
        stamp = _stamp(path) if self._local else None
        if stamp is not None and stamp[0] != size:
            raise DataError(
                f"{self._index.root}/{self._index.paths[number]} has {stamp[0]} bytes and had "
                f"{size} when it was indexed. Put the data back, or start a new run."
            )
        fragment = self._format.make_fragment(path, self._filesystem, file_size=size)
        fragment.ensure_complete_metadata()
        return _Shard(fragment, stamp)

    def _read(self, group: int) -> pa.Table:
        shard, ordinal = self._shard(int(self._index.shard[group])), int(self._index.ordinal[group])
        if shard.stamp is None:
            part = shard.fragment.subset(row_group_ids=[ordinal])
            return part.to_table(columns=self._columns, use_threads=False)
        if _stamp(shard.fragment.path) != shard.stamp:
            raise DataError(
                f"{self._index.where(group)} was written to while this run reads it. Put the data "
                f"back, or start a new run."
            )
        # cheaper than a scan of the fragment by a sixth, but it would ask a store for the size
        with pq.ParquetFile(
            shard.fragment.path, metadata=shard.fragment.metadata, page_checksum_verification=True
        ) as file:
            table = file.read_row_group(ordinal, columns=self._columns, use_threads=False)
        return table.select(self._columns)  # an older Arrow gives them in the file's order

    def _checked(self, group: int, table: pa.Table) -> pa.Table:
        index = self._index
        if table.num_rows != index.rows[group]:
            raise DataError(
                f"{index.where(group)} has {table.num_rows} rows and had {index.rows[group]} when "
                f"it was indexed. Put the data back, or start a new run."
            )
        for name, wanted, found in zip(self._columns, self._types, table.schema.types, strict=True):
            if found != wanted:
                raise DataError(
                    f"column {name!r} is {found} in {index.where(group)} and was {wanted} when it "
                    f"was indexed. Put the data back, or start a new run."
                )
        return table

    def _unreadable(self, group: int, error: Exception, *, tries: bool) -> DataError:
        often = f" in {len(_PAUSES_S) + 1} tries" if tries and not self._local else ""
        text = explain(error, self._index.root).rstrip(".")
        return DataError(
            f"{self._index.where(group)} cannot be read{often}: {text}. If the file was changed "
            f"since it was indexed, put it back; else write it again."
        )


def _stamp(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino

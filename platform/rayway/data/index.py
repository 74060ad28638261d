"""The index of a data set: its shards, their row groups and its schema, from the footers alone.

A *sample id* is the place of a row in stored order: shards by the bytes of their path, row groups
in file order, rows. The index is what the order of training is made from, so it is written into
the run folder and compared at a resume.
"""

import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayway.data.files import Place, StoredFile, find_files, list_files
from rayway.data.footers import (
    Footer,
    FooterReader,
    changed_files,
    common_schema,
    known_columns,
    read_footers,
)
from rayway.data.keys import Int64s
from rayway.errors import DataError, StorageError
from rayway.storage.objects import Objects

_VERSION = b"2"
INDEX_KEY = "_rayway/index.parquet"
"""Where an index lies below the folder that it tells of."""
_OURS = "_rayway"
_TYPES = {
    "path": pa.string(),
    "size": pa.int64(),
    "stamp": pa.string(),
    "digest": pa.string(),
    "rows": pa.list_(pa.int64()),
}
_IGNORED = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """A data set's row groups in stored order; empty ones are left out.

    ``rows[g]``, ``shard[g]`` and ``ordinal[g]`` are row group g's row count, its shard's place in
    ``paths`` and its number in that shard; each has shape (row groups,).
    """

    root: str
    """The folder's URL or path."""
    paths: tuple[str, ...]
    """Each shard's path below ``root``."""
    sizes: tuple[int, ...]
    """Each shard's size in bytes."""
    digests: tuple[str, ...]
    """A hash of each shard's footer; it names the content."""
    rows: Int64s
    shard: Int64s
    ordinal: Int64s
    group_bytes: int
    """The largest row group in memory, in bytes; estimated from the footers."""
    schema: pa.Schema
    """The chosen columns, the same in every shard."""
    ignored: tuple[str, ...] = ()
    """Names beside the shards that are no data: markers, hidden and foreign files; the first 20."""
    ignored_count: int = 0
    """How many such files there are."""
    pattern: str = ""
    """Which files below ``root`` are meant, as a glob; empty: all."""
    stamps: tuple[str, ...] = ()
    """What the store says of each shard's version: its etag, or when it was written in ns."""
    nulls: Mapping[str, Int64s] = field(default_factory=dict)
    """Columns known to hold nulls -> how many in each shard, shape (shards,)."""
    column_bytes: Mapping[str, int] = field(default_factory=dict)
    """Column -> bytes in memory of its part of the largest row group; estimated."""

    @cached_property
    def first(self) -> Int64s:
        """Each row group's first sample id, and the number of rows; shape (row groups + 1,)."""
        return np.concatenate([[0], np.cumsum(self.rows, dtype=np.int64)])

    @cached_property
    def total(self) -> int:
        """The number of rows."""
        return int(self.first[-1])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all shards' paths, sizes and footers: another content, another fingerprint."""
        lines = zip(self.paths, self.sizes, self.digests, strict=True)
        return _digest("".join(f"{p}\0{s}\0{d}\n" for p, s, d in lines).encode())

    def where(self, group: int) -> str:
        """Return the words for row group ``group`` in a message."""
        return f"{self.root}/{self.paths[self.shard[group]]} (row group {self.ordinal[group]})"

    def __reduce__(self) -> tuple[Callable[[bytes], "Index"], tuple[bytes]]:
        return Index.from_bytes, (self.to_bytes(),)

    def to_bytes(self) -> bytes:
        """Return the index as one Parquet file, a row a shard."""
        sink = io.BytesIO()
        pq.write_table(_to_table(self), sink, compression="zstd", write_statistics=False)
        return sink.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> "Index":
        """Return the index that :meth:`to_bytes` wrote.

        Raises:
            DataError: The bytes are no index, one of another version, or damaged.
        """
        try:
            table = pq.read_table(io.BytesIO(data), use_threads=False)
            about = table.schema.metadata or {}
            if b"rayway" not in about:
                raise DataError("this file is no data index of rayway.")
            if about[b"rayway"] != _VERSION:
                raise DataError(
                    f"this data index has version {about[b'rayway'].decode()}; this rayway reads "
                    f"{_VERSION.decode()}. Use the rayway that wrote it, or index the data again."
                )
            index = _from_table(table)
            if _checksum(index).encode() != about[b"checksum"]:
                raise DataError("the data index is damaged: its checksum does not match.")
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
            raise DataError(f"the data index is damaged or something else: {error!r}") from error
        return index

    @property
    def place(self) -> Place:
        """Where the data lies."""
        return Place(self.root, self.pattern)

    def check_unchanged(self) -> tuple[str, ...]:
        """Compare the shards with what they were when indexed.

        One listing tells: a shard of the same size and stamp is not touched. Where only the stamp
        differs the footer is read. If it is the same the shard counts as unchanged: it was copied,
        touched or uploaded again, which must not end a run. Only an edit that keeps every size and
        every column's smallest and largest value, or a file without statistics, would get through.

        Returns:
            The paths of shards with another stamp and the same footer.

        Raises:
            DataError: A shard changed, is missing or was added; each kind is named by example.
        """
        now = {file.path: file for file in list_files(self.place) if is_shard(file.path)}
        before = dict(zip(self.paths, zip(self.sizes, self._stamps, strict=True), strict=True))
        resized = [path for path in before if path in now and before[path][0] != now[path].size]
        doubtful = [
            file
            for path, file in now.items()
            if path in before and path not in resized and before[path][1] != file.stamp
        ]
        digests = dict(zip(self.paths, self.digests, strict=True))
        kinds = {
            "missing": sorted(before.keys() - now.keys()),
            "added": sorted(now.keys() - before.keys()),
            "changed": sorted([*resized, *changed_files(self.root, doubtful, digests)]),
        }
        named = [f"{kind}: {_some(paths)}" for kind, paths in kinds.items() if paths]
        if named:
            raise DataError(
                f"{self.place.url} is not what it was when this run began ({'; '.join(named)}). "
                f"Put the data back to continue with the same order, or start a new run."
            )
        return tuple(file.path for file in doubtful)

    def select(self, columns: Sequence[str] | None) -> "Index":
        """Return the index of the same rows with some of their columns; ``None``: with all.

        Raises:
            DataError: There is no such column, or none is chosen.
        """
        if columns is None:
            return self
        schema = pa.schema(
            [self.schema.field(n) for n in known_columns(columns, self.schema, self.root)]
        )
        return replace(
            self,
            schema=schema,
            nulls={name: counts for name, counts in self.nulls.items() if name in schema.names},
            column_bytes={name: self.column_bytes[name] for name in schema.names},
            group_bytes=sum(self.column_bytes[name] for name in schema.names),
        )

    @property
    def _stamps(self) -> tuple[str, ...]:
        return self.stamps or ("",) * len(self.paths)


def _to_table(index: Index) -> pa.Table:
    """Return a row a shard; what is said of all shards is in the schema's metadata."""
    shards = len(index.paths)
    counts = np.zeros(shards, dtype=np.int64)  # of row groups, those without rows included
    np.maximum.at(counts, index.shard, index.ordinal + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.zeros(offsets[-1], dtype=np.int64)
    rows[offsets[index.shard] + index.ordinal] = index.rows
    columns: dict[str, pa.Array] = {
        "path": pa.array(index.paths, _TYPES["path"]),
        "size": pa.array(index.sizes, _TYPES["size"]),
        "stamp": pa.array(index.stamps or [""] * shards, _TYPES["stamp"]),
        "digest": pa.array(index.digests, _TYPES["digest"]),
        "rows": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(rows)),
    }
    columns |= {f"nulls:{name}": pa.array(count) for name, count in index.nulls.items()}
    about = {
        "rayway": _VERSION,
        "about": json.dumps(_about(index)),
        "schema": base64.b64encode(index.schema.serialize()),
        "checksum": _checksum(index),
    }
    return pa.table(columns).replace_schema_metadata(about)


def _from_table(table: pa.Table) -> Index:
    about = table.schema.metadata
    counts_of = [name for name in table.column_names if name.startswith("nulls:")]
    for name, kind in {**_TYPES, **dict.fromkeys(counts_of, pa.int64())}.items():
        if table.schema.field(name).type != kind or table[name].null_count:
            raise TypeError(f"{name} is {table.schema.field(name).type}")
    groups = table["rows"].combine_chunks()
    counts = np.diff(groups.offsets.to_numpy())
    shard = np.repeat(np.arange(len(counts)), counts)
    ordinal = np.arange(len(shard)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = groups.flatten().to_numpy()
    real = rows > 0
    stamps = tuple(table["stamp"].to_pylist())
    return Index(
        paths=tuple(table["path"].to_pylist()),
        sizes=tuple(table["size"].to_pylist()),
        stamps=stamps if any(stamps) else (),
        digests=tuple(table["digest"].to_pylist()),
        rows=rows[real],
        shard=shard[real],
        ordinal=ordinal[real],
        nulls={name.removeprefix("nulls:"): table[name].to_numpy() for name in counts_of},
        schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(about[b"schema"]))),
        **_fields(json.loads(about[b"about"])),
    )


def _about(index: Index) -> dict[str, Any]:
    return {
        "root": index.root,
        "pattern": index.pattern,
        "group_bytes": index.group_bytes,
        "column_bytes": index.column_bytes,
        "ignored": index.ignored,
        "ignored_count": index.ignored_count,
        "fingerprint": index.fingerprint,
    }


def _fields(about: dict[str, Any]) -> dict[str, Any]:
    """Return those entries of :func:`_about` that are stored in the index's fields."""
    kept = {name: value for name, value in about.items() if name != "fingerprint"}
    return kept | {"ignored": tuple(kept["ignored"])}


def _checksum(index: Index) -> str:
    """Return a hash of all that an index says."""
    hashed = hashlib.sha256(json.dumps(_about(index)).encode())
    hashed.update(json.dumps([index.stamps, list(index.nulls)]).encode())
    hashed.update(index.schema.serialize())
    for numbers in (index.rows, index.shard, index.ordinal, *index.nulls.values()):
        hashed.update(numbers.astype(np.int64, copy=False).tobytes())
    return hashed.hexdigest()[:16]


def build_index(
    root: str,
    *,
    columns: Sequence[str] | None = None,
    read: FooterReader = read_footers,
    stored: bool = True,
) -> Index:
    """Return the index of the Parquet files that ``root`` means.

    An index stored beside the data is used if no shard's size or stamp has changed since; else
    all footers are read.

    Args:
        root: A folder, a glob (``data/*/part-*.parquet``) or one .parquet file; path or URL.
        columns: The columns to train on. ``None``: all of them.
        read: What reads footers.
        stored: Whether a stored index may be used, and must be there for prepared data.

    Raises:
        DataError: No such place, no Parquet file in it, a file that is empty, cut off or has
            other columns than the first, an unknown column, no row at all, or data that
            ``rayway data prepare`` has not finished.
    """
    place, files = find_files(root)
    if stored:
        refuse_unfinished(place, files)
    shards = [file for file in files if is_shard(file.path)]
    foreign = [f.path for f in files if not is_shard(f.path) and not _is_ours(f.path)]
    if not shards:
        seen = f"It holds {_some(foreign)}." if foreign else "It is empty."
        raise DataError(f"{place.url} holds no .parquet file. {seen}")
    index = _stored_index(place, files, shards) if stored else None
    if index is None:
        index = of_footers(place, shards, list(read(place.folder, shards)), columns)
    return replace(
        index.select(columns),
        root=place.folder,
        pattern=place.pattern,
        ignored=tuple(foreign[:_IGNORED]),
        ignored_count=len(foreign),
    )


def write_index(index: Index) -> str:
    """Store an index of a whole folder beside its data, where :func:`build_index` finds it.

    Returns:
        Where it is.

    Raises:
        DataError: The index is of a part of the folder.
        StorageError: It cannot be written.
    """
    if index.pattern:
        raise DataError(
            f"{index.place.url} is a part of a folder, and an index beside the data is of all of "
            f"it. Store it elsewhere with --out FILE, or index {index.root}."
        )
    Objects(index.root).put(INDEX_KEY, index.to_bytes())
    return f"{index.root}/{INDEX_KEY}"


def is_shard(path: str) -> bool:
    """Tell whether a file is data: a .parquet file, not hidden by a dot or an underscore."""
    hidden = any(part.startswith((".", "_")) for part in path.split("/"))
    return path.endswith(".parquet") and not hidden


def _is_ours(path: str) -> bool:
    return _OURS in path.split("/")


def refuse_unfinished(place: Place, files: Sequence[StoredFile]) -> None:
    """Refuse a folder in which ``rayway data prepare`` was stopped.

    Raises:
        DataError: It has a ``prepare.json`` and no index.
    """
    paths = {file.path for file in files}
    for path in paths:
        begun, _, name = path.rpartition("/")
        ours = name == "prepare.json" and begun.split("/")[-1] == _OURS
        if ours and f"{begun}/index.parquet" not in paths:
            folder = f"{place.folder}/{begun.removesuffix(_OURS)}".rstrip("/")
            raise DataError(
                f"{folder} is not finished: rayway data prepare was stopped. Start the same "
                f"command again, it goes on where it was; or delete the folder."
            )


def _stored_index(
    place: Place, files: Sequence[StoredFile], shards: Sequence[StoredFile]
) -> Index | None:
    """Return the index beside the data, if there is one and it tells of just these shards."""
    if place.pattern or not any(file.path == INDEX_KEY for file in files):
        return None
    try:
        index = Index.from_bytes(Objects(place.folder).get(INDEX_KEY))
    except (DataError, StorageError):  # of another version or damaged: as if it was not there
        return None
    stored = zip(index.paths, index.sizes, index._stamps, strict=True)
    return index if list(stored) == [(f.path, f.size, f.stamp) for f in shards] else None


def of_footers(
    place: Place,
    files: Sequence[StoredFile],
    footers: Sequence[Footer],
    columns: Sequence[str] | None,
) -> Index:
    """Return the index of some files from their footers.

    Args:
        place: Where the files are.
        files: By the bytes of their paths.
        footers: One for each file.
        columns: Those that must be alike in all of them. ``None``: all.

    Raises:
        DataError: The columns are not alike, one is unknown, or there is no row.
    """
    root = place.folder
    schema = common_schema(files, footers, columns, root)
    groups = [
        (count, number, ordinal)
        for number, footer in enumerate(footers)
        for ordinal, count in enumerate(footer.rows)
        if count > 0
    ]
    if not groups:
        raise DataError(f"{place.url} has 0 rows in {len(files)} Parquet file(s). Write some data.")
    rows, shard_of, ordinals = np.array(groups, dtype=np.int64).T
    column_bytes = {n: max(f.column_bytes.get(n, 0) for f in footers) for n in schema.names}
    with_nulls = {name for footer in footers for name in footer.nulls}
    return Index(
        root=root,
        pattern=place.pattern,
        paths=tuple(file.path for file in files),
        sizes=tuple(file.size for file in files),
        stamps=tuple(file.stamp for file in files),
        digests=tuple(footer.digest for footer in footers),
        rows=np.ascontiguousarray(rows),
        shard=np.ascontiguousarray(shard_of),
        ordinal=np.ascontiguousarray(ordinals),
        group_bytes=sum(column_bytes.values()),
        column_bytes=column_bytes,
        nulls={
            name: np.array([footer.nulls.get(name, 0) for footer in footers], dtype=np.int64)
            for name in schema.names
            if name in with_nulls
        },
        schema=schema,
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

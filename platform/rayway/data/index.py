"""The index of a data set: its shards, their row groups and its schema, from the footers alone.

A *sample id* is the place of a row in stored order: shards by the bytes of their path, row groups
in file order, rows. The index is what the order of training is made from, so it is written into
the run folder and compared at a resume.
"""

import base64
import difflib
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rayway.data.files import filesystem_for, read_footer
from rayway.data.keys import Int64s
from rayway.errors import DataError

_SCHEMA_VERSION = 1
_VERSION = b"2"
_FOOTER_THREADS = 16


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
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise DataError(f"the data index is damaged or something else: {error!r}") from error
        return index

    def to_json(self) -> str:
        """Return the index as JSON text."""
        record = {
            "schema_version": _SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "root": self.root,
            "paths": self.paths,
            "sizes": self.sizes,
            "digests": self.digests,
            "rows": self.rows.tolist(),
            "shard": self.shard.tolist(),
            "ordinal": self.ordinal.tolist(),
            "group_bytes": self.group_bytes,
            "schema": base64.b64encode(self.schema.serialize()).decode(),
            "ignored": self.ignored,
        }
        return json.dumps(record)

    @staticmethod
    def from_json(text: str) -> "Index":
        """Return the index that :meth:`to_json` wrote.

        Raises:
            DataError: The text is no index of this version, or does not match its fingerprint.
        """
        try:
            record = json.loads(text)
            if record["schema_version"] != _SCHEMA_VERSION:
                raise DataError(
                    f"this data index has schema_version={record['schema_version']}; this rayway "
                    f"reads {_SCHEMA_VERSION}. Use the rayway that wrote it, or start a new run."
                )
            index = Index(
                root=record["root"],
                paths=tuple(record["paths"]),
                sizes=tuple(record["sizes"]),
                digests=tuple(record["digests"]),
                rows=np.array(record["rows"], dtype=np.int64),
                shard=np.array(record["shard"], dtype=np.int64),
                ordinal=np.array(record["ordinal"], dtype=np.int64),
                group_bytes=record["group_bytes"],
                schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["schema"]))),
                ignored=tuple(record["ignored"]),
            )
            if index.fingerprint != record["fingerprint"]:
                raise DataError("the data index is damaged: its fingerprint does not match.")
        except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise DataError(f"the data index cannot be read: {error!r}") from error
        return index

    def check_unchanged(self) -> None:
        """Compare the shards' sizes and footers with what they were when indexed.

        Raises:
            DataError: A shard changed, is missing or was added; each kind is named by example.
        """
        now = build_index(self.root, columns=self.schema.names)
        before = dict(zip(self.paths, zip(self.sizes, self.digests, strict=True), strict=True))
        after = dict(zip(now.paths, zip(now.sizes, now.digests, strict=True), strict=True))
        kinds = {
            "missing": sorted(before.keys() - after.keys()),
            "added": sorted(after.keys() - before.keys()),
            "changed": sorted(p for p in before.keys() & after if before[p] != after[p]),
        }
        found = [f"{kind}: {_some(paths)}" for kind, paths in kinds.items() if paths]
        if found:
            raise DataError(
                f"{self.root} is not what it was when this run began ({'; '.join(found)}). Put "
                f"the data back to continue with the same order, or start a new run."
            )


def _to_table(index: Index) -> pa.Table:
    """Return a row a shard; what is said of all shards is in the schema's metadata."""
    shards = len(index.paths)
    counts = np.zeros(shards, dtype=np.int64)  # of row groups, those without rows included
    np.maximum.at(counts, index.shard, index.ordinal + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.zeros(offsets[-1], dtype=np.int64)
    rows[offsets[index.shard] + index.ordinal] = index.rows
    columns: dict[str, pa.Array] = {
        "path": pa.array(index.paths, pa.string()),
        "size": pa.array(index.sizes, pa.int64()),
        "stamp": pa.array(index.stamps or [""] * shards, pa.string()),
        "digest": pa.array(index.digests, pa.string()),
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
        nulls={
            name.removeprefix("nulls:"): table[name].to_numpy()
            for name in table.column_names
            if name.startswith("nulls:")
        },
        schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(about[b"schema"]))),
        **_fields(json.loads(about[b"about"])),
    )


def _about(index: Index) -> dict[str, Any]:
    return {
        "root": index.root,
        "pattern": index.pattern,
        "group_bytes": index.group_bytes,
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
        hashed.update(numbers.astype(np.int64).tobytes())
    return hashed.hexdigest()[:16]


@dataclass(frozen=True)
class _Shard:
    """What the footer of one Parquet file says."""

    path: str
    size: int
    digest: str
    rows: list[int]
    group_bytes: list[int]
    schema: pa.Schema


def build_index(root: str, *, columns: Sequence[str] | None = None) -> Index:
    """Read the footers of all Parquet files below ``root``.

    Args:
        root: A folder: a local path or a URL.
        columns: The columns to train on. ``None``: all of them.

    Raises:
        DataError: No such folder, no Parquet file in it, a file that is empty, cut off or has
            other columns than the first, an unknown column, or no row at all.
    """
    filesystem, folder = filesystem_for(root)
    files, ignored = _list(filesystem, folder, root)
    if not files:
        seen = f"It holds {_some(ignored)}." if ignored else "It is empty."
        raise DataError(f"{root} holds no .parquet file. {seen}")

    def read(item: tuple[str, pafs.FileInfo]) -> _Shard:
        return _read_shard(filesystem, item[1], item[0])

    with ThreadPoolExecutor(_FOOTER_THREADS, "rayway-footers") as pool:
        shards = list(pool.map(read, files))
    schema = _common_schema(shards, columns, root)
    groups = [
        (count, number, ordinal)
        for number, shard in enumerate(shards)
        for ordinal, count in enumerate(shard.rows)
        if count > 0
    ]
    if not groups:
        raise DataError(f"{root} has 0 rows in {len(shards)} Parquet file(s). Write some data.")
    rows, shard_of, ordinals = np.array(groups, dtype=np.int64).T
    encoded = max(size for shard in shards for size in shard.group_bytes)
    return Index(
        root=root.rstrip("/"),
        paths=tuple(shard.path for shard in shards),
        sizes=tuple(shard.size for shard in shards),
        digests=tuple(shard.digest for shard in shards),
        rows=np.ascontiguousarray(rows),
        shard=np.ascontiguousarray(shard_of),
        ordinal=np.ascontiguousarray(ordinals),
        group_bytes=max(encoded, int(rows.max()) * sum(_row_bytes(t) for t in schema.types)),
        schema=schema,
        ignored=tuple(ignored),
    )


def _list(
    filesystem: pafs.FileSystem, folder: str, root: str
) -> tuple[list[tuple[str, pafs.FileInfo]], list[str]]:
    """Return (relative path, file) of each shard in order, and the names that are no shards."""
    try:
        if filesystem.get_file_info(folder).type == pafs.FileType.File:
            raise DataError(f"{root} is a file. Name the folder that holds the Parquet files.")
        infos = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
    except FileNotFoundError as error:
        raise DataError(f"{root} does not exist. Make the data first, or set data.prepare.") from (
            error
        )
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{root} cannot be listed: {error}") from error
    files, ignored = [], []
    for info in infos:
        if not info.is_file:
            continue
        path = info.path[len(folder) :].strip("/")
        hidden = any(part.startswith((".", "_")) for part in path.split("/"))
        if path.endswith(".parquet") and not hidden:
            files.append((path, info))
        else:
            ignored.append(path)
    return sorted(files, key=lambda item: item[0].encode()), sorted(ignored)


def _read_shard(filesystem: pafs.FileSystem, info: pafs.FileInfo, path: str) -> _Shard:
    footer = read_footer(filesystem, info.path, info.size)
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{info.path} has a damaged footer: {error}. Write it again.") from error
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return _Shard(
        path=path,
        size=info.size,
        digest=_digest(footer),
        rows=[group.num_rows for group in groups],
        group_bytes=[group.total_byte_size for group in groups] or [0],
        schema=schema.remove_metadata(),
    )


def _common_schema(shards: list[_Shard], columns: Sequence[str] | None, root: str) -> pa.Schema:
    """Return the chosen columns of the first shard, once all shards have them alike."""
    first = shards[0]
    for shard in shards:
        twice = sorted({name for name in shard.schema.names if shard.schema.names.count(name) > 1})
        if twice:
            raise DataError(
                f"{root}/{shard.path} has more than one column {twice[0]!r}, and which one is "
                f"meant cannot be told. Write it with each name once."
            )
    names = list(first.schema.names if columns is None else columns)
    for name in names:
        if name not in first.schema.names:
            near = difflib.get_close_matches(name, first.schema.names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise DataError(
                f"{root} has no column {name!r}. {hint}It has: {', '.join(first.schema.names)}."
            )
    if not names:
        raise DataError(f"no column of {root} is chosen. It has: {', '.join(first.schema.names)}.")
    wanted = {name: first.schema.field(name).type for name in names}
    for shard in shards[1:]:
        found = dict(zip(shard.schema.names, shard.schema.types, strict=True))
        extra = [name for name in found if name not in wanted] if columns is None else []
        for name in [*names, *extra]:
            if found.get(name) != wanted.get(name):
                raise DataError(
                    f"column {name!r} is {found.get(name, 'missing')} in {root}/{shard.path} but "
                    f"{wanted.get(name, 'missing')} in {root}/{first.path}. Write them alike, or "
                    f"choose columns that agree with data.columns."
                )
    return pa.schema(list(wanted.items()))


def _row_bytes(kind: pa.DataType) -> int:
    """Return the bytes of one value; 0 where the type does not tell."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _row_bytes(kind.value_type)
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:
        return 0


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

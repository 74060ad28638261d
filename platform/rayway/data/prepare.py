"""Makes one training shard from a part of the source; what a task of ``rayway data prepare`` does.

A shard is a function of its pieces of the source, the options and the user's code: not of when,
where, beside what or how often it is made. It appears whole, and the marker that says so after it.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayway.data.infer import csv_rows, json_rows
from rayway.data.pack import Packer
from rayway.data.source_rows import (
    Opened,
    Rows,
    image_rows,
    parquet_rows,
    text_files,
    text_lines,
)
from rayway.data.sources import Piece
from rayway.errors import DataError, RaywayError, SpecError, StorageError
from rayway.spec.code import enter_code_root, user_traceback
from rayway.spec.load import import_object
from rayway.storage.objects import Objects

DONE = "_rayway/done"
GROUP_BYTES = 1_000_000
LABELS_KEY = b"rayway.labels"
"""Where in the schema's metadata the names of the labels are, as a JSON list."""

Transform = Callable[[pa.Table], pa.Table]
Meter = Callable[[int], None]
"""Told how many bytes of the source were read since the last call, about."""


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """All that it takes to make one shard, in any process."""

    number: int
    destination: str
    root: str
    format: str
    pieces: tuple[Piece, ...]
    schema: pa.Schema | None = None
    """What CSV and JSON lines are read as."""
    labels: tuple[str, ...] = ()
    by_line: bool = True
    image_size: tuple[int, int] | None = None
    transform: str | None = None
    code_root: str = "."
    pack: tuple[str, int] | None = None
    rows_per_group: int | None = None
    ragged: frozenset[str] = frozenset()
    """Columns that stay lists, because their rows differ in length somewhere."""

    @property
    def weight(self) -> int:
        """The bytes of the source that it reads, about."""
        return sum(piece.weight for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class ShardDone:
    """What became of a shard; the content of its marker."""

    number: int
    first: str
    """The first file that it was made from."""
    rows: int = 0
    """0: there is no file, nothing was left."""
    rows_read: int = 0
    size: int = 0
    sha256: str = ""
    groups: int = 0
    schema: str = ""
    fixed: dict[str, int] = field(default_factory=dict)
    """List column -> the length that all of its rows have."""
    ragged: tuple[str, ...] = ()
    empty_documents: int = 0
    tokens: int = 0
    """What was packed."""

    @property
    def part(self) -> str:
        """The name of the shard's file."""
        return part_name(self.number)

    def arrow_schema(self) -> pa.Schema:
        """Return the shard's columns."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))

    def to_json(self) -> bytes:
        """Return the marker's content."""
        return json.dumps(asdict(self), indent=1).encode()

    @staticmethod
    def from_json(data: bytes) -> "ShardDone":
        """Return what :meth:`to_json` wrote; another content is a ValueError or a TypeError."""
        record = json.loads(data)
        return ShardDone(**{**record, "ragged": tuple(record["ragged"])})


def part_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"part-{number:05d}.parquet"


def done_key(number: int) -> str:
    """Return the key of a shard's marker."""
    return f"{DONE}/{number:05d}.json"


def make_shard(task: ShardTask, meter: Meter) -> ShardDone:
    """Make a shard, write it, and then its marker.

    Raises:
        DataError: A file of the source cannot be read as what it should be.
        SpecError: The transform is missing, or gave something that is no such table.
        RaywayError: The transform raised; file and row are named where they can be found.
        StorageError: The shard cannot be written.
    """
    objects = Objects(task.destination)
    transform = load_transform(task.transform, task.code_root)
    ragged = set(task.ragged)
    while True:
        making = _Making(task, transform, meter, frozenset(ragged))
        try:
            done = making.store(objects)
            break
        except _RaggedError as error:
            ragged.add(error.column)
    objects.put(done_key(task.number), done.to_json())
    return done


def load_transform(path: str | None, code_root: str) -> Transform | None:
    """Import the user's function.

    Raises:
        SpecError: There is no such function, or its module fails.
    """
    if path is None:
        return None
    enter_code_root(Path(code_root))
    found = import_object(path)
    if not callable(found):
        raise SpecError(f"{path} is of type {type(found).__name__}; a transform is a function.")
    transform: Transform = found
    return transform


class _RaggedError(Exception):
    """A list column turned out to have rows of other lengths."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


class _Making:
    """One try to make a shard: what is known of it so far."""

    def __init__(
        self, task: ShardTask, transform: Transform | None, meter: Meter, ragged: frozenset[str]
    ) -> None:
        self._task, self._transform, self._meter = task, transform, meter
        self._known_ragged = ragged
        self._fixed: dict[str, int] = {}
        self._schema: pa.Schema | None = None
        self._stored_schema = pa.schema([])
        self._packer: Packer | None = None
        self._first: pa.Table | None = None
        self._error: Exception | None = None

    def store(self, objects: Objects) -> ShardDone:
        """Write the shard unless nothing is left for it."""
        self._begin()
        from_file = f"{self._task.root}/{self._task.pieces[0].path}"
        if self._first is None:
            return ShardDone(number=self._task.number, first=from_file, **self._counts())
        try:
            objects.put(part_name(self._task.number), self)
        except StorageError:
            if self._error is not None:  # it was the making that failed, not the storing
                raise self._error from None
            raise
        return ShardDone(
            number=self._task.number,
            first=from_file,
            rows=self._rows,
            size=self._sink.tell(),
            sha256=self._sink.digest(),
            groups=self._groups_made,
            schema=base64.b64encode(self._stored_schema.serialize()).decode(),
            fixed=self._fixed,
            ragged=tuple(sorted(self._ragged)),
            **self._counts(),
        )

    def _begin(self) -> None:
        """Make the first row group, which tells the columns."""
        self._fixed, self._ragged = {}, set(self._task.ragged | self._known_ragged)
        self._schema, self._schema_from = None, ""
        self._rows = self._rows_read = self._groups_made = 0
        self._packer = Packer(*self._task.pack) if self._task.pack else None
        self._sink, self._error = _Sink(), None
        self._groups = cut_groups(self._tables(), self._task.rows_per_group)
        self._first = next(self._groups, None)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the file's bytes. A store that needs them again has them made again."""
        if self._first is None:
            self._begin()
        first, self._first = self._first, None
        assert first is not None, "the source has not changed"
        schema = self._stored_schema = self._with_labels(first.schema)
        try:
            with _writer(self._sink, schema) as writer:
                for group in chain([first], self._groups):
                    _write_group(writer, group.replace_schema_metadata(schema.metadata))
                    self._rows, self._groups_made = self._rows + len(group), self._groups_made + 1
                    yield from self._sink.take()
                # the content's name: the footer holds it, and so it names the content too
                writer.add_key_value_metadata({"rayway.sha256": self._sink.digest()})
            yield from self._sink.take()
        except Exception as error:
            self._error = error
            raise

    def _with_labels(self, schema: pa.Schema) -> pa.Schema:
        labels = self._task.labels
        return schema.with_metadata({LABELS_KEY: json.dumps(labels)}) if labels else schema

    def _counts(self) -> dict[str, Any]:
        packer = self._packer
        return {
            "rows_read": self._rows_read,
            "empty_documents": packer.empty_documents if packer else 0,
            "tokens": packer.tokens if packer else 0,
        }

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the shard's rows as they are to be stored."""
        where = ""
        for rows in read_rows(self._task):
            self._rows_read += len(rows.table)
            where = rows.range()
            table = self._transformed(rows)
            if self._packer is None:
                yield from self._fit(table, where)
            elif len(table):
                for packed in self._packer.add(table):
                    yield from self._fit(packed, where)
            self._meter(rows.weight)
        for packed in self._packer.finish() if self._packer else ():
            yield from self._fit(packed, where)

    def _transformed(self, rows: Rows) -> pa.Table:
        if self._transform is None:
            return rows.table
        made = _call(self._transform, rows.table)
        if isinstance(made, Exception):
            where, error = _find_row(self._transform, rows, made)
            raise RaywayError(f"{self._task.transform} failed on {where}:\n{user_traceback(error)}")
        if not isinstance(made, pa.Table):
            raise SpecError(
                f"{self._task.transform} gave a {type(made).__name__} for {rows.range()}. Return a "
                f"pyarrow.Table."
            )
        names = made.schema.names
        if twice := {name for name in names if names.count(name) > 1}:
            raise SpecError(
                f"{self._task.transform} gave two columns {min(twice)!r}. Name each once."
            )
        return made

    def _fit(self, table: pa.Table, where: str) -> Iterator[pa.Table]:
        """Yield the rows in the shard's schema, if there are any."""
        if len(table):
            table = self._with_fixed_lists(_decoded(table.combine_chunks(), where))
            if self._schema is None:
                self._schema, self._schema_from = table.schema.remove_metadata(), where
            yield self._in_schema(table, where)

    def _in_schema(self, table: pa.Table, where: str) -> pa.Table:
        assert self._schema is not None
        wanted = dict(zip(self._schema.names, self._schema.types, strict=True))
        found = dict(zip(table.schema.names, table.schema.types, strict=True))
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                raise SpecError(
                    f"column {name!r} is {wanted.get(name, 'missing')} in what was made of "
                    f"{self._schema_from} but {found.get(name, 'missing')} in what was made of "
                    f"{where}. Give it one type in the transform."
                )
        return table.select(self._schema.names).replace_schema_metadata(None)

    def _with_fixed_lists(self, table: pa.Table) -> pa.Table:
        for place, column in enumerate(table.schema):
            kind = column.type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                continue
            if column.name in self._ragged:
                continue
            values = pa.concat_arrays(table[column.name].chunks)
            length = _common_length(values)
            if column.name not in self._fixed and length:
                self._fixed[column.name] = length
            if length is None or length != self._fixed.get(column.name):
                if self._schema is not None:
                    raise _RaggedError(column.name)
                self._ragged.add(column.name)
                continue
            fixed = pa.FixedSizeListArray.from_arrays(values.flatten(), length)
            table = table.set_column(place, column.name, fixed)
        return table


def read_rows(task: ShardTask) -> Iterator[Rows]:
    """Yield the source's rows for a shard.

    Raises:
        DataError: A file cannot be read; it is named.
    """
    place = Opened.at(task.root)
    if task.format == "parquet":
        return parquet_rows(place, task.pieces)
    if task.format == "images":
        return image_rows(place, task.pieces, task.labels, task.image_size)
    if task.format == "text":
        return (text_lines if task.by_line else text_files)(place, task.pieces)
    assert task.schema is not None, "it was found before"
    return (csv_rows if task.format == "csv" else json_rows)(place, task.pieces, task.schema)


def cut_groups(tables: Iterable[pa.Table], rows: int | None) -> Iterator[pa.Table]:
    """Yield row groups: of ``rows`` rows, or as soon as they have about a megabyte in memory."""
    limit = float(rows or GROUP_BYTES)
    held: list[pa.Table] = []
    full = 0.0
    for table in tables:
        each = 1.0 if rows else max(table.nbytes / len(table), 1e-9)
        begin = 0
        while begin < len(table):
            some = max(int(np.ceil((limit - full) / each)), 1)
            part = table.slice(begin, some)
            held.append(part)
            begin, full = begin + len(part), full + len(part) * each
            if full >= limit:
                yield pa.concat_tables(held).combine_chunks()
                held, full = [], 0.0
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _call(transform: Transform, table: pa.Table) -> pa.Table | Exception:
    """Return what the user's function gives or raises."""
    try:
        return transform(table)
    except Exception as error:  # noqa: BLE001 - it is the user's own, and is shown
        return error


def _find_row(transform: Transform, rows: Rows, error: Exception) -> tuple[str, Exception]:
    """Return where a transform fails, by halves, and how it does there."""
    low, high = 0, len(rows.table)
    while high - low > 1:
        middle = (low + high) // 2
        for begin, end in ((low, middle), (middle, high)):
            found = _call(transform, rows.table.slice(begin, end - begin))
            if isinstance(found, Exception):
                low, high, error = begin, end, found
                break
        else:  # neither half fails for itself
            return rows.range(), error
    return rows.where(low), error


def _common_length(values: pa.Array) -> int | None:
    """Return the length that all lists have, if that is so and it is not 0."""
    if values.null_count or not len(values):
        return None
    lengths = np.diff(values.offsets.to_numpy())
    return int(lengths[0]) if lengths[0] and (lengths == lengths[0]).all() else None


def _decoded(table: pa.Table, where: str) -> pa.Table:
    """Return the table with plain values, and refuse what has no type."""
    for place, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            plain = table[column.name].cast(column.type.value_type)
            table = table.set_column(place, column.name, plain)
        if pa.types.is_null(column.type):
            raise SpecError(
                f"column {column.name!r} has no type in what was made of {where}: it holds nothing "
                f"but nulls. Give it a type in the transform."
            )
    return table


def _writer(sink: "_Sink", schema: pa.Schema) -> pq.ParquetWriter:
    try:
        return pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            use_dictionary=False,  # numbers seldom repeat, and are read faster as they are
            write_statistics=list(_leaves_with_statistics(schema)),
            write_page_checksum=True,
        )
    except (pa.ArrowException, NotImplementedError) as error:
        raise _unstorable(error) from error


def _write_group(writer: pq.ParquetWriter, group: pa.Table) -> None:
    try:
        writer.write_table(group, row_group_size=len(group))
    except (pa.ArrowException, NotImplementedError) as error:
        raise _unstorable(error) from error


def _unstorable(error: Exception) -> DataError:
    return DataError(f"a column cannot be stored in Parquet: {error}. Leave it out or change it.")


def _leaves_with_statistics(schema: pa.Schema) -> Iterator[str]:
    """Yield the paths of number columns: a text's extremes would only make the footer long."""
    for column in schema:
        kind, path = column.type, column.name
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            kind, path = kind.value_type, f"{path}.list.element"
        if pa.types.is_primitive(kind):
            yield path


class _Sink:
    """A file to write to that knows the hash of what was written, and hands it on."""

    closed = False

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._sha256, self._bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._sha256.update(content)
        self._bytes += len(content)
        self._held.append(content)
        return len(content)

    def take(self) -> list[bytes]:
        """Return what was written since the last call."""
        taken, self._held = self._held, []
        return taken

    def tell(self) -> int:
        return self._bytes

    def digest(self) -> str:
        return self._sha256.hexdigest()

    def flush(self) -> None:
        """Do nothing: it is all in memory."""

    def close(self) -> None:
        """Do nothing: what was written is still to be taken."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

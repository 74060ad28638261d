"""Reads a whole data set and tells all that is wrong with it, not only the first thing.

Files are read by threads, a piece of a row group at a time, so that memory stays small whatever
the size of a file. What is told does not depend on which thread was first.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rayway.data.check import Finding
from rayway.data.files import Place, StoredFile, explain, filesystem_for, find_files, read_footer
from rayway.data.footers import Footer, known_columns, parse_footer
from rayway.data.index import is_shard, refuse_unfinished
from rayway.data.values import Range, Spot, Values, look
from rayway.errors import DataError

_THREADS = min(16, 2 * (os.cpu_count() or 1))
_PIECE_ROWS = 1 << 16
_PAGE_HEADER_BYTES = 32
_NEXT_NUMBER = b"\x15"  # in Thrift's compact form: the next field, a 32-bit number
OnProgress = Callable[[int, int], None]
"""Told how many files are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is asked of a data set."""

    columns: Sequence[str] | None = None
    """``None``: all."""
    pad: Mapping[str, int] = field(default_factory=dict)
    """Columns of lists that are filled up -> their length."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """Column -> the smallest and the largest value that may be."""
    invalid: Literal["error", "skip", "fill"] = "error"
    transform: bool = False
    """Whether a transform makes the tensors, from whatever is stored."""
    job: bool = False
    """Whether a job asks for all this, with the batch below."""
    global_batch: int = 1
    micro_batch: int = 1
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What was found in a data set."""

    place: Place
    files: Sequence[StoredFile]
    footers: Mapping[int, Footer]
    """Of those files that are whole, by their number."""
    schema: pa.Schema
    """The chosen columns as in the first whole file with rows."""
    values: Mapping[str, Values]
    damage: Sequence[Finding]
    groups_read: int
    checksums: bool | None
    """Whether all pages looked at have checksums. ``None``: none was looked at."""

    def where(self, spot: Spot) -> str:
        """Return the words for a row in a message."""
        file, group, row = spot
        return f"{self.place.folder}/{self.files[file].path} (row group {group}, row {row})"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What the rows of one file gave."""

    values: dict[str, Values]
    damage: list[Finding]
    groups: int
    checksums: bool | None


def scan(
    url: str, rules: Rules, *, sample: int | None = None, on_progress: OnProgress | None = None
) -> Scan:
    """Read a data set and return what is in it.

    Args:
        url: A folder, a glob or a file, as for :func:`rayway.data.index.build_index`.
        rules: What is asked of it.
        sample: How many row groups to read, spread evenly; ``None``: all. Footers are all read.
        on_progress: Told after each footer, and again after each file's rows.

    Raises:
        DataError: There is no such place, no whole Parquet file in it, or an unknown column; or
            the data is half prepared.
    """
    place, found = find_files(url)
    refuse_unfinished(place, found)
    files = [file for file in found if is_shard(file.path)]
    if not files:
        raise DataError(f"{place.url} holds no .parquet file.")
    footers, damage = _footers(place.folder, files, on_progress)
    if not footers:
        raise DataError(f"no file of {place.url} is a whole Parquet file. {damage[0].text}")
    schema = next((f for f in footers.values() if any(f.rows)), next(iter(footers.values()))).schema
    if rules.columns is not None:
        schema = pa.schema([schema.field(n) for n in known_columns(rules.columns, schema, url)])
    if rules.ranges:  # one of a misspelt column would check nothing
        known_columns(list(rules.ranges), schema, url)
    look_at = _Looker(place.folder, files, schema, rules)
    chosen = _chosen(footers, sample)
    values: dict[str, Values] = {}
    parts: list[_Part] = []
    with ThreadPoolExecutor(_THREADS, "rayway-scan") as pool:
        work = [pool.submit(look_at, n, footers[n], groups) for n, groups in chosen.items()]
        for done, part in enumerate(as_completed(work), 1):
            parts.append(part.result())
            for name, more in parts[-1].values.items():
                values[name] = values[name].plus(more) if name in values else more
            if on_progress is not None:
                on_progress(done, len(chosen))
    checked = {part.checksums for part in parts if part.checksums is not None}
    return Scan(
        place=place,
        files=files,
        footers=footers,
        schema=schema,
        values={name: values[name] for name in schema.names if name in values},
        damage=[*damage, *sorted(finding for part in parts for finding in part.damage)],
        groups_read=sum(part.groups for part in parts),
        checksums=checked == {True} if checked else None,
    )


def _footers(
    folder: str, files: Sequence[StoredFile], on_progress: OnProgress | None
) -> tuple[dict[int, Footer], list[Finding]]:
    """Return the footers of whole files by number, and what is wrong with the others."""
    filesystem, root = filesystem_for(folder)
    schemas: dict[bytes, pa.Schema] = {}

    def read(file: StoredFile) -> Footer | Finding:
        url = f"{folder}/{file.path}"
        try:
            footer = read_footer(filesystem, f"{root}/{file.path}", file.size, url=url)
            return parse_footer(footer, url, schemas)
        except DataError as error:
            return Finding("problem", str(error))

    with ThreadPoolExecutor(_THREADS, "rayway-footers") as pool:
        told = []
        for each in pool.map(read, files):
            told.append(each)
            if on_progress is not None:
                on_progress(len(told), len(files))
    whole = {number: each for number, each in enumerate(told) if isinstance(each, Footer)}
    return whole, [each for each in told if isinstance(each, Finding)]


def _chosen(footers: Mapping[int, Footer], sample: int | None) -> dict[int, list[int]]:
    """Return which row groups of which files to read."""
    groups = [
        (number, ordinal)
        for number, footer in footers.items()
        for ordinal, rows in enumerate(footer.rows)
        if rows
    ]
    if sample is not None and sample < len(groups):
        groups = [groups[i * len(groups) // sample] for i in range(sample)]
    chosen: dict[int, list[int]] = {}
    for number, ordinal in groups:
        chosen.setdefault(number, []).append(ordinal)
    return chosen


class _Looker:
    """Looks at the rows of one file; any number of threads may call it."""

    def __init__(
        self, folder: str, files: Sequence[StoredFile], schema: pa.Schema, rules: Rules
    ) -> None:
        self._folder, self._files, self._schema, self._rules = folder, files, schema, rules
        self._filesystem, self._root = filesystem_for(folder)

    def __call__(self, number: int, footer: Footer, groups: Sequence[int]) -> _Part:
        path = self._files[number].path
        names = self._readable(footer.schema)
        values: dict[str, Values] = {}
        damage: list[Finding] = []
        checksums: bool | None = None
        try:
            with self._filesystem.open_input_file(f"{self._root}/{path}") as source:
                file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True)
                for group in groups:
                    try:
                        self._look(file, (number, group), names, values)
                    except (OSError, pa.ArrowException) as error:
                        damage.append(self._damaged(path, f" (row group {group})", error))
                checksums = has_checksum(source, file.metadata.row_group(groups[0]).column(0))
        except (OSError, pa.ArrowException) as error:
            damage.append(self._damaged(path, "", error))
        return _Part(values=values, damage=damage, groups=len(groups), checksums=checksums)

    def _readable(self, schema: pa.Schema) -> list[str]:
        """Return the chosen columns that this file has like the others."""
        wanted = self._schema
        if len(set(schema.names)) < len(schema.names):
            return []
        return [n for n in wanted.names if n in schema.names and schema.field(n) == wanted.field(n)]

    def _look(
        self,
        file: pq.ParquetFile,
        place: tuple[int, int],
        names: list[str],
        values: dict[str, Values],
    ) -> None:
        row = 0
        pieces = file.iter_batches(_PIECE_ROWS, [place[1]], columns=names, use_threads=False)
        for piece in pieces:
            for name in names:
                within = self._rules.ranges.get(name, (None, None))
                found = look(
                    piece.column(name),
                    (*place, row),
                    within=within,
                    longest=self._rules.pad.get(name),
                )
                values[name] = values[name].plus(found) if name in values else found
            row += len(piece)

    def _damaged(self, path: str, group: str, error: Exception) -> Finding:
        url = f"{self._folder}/{path}"
        why = (
            "its bytes do not match their checksum" if "CRC" in str(error) else explain(error, url)
        )
        return Finding("problem", f"{url}{group} is damaged: {why}. Write the file again.")


def has_checksum(source: pa.NativeFile, column: pq.ColumnChunkMetaData) -> bool | None:
    """Tell whether the first page of a column has a checksum; ``None``: cannot be told.

    A page begins with a Thrift struct: three numbers, and then the checksum if there is one.
    """
    begin = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        begin = min(begin, column.dictionary_page_offset)
    header = bytes(source.read_at(_PAGE_HEADER_BYTES, begin))
    at = 0
    for _ in range(3):
        if header[at : at + 1] != _NEXT_NUMBER:
            return None
        at += 1
        while at < len(header) and header[at] >= 0x80:  # a number goes on
            at += 1
        at += 1
    return header[at : at + 1] == _NEXT_NUMBER

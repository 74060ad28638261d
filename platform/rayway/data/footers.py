"""What the footers of Parquet files say: row groups, columns, sizes and nulls.

Reading them is all that indexing costs, and each file is independent of the others, so it is one
function over some files: called here by threads, elsewhere by tasks on a cluster.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from rayway.data.files import DamagedError, StoredFile, filesystem_for, read_footer
from rayway.errors import DataError

_THREADS = 16


MANY_FILES = 5_000
"""From so many files on, one process is not enough to read their footers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What the footer of one file says."""

    digest: str
    """A hash of the footer; it names the file's content."""
    rows: tuple[int, ...]
    """The row count of each row group."""
    group_bytes: tuple[int, ...]
    """The bytes in memory of each row group; estimated."""
    column_bytes: dict[str, int]
    """Column -> bytes in memory of its largest row group; estimated."""
    nulls: dict[str, int]
    """Column -> how many nulls it has, where that is known and not 0."""
    schema: pa.Schema
    """Without metadata."""


FooterReader = Callable[[str, Sequence[StoredFile]], Iterator[Footer]]
"""(folder, files below it) -> their footers, in the order of the files."""


def read_footers(folder: str, files: Sequence[StoredFile]) -> Iterator[Footer]:
    """Yield the footer of each file below ``folder``, read by 16 threads.

    Raises:
        DataError: A file is empty, cut off, damaged or cannot be read; it is named.
    """
    filesystem, root = filesystem_for(folder)
    schemas: dict[bytes, pa.Schema] = {}  # equal ones are one object: light to keep and to send

    def read(file: StoredFile) -> Footer:
        url = f"{folder}/{file.path}"
        return parse_footer(
            read_footer(filesystem, f"{root}/{file.path}", file.size, url=url), url, schemas
        )

    pool = ThreadPoolExecutor(_THREADS, "rayway-footers")
    try:
        yield from pool.map(read, files)
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, the other files are of no interest


def parse_footer(footer: bytes, url: str, schemas: dict[bytes, pa.Schema] | None = None) -> Footer:
    """Return what the bytes of a footer say.

    Args:
        footer: As :func:`rayway.data.files.read_footer` returns it.
        url: The file, for messages.
        schemas: Schemas seen so far; an equal one is taken from there.

    Raises:
        DamagedError: The footer is damaged.
    """
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        schema = metadata.schema.to_arrow_schema().remove_metadata()
        rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        group_bytes, column_bytes, nulls = _columns(metadata, schema)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedError(f"{url} has a damaged footer: {error}. Write it again.") from error
    if schemas is not None:
        schema = schemas.setdefault(schema.serialize().to_pybytes(), schema)
    return Footer(
        digest=footer_digest(footer),
        rows=rows,
        group_bytes=group_bytes,
        column_bytes=column_bytes,
        nulls=nulls,
        schema=schema,
    )


def footer_digest(footer: bytes) -> str:
    """Return the hash that names a file's content."""
    return hashlib.sha256(footer).hexdigest()[:16]


def changed_files(
    folder: str, files: Sequence[StoredFile], digests: Mapping[str, str]
) -> list[str]:
    """Return the paths of those files whose footer no longer has the digest it had.

    Raises:
        DataError: A file cannot be read.
    """
    if not files:
        return []
    filesystem, root = filesystem_for(folder)

    def changed(file: StoredFile) -> bool:
        url = f"{folder}/{file.path}"
        try:
            footer = read_footer(filesystem, f"{root}/{file.path}", file.size, url=url)
        except DamagedError:
            return True
        return footer_digest(footer) != digests[file.path]

    with ThreadPoolExecutor(_THREADS, "rayway-footers") as pool:
        told = list(pool.map(changed, files))
    return [file.path for file, is_changed in zip(files, told, strict=True) if is_changed]


def common_schema(
    files: Sequence[StoredFile],
    footers: Sequence[Footer],
    columns: Sequence[str] | None,
    root: str,
) -> pa.Schema:
    """Return the chosen columns of the first file with rows, once all such files have them alike.

    Raises:
        DataError: A file lacks a column, has it with another type or twice; or none is chosen.
    """
    for file, footer in zip(files, footers, strict=True):
        names = footer.schema.names
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise DataError(
                f"{root}/{file.path} has more than one column {twice[0]!r}, and which one is "
                f"meant cannot be told. Write it with each name once."
            )
    # what wrote a file without rows had nothing to tell the types from
    real = [pair for pair in zip(files, footers, strict=True) if any(pair[1].rows)]
    first_file, first = real[0] if real else (files[0], footers[0])
    names = known_columns(first.schema.names if columns is None else columns, first.schema, root)
    wanted = {name: first.schema.field(name).type for name in names}
    for file, footer in real:
        if footer.schema is first.schema:
            continue
        found = dict(zip(footer.schema.names, footer.schema.types, strict=True))
        extra = [name for name in found if name not in wanted] if columns is None else []
        for name in [*names, *extra]:
            if found.get(name) != wanted.get(name):
                raise DataError(
                    f"column {name!r} is {found.get(name, 'missing')} in {root}/{file.path} but "
                    f"{wanted.get(name, 'missing')} in {root}/{first_file.path}. Write them alike, "
                    f"or choose columns that agree with data.columns."
                )
    return pa.schema(list(wanted.items()))


def known_columns(columns: Sequence[str], schema: pa.Schema, root: str) -> list[str]:
    """Return the columns, once the schema has each of them.

    Raises:
        DataError: It lacks one; the nearest is named. Or there is none in ``columns``.
    """
    for name in columns:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise DataError(
                f"{root} has no column {name!r}. {hint}It has: {', '.join(schema.names)}."
            )
    if not columns:
        raise DataError(f"no column of {root} is chosen. It has: {', '.join(schema.names)}.")
    return list(columns)


def _columns(
    metadata: pq.FileMetaData, schema: pa.Schema
) -> tuple[tuple[int, ...], dict[str, int], dict[str, int]]:
    """Return the bytes of each row group, of each column's largest one, and columns' nulls.

    A leaf inside a list counts an empty list as a null, so only plain columns' nulls are told.
    """
    leaves = [(field, kind) for field in schema for kind in _leaves(field.type)]
    plain = [not pa.types.is_nested(field.type) for field, _ in leaves]
    widths = [_width(kind) for _, kind in leaves]
    nulls: dict[str, int] = {}
    group_bytes = []
    largest = dict.fromkeys(schema.names, 0)
    for ordinal in range(metadata.num_row_groups):
        group = metadata.row_group(ordinal)
        sizes = dict.fromkeys(schema.names, 0)
        for i, (field, _) in enumerate(leaves):
            column = group.column(i)
            width = widths[i]
            sizes[field.name] += (
                column.num_values * width if width else column.total_uncompressed_size
            )
            if plain[i] and (statistics := column.statistics) is not None:
                count = statistics.null_count if statistics.has_null_count else 0
                if count:
                    nulls[field.name] = nulls.get(field.name, 0) + count
        group_bytes.append(sum(sizes.values()))
        for name, size in sizes.items():
            largest[name] = max(largest[name], size)
    return tuple(group_bytes), largest, nulls


def _leaves(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types of the Parquet columns that hold a column of this type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return [leaf for each in inner for leaf in _leaves(each)] if inner else [kind]


def _width(kind: pa.DataType) -> int:
    """Return the bytes of one value in memory; 0 where the type does not tell."""
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:
        return 0

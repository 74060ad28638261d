"""What a data set is prepared from: its files, and the pieces they can be cut into."""

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from rayway.data.files import StoredFile, filesystem_for, find_files, read_footer
from rayway.errors import DataError

EXTENSIONS = {
    "parquet": ("parquet", "pq"),
    "csv": ("csv", "tsv"),
    "jsonl": ("jsonl", "ndjson", "json"),
    "images": ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff"),
    "text": ("txt", "text"),
}
"""Format -> the ends of the names of its files."""

COMPRESSED = {"gz": "gzip", "bz2": "bz2", "zst": "zstd", "lz4": "lz4"}
"""The end of a packed file's name -> Arrow's word for it."""

_GLOB = re.compile(r"[*?\[]")
_PIECE_BYTES = 1 << 20
_FOOTER_THREADS = 16
_MARKER = re.compile(
    r"\..*|.*\.crc|__MACOSX|__pycache__|"
    r"_(SUCCESS|metadata|common_metadata|committed_.*|started_.*|temporary|delta_log|rayway)"
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one format below a root."""

    root: str
    """A folder: an absolute path or a URL."""
    format: str
    files: tuple[StoredFile, ...]
    """Ordered by the bytes of their paths."""
    ignored: tuple[str, ...]
    """Other files that were there: markers, hidden files, other formats."""
    empty: tuple[str, ...]
    """Text files of 0 bytes, which are left out."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file that can be read for itself."""

    path: str
    first: int
    """The first row group of a Parquet file; the first byte of other files."""
    stop: int | None
    """Where the piece ends; ``None``: with the file."""
    weight: int
    """Its bytes, about."""


def find_source(src: str, *, format: str = "auto") -> Source:  # noqa: A002 - as the option
    """List the files that ``src`` means.

    Args:
        src: A file, a folder with all that is below it, or a glob, where ``**`` stands for any
            folders; a path or a URL.
        format: A key of :data:`EXTENSIONS`, or ``auto``: what the names of the files say.

    Raises:
        DataError: There is no such place or no such file in it; a file cannot be listed or has no
            byte; under ``auto`` the files are of several formats, or of none.
    """
    root, listed = _list(src)
    shown: list[StoredFile] = []
    ignored: list[StoredFile] = []
    for info in listed:
        (ignored if any(map(_MARKER.fullmatch, info.path.split("/"))) else shown).append(info)
    if not shown:
        seen = f"only {_some([i.path for i in ignored])}" if ignored else "no file"
        raise DataError(f"{src} holds {seen}. Name a file, a folder or a glob with data in it.")
    asked, format = format, _format_of(shown, src) if format == "auto" else format  # noqa: A001
    files = [info for info in shown if _kind(info.path) == format]
    if asked == "text" or not files:
        files = shown  # asked for by name: then that is what they are
    chosen = {file.path for file in files}
    ignored += [info for info in shown if info.path not in chosen]
    empty = [file for file in files if file.size == 0]
    if empty and format != "text":
        raise DataError(
            f"{root}/{empty[0].path} is empty (0 bytes). Write it again or delete it."
            + (f" There are {len(empty) - 1} more such files." if len(empty) > 1 else "")
        )
    files = [file for file in files if file.size]
    if not files:
        raise DataError(f"{src} holds files of 0 bytes only, e.g. {empty[0].path}.")
    return Source(
        root=root,
        format=format,
        files=tuple(sorted(files, key=lambda file: file.path.encode())),
        ignored=tuple(sorted(file.path for file in ignored)),
        empty=tuple(sorted(file.path for file in empty)),
    )


def _list(src: str) -> tuple[str, list[StoredFile]]:
    """Return the root, and every file below it that ``src`` means."""
    path = src.removeprefix("file://")
    if os.path.isfile(path):
        root, name = os.path.split(os.path.abspath(path))
        about = os.stat(path)
        return root, [StoredFile(name, about.st_size, str(about.st_mtime_ns))]
    if "://" not in path and not os.path.lexists(path) and not _GLOB.search(path):
        raise DataError(f"{src} does not exist. Name a file, a folder or a glob.")
    place, listed = find_files(src)
    folder = place.folder.removeprefix("file://")
    return (folder if "://" in folder else os.path.abspath(folder)), listed


def _kind(path: str) -> str | None:
    """Return the format that a name says."""
    *_, name = path.lower().split("/")
    ends = name.split(".")[1:]
    if len(ends) > 1 and ends[-1] in COMPRESSED:
        ends.pop()
    return next((kind for kind, known in EXTENSIONS.items() if ends and ends[-1] in known), None)


def _format_of(files: Sequence[StoredFile], src: str) -> str:
    """Return the one format of the files."""
    examples: dict[str, str] = {}
    for file in files:
        if kind := _kind(file.path):
            examples.setdefault(kind, file.path)
    if len(examples) == 1:
        return next(iter(examples))
    if examples:
        found = ", ".join(f"{kind} ({path})" for kind, path in sorted(examples.items()))
        raise DataError(f"{src} holds files of several formats: {found}. Say which with --format.")
    raise DataError(
        f"{src} holds no file whose name tells its format, e.g. {_some([f.path for f in files])}. "
        f"Say which it is with --format: {', '.join(EXTENSIONS)}."
    )


def cut_into_pieces(source: Source, *, by_line: bool) -> tuple[list[Piece], pa.Schema | None]:
    """Return the pieces of all files in order, and the columns if the files tell them.

    Parquet is cut between row groups, uncompressed lines between lines; other files are pieces
    themselves. Where a file is a row, files come in an order mixed by a hash of their paths:
    next to each other they tend to be alike, as the pictures of one folder are.

    Raises:
        DataError: A Parquet file is damaged, or has other columns than the first.
    """
    if source.format == "parquet":
        return _cut_parquet(source)
    one_row_a_file = source.format == "images" or (source.format == "text" and not by_line)
    if one_row_a_file:
        files = sorted(source.files, key=lambda file: _mixed(file.path))
        return [Piece(file.path, 0, None, file.size) for file in files], None
    pieces = []
    for file in source.files:
        ends = file.path.rpartition(".")[2].lower()
        count = max(file.size // _PIECE_BYTES, 1)
        if source.format == "csv" or ends in COMPRESSED:
            count = 1
        cuts = [file.size * i // count for i in range(count)]
        for first, stop in zip(cuts, [*cuts[1:], None], strict=True):
            pieces.append(Piece(file.path, first, stop, (stop or file.size) - first))
    return pieces, None


def _mixed(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


def _cut_parquet(source: Source) -> tuple[list[Piece], pa.Schema]:
    filesystem, folder = filesystem_for(source.root)

    def look(file: StoredFile) -> tuple[list[Piece], pa.Schema]:
        path = f"{folder}/{file.path}"
        footer = read_footer(filesystem, path, file.size, url=f"{source.root}/{file.path}")
        try:
            found = pq.read_metadata(pa.BufferReader(footer))
            groups = [found.row_group(i) for i in range(found.num_row_groups)]
            schema = found.schema.to_arrow_schema().remove_metadata()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} has a damaged footer: {error}. Write it again.") from error
        pieces = [Piece(file.path, i, i + 1, g.total_byte_size) for i, g in enumerate(groups)]
        return pieces, schema

    with ThreadPoolExecutor(_FOOTER_THREADS, "rayway-footers") as pool:
        looks = list(pool.map(look, source.files))
    first = looks[0][1]
    for file, (_, schema) in zip(source.files, looks, strict=True):
        names = (f"{source.root}/{source.files[0].path}", f"{source.root}/{file.path}")
        refuse_other_columns(first, schema, names)
    return [piece for pieces, _ in looks for piece in pieces], first


def refuse_other_columns(one: pa.Schema, other: pa.Schema, names: tuple[str, str]) -> None:
    """Compare the columns of two files, whatever their order.

    Raises:
        DataError: A column is missing in one of them, of another type, or there twice.
    """
    for schema, name in zip((one, other), names, strict=True):
        if twice := {each for each in schema.names if schema.names.count(each) > 1}:
            raise DataError(f"{name} has more than one column {min(twice)!r}. Name each once.")
    types = [dict(zip(each.names, each.types, strict=True)) for each in (one, other)]
    for column in [*types[0], *types[1]]:
        kinds = [each.get(column, "missing") for each in types]
        if kinds[0] != kinds[1]:
            raise DataError(
                f"column {column!r} is {kinds[0]} in {names[0]} but {kinds[1]} in {names[1]}. "
                f"Write them alike, or leave the column out with a transform."
            )


def merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the same pieces with those that follow each other in a file as one."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and last.path == piece.path and last.stop == piece.first:
            merged[-1] = Piece(last.path, last.first, piece.stop, last.weight + piece.weight)
        else:
            merged.append(piece)
    return merged


def label_names(source: Source) -> list[str]:
    """Return the folders that hold the files, sorted: the number of a label is a place here."""
    return sorted({file.path.rpartition("/")[0] or "." for file in source.files})


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

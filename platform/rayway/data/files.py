"""Where shards lie: from a URL to a filesystem, the files below it, and one file's footer.

Footers are fetched as raw bytes: their hash names the content of a shard (a footer holds sizes,
offsets and statistics of all columns), and a file cut off is found before anything is parsed.
"""

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs

from rayway.data.s3 import explain_s3, list_s3, s3_filesystem
from rayway.errors import DataError

_TAIL_BYTES = 64 << 10
_MAGIC = b"PAR1"
_MAGIC_SIGNS = re.compile(r"[*?[]")
_STAMPS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
"""What filesystems call a file's version, the most exact first."""


class DamagedError(DataError):
    """A file is there and is no whole Parquet file."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file below a folder."""

    path: str
    """Below the folder, with ``/``."""
    size: int
    """In bytes."""
    stamp: str
    """What the store says of the file's version: its etag, or when it was written in ns."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a user's URL means: a folder, and which of its files."""

    folder: str
    """The folder's URL or path."""
    pattern: str = ""
    """A glob below the folder; empty: all files."""

    @property
    def url(self) -> str:
        """The URL of it all."""
        return f"{self.folder}/{self.pattern}" if self.pattern else self.folder

    def holds(self, path: str) -> bool:
        """Tell whether the pattern means the file ``path``, or a folder that it is in."""
        return not self.pattern or _matches(path.split("/"), self.pattern.split("/"))


def place_of(url: str) -> Place:
    """Return the folder and the pattern of ``url``: a folder, a glob or a single local file.

    A local path that exists is meant as it is, whatever signs are in it; elsewhere ``*``, ``?``
    and ``[`` make a glob. ``**`` stands for any folders, and a folder that fits for all in it.

    Raises:
        DataError: A wildcard stands where the bucket's name should, or the URL is empty.
    """
    if not url.strip():
        raise DataError("the place of the data is empty. Give a folder, a glob, a file or a URL.")
    scheme, found, rest = url.rpartition("://")
    root = rest.rstrip("/") or rest[:1]
    if scheme in ("", "file"):
        if os.path.isfile(root):
            folder, name = os.path.split(root)
            return Place(scheme + found + (folder or "."), glob.escape(name))
        if os.path.exists(root):
            return Place(scheme + found + root)
    parts = root.split("/")
    magic = next((i for i, part in enumerate(parts) if _MAGIC_SIGNS.search(part)), None)
    if magic is None:
        return Place(scheme + found + root)
    if magic == 0 and scheme not in ("", "file"):
        raise DataError(f"{url} has a wildcard in its first part. Name the bucket in full.")
    folder = "/".join(parts[:magic]) or ("/" if root.startswith("/") else ".")
    return Place(scheme + found + folder, "/".join(parts[magic:]))


def filesystem_for(url: str) -> tuple[pafs.FileSystem, str]:
    """Return the filesystem of ``url`` and the path of ``url`` on it.

    Local paths, ``file://`` and ``s3://`` are Arrow's own; every other scheme goes through fsspec.

    Raises:
        DataError: No filesystem knows the scheme, or it cannot be set up.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        return pafs.LocalFileSystem(), os.path.abspath(url)
    if scheme == "file":
        return pafs.LocalFileSystem(), os.path.abspath(rest)
    if scheme == "s3":
        return s3_filesystem(rest.partition("/")[0]), rest.rstrip("/")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise DataError(f"{url} cannot be opened: {error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path.rstrip("/")


def find_files(url: str) -> tuple[Place, list[StoredFile]]:
    """Return what ``url`` means and the files that are there.

    Raises:
        DataError: Nothing is there, or it cannot be listed.
    """
    place = place_of(url)
    files = list_files(place)
    if not files and not place.pattern and "://" in url and url.rstrip("/").endswith(".parquet"):
        folder, _, name = place.folder.rpartition("/")  # on a store, only a listing tells
        place = Place(folder, glob.escape(name))
        files = list_files(place)
    if not files and "://" in url and not url.startswith("file:"):
        raise DataError(f"{url} holds no object. Check the URL, or make the data first.")
    return place, files


def is_there(url: str) -> bool:
    """Return whether there is anything at ``url``.

    Raises:
        DataError: It cannot be listed.
    """
    try:
        return bool(list_files(place_of(url)))
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise


def list_files(place: Place) -> list[StoredFile]:
    """Return the files of ``place``, by the bytes of their paths.

    Raises:
        DataError: The folder cannot be listed, with the store's reason; or, on a disk, there is
            no such folder. A store has no folders: there a missing one is empty.
    """
    scheme, found, rest = place.folder.partition("://")
    try:
        if not found or scheme == "file":
            files = _list_local(rest if found else place.folder)
        elif scheme == "s3":
            files = _list_bucket(rest, _literal(place.pattern))
        else:
            files = _list_fsspec(place.folder)
        return sorted((f for f in files if place.holds(f.path)), key=lambda f: f.path.encode())
    except FileNotFoundError as error:
        raise DataError(
            f"{place.folder} does not exist. Make the data first, or set data.prepare."
        ) from error
    except DataError:
        raise
    except Exception as error:  # each filesystem of fsspec has errors of its own
        raise DataError(f"{place.url} cannot be listed: {explain(error, place.url)}") from error


def explain(error: Exception, url: str) -> str:
    """Return what is wrong when ``url`` cannot be read, in words without a secret."""
    if url.startswith("s3://"):
        return explain_s3(error, url)
    return str(error) or repr(error)


def read_footer(filesystem: pafs.FileSystem, path: str, size_bytes: int, *, url: str = "") -> bytes:
    """Return the footer of a Parquet file, with its length and magic, as the file ends.

    Args:
        filesystem: Of :func:`filesystem_for`.
        path: The file on it.
        size_bytes: The file's size.
        url: The file as a message should name it; ``path`` if not given.

    Raises:
        DamagedError: The file is empty, cut off, or not Parquet.
        DataError: It cannot be read.
    """
    url = url or path
    if size_bytes == 0:
        raise DamagedError(f"{url} is empty (0 bytes). Write it again or delete it.")
    try:
        with filesystem.open_input_file(path) as file:
            tail = file.read_at(min(size_bytes, _TAIL_BYTES), max(size_bytes - _TAIL_BYTES, 0))
            length = int.from_bytes(tail[-8:-4], "little") + 8
            if not tail.endswith(_MAGIC) or length + len(_MAGIC) > size_bytes:
                raise DamagedError(
                    f"{url} ({size_bytes} bytes) does not end as a Parquet file: it was cut off "
                    f"or is something else. Write it again or delete it."
                )
            if length > len(tail):
                tail = file.read_at(length, size_bytes - length)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{url} cannot be read: {explain(error, url)}") from error
    return bytes(tail[-length:])


def _list_local(folder: str) -> Iterator[StoredFile]:
    folder = os.path.abspath(folder)
    selector = pafs.FileSelector(folder, recursive=True)
    for info in pafs.LocalFileSystem().get_file_info(selector):
        if info.is_file:
            path = info.path[len(folder) :].strip("/")
            yield StoredFile(path, info.size, str(info.mtime_ns))


def _list_bucket(address: str, literal: str) -> Iterator[StoredFile]:
    bucket, _, key = address.rstrip("/").partition("/")
    prefix = f"{key}/" if key else ""
    for name, size, etag in list_s3(bucket, prefix + literal):
        if not name.endswith("/"):  # some tools write an empty object to stand for a folder
            yield StoredFile(name[len(prefix) :], size, etag)


def _list_fsspec(url: str) -> Iterator[StoredFile]:
    filesystem, folder = fsspec.core.url_to_fs(url)
    folder = folder.rstrip("/")
    for name, info in filesystem.find(folder, detail=True).items():
        stamp = next((str(info[key]) for key in _STAMPS if info.get(key) is not None), "")
        path = name[len(folder) :].strip("/") if name.startswith(folder) else name
        if path:
            yield StoredFile(path, int(info.get("size") or 0), stamp)


def _literal(pattern: str) -> str:
    """Return what all matches of a glob begin with."""
    found = _MAGIC_SIGNS.search(pattern)
    return pattern if found is None else pattern[: found.start()]


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether a path, or a folder that it is in, fits a glob; both cut at the slashes."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(path[i:], pattern[1:]) for i in range(len(path)))
    if not path or not fnmatch.fnmatchcase(path[0], pattern[0]):
        return False
    return _matches(path[1:], pattern[1:])

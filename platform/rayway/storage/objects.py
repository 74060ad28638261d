"""Put, get, list and delete objects in one folder, wherever it is.

``Objects`` is the only door to storage. It checks keys, repeats calls that a remote store may
answer later, and turns whatever went wrong into a ``StorageError`` that says what to do.
"""

import copy
import io
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from rayway.errors import SpecError, StorageError
from rayway.storage.background import in_order, within
from rayway.storage.failures import without_user
from rayway.storage.folder import Chunks, Folder, Names, Page, Parts, Piece, Stamp
from rayway.storage.local import LocalFolder
from rayway.storage.logs import SEGMENT_BYTES, LastSegment, more_of, segment_key
from rayway.storage.remote import RemoteFolder
from rayway.storage.retry import Retry
from rayway.storage.transfer import Download, Upload, pieces, whole

T = TypeVar("T")

_SLOWEST = 250_000
"""Bytes a second below which a transfer is taken for a hanging one."""

_AT_ONCE = 16
"""Requests under way together where many small ones are to be made."""

_BUFFER_BYTES = 1 << 20


_PROBE_S = 8.0


class ObjectMissing(StorageError):  # noqa: N818 - reads as what it says, like FileNotFoundError
    """There is no object of that key."""


class _ObjectExists(StorageError):  # noqa: N818
    """There is an object of that key already."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object."""

    key: str
    """Its name below the folder it was listed from, parts joined by ``/``."""

    bytes: int
    """Its size in bytes."""


Infos = list[ObjectInfo]


class Objects:
    """The objects in one folder on one storage.

    Args:
        url: A local path, or the URL of a folder on any fsspec file system.
        folder: What answers the calls; found from the URL unless given.
        retry: How long to insist on a remote storage. A local disk is asked once.
        try_s: Longest time of one try there, in seconds; longer by 1 s for each 250 kB sent.

    Raises:
        SpecError: No file system is known, or installed, for the URL.
    """

    def __init__(
        self,
        url: str,
        *,
        folder: Folder | None = None,
        retry: Retry | None = None,
        try_s: float = 30.0,
    ) -> None:
        self._url = _absolute(url)
        self._folder: Folder = folder or _folder_for(self._url)
        self._retry = retry or Retry(**({"budget_s": 0} if self._folder.is_local else {}))
        self._try_s = try_s
        self._prefix = ""
        self._last_segments: dict[str, LastSegment] = {}
        self._logs_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Objects({shown_url(self.url)!r})"

    @property
    def url(self) -> str:
        """The folder's address; an absolute path where it is local."""
        return f"{self._url}/{self._prefix[:-1]}" if self._prefix else self._url

    @property
    def is_local(self) -> bool:
        """Whether objects are files of this machine, see ``local_path``."""
        return self._folder.is_local

    @property
    def is_shared(self) -> bool:
        """Whether another process can see the objects; not so for ``memory://``."""
        return self._folder.is_shared

    def at(self, prefix: str) -> Self:
        """Return the objects in a folder below this one."""
        below = copy.copy(self)
        below._prefix = self._full(prefix) + "/"
        return below

    def local_path(self, key: str) -> Path | None:
        """Return the file that holds an object, or ``None`` if the storage is not local."""
        return Path(self._url, self._full(key)) if self.is_local else None

    def put(self, key: str, data: bytes | memoryview | Chunks) -> None:
        """Store an object in place of an older one; a reader sees the old or the new one, whole.

        Args:
            key: Its name below this folder.
            data: The bytes, or chunks of bytes that can be iterated again if a try fails.
        """
        chunks = (data,) if isinstance(data, bytes | memoryview) else data
        if self._folder.parts is None:
            self._call("write", key, lambda full: self._folder.write(full, chunks))
            return
        self._full(key)
        upload = Upload(_Target(self, key, self._folder, self._folder.parts))
        try:
            for chunk in chunks:
                upload.write(chunk)
            upload.finish()
        except BaseException:
            upload.drop()
            raise

    def create(self, key: str, data: bytes) -> bool:
        """Store an object unless there is one: of several writers exactly one is told yes.

        Args:
            key: Its name below this folder.
            data: Bytes no other writer uses (they hold a random id). If an answer was lost on its
                way, they tell whether the object that is there is ours.

        Returns:
            Whether the object is the one this call stored.
        """
        try:
            self._call("create", key, lambda full: self._folder.create(full, data))
        except _ObjectExists:
            try:
                return self.get(key) == data
            except ObjectMissing:  # deleted meanwhile: it was there, so it was not ours
                return False
        return True

    def append(self, key: str, data: bytes) -> None:
        """Add bytes to the end of a log, made if missing. A crash may lose the last ones.

        A log has one writer at a time, and is read by ``open_log``.
        """
        append = self._folder.append
        if append is not None:
            self._call("append to", key, lambda full: append(full, data))
            return
        full = self._full(key)
        with self._logs_lock:
            last = (self._last_segments.get(full) or self._find_last_segment(key)).next()
            grown = LastSegment(last.number, last.data + data)
            self.put(segment_key(key, last.number), memoryview(grown.data))
            self._last_segments[full] = grown

    def get(self, key: str) -> bytes:
        """Return an object's bytes.

        Raises:
            ObjectMissing: There is no such object.
        """
        first: Piece = self._call("read", key, self._folder.fetch)
        return whole(first, self._fetch(key, first.version))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return bytes of an object; fewer where it ends.

        Raises:
            ObjectMissing: There is no such object.
        """
        first = self._fetch_piece(key, start, min(length, _BUFFER_BYTES))
        end = min(start + length, first.total)
        rest = pieces(self._fetch(key, first.version), start + len(first.data), end)
        return b"".join((first.data, *rest)) if start + len(first.data) < end else first.data

    def open_read(self, key: str) -> BinaryIO:
        """Open an object for reading, to be closed by the caller.

        Raises:
            ObjectMissing: There is no such object. Reading may raise ``StorageError``, too.
        """
        file = self._call("open", key, self._folder.open_read)
        if file is not None:
            return file
        size, version = self._call("open", key, self._folder.size)
        return io.BufferedReader(Download(self._fetch(key, version), size), _BUFFER_BYTES)

    def open_log(self, key: str) -> BinaryIO:
        """Open what was appended to a log so far, to be closed by the caller.

        Raises:
            ObjectMissing: There is no such log. Reading may raise ``StorageError``, too.
        """
        size, _ = self._call("open", key, self._folder.size)
        more = self.list(more_of(key)) if size >= SEGMENT_BYTES else []
        if not more and self.is_local:
            return self.open_read(key)
        segments = [ObjectInfo(key, size), *more]

        def fetch(start: int, length: int) -> bytes:
            data = bytearray()
            for segment in segments:
                if start < segment.bytes and length:
                    some = min(length, segment.bytes - start)
                    data += self._fetch(segment.key, None)(start, some)
                    length -= some
                start = max(start - segment.bytes, 0)
            return bytes(data)

        total = sum(segment.bytes for segment in segments)
        return io.BufferedReader(Download(fetch, total), _BUFFER_BYTES)

    def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        return self._call("look up", key, self._folder.exists)

    def which_exist(self, keys: Iterable[str]) -> Names:
        """Return those keys, in their order, of which there is an object."""
        keys = list(keys)
        asks = (lambda key=key: self.exists(key) for key in keys)
        there = in_order(asks, at_once=1 if self.is_local else _AT_ONCE)
        return [key for key, is_there in zip(keys, there, strict=True) if is_there]

    def list(self, prefix: str = "") -> Infos:
        """Return all objects below the folder ``prefix``, sorted by key; none if it is missing.

        The keys are relative to this folder, not to ``prefix``. Unfinished writes are no objects.
        """
        entries = [entry for page in self._pages(prefix, deep=True) for entry in page.sizes]
        return [ObjectInfo(key.removeprefix(self._prefix), size) for key, size in sorted(entries)]

    def folders(self, prefix: str = "") -> Names:
        """Return the sorted names of the folders directly in the folder ``prefix``."""
        return sorted(name for page in self._pages(prefix, deep=False) for name in page.folders)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, in the order given; one that is gone already is fine."""
        for key in keys:
            self._call("delete", key, self._folder.delete)
            self._last_segments.pop(self._full(key), None)

    def delete_folder(self, prefix: str) -> None:
        """Remove the folder ``prefix`` with all that is in it, unfinished writes included."""
        full = self._full(prefix)
        for page in self._pages(prefix, deep=True):
            keys = [key for key, _ in page.sizes]
            if keys:
                self._call("delete", prefix, lambda _, keys=keys: self._folder.delete_all(keys))  # type: ignore[misc]  # mypy does not infer a lambda's default
        self._call("delete", prefix, self._folder.delete_rest)
        with self._logs_lock:
            for key in [key for key in self._last_segments if key.startswith(f"{full}/")]:
                del self._last_segments[key]

    def probe(self) -> None:
        """Create, read, list and delete a small object, within some 20 s.

        Raises:
            StorageError: One of them failed, what was read is not what was written, or the store
                lets two writers create the same object.
        """
        patient = copy.copy(self)
        patient._retry = Retry(budget_s=min(self._retry.budget_s, _PROBE_S))
        patient._try_s = min(self._try_s, _PROBE_S)
        folder = f"probe-{secrets.token_hex(8)}"
        key, mine = f"{folder}/object", folder.encode()
        try:
            patient.create(key, mine)
            taken = patient.create(key, b"somebody else's")
            found = patient.get(key)
            listed = [info.key for info in patient.list(folder)]
        except StorageError:
            with suppress(StorageError):  # the first error is the one to report
                patient.delete([key])
                patient.delete_folder(folder)
            raise
        patient.delete_folder(folder)
        where = shown_url(self.url)
        if taken:
            raise StorageError(
                f"{where} lets two writers create the same object: it ignores the condition "
                "(If-None-Match). Two runs could take the same folder there: use another store."
            )
        if found != mine:
            raise StorageError(
                f"{where} gave back {len(found)} other bytes than the {len(mine)} "
                "just written. Do not train on this storage."
            )
        if listed != [key]:
            raise StorageError(
                f"{where} does not list an object that was just written. Do not train on this "
                "storage."
            )

    def _pages(self, prefix: str, *, deep: bool) -> Iterator[Page]:
        after: str | None = None
        while True:
            page: Page = self._call(
                "list",
                prefix,
                lambda full, after=after: self._folder.list(full, deep=deep, after=after),  # type: ignore[misc]  # mypy does not infer a lambda's default
                may_be_root=True,
            )
            yield page
            after = page.after
            if after is None:
                return

    def _fetch_piece(self, key: str, start: int, length: int, version: str | None = None) -> Piece:
        def fetch(full: str) -> Piece:
            return self._folder.fetch(full, start, length, version=version)

        return self._call("read", key, fetch, size=length)

    def _fetch(self, key: str, version: str | None) -> Callable[[int, int], bytes]:
        """Return what fetches bytes that are known to be there, of one version of an object."""

        def fetch(start: int, length: int) -> bytes:
            data = self._fetch_piece(key, start, length, version).data
            if len(data) != length:
                raise StorageError(
                    f"{shown_url(self.url)}/{key} ended while it was read: {len(data)} bytes from "
                    f"byte {start} on, instead of {length}. It was replaced, or is damaged."
                )
            return data

        return fetch

    def _find_last_segment(self, key: str) -> LastSegment:
        """Return where a log goes on that somebody else began."""
        try:
            first = self.get(key)
        except ObjectMissing:
            return LastSegment()
        more = self.list(more_of(key)) if len(first) >= SEGMENT_BYTES else []
        if not more:
            return LastSegment(0, bytearray(first))
        newest = more[-1].key
        return LastSegment(int(newest.rpartition("/")[2]), bytearray(self.get(newest)))

    def _call(
        self,
        verb: str,
        key: str,
        call: Callable[[str], T],
        *,
        may_be_root: bool = False,
        size: int = 0,
    ) -> T:
        """Make one call to the storage, in time or again: every one goes through here."""
        full = self._prefix[:-1] if may_be_root and not key else self._full(key)
        folder, limit_s = self._folder, self._try_s + size / _SLOWEST
        is_remote = folder.is_shared and not folder.is_local
        try:
            return self._retry.run(
                lambda: within(limit_s, lambda: call(full)) if is_remote else call(full),
                may_pass=folder.may_pass,
            )
        except Exception as error:  # noqa: BLE001 - raised again, as one of ours
            # A traceback would show what explain() took out of the words of a store.
            raise self._failure(verb, key, error) from (None if is_remote else error)

    def _failure(self, verb: str, key: str, error: Exception) -> StorageError:
        if isinstance(error, StorageError):
            return error
        where = f"{shown_url(self.url)}/{key}".rstrip("/")
        if isinstance(error, FileNotFoundError):
            return ObjectMissing(f"{where} does not exist.")
        if isinstance(error, FileExistsError):
            return _ObjectExists(f"{where} exists already.")
        cause, repair = self._folder.explain(error)
        return StorageError(f"cannot {verb} {where}: {cause}. {repair}")

    def _full(self, key: str) -> str:
        """Return the key below the storage's root, if it stays inside on every kind of storage."""
        parts = key.split("/")
        if any(part in {"", ".", ".."} or len(part.encode()) > 200 for part in parts) or re.search(
            r"[\x00-\x1f\x7f\\]", key
        ):
            raise StorageError(
                f"{key!r} is no object key: use names of 1 to 200 bytes joined by '/', without "
                "'.', '..', backslashes and control characters."
            )
        return self._prefix + key


class _Target:
    """Where an upload in parts goes: one key of a folder, each request tried again."""

    def __init__(self, objects: Objects, key: str, folder: Folder, parts: Parts) -> None:
        self._objects = objects
        self._key = key
        self._folder = folder
        self._parts = parts
        self.part_bytes = parts.part_bytes
        self.most_parts = parts.most_parts

    def put_whole(self, data: memoryview) -> None:
        self._call(lambda full: self._folder.write(full, (data,)), size=len(data))

    def begin(self, writer: str) -> str:
        return self._call(lambda full: self._parts.begin(full, writer))

    def put_part(self, upload: str, number: int, data: memoryview) -> Stamp:
        return self._call(lambda full: self._parts.put(full, upload, number, data), size=len(data))

    def finish(self, upload: str, stamps: list[Stamp], writer: str) -> None:
        try:
            self._call(
                lambda full: self._parts.finish(full, upload, stamps),
                size=len(stamps) * _SLOWEST,  # a second more for each part
            )
        except ObjectMissing as error:  # perhaps since it was finished, and the answer got lost
            if self._call(self._parts.writer) != writer:
                raise StorageError(
                    f"cannot write {shown_url(self._objects.url)}/{self._key}: somebody dropped "
                    "its upload. Try again."
                ) from error

    def drop(self, upload: str) -> None:
        self._call(lambda full: self._parts.drop(full, upload))

    def _call(self, call: Callable[[str], T], *, size: int = 0) -> T:
        return self._objects._call("write", self._key, call, size=size)


def shown_url(url: str) -> str:
    """Return a URL fit for a message: without user name, password and query."""
    return without_user(url).partition("?")[0] if "://" in url else url


def _absolute(url: str) -> str:
    """Return a URL without a trailing slash, or the absolute path of a local folder."""
    if url.startswith("file:"):
        url = "/" + url.removeprefix("file:").lstrip("/")
    if "://" in url:
        scheme, _, path = url.partition("://")
        return f"{scheme}://{path.rstrip('/')}"
    if not url:
        raise SpecError("the storage address is empty. Give a path or a URL, such as ./runs.")
    return os.path.abspath(url)


def _folder_for(url: str) -> Folder:
    if "://" not in url:
        return LocalFolder(Path(url))
    try:
        if url.startswith("s3://"):
            from rayway.storage.s3 import S3Folder  # noqa: PLC0415 - botocore takes a quarter second

            return S3Folder(url)
        return RemoteFolder(url)
    except (ValueError, ImportError) as error:
        raise SpecError(
            f"no storage is known for {shown_url(url)}: {error}. Use a path, s3://bucket/folder, "
            "or install the package that serves this URL."
        ) from error

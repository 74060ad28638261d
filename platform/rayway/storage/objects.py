"""Put, get, list and delete objects in one folder, wherever it is.

``Objects`` is the only door to storage. It checks keys, repeats calls that a remote store may
answer later, and turns whatever went wrong into a ``StorageError`` that says what to do.
"""

import copy
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from rayway.errors import SpecError, StorageError
from rayway.storage.local import LocalFolder
from rayway.storage.remote import RemoteFolder
from rayway.storage.retry import Retry

T = TypeVar("T")
Folder = LocalFolder | RemoteFolder
Chunks = Iterable[bytes | memoryview]
Names = list[str]  # named here, since the class below has a method called list

_REPAIRS = {
    errno.ENOSPC: "Free some space, then start again; what was committed is untouched.",
    errno.EDQUOT: "Free some of the quota, then start again; what was committed is untouched.",
    errno.EACCES: "Check who may write there, and the credentials.",
    errno.EPERM: "Check who may write there, and the credentials.",
    errno.EROFS: "The file system is read-only: choose another storage.",
    errno.ENOTDIR: "A file stands where a folder is needed: move it or choose another storage.",
}
_USER_INFO = re.compile(r"//[^/@\s]*@")
_REPAIR = "Check that the storage is reachable and its address is right."


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

    Raises:
        SpecError: No file system is known, or installed, for the URL.
    """

    def __init__(
        self, url: str, *, folder: Folder | None = None, retry: Retry | None = None
    ) -> None:
        self._url = _absolute(url)
        self._folder = folder or _folder_for(self._url)
        self._retry = retry or Retry(budget_s=0 if self._folder.is_local else 60)
        self._prefix = ""

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
        self._call("write", key, lambda full: self._folder.write(full, chunks))

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
        """Add bytes to the end of an object, made if missing. A crash may lose the last ones."""
        self._call("append to", key, lambda full: self._folder.append(full, data), once=True)

    def get(self, key: str) -> bytes:
        """Return an object's bytes.

        Raises:
            ObjectMissing: There is no such object.
        """
        return self._call("read", key, self._folder.read)

    def open_read(self, key: str) -> BinaryIO:
        """Open an object for reading, to be closed by the caller.

        Raises:
            ObjectMissing: There is no such object.
        """
        return self._call("open", key, self._folder.open_read)

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """Open an object for writing; whole, it appears when the block ends without an error."""
        full = self._full(key)
        try:
            with self._folder.open_write(full) as file:
                yield file
        except OSError as error:
            raise self._failure("write", key, error) from error

    def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        return self._call("look up", key, self._folder.exists)

    def list(self, prefix: str = "") -> Infos:
        """Return all objects below the folder ``prefix``, sorted by key; none if it is missing.

        The keys are relative to this folder, not to ``prefix``. Unfinished writes are no objects.
        """
        entries = self._call("list", prefix, self._folder.list, may_be_root=True)
        return [ObjectInfo(key.removeprefix(self._prefix), size) for key, size in sorted(entries)]

    def folders(self, prefix: str = "") -> Names:
        """Return the sorted names of the folders directly in the folder ``prefix``."""
        return sorted(self._call("list", prefix, self._folder.folders, may_be_root=True))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, in the order given; one that is gone already is fine."""
        for key in keys:
            self._call("delete", key, self._folder.delete)

    def delete_folder(self, prefix: str) -> None:
        """Remove the folder ``prefix`` with all that is in it, unfinished writes included."""
        self._call("delete", prefix, self._folder.delete_folder)

    def probe(self) -> None:
        """Write, read and delete a small object.

        Raises:
            StorageError: One of them failed, or what was read is not what was written.
        """
        key = f"probe-{secrets.token_hex(8)}"
        patient = copy.copy(self)
        patient._retry = Retry(budget_s=min(self._retry.budget_s, 10))
        patient.put(key, key.encode())
        found = patient.get(key)
        patient.delete([key])
        if found != key.encode():
            raise StorageError(
                f"{shown_url(self.url)} gave back {len(found)} other bytes than the {len(key)} "
                "just written. Do not train on this storage."
            )

    def _call(
        self,
        verb: str,
        key: str,
        call: Callable[[str], T],
        *,
        once: bool = False,
        may_be_root: bool = False,
    ) -> T:
        """Make one call to the storage: every one goes through here but streamed writes."""
        full = self._prefix[:-1] if may_be_root and not key else self._full(key)
        retry = Retry(budget_s=0) if once else self._retry
        try:
            return retry.run(lambda: call(full))
        except Exception as error:
            raise self._failure(verb, key, error) from error

    def _failure(self, verb: str, key: str, error: Exception) -> StorageError:
        where = f"{shown_url(self.url)}/{key}".rstrip("/")
        if isinstance(error, FileNotFoundError):
            return ObjectMissing(f"{where} does not exist.")
        if isinstance(error, FileExistsError):
            return _ObjectExists(f"{where} exists already.")
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        cause = _USER_INFO.sub("//", cause)
        repair = _REPAIRS.get(getattr(error, "errno", None) or 0, _REPAIR)
        return StorageError(
            f"cannot {verb} {where}: {cause or type(error).__name__} "
            f"({type(error).__name__}). {repair}"
        )

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


def shown_url(url: str) -> str:
    """Return a URL fit for a message: without user name, password and query."""
    return _USER_INFO.sub("//", url).partition("?")[0] if "://" in url else url


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
        return RemoteFolder(url)
    except (ValueError, ImportError) as error:
        raise SpecError(
            f"no storage is known for {shown_url(url)}: {error}. Use a path, s3://bucket/folder, "
            "or install the package that serves this URL."
        ) from error

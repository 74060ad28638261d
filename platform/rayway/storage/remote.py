"""Objects on any fsspec file system: an object store, or the memory of this process.

An object store shows an upload whole or not at all, so a write needs no draft there.
"""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, BinaryIO

import fsspec

from rayway.storage.failures import explain, is_transient
from rayway.storage.folder import Chunks, Names, Page, Piece, Sizes

# The memory file system hands out its live buffers and checks before it creates; threads of one
# process need a lock around both.
_MEMORY_LOCK = threading.RLock()
_PIECE = 8 << 20  # bytes handed to an upload at once


class RemoteFolder:
    """A folder of an fsspec file system. Methods raise what that raises; keys are checked."""

    is_local = False
    parts = None

    def __init__(self, url: str, *, filesystem: Any = None) -> None:
        if filesystem is None:
            filesystem, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        else:
            self._root = filesystem._strip_protocol(url)
        self._fs = filesystem
        self._in_memory = url.startswith("memory:")
        self.is_shared = not self._in_memory
        self._lock: AbstractContextManager[Any] = _MEMORY_LOCK if self._in_memory else nullcontext()

    def write(self, key: str, chunks: Chunks) -> None:
        """Store an object whole, in place of an older one."""
        with self.open_write(key) as file:
            for chunk in chunks:
                for start in range(0, len(chunk), _PIECE):
                    file.write(chunk[start : start + _PIECE])

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """Open an object for writing; it appears when the block ends without an error."""
        if self._in_memory:
            buffer = io.BytesIO()
            yield buffer
            with self._lock:
                self._fs.pipe_file(self._path(key), buffer.getvalue())
            return
        file = self._fs.open(self._path(key), "wb", autocommit=False)
        try:
            yield file
            file.close()
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                file.discard()
            raise
        file.commit()

    def create(self, key: str, data: bytes) -> None:
        """Store an object unless the key is taken, which is a FileExistsError."""
        with self._lock:
            self._fs.pipe_file(self._path(key), data, mode="create")

    @property
    def append(self) -> Callable[[str, bytes], None] | None:
        """What adds bytes to the end of an object; in an object store they cannot grow."""
        return self._append if self._in_memory else None

    def fetch(
        self, key: str, start: int = 0, length: int | None = None, *, version: str | None = None
    ) -> Piece:
        """Return bytes of an object. fsspec knows no versions."""
        del version
        path = self._path(key)
        with self._lock:
            if start == 0 and length is None:
                whole: bytes = self._fs.cat_file(path)
                return Piece(whole, len(whole))
            total = self.size(key)[0]
            end = total if length is None else min(start + length, total)
            data: bytes = self._fs.cat_file(path, start=start, end=end) if start < end else b""
            return Piece(data, total)

    def size(self, key: str) -> tuple[int, str | None]:
        """Return the size in bytes of an object."""
        info = self._fs.info(self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return int(info["size"]), None

    def open_read(self, key: str) -> BinaryIO | None:
        """Open an object in memory for reading; in a store it is fetched piece by piece."""
        return io.BytesIO(self.fetch(key).data) if self._in_memory else None

    def exists(self, key: str) -> bool:
        """Return whether there is such an object. Failing to ask is an error, not a no."""
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, folder: str, *, deep: bool, after: str | None = None) -> Page:
        """Return all that is in a folder; folder markers are left out."""
        del after  # there is one page
        self._fs.invalidate_cache()
        return Page(self._files(folder), []) if deep else Page([], self._folders(folder))

    def delete(self, key: str) -> None:
        """Remove an object that may be gone already."""
        with self._lock, suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def delete_all(self, keys: Names) -> None:
        """Remove objects that may be gone already."""
        for key in keys:
            self.delete(key)

    def delete_rest(self, folder: str) -> None:
        """Nothing is left of a folder without objects, as far as fsspec can tell."""

    def may_pass(self, error: Exception) -> bool:
        """Return whether the same call may succeed a little later."""
        return is_transient(error)

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return (what went wrong, what to do)."""
        return explain(error)

    def _append(self, key: str, data: bytes) -> None:
        with self._lock, self._fs.open(self._path(key), "ab") as file:
            file.write(data)

    def _files(self, folder: str) -> Sizes:
        entries = self._fs.find(self._path(folder), detail=True)
        start = len(self._root) + 1
        return [
            (name[start:], int(info["size"]))
            for name, info in entries.items()
            if info["type"] == "file" and not name.endswith("/") and name != self._path(folder)
        ]

    def _folders(self, folder: str) -> Names:
        try:
            entries = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return [
            entry["name"].rstrip("/").rsplit("/", 1)[-1]
            for entry in entries
            if entry["type"] == "directory"
        ]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

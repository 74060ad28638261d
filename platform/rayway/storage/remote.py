"""Objects on any fsspec file system: an object store, or the memory of this process.

An object store shows an upload whole or not at all, so a write needs no draft there.
"""

import io
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, BinaryIO

import fsspec

# The memory file system hands out its live buffers and checks before it creates; threads of one
# process need a lock around both.
_MEMORY_LOCK = threading.RLock()
_PIECE = 8 << 20  # bytes handed to an upload at once

# Named here, since the class below has a method called list.
Names = list[str]
Sizes = list[tuple[str, int]]


class RemoteFolder:
    """A folder of an fsspec file system. Methods raise what that raises; keys are checked."""

    is_local = False

    def __init__(self, url: str, *, filesystem: Any = None) -> None:
        if filesystem is None:
            filesystem, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        else:
            self._root = filesystem._strip_protocol(url)
        self._fs = filesystem
        self._in_memory = url.startswith("memory:")
        self.is_shared = not self._in_memory
        self._lock: AbstractContextManager[Any] = _MEMORY_LOCK if self._in_memory else nullcontext()

    def write(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
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

    def append(self, key: str, data: bytes) -> None:
        """Add bytes to the end of an object."""
        with self._lock, self._fs.open(self._path(key), "ab") as file:
            file.write(data)

    def read(self, key: str) -> bytes:
        """Return an object's bytes."""
        with self._lock:
            data: bytes = self._fs.cat_file(self._path(key))
        return data

    def open_read(self, key: str) -> BinaryIO:
        """Open an object for reading."""
        if self._in_memory:
            return io.BytesIO(self.read(key))
        file: BinaryIO = self._fs.open(self._path(key), "rb")
        return file

    def exists(self, key: str) -> bool:
        """Return whether there is such an object. Failing to ask is an error, not a no."""
        try:
            kind: str = self._fs.info(self._path(key))["type"]
        except FileNotFoundError:
            return False
        return kind == "file"

    def list(self, folder: str) -> Sizes:
        """Return (key, bytes) of each object below a folder; folder markers are left out."""
        self._fs.invalidate_cache()
        entries = self._fs.find(self._path(folder), detail=True)
        start = len(self._root) + 1
        return [
            (name[start:], int(info["size"]))
            for name, info in entries.items()
            if info["type"] == "file" and not name.endswith("/") and name != self._path(folder)
        ]

    def folders(self, folder: str) -> Names:
        """Return the names of the folders directly inside a folder."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return [
            entry["name"].rstrip("/").rsplit("/", 1)[-1]
            for entry in entries
            if entry["type"] == "directory"
        ]

    def delete(self, key: str) -> None:
        """Remove an object that may be gone already."""
        with self._lock, suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def delete_folder(self, folder: str) -> None:
        """Remove every object below a folder."""
        for key, _ in self.list(folder):
            self.delete(key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

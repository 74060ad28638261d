"""Objects as files in a folder of this machine, each whole or absent after any crash.

A file is written under a draft name in its own folder, made durable, and only then given its name;
last, the folder is made durable. Leaving out one of the two syncs lets a power cut keep the name
without the bytes, or lose a file that was announced.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rayway.storage.disk import Disk
from rayway.storage.failures import explain, is_transient
from rayway.storage.folder import Chunks, Names, Page, Piece, Sizes

# Answers of file systems that know no hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


class LocalFolder:
    """A folder of the local file system. Methods raise OSError; keys are already checked."""

    is_local = True
    is_shared = True
    parts = None

    def __init__(self, root: Path, *, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or Disk()

    def path(self, key: str) -> Path:
        """Return the file that holds an object, there or not."""
        return self._root / key

    def write(self, key: str, chunks: Chunks) -> None:
        """Store an object whole, in place of an older one."""
        with self.open_write(key) as file:
            for chunk in chunks:
                file.write(chunk)

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """Open an object for writing; it appears when the block ends without an error."""
        path = self.path(key)
        with self._draft(path) as draft:
            with self._disk.create_file(draft) as file:
                yield file
                self._disk.sync_file(file)
            self._disk.rename(draft, path)
            self._disk.sync_folder(path.parent)

    def create(self, key: str, data: bytes) -> None:
        """Store an object unless the key is taken, which is a FileExistsError."""
        path = self.path(key)
        with self._draft(path) as draft:
            self._write_file(draft, data)
            try:
                self._disk.link(draft, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._write_file(path, data)  # exclusive too, but a crash can leave it cut short
            self._disk.sync_folder(path.parent)

    def append(self, key: str, data: bytes) -> None:
        """Add bytes to the end of an object. Not synced: a power cut may lose the last ones."""
        path = self.path(key)
        self._make_folder(path.parent)
        with path.open("ab") as file:
            file.write(data)

    def fetch(
        self, key: str, start: int = 0, length: int | None = None, *, version: str | None = None
    ) -> Piece:
        """Return bytes of an object. A disk knows no versions."""
        del version
        with self.path(key).open("rb") as file:
            file.seek(start)
            data = file.read() if length is None else file.read(length)
            return Piece(data, os.fstat(file.fileno()).st_size)

    def size(self, key: str) -> tuple[int, str | None]:
        """Return the size in bytes of an object."""
        return self.path(key).stat().st_size, None

    def open_read(self, key: str) -> BinaryIO:
        """Open an object for reading."""
        return self.path(key).open("rb")

    def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        return self.path(key).is_file()

    def list(self, folder: str, *, deep: bool, after: str | None = None) -> Page:
        """Return all that is in a folder; links to folders are not followed."""
        del after  # there is one page
        return Page(self._files(folder), []) if deep else Page([], self._folders(folder))

    def delete(self, key: str) -> None:
        """Remove an object that may be gone already."""
        path = self.path(key)
        self._disk.remove_file(path)
        with suppress(FileNotFoundError):
            self._disk.sync_folder(path.parent)

    def delete_all(self, keys: Names) -> None:
        """Remove objects that may be gone already. Their folders are not synced yet."""
        for key in keys:
            self._disk.remove_file(self.path(key))

    def delete_rest(self, folder: str) -> None:
        """Remove a folder with everything that is still in it, drafts of dead writers included."""
        root = self._root / folder
        for parent, folders, names in os.walk(root, topdown=False, onerror=_unless_missing):
            for name in names:
                self._disk.remove_file(Path(parent, name))
            for name in folders:
                path = Path(parent, name)
                remove = self._disk.remove_file if path.is_symlink() else self._disk.remove_folder
                remove(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            self._disk.remove_folder(root)
            self._disk.sync_folder(root.parent)

    def may_pass(self, error: Exception) -> bool:
        """Return whether the same call may succeed a little later."""
        return is_transient(error)

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return (what went wrong, what to do)."""
        return explain(error)

    def _files(self, folder: str) -> Sizes:
        found = []
        for parent, _, names in os.walk(self._root / folder, onerror=_unless_missing):
            for name in names:
                path = Path(parent, name)
                # A file may go while we look, and a link may lead nowhere.
                with suppress(FileNotFoundError):
                    if not _DRAFT.fullmatch(name):
                        found.append((path.relative_to(self._root).as_posix(), path.stat().st_size))
        return found

    def _folders(self, folder: str) -> Names:
        try:
            with os.scandir(self._root / folder) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def _draft(self, path: Path) -> Iterator[Path]:
        """Lend a draft's name beside ``path``; nothing has it afterwards."""
        self._make_folder(path.parent)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            yield draft
        finally:
            with suppress(OSError):  # the first error is the one to report
                self._disk.remove_file(draft)

    def _write_file(self, path: Path, data: bytes) -> None:
        with self._disk.create_file(path) as file:
            file.write(data)
            self._disk.sync_file(file)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; a file in a folder that vanishes would vanish with it."""
        if not folder.is_dir():
            self._make_folder(folder.parent)
            try:
                self._disk.create_folder(folder)
            except FileExistsError as error:  # a file; nothing to be taken for the object itself
                cause = os.strerror(errno.ENOTDIR)
                raise NotADirectoryError(errno.ENOTDIR, cause, str(folder)) from error
            self._disk.sync_folder(folder.parent)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error

"""The few calls by which a local file becomes durable, one method each.

They are a class only so that a test can hand in one that loses power between any two of them.
"""

import os
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The machine's own file system."""

    def create_file(self, path: Path) -> BinaryIO:
        """Open a new file for writing; its name and bytes are not durable yet."""
        return path.open("xb")

    def sync_file(self, file: BinaryIO) -> None:
        """Make the bytes written to ``file`` durable."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Make the names in the folder durable: new, renamed and removed ones."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name, in place of what had it."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; FileExistsError if it is taken."""
        os.link(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove a name that may be gone already."""
        path.unlink(missing_ok=True)

    def create_folder(self, path: Path) -> None:
        """Make one folder, which may be there already."""
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove one empty folder."""
        path.rmdir()

"""What a kind of storage has to do so that ``Objects`` can stand on it.

Each method is one request, or as good as one: it is tried again as a whole, in ``Objects`` and
nowhere else. It raises whatever its store raises; ``FileNotFoundError`` and ``FileExistsError``
mean what they say.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

Chunks = Iterable[bytes | memoryview]
Names = list[str]  # named here, since classes below have a method called list
Sizes = list[tuple[str, int]]
Stamp = tuple[str, ...]
"""What a store says of a part, to be handed back."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of an object, from where they were asked for."""

    data: bytes
    """Fewer than asked for where the object, or what a store gives at once, ends."""

    total: int
    """The object's size in bytes."""

    version: str | None = None
    """Which of the contents that the key has had; ``None`` where a store does not tell."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the entries of a folder."""

    sizes: Sizes
    """(key, bytes) of objects. Unfinished writes and folder markers are none."""

    folders: Names
    """Names of the folders directly inside, if they were asked for."""

    after: str | None = None
    """Ask again with this for the next page; ``None``: that was all."""


class Parts(Protocol):
    """How a large object is stored: in parts, which become an object by one last request."""

    part_bytes: int
    """Size of each part but the last. An object no larger is stored at once."""

    most_parts: int
    """How many parts an object may have."""

    def begin(self, key: str, writer: str) -> str:
        """Begin an upload, remember who does it, and return the upload's name."""

    def put(self, key: str, upload: str, number: int, data: memoryview) -> Stamp:
        """Store a part, numbered from 1, in place of an earlier try; return its stamp."""

    def finish(self, key: str, upload: str, stamps: list[Stamp]) -> None:
        """Make the object of all parts; ``FileNotFoundError``: there is no such upload (now)."""

    def drop(self, key: str, upload: str) -> None:
        """Throw away an upload that may be gone already."""

    def writer(self, key: str) -> str | None:
        """Return who wrote the object of that key, as told to ``begin``; ``None``: not known."""


class Folder(Protocol):
    """The objects below one address. Keys are already checked."""

    is_local: bool
    """Whether objects are files of this machine. It is asked once, and without a deadline."""

    is_shared: bool
    """Whether another process can see the objects."""

    @property
    def parts(self) -> Parts | None:
        """How large objects are stored; ``None``: ``write`` takes any."""

    @property
    def append(self) -> Callable[[str, bytes], None] | None:
        """What adds bytes to the end of an object; ``None``: objects cannot grow here."""

    def write(self, key: str, chunks: Chunks) -> None:
        """Store an object whole, in place of an older one."""

    def create(self, key: str, data: bytes) -> None:
        """Store an object unless the key is taken, which is a ``FileExistsError``."""

    def fetch(
        self, key: str, start: int = 0, length: int | None = None, *, version: str | None = None
    ) -> Piece:
        """Return bytes of an object; none beyond its end.

        Args:
            key: Which object.
            start: The first byte, from 0.
            length: How many; ``None``: as many as are best asked for at once.
            version: Which content it must still be; another one is an ``OSError``.
        """

    def size(self, key: str) -> tuple[int, str | None]:
        """Return the size in bytes, and the version, of an object."""

    def open_read(self, key: str) -> BinaryIO | None:
        """Open an object for reading; ``None``: it is to be fetched piece by piece."""

    def exists(self, key: str) -> bool:
        """Return whether there is such an object. Failing to ask is an error, not a no."""

    def list(self, folder: str, *, deep: bool, after: str | None = None) -> Page:
        """Return a page of what is in a folder; an empty one if there is no folder.

        Args:
            folder: Which; empty: this one.
            deep: All objects below it; otherwise only the folders directly inside.
            after: What the page before said.
        """

    def delete(self, key: str) -> None:
        """Remove an object that may be gone already."""

    def delete_all(self, keys: Names) -> None:
        """Remove objects that may be gone already, in any order."""

    def delete_rest(self, folder: str) -> None:
        """Remove what is left of a folder without objects: unfinished writes, empty folders."""

    def may_pass(self, error: Exception) -> bool:
        """Return whether the same request may succeed a little later."""

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return (what went wrong, what to do), without a secret."""

"""Large objects, in parts: several at once, each tried again for itself, never half an object."""

import io
import secrets
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Protocol

from rayway.errors import StorageError
from rayway.storage.background import in_order, start
from rayway.storage.folder import Piece, Stamp

AT_ONCE = 4
"""Requests of one transfer that are under way together."""

_LAST_PARTS_S = 10.0
"""How long an upload that is given up waits for the parts that are still on their way."""


class Target(Protocol):
    """Where an upload goes. Each call is made until it succeeds or its time is up."""

    part_bytes: int
    most_parts: int

    def put_whole(self, data: memoryview) -> None:
        """Store the object at once."""

    def begin(self, writer: str) -> str:
        """Begin an upload in parts and return its name."""

    def put_part(self, upload: str, number: int, data: memoryview) -> Stamp:
        """Store a part and return its stamp."""

    def finish(self, upload: str, stamps: list[Stamp], writer: str) -> None:
        """Make the object of the parts, once."""

    def drop(self, upload: str) -> None:
        """Throw the parts away."""


class Upload(io.RawIOBase):
    """A file to write an object into. It is there after ``finish``, whole, or never.

    At most ``AT_ONCE`` + 1 parts are held in memory.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._filling = bytearray()
        self._upload: str | None = None
        self._writer = secrets.token_hex(16)
        self._stamps: list[Future[Stamp]] = []

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]  # any buffer
        """Add bytes; wait where the network is slower than whoever writes."""
        view, size = memoryview(data).cast("B"), self._target.part_bytes
        for at in range(0, len(view), size):
            piece = view[at : at + size]
            room = size - len(self._filling)
            self._filling += piece[:room]
            if len(piece) > room:
                self._send()
                self._filling += piece[room:]
        return len(view)

    def finish(self) -> None:
        """Make it an object.

        Raises:
            StorageError: The store did not take it.
        """
        if self._upload is None:
            self._target.put_whole(memoryview(self._filling))
            return
        self._send()
        stamps = [stamp.result() for stamp in self._stamps]
        self._target.finish(self._upload, stamps, self._writer)

    def drop(self) -> None:
        """Leave nothing behind. Failing to is no error: the first one is the one to report."""
        if self._upload is not None:
            wait(self._stamps, timeout=_LAST_PARTS_S)  # one that comes later would stay
            with suppress(StorageError):
                self._target.drop(self._upload)

    def _send(self) -> None:
        target, number = self._target, len(self._stamps) + 1
        if number > target.most_parts:
            most = target.most_parts * target.part_bytes
            raise StorageError(f"this store takes at most {most} bytes an object. Write several.")
        if self._upload is None:
            self._upload = target.begin(self._writer)
        if number > AT_ONCE:
            self._stamps[-AT_ONCE].result()
        upload, part = self._upload, memoryview(self._filling)
        self._filling = bytearray()
        self._stamps.append(start(lambda: target.put_part(upload, number, part)))


Fetch = Callable[[int, int], bytes]
"""Returns bytes of an object, by first byte and length: all of them, or it raises."""

_FIRST_BYTES, _NEXT_BYTES = 1 << 20, 8 << 20


def pieces(fetch: Fetch, begin: int, end: int) -> Generator[bytes, None, None]:
    """Yield the bytes from ``begin`` to ``end``, in order, with some requests made ahead."""
    yield from in_order(
        (
            lambda at=at: fetch(at, min(_NEXT_BYTES, end - at))  # type: ignore[misc]  # mypy does not infer a lambda's default
            for at in range(begin, end, _NEXT_BYTES)
        ),
        at_once=AT_ONCE,
    )


def whole(first: Piece, fetch: Fetch) -> bytes:
    """Return an object of which the first piece is there already."""
    if len(first.data) >= first.total:
        return first.data
    return b"".join((first.data, *pieces(fetch, len(first.data), first.total)))


class Download(io.RawIOBase):
    """A file to read an object from, fetched as it is read: ahead, where it is read on and on."""

    def __init__(self, fetch: Fetch, size: int) -> None:
        super().__init__()
        self._fetch = fetch
        self._size = size
        self._at = 0
        self._held = memoryview(b"")  # fetched and not read yet, from _at on
        self._ahead: Generator[bytes, None, None] | None = None
        self._reads_on = False

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        at = max(base + offset, 0)
        if at != self._at:
            self._at, self._held, self._reads_on = at, memoryview(b""), False
            self._stop()
        return at

    def tell(self) -> int:
        """Return the next byte's number."""
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]  # any buffer
        """Fill ``buffer`` as far as what is there goes; 0 at the end."""
        if not self._held and self._at < self._size:
            self._held = memoryview(self._next(len(buffer)))
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        self._at += count
        return count

    def close(self) -> None:
        """Ask for nothing more."""
        self._stop()
        super().close()

    def _next(self, wanted: int) -> bytes:
        if not self._reads_on:  # it may be all that is wanted
            self._reads_on = True
            return self._fetch(self._at, min(max(wanted, _FIRST_BYTES), self._size - self._at))
        if self._ahead is None:
            self._ahead = pieces(self._fetch, self._at, self._size)
        return next(self._ahead)

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

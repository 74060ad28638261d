"""What is new in an event log that another process writes."""

from collections.abc import Callable
from typing import BinaryIO

from rayway.errors import StorageError
from rayway.telemetry.events import Record, decode


class LineTail:
    """Reads on where the last look ended, in whole lines.

    Args:
        open_log: Opens the log for reading, anew for each look; it must be able to seek. A log
            that is not there yet, or storage that fails, is a look that sees nothing.
    """

    def __init__(self, open_log: Callable[[], BinaryIO]) -> None:
        self._open_log = open_log
        self._offset = 0

    def poll(self) -> list[str]:
        """Return the lines added since the last call; a half-written one waits for the next."""
        return self.read_new().decode("utf-8", errors="replace").splitlines()

    def read_new(self) -> bytes:
        """Return the whole lines added since the last call, as they are."""
        try:
            with self._open_log() as log:
                log.seek(self._offset)
                new = log.read()
        except (StorageError, OSError):
            return b""
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole


class Tail:
    """Reads the records that were added to an event log since the last look.

    Args:
        open_log: As for ``LineTail``.
    """

    def __init__(self, open_log: Callable[[], BinaryIO]) -> None:
        self._lines = LineTail(open_log)

    def poll(self) -> list[Record]:
        """Return the records added since the last call."""
        return decode(self._lines.read_new()).records

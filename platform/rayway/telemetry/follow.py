"""What is new in an event log that another process writes."""

from collections.abc import Callable
from typing import BinaryIO

from rayway.errors import StorageError
from rayway.telemetry.events import Record, decode


class Tail:
    """Reads on where the last look ended.

    Args:
        open_log: Opens the log for reading, anew for each look; it must be able to seek. A log
            that is not there yet, or storage that fails, is a look that sees nothing.
    """

    def __init__(self, open_log: Callable[[], BinaryIO]) -> None:
        self._open_log = open_log
        self._offset = 0

    def poll(self) -> list[Record]:
        """Return the records added since the last call; a half-written line waits for the next."""
        try:
            with self._open_log() as log:
                log.seek(self._offset)
                new = log.read()
        except (StorageError, OSError):
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return decode(whole).records

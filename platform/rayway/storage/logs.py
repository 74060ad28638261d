"""Logs: objects that grow at the end, also where objects cannot grow.

On an object store a log is its first object, ``events.jsonl``, and once that has ``SEGMENT_BYTES``,
numbered ones in ``events.jsonl.more/``. Only the last one is written again when something is added,
so adding costs one request of bounded size, and trying that again changes nothing. A log that is
copied to a disk, or back, reads the same there.

A log has one writer at a time.
"""

from dataclasses import dataclass, field

SEGMENT_BYTES = 256 << 10
"""An object of a log is closed once it has so many bytes."""

_FOLDER = ".more"


def more_of(key: str) -> str:
    """Return the folder of a log's objects after the first."""
    return key + _FOLDER


def segment_key(key: str, number: int) -> str:
    """Return the key of one of a log's objects, counted from 0."""
    return f"{more_of(key)}/{number:06d}" if number else key


def is_more(key: str) -> bool:
    """Return whether a key is of a log's object after the first."""
    return f"{_FOLDER}/" in key


@dataclass(slots=True)
class LastSegment:
    """The object of a log that is still written to."""

    number: int = 0
    data: bytearray = field(default_factory=bytearray)

    def next(self) -> "LastSegment":
        """Return what to write to: this one, or a new one if it is full."""
        return self if len(self.data) < SEGMENT_BYTES else LastSegment(self.number + 1)

"""Where the time of reading goes, so that a run that waits for data can name what it waits for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Final

READ: Final = "read"
"""Waiting for storage: the time of a read in which its thread neither computes nor wants to."""
DECODE: Final = "decode"
"""Decompressing, decoding and checking, waiting for a core included where Linux tells it."""
TRANSFORM: Final = "transform"
"""The user's function, waiting for a core or for Python's lock included."""


class Stages:
    """Seconds spent in each stage of reading, summed over threads. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = {READ: 0.0, DECODE: 0.0, TRANSFORM: 0.0}
        self._contended_s = 0.0

    def add(self, name: str, seconds: float) -> None:
        """Add to the stage ``name``; one that is not known yet begins at 0."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Return stage -> seconds since this object was made."""
        with self._lock:
            return dict(self._seconds)

    @property
    def contended_s(self) -> float:
        """The part of it all in which threads waited for a core or for Python's lock, in seconds.

        Where it is a large part, more threads would read no faster.
        """
        return self._contended_s

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Split the time of the body into ``read`` and ``decode``."""
        wall, cpu, queued = perf_counter(), thread_time(), _queued_s()
        try:
            yield
        finally:
            used, waited = thread_time() - cpu, _queued_s() - queued
            with self._lock:
                self._seconds[DECODE] += used + waited
                self._seconds[READ] += max(perf_counter() - wall - used - waited, 0.0)
                self._contended_s += waited

    @contextmanager
    def transforming(self) -> Iterator[None]:
        """Add the time of the body to ``transform``."""
        wall, cpu = perf_counter(), thread_time()
        try:
            yield
        finally:
            took = perf_counter() - wall
            with self._lock:
                self._seconds[TRANSFORM] += took
                self._contended_s += max(took - (thread_time() - cpu), 0.0)


def _queued_s() -> float:
    """Return for how long this thread was ready to run and had no core; 0 if nobody says.

    More threads decode at once than there are cores. Without this they seem to wait for storage.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

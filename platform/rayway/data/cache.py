"""Keeps what was read last in memory, up to a number of bytes; each thing is read once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """The values used last, by key. Any number of threads may ask; one of them reads.

    Args:
        most_bytes: What the values kept may hold. One that is larger is given and not kept.
        size: Returns what a value holds, in bytes.
    """

    def __init__(self, most_bytes: int, size: Callable[[V], int]) -> None:
        self._most_bytes, self._size = most_bytes, size
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._reading: dict[K, Future[V]] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What the values kept hold, in bytes."""
        return self._bytes

    def get(self, key: K, read: Callable[[], V]) -> V:
        """Return the value of ``key``: as kept, as another thread reads it now, or from ``read``.

        An error of ``read`` is raised in every thread that waits for it and not kept.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
            found = self._reading.get(key)
            if found is None:
                mine = self._reading[key] = Future[V]()
        if found is not None:
            return found.result()
        try:
            value = read()
        except BaseException as error:
            with self._lock:
                del self._reading[key]
            mine.set_exception(error)
            raise
        with self._lock:
            self._keep(key, value)
            del self._reading[key]
        mine.set_result(value)
        return value

    def _keep(self, key: K, value: V) -> None:
        size = self._size(value)
        if size > self._most_bytes:
            return
        self._kept[key] = value, size
        self._bytes += size
        while self._bytes > self._most_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped

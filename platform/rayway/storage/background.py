"""Calls in threads of their own: to stop waiting for one in time, or to make several at once.

The threads are daemons, so that a call which hangs holds up neither its caller nor the end of the
process.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_this_thread = threading.local()


def start(call: Callable[[], T]) -> Future[T]:
    """Make a call in the background."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="storage", daemon=True).start()
    return future


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, or stop waiting for it.

    Client libraries bound each single wait on a socket. A store that sends a byte now and then
    passes all of those, so the call as a whole gets a limit here. One that is late goes on until
    its next ``check_time``, or until a socket gives up; nobody gets its result.

    Raises:
        TimeoutError: It took longer than ``limit_s`` seconds.
        BaseException: What the call raised.
    """
    deadline = time.monotonic() + limit_s

    def limited() -> T:
        _this_thread.deadline = deadline
        return call()

    future = start(limited)
    try:
        return future.result(limit_s)
    except TimeoutError as error:
        if future.done():  # the call's own
            raise
        raise TimeoutError(f"no answer within {limit_s:.3g} s") from error


def check_time() -> None:
    """End a call that nobody waits for any more.

    Raises:
        TimeoutError: The limit of the call that this thread makes has passed.
    """
    if time.monotonic() > getattr(_this_thread, "deadline", float("inf")):
        raise TimeoutError("too slow")


def in_order(calls: Iterable[Callable[[], T]], *, at_once: int) -> Iterator[T]:
    """Yield what the calls return, in their order, with at most so many under way."""
    under_way: deque[Future[T]] = deque()
    for call in calls:
        if len(under_way) == at_once:
            yield under_way.popleft().result()
        under_way.append(start(call))
    while under_way:
        yield under_way.popleft().result()

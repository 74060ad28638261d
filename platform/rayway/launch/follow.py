"""What is shown while a run goes, and what a signal does to it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from rayway.errors import StorageError
from rayway.storage.runs import STOP_KEY, RunFolder, events_key, output_key
from rayway.telemetry.console import Progress
from rayway.telemetry.follow import LineTail, Tail

_POLL_S, _REMOTE_POLL_S = 0.1, 1.0  # a look at an object store is two requests or more


class Follower:
    """Shows the events of an attempt's rank 0, and what it prints, as they come."""

    def __init__(self, folder: RunFolder, attempt: int, progress: Progress) -> None:
        events, output = events_key(attempt, 0), output_key(attempt, 0, "out")
        self._events = Tail(lambda: folder.objects.open_log(events))
        self._output = LineTail(lambda: folder.objects.open_log(output))
        self._progress = progress
        self._every_s = _POLL_S if folder.objects.is_local else _REMOTE_POLL_S
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join(timeout=10.0)

    def _follow(self) -> None:
        while not self._closing.wait(self._every_s):
            self._look()
        self._look()  # what came with the end

    def _look(self) -> None:
        for line in self._output.poll():
            self._progress.note(line)
        for record in self._events.poll():
            self._progress.feed(record)
        self._progress.refresh()


@contextmanager
def stop_on_signal(folder: RunFolder, note: Callable[[str], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request to stop; a second one aborts.

    Off the main thread, where Python allows no signal handlers, it does nothing.

    Raises:
        KeyboardInterrupt: At the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        name = signal.Signals(number).name
        note(f"{name}: stopping after this step, with a checkpoint. Once more aborts at once.")
        try:
            folder.write(STOP_KEY, {"asked_at": time.time(), "by": name})
        except StorageError as error:  # raised here, it would end the run wherever it is
            note(f"The request to stop could not be stored: {error}. Once more aborts at once.")

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

"""Looking out, beside training, for what others put into the run folder."""

import threading
import time
from types import TracebackType
from typing import Self

from rayway.errors import SpecError, StorageError
from rayway.storage.runs import STOP_KEY, RunFolder, attempt_key
from rayway.telemetry.alive import judge_life, this_place

_EVERY_S = 0.5
_EVERY_REMOTE_S = 2.0


def refuse_running(folder: RunFolder, attempt: int) -> None:
    """Look for signs of life of an attempt that another one is to follow.

    Raises:
        SpecError: It is still running.
    """
    sign = folder.read(attempt_key(attempt, "alive.json"))
    if sign is None:
        return
    verdict = judge_life(sign, now=time.time(), here=this_place())
    if verdict.alive:
        raise SpecError(
            f"run {folder.run_id} is still running: {verdict.because}. Stop it first, or wait: a "
            f"run that gives no sign of life for 30 s can be resumed."
        )


class FencedError(SpecError):
    """A newer attempt has begun, so this one must not go on."""


class Watch:
    """Sees a request to stop, and that a newer attempt took over.

    Args:
        folder: The run.
        attempt: The attempt that this process works for.
        every_s: Seconds between two looks. ``None``: more where a look is a request to a store.
    """

    def __init__(self, folder: RunFolder, attempt: int, *, every_s: float | None = None) -> None:
        self._folder = folder
        self._attempt = attempt
        usual_s = _EVERY_S if folder.objects.is_local else _EVERY_REMOTE_S
        self._every_s = usual_s if every_s is None else every_s
        self._asked = False
        self._fenced = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._thread.start()

    def stop_asked(self) -> bool:
        """Has the run been asked to stop?

        Raises:
            FencedError: A newer attempt has begun.
        """
        if self._fenced:
            raise FencedError(
                f"attempt {self._attempt} of run {self._folder.run_id} ends here: a newer attempt "
                f"has begun elsewhere, and two must not train the same run."
            )
        return self._asked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _look_on(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self._asked = self._asked or self._folder.objects.exists(STOP_KEY)
                self._fenced = not self._folder.is_newest(self._attempt)
            except StorageError:  # unknown is no reason to end a healthy run
                continue

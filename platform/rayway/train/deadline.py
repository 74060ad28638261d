"""A rank that hangs ends itself, and leaves the stacks of all its threads.

Ray watches processes, not progress; a collective that waits for a lost rank has its own time-out.
What is left is a rank that is busy with nothing: a deadlock, a reader that never answers. A timer
of the interpreter, which needs no lock that the hung code may hold, then writes all stacks to
stderr and ends the process. That is a fault like any other, and the run goes on in a new attempt.
"""

import faulthandler
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rayway.data.feed import MicroBatch
from rayway.train.step import StepReport

_RENEWALS = 20  # setting the timer starts a thread, so not every step does it


class StepDeadline:
    """An observer that lets the process live on for a while after each step.

    Args:
        timeout_s: Seconds within which a step, an evaluation or a save has to be done. It may
            take a twentieth longer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._renewed_at = 0.0

    def __enter__(self) -> Self:
        self.settle()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        faulthandler.cancel_dump_traceback_later()

    def on_step(self, report: StepReport, micro_batches: Sequence[MicroBatch]) -> None:  # noqa: ARG002 - that there was a step is all that counts
        """Take note that there is progress."""
        if time.monotonic() - self._renewed_at > self._timeout_s / _RENEWALS:
            self.settle()

    def settle(self) -> None:
        """Take note that an evaluation, a save or the end comes next."""
        self._renewed_at = time.monotonic()
        faulthandler.dump_traceback_later(
            self._timeout_s * (1 + 1 / _RENEWALS), exit=True, file=sys.__stderr__ or sys.stderr
        )

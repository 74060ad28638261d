"""How long to insist when a storage service stumbles."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rayway.storage.failures import is_transient

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Repeats a call with doubling pauses until a budget of time is spent."""

    budget_s: float = 90.0
    """Seconds from the first try after which no new try is begun. 0: one try only."""

    first_s: float = 0.2
    """Longest pause before the second try, in seconds; each pause is drawn from its upper half."""

    longest_s: float = 8.0
    """No pause is longer than this, in seconds."""

    def run(
        self, call: Callable[[], T], *, may_pass: Callable[[Exception], bool] = is_transient
    ) -> T:
        """Return what ``call`` returns, calling it again after an error that may pass.

        Raises:
            Exception: The last error of ``call``, once it is final or the budget is spent.
        """
        deadline = time.monotonic() + self.budget_s
        pause_s = self.first_s
        while True:
            try:
                return call()
            except Exception as error:
                # Ranks that failed together must not come back together.
                wait_s = pause_s * (0.5 + secrets.randbelow(500) / 1000)
                if time.monotonic() + wait_s > deadline or not may_pass(error):
                    raise
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, self.longest_s)

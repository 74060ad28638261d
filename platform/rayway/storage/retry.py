"""How long to insist when a storage service stumbles."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# An answer that will not change by asking again.
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
# Network failures that client libraries do not derive from OSError, by class name: naming them
# saves us from importing botocore and aiohttp for storage that needs neither.
_NETWORK = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "ServerTimeoutError"}


def is_transient(error: Exception) -> bool:
    """Return whether the same call may succeed a little later."""
    if isinstance(error, _FINAL):
        return False
    return isinstance(error, OSError) or any(
        parent.__name__ in _NETWORK for parent in type(error).__mro__
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Repeats a call with doubling pauses until a budget of time is spent."""

    budget_s: float = 60.0
    """Seconds from the first try after which no new try is begun. 0: one try only."""

    first_s: float = 0.2
    """Longest pause before the second try, in seconds; each pause is drawn from its upper half."""

    longest_s: float = 8.0
    """No pause is longer than this, in seconds."""

    def run(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns, calling it again after a transient error.

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
                if not is_transient(error) or time.monotonic() + wait_s > deadline:
                    raise
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, self.longest_s)

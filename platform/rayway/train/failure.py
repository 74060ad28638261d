"""What ended a rank early, in a form that outlives the process."""

import re
import traceback
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rayway.errors import LostError, RaywayError, TrainingError
from rayway.spec.code import user_traceback

Kind = Literal["refused", "user", "peer"]

_LIBRARY = re.compile(r"\b(gloo|nccl)\b", re.IGNORECASE)
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|socket|timed out waiting|store", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class RankError:
    """What ended a rank early."""

    rank: int
    kind: Kind
    """``refused``: rayway said no, and says why. ``user``: the user's code raised. ``peer``: this
    rank only noticed that another process, most often a rank, went away."""

    error: str
    """The exception's class name."""

    message: str
    """For ``user``: the traceback of the user's own frames. Else what to tell the user."""

    step: int
    """Finished steps when it happened."""

    exit_code: int
    """What the command exits with if the run ends because of it."""

    summary: str = ""
    """For ``user``: the exception in one line."""

    def record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def describe_failure(error: BaseException, *, rank: int, step: int) -> RankError:
    """Return what is to be kept about an exception that ended a rank."""
    kind: Kind
    if isinstance(error, LostError):
        kind, message = "peer", str(error)
    elif isinstance(error, RaywayError):
        kind, message = "refused", str(error)
    elif _is_lost_peer(error):
        kind, message = "peer", f"another rank went away: {error}"
    else:
        kind, message = "user", user_traceback(error)
    return RankError(
        rank=rank,
        kind=kind,
        error=type(error).__name__,
        message=message,
        step=step,
        exit_code=error.exit_code if isinstance(error, RaywayError) else TrainingError.exit_code,
        summary=f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}",
    )


def _is_lost_peer(error: BaseException) -> bool:
    """Is this what torch raises in a collective whose other end is gone?

    torch has a class for it (``DistBackendError``) that gloo does not use: it raises a bare
    ``RuntimeError``. The text of one that the user raised may look alike, so without the library's
    name in it, it also has to come from a file of torch's or ours.
    """
    if type(error).__name__ in {"DistBackendError", "DistNetworkError"}:
        return True
    if type(error) is not RuntimeError:
        return False
    if _LIBRARY.search(str(error)):
        return True
    if not _LOST_PEER.search(str(error)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = frames[-1].f_globals.get("__name__", "") if frames else ""
    return raised_in.partition(".")[0] in {"torch", "rayway"}

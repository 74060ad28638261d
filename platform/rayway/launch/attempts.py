"""Whether a run that lost its workers tries again: a pure function of what happened so far."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayway.train.failure import RankError

_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Life:
    """One attempt that ended too early."""

    attempt: int
    from_step: int
    """The checkpoint it began at, 0 if there was none."""

    to_step: int
    """The newest checkpoint when it ended."""

    failure: RankError | None
    """What a rank said of its end; ``None`` if a process just died."""

    what: str
    """The reason in words."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """Start the next attempt."""

    after_s: float


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """End the run."""

    reason: str


def plan_next(lives: Sequence[Life], *, max_attempts: int) -> Again | GiveUp:
    """Return what to do after the last of ``lives`` ended too early.

    A process that died is started again as long as checkpoints get on; lives without a new
    checkpoint are counted, and the count begins anew with each one that made some. An exception of
    the user's code is given one more chance, as it may come from outside; the same one at the same
    step ends the run, and so does one before the life's first step. A refusal ends it at once.

    Args:
        lives: All attempts of this command, oldest first; at least one.
        max_attempts: Lives without progress after which the run fails.
    """
    last = lives[-1]
    failure = last.failure
    if failure is not None and failure.kind == "refused":
        return GiveUp(reason=last.what)
    if failure is not None and failure.kind == "user":
        if failure.step <= last.from_step:
            return GiveUp(reason=last.what)
        if any(_same(failure, life.failure) for life in lives[:-1]):
            return GiveUp(reason=f"{last.what}, at step {failure.step} again")
    idle = 0
    for life in reversed(lives):
        if life.to_step > life.from_step:
            break
        idle += 1
    if idle >= max_attempts:
        return GiveUp(
            reason=f"{last.what}; {idle} lives in a row committed no new checkpoint "
            f"(scale.max_attempts={max_attempts})"
        )
    return Again(after_s=0.0 if idle <= 1 else min(2.0 ** (idle - 1), _LONGEST_PAUSE_S))


def _same(failure: RankError, other: RankError | None) -> bool:
    return other is not None and (failure.error, failure.step) == (other.error, other.step)

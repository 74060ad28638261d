"""When to save and what to delete, as functions of numbers alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class SaveRule(Protocol):
    """The part of ``CheckpointSpec`` that says when to save."""

    @property
    def every_steps(self) -> int | None:
        """Save after each such number of steps; ``None``: only at the end."""
        ...


class KeepRule(Protocol):
    """The part of ``CheckpointSpec`` that says what stays."""

    @property
    def keep_last(self) -> int:
        """How many of the newest checkpoints stay, 1 or more."""
        ...

    @property
    def keep_every_steps(self) -> int | None:
        """Checkpoints at multiples of this stay for good; ``None``: none does."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """A ``KeepRule`` outside a job."""

    keep_last: int
    """How many of the newest checkpoints stay, 1 or more."""

    keep_every_steps: int | None = None
    """Checkpoints at multiples of this stay for good; ``None``: none does."""


def save_due(step: int, last_step: int, spec: SaveRule) -> bool:
    """Return whether to save after ``step`` finished steps; always so at ``last_step``."""
    if step == last_step:
        return True
    return step > 0 and spec.every_steps is not None and step % spec.every_steps == 0


def to_delete(steps: Iterable[int], spec: KeepRule, in_use: int | None) -> list[int]:
    """Return which checkpoints may go, oldest first.

    Args:
        steps: The steps of all committed checkpoints, in any order. The newest one stays always.
        spec: What else stays.
        in_use: The step being resumed from, which stays; ``None`` if there is none.
    """
    ordered = sorted(set(steps))
    older = ordered[: -max(spec.keep_last, 1)]
    every = spec.keep_every_steps
    return [step for step in older if step != in_use and (every is None or step % every != 0)]

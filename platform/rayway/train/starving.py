"""Says when a training waits for its data, and for which stage of it.

The readers work ahead of the steps, so a slow stage only counts once steps wait. Then the stage
that took the readers most time is the one to do something about.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from rayway.data.feed import MicroBatch, Waits
from rayway.train.step import StepReport

_LOOK_EVERY_S = 10.0
_SHARE = 0.1

_STAGES: Mapping[str, tuple[str, str]] = {
    "read_s": (
        "reading from storage",
        "Bring the data nearer, or give it larger row groups and fewer bytes: rayway data prepare.",
    ),
    "decode_s": (
        "decoding Parquet",
        "Choose fewer columns with data.columns, or store rows of fixed width: rayway data "
        "prepare.",
    ),
    "transform_s": (
        "data.transform",
        "Do the part of it that never changes once, in rayway data prepare, or leave it more CPUs "
        "beside the workers, for scale.data_engine=ray.",
    ),
    "transfer_s": (
        "moving blocks between processes",
        "Try scale.data_engine=local, or do the transform once, in rayway data prepare.",
    ),
    "gather_s": (
        "gathering rows into batches",
        "Choose fewer columns with data.columns, or make rows smaller in rayway data prepare.",
    ),
}


def slowest_stage(waits: Waits) -> tuple[str, str]:
    """Return the stage that took the readers most time, in words, and what to do about it."""
    seconds = {name: getattr(waits, name) for name in _STAGES}
    return _STAGES[max(seconds, key=lambda name: seconds[name])]


class DataWatch:
    """An observer that warns, once a stage, while steps wait for data.

    Args:
        waits: The feed's seconds so far.
        warn: Takes the text; ``None`` on ranks that do not write.
        now: Seconds of a steady clock.
    """

    def __init__(
        self,
        waits: Callable[[], Waits],
        warn: Callable[[str], None] | None,
        *,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._waits, self._warn, self._now = waits, warn, now
        self._looked_at: float | None = None
        self._waited_s, self._said = 0.0, set[str]()

    def on_step(self, _: StepReport, __: Sequence[MicroBatch]) -> None:
        """Look at the waits every few seconds. The first step's does not count."""
        now = self._now()
        if self._looked_at is None:
            self._looked_at, self._waited_s = now, self._waits().wait_s
        elif now - self._looked_at >= _LOOK_EVERY_S:
            self._look(now - self._looked_at)
            self._looked_at = now

    def settle(self) -> None:
        """Nothing waits here."""

    def _look(self, passed_s: float) -> None:
        waits = self._waits()
        share = (waits.wait_s - self._waited_s) / passed_s
        self._waited_s = waits.wait_s
        stage, repair = slowest_stage(waits)
        if share >= _SHARE and stage not in self._said and self._warn is not None:
            self._said.add(stage)
            self._warn(
                f"training waits for data {100 * share:.0f} % of the time; most of the readers' "
                f"time goes into {stage}. {repair}"
            )


def waits_record(waits: Waits) -> dict[str, object]:
    """Return a feed's waits for the run's records."""
    stage, repair = slowest_stage(waits)
    names = ("wait_s", *_STAGES)
    return {
        **{name: round(getattr(waits, name), 4) for name in names},
        "slowest": stage,
        "advice": repair,
    }

"""A rank's feeds: the training samples, and a pass over the validation data."""

from dataclasses import dataclass
from typing import Any, Protocol

from rayway.data.engine import Engine
from rayway.data.feed import Feed
from rayway.data.index import Index
from rayway.data.plan import Plan, plan_order
from rayway.data.stages import Stages
from rayway.spec.batch import plan_batch
from rayway.spec.job import Job
from rayway.spec.load import import_object
from rayway.spec.own import OwnSpec
from rayway.train.ranks import dp_size

TRAINING, VALIDATION = "training", "validation"


class SharedEngine(Protocol):
    """A rank's end of a pipeline that reads for all ranks."""

    def __call__(
        self, kind: str, plan: Plan, *, start: int, stop: int, stages: Stages, name: str
    ) -> Engine:
        """Return the engine that gives this rank its units of the steps [start, stop).

        Args:
            kind: ``TRAINING`` or ``VALIDATION``: which data, read how.
            plan: The order, the same on all ranks.
            start: The first step.
            stop: The step to end before.
            stages: Told where the time goes.
            name: Of this reading, the same on all ranks; no two readings share one.
        """


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Makes the feeds of one rank. Which engine fills them changes no sample."""

    spec: Job | OwnSpec
    plan: Plan
    """The order of the training samples."""

    rank: int
    validation: Index | None = None
    shared: SharedEngine | None = None
    """``None``: threads of this process read."""

    def training(self, first: int, last: int) -> Feed:
        """Return this rank's micro-batches of the steps [first, last)."""
        return self._feed(
            self.plan, TRAINING, first, last, micro_batch=self._micro_batch, name="training"
        )

    def look(self) -> Feed:
        """Return the first step alone, read by this process."""
        micro_batch = self._micro_batch
        return self._feed(self.plan, TRAINING, 0, 1, micro_batch=micro_batch, name=None)

    def evaluation(self, step: int) -> Feed:
        """Return one pass in stored order: every row once, on any number of ranks.

        Args:
            step: Finished steps at this evaluation.
        """
        assert self.validation is not None, "asked for only where there is validation data"
        assert isinstance(self.spec, Job), "an own loop evaluates by itself"
        micro_batch = self.spec.evaluate.micro_batch or self._micro_batch
        plan = plan_order(
            self.validation,
            global_batch=micro_batch * dp_size(),
            seed=self.spec.seed,
            shuffle=False,
            cover="all",
        )
        return self._feed(
            plan,
            VALIDATION,
            0,
            plan.steps_per_epoch,
            micro_batch=micro_batch,
            name=f"validation-{step}",
        )

    @property
    def _micro_batch(self) -> int:
        return plan_batch(self.spec.batch, dp_size=dp_size()).micro_batch

    def _feed(
        self, plan: Plan, kind: str, start: int, stop: int, *, micro_batch: int, name: str | None
    ) -> Feed:
        stages = Stages()
        engine = None
        if self.shared is not None and name is not None:
            engine = self.shared(kind, plan, start=start, stop=stop, stages=stages, name=name)
        return Feed(
            plan,
            rank=self.rank,
            world_size=dp_size(),
            micro_batch=micro_batch,
            start_step=start,
            stop_step=stop,
            engine=engine,
            stages=stages,
            training=kind == TRAINING,
            **reading(self.spec),
        )


def reading(spec: Job | OwnSpec) -> dict[str, Any]:
    """Return how the rows of a job are read, as a ``Feed`` and a ``Reader`` take it."""
    data = spec.data
    return {
        "columns": data.columns,
        "transform": None if data.transform is None else import_object(data.transform),
        "seed": spec.seed,
        "invalid": data.invalid,
        "pad": data.pad,
    }

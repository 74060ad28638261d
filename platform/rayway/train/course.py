"""What a job does at which step, worked out from the job and the order of its data. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayway.checkpoint.policy import save_due
from rayway.data.index import Index
from rayway.data.plan import Plan, plan_order
from rayway.errors import SpecError
from rayway.spec.job import Job, OptimSpec
from rayway.spec.own import OwnSpec


@dataclass(frozen=True, kw_only=True)
class Course:
    """What happens at which step. Pure functions of the step: a resumed run does the same."""

    steps: int
    """Finished steps at which the run ends."""

    rows_in_step: Callable[[int], int]
    """Rows of the global batch that is next after so many finished steps."""

    save_due: Callable[[int], bool]
    evaluate_due: Callable[[int], bool]


def plan_training(job: Job | OwnSpec, indexes: Sequence[Index]) -> Plan:
    """Return the order of a job's training samples.

    Args:
        job: What is trained.
        indexes: One for each place of ``data.train``, in its order.

    Raises:
        DataError: The rows do not fill one global batch, or a place has no share of it.
    """
    return plan_order(
        indexes,
        weights=list(job.data.sources.values()),
        global_batch=job.batch.global_batch,
        seed=job.seed,
        shuffle=job.data.shuffle,
        cover=job.data.cover,
        lanes=job.data.lanes,
        bands=job.data.bands,
        window=job.data.window,
    )


def plan_course(job: Job, plan: Plan) -> Course:
    """Return what a job does at which step.

    Raises:
        SpecError: The warm-up is longer than the training.
    """
    steps = _count_steps(job, plan)
    every = job.evaluate.every_steps

    def evaluate_due(step: int) -> bool:
        if job.data.validation is None:
            return False
        return step == steps or (every is not None and step % every == 0)

    return Course(
        steps=steps,
        rows_in_step=plan.rows_in_step,
        save_due=lambda step: save_due(step, steps, job.checkpoint),
        evaluate_due=evaluate_due,
    )


def count_steps(length: OptimSpec | OwnSpec, plan: Plan) -> int:
    """Return how many steps a training of so many steps or epochs has."""
    if length.steps is not None:
        return length.steps
    assert length.epochs is not None, "the spec has one of the two"
    return max(round(length.epochs * plan.steps_per_epoch), 1)


def _count_steps(job: Job, plan: Plan) -> int:
    steps = count_steps(job.optim, plan)
    if job.optim.epochs is not None and job.optim.warmup_steps > steps:
        raise SpecError(
            f"optim.warmup_steps={job.optim.warmup_steps} is longer than the training: "
            f"optim.epochs={job.optim.epochs:g} of {plan.steps_per_epoch} steps are {steps} steps. "
            f"Use {steps} or less, or train longer."
        )
    return steps

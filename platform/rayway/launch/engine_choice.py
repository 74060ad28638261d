"""Who reads and transforms the data of a job: its workers, or Ray Data beside them. No Ray."""

from dataclasses import dataclass
from typing import Literal

from rayway.errors import SpecError
from rayway.spec.job import Job


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine fills the feeds, and why. No choice changes a sample or its order."""

    name: Literal["local", "ray"]
    data_cpus: int
    """CPUs beside the workers that may read and transform; 0 for ``local``."""

    reason: str
    """A sentence for the user."""


def choose_engine(job: Job, *, workers: int, cpus: float) -> EngineChoice:
    """Return the engine of a job.

    Args:
        job: Its ``scale.data_engine`` decides, or its transform if that is ``auto``.
        workers: Worker processes; 0: the training is in the command's own process.
        cpus: What the cluster has, the workers' share included.

    Raises:
        SpecError: ``scale.data_engine=ray`` is asked for where it cannot run.
    """
    asked, each = job.scale.data_engine, job.scale.cpus_per_worker
    left = max(int(cpus - workers * each), 0)
    if asked == "local":
        return _local("each worker reads for itself, as scale.data_engine=local says")
    if asked == "ray":
        _check_possible(workers, each=each, cpus=cpus, left=left)
        return _ray(left, "as scale.data_engine=ray says")
    if not workers:
        return _local("the training's own process reads the data: there are no workers")
    if job.data.transform is None:
        return _local(
            "each worker reads for itself: without a data.transform that is cheapest "
            "(scale.data_engine=auto)"
        )
    if not left:
        return _local(
            f"each worker reads and transforms for itself: the {workers} workers have all "
            f"{cpus:g} CPUs, and Ray Data would need one (scale.data_engine=auto)"
        )
    return _ray(left, "for data.transform (scale.data_engine=auto)")


def _local(reason: str) -> EngineChoice:
    return EngineChoice(name="local", data_cpus=0, reason=reason)


def _ray(left: int, why: str) -> EngineChoice:
    share = "1 CPU" if left == 1 else f"{left} CPUs"
    return EngineChoice(
        name="ray",
        data_cpus=left,
        reason=f"Ray Data reads and transforms on {share} beside the workers, {why}",
    )


def _check_possible(workers: int, *, each: float, cpus: float, left: int) -> None:
    if not workers:
        raise SpecError(
            "scale.data_engine=ray needs workers, and with scale.workers=0 there is no Ray "
            "cluster. Use scale.data_engine=local or auto, or 1 worker and more."
        )
    if not left:
        raise SpecError(
            f"scale.data_engine=ray: scale.workers={workers} x scale.cpus_per_worker={each:g} = "
            f"{workers * each:g} CPUs, the cluster has {cpus:g}, and data tasks need at least 1. "
            f"Use {_fitting(workers, each=each, cpus=cpus)}scale.data_engine=local."
        )


def _fitting(workers: int, *, each: float, cpus: float) -> str:
    """Say what would leave a CPU, if anything does."""
    if cpus - 1 >= each:
        return f"scale.workers={int((cpus - 1) / each)} or fewer, or "
    share = int(100 * (cpus - 1) / workers) / 100
    return f"scale.cpus_per_worker={share:g} or less, or " if share > 0 else ""

"""Everything about a job that can be found wrong before anything expensive starts. No torch."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import iglob
from pathlib import Path

from rayway.data.files import StoredFile, is_there
from rayway.data.footers import MANY_FILES, Footer, read_footers
from rayway.data.index import build_index
from rayway.data.plan import Plan
from rayway.errors import RaywayError, SpecError
from rayway.launch.engine_choice import EngineChoice, choose_engine
from rayway.spec.batch import BatchPlan, plan_batch
from rayway.spec.code import user_traceback
from rayway.spec.job import Job
from rayway.spec.load import Resolved, check_user_code, import_object
from rayway.train.course import Course, plan_course, plan_training
from rayway.train.run_data import RunData, check_alike, check_fit


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that has all it needs."""

    data: RunData
    plan: Plan
    course: Course
    batch: BatchPlan
    engine: EngineChoice
    advice: list[str]
    """What is not good about the data and does not hinder."""


def check_scale(job: Job, *, workers: int) -> BatchPlan:
    """Return how the batch is cut for a number of workers on this machine.

    Raises:
        SpecError: The batch does not divide, or the machine has too few CPUs.
    """
    plan = plan_batch(job.batch, dp_size=max(workers, 1))
    cpus, each = available_cpus(), job.scale.cpus_per_worker
    if workers * each > cpus:
        fit = int(cpus / each)
        instead = f"Use {fit} workers or fewer" if fit else "Use --workers 0"
        raise SpecError(
            f"scale.workers={workers} x scale.cpus_per_worker={each:g} need {workers * each:g} "
            f"CPUs and this machine has {cpus}. {instead}, or a smaller scale.cpus_per_worker "
            f"(fractions share a CPU)."
        )
    return plan


def prepare(resolved: Resolved, *, workers: int) -> Prepared:
    """Check a job's code, make its data if it knows how, and index the data.

    Raises:
        SpecError: The batch, the scale or a function of the user's is wrong.
        DataError: The data is missing, empty or unreadable.
    """
    job = resolved.job
    batch = check_scale(job, workers=workers)
    engine = choose_engine(job, workers=workers, cpus=available_cpus())
    check_user_code(resolved)
    _make_data(job)
    data = _index_data(job)
    plan = plan_training(job, data.train)
    return Prepared(
        data=data,
        plan=plan,
        course=plan_course(job, plan),
        batch=batch,
        engine=engine,
        advice=check_fit(job, data, plan, workers=workers),
    )


def _index_data(job: Job) -> RunData:
    columns = job.data.columns
    train = tuple(build_index(place, columns=columns, read=_footers) for place in job.data.sources)
    validation = None
    if job.data.validation is not None:
        validation = build_index(job.data.validation, columns=columns, read=_footers)
    check_alike(train, job.data)
    return RunData(train=train, validation=validation)


def _footers(folder: str, files: Sequence[StoredFile]) -> Iterator[Footer]:
    if len(files) < MANY_FILES:
        return read_footers(folder, files)
    from rayway.launch.index_data import read_many_footers  # noqa: PLC0415 - Ray takes a second

    return read_many_footers(folder, files)


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_data(job: Job) -> None:
    """Call the job's ``data.prepare`` if the training data is not there yet.

    A local folder is made beside its place and moved there when it is whole, the training data
    last: a run that finds it finds all of it.
    """
    if job.data.prepare is None or all(_exists(place) for place in job.data.sources):
        return
    first = next(iter(job.data.sources))
    folder, _, train = first.rstrip("/").rpartition("/")
    if "://" in folder:
        _prepare(job, folder, place=folder)
    else:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".rayway-", dir=place) as scratch:
            made = Path(scratch) / place.name
            _prepare(job, str(made), place=folder)
            entries = made.iterdir() if made.is_dir() else ()
            for entry in sorted(entries, key=lambda each: each.name == train):
                with suppress(OSError):  # another run was quicker: the same data is there
                    entry.rename(place / entry.name)
    for source in job.data.sources:
        if not _exists(source):
            raise SpecError(
                f"data.prepare={job.data.prepare} ran for {folder} and did not make "
                f"data.train={source}. Let it write there, or change data.train."
            )


def _prepare(job: Job, folder: str, *, place: str) -> None:
    make = import_object(job.data.prepare or "")
    try:
        make(folder)
    except RaywayError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the user's own, and is shown
        raise SpecError(
            f"data.prepare={job.data.prepare} failed to make {place}.\n{user_traceback(error)}"
        ) from None


def _exists(url: str) -> bool:
    if "://" not in url:
        return Path(url).exists() or any(iglob(url))
    return is_there(url)

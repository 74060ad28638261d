"""A job from its start, or from its newest checkpoint, to an end that has a name.

A run is a sequence of attempts. Each takes the next number in the run folder, starts workers and
waits for them; ``attempts.py`` says whether another one follows. What happened is in the folder,
not in this process: a run whose command was killed is resumed by another command, the same way.
"""

import platform
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Protocol

from rayway.checkpoint.catalog import committed
from rayway.errors import RaywayError, SpecError, StoppedError, TrainingError
from rayway.launch.attempts import Again, Life, plan_next
from rayway.launch.follow import Follower, stop_on_signal
from rayway.launch.preflight import Prepared, check_scale, prepare
from rayway.spec.code import enter_code_root
from rayway.spec.job import Job
from rayway.spec.load import Resolved, job_from_json, job_to_json, resolve_job
from rayway.storage.objects import Objects
from rayway.storage.runs import (
    DATA_KEY,
    STOP_KEY,
    RunFolder,
    attempt_key,
    check_run_id,
    find_run,
    new_run_id,
)
from rayway.telemetry.alive import Heartbeat, sign_of_life
from rayway.telemetry.console import Progress
from rayway.train.failure import RankError
from rayway.train.run_data import check_run_data, write_run_data
from rayway.train.watch import refuse_running

_HANG_MARK = (
    b"Timeout ("  # what faulthandler's report of a hung process begins with, see deadline.py
)

DEFAULT_STORAGE = "./runs"

LOST = "LOST"
"""How an attempt ended that another one follows. The run itself has not ended."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended that did not fail."""

    run_id: str
    url: str
    """Where its folder is."""

    state: str
    """``FINISHED`` or ``STOPPED``."""


class Workers(Protocol):
    """What runs an attempt."""

    def run(self, run_url: str, attempt: int) -> str:
        """Run one attempt to its end; return the state it ended in, or raise what ended it."""


def run(
    job: Job | Resolved,
    *,
    storage: str = DEFAULT_STORAGE,
    run_id: str | None = None,
    workers: int | None = None,
    show: bool = True,
    on_start: Callable[[str], None] | None = None,
) -> RunResult:
    """Train a job as a new run and wait for its end.

    Args:
        job: A job, or what ``load_job`` returned.
        storage: Folder or URL in which the run's folder is made.
        run_id: Name of the run; ``None`` makes one from the job's name and the time.
        workers: Worker processes; ``None``: as the job says. 0: train in this process.
        show: Show progress on stderr.
        on_start: Told the run id once the run exists.

    Raises:
        SpecError: The job, its batch, its scale or its code is wrong. Nothing was started.
        DataError: The data is missing, empty or unreadable. Nothing was started.
        StorageError: The run's folder cannot be written, or the run exists already.
        TrainingError: Training failed; the message and the run's folder say why.
    """
    resolved = job if isinstance(job, Resolved) else resolve_job(job)
    if workers is not None:
        resolved = _with_workers(resolved, workers)
    workers = resolved.job.scale.workers
    check_scale(resolved.job, workers=workers)
    objects = Objects(storage)
    _check_reach(objects, workers)
    objects.probe()
    now = datetime.now(UTC)
    run_id = check_run_id(run_id) if run_id else new_run_id(resolved.job.name, now)
    _refuse_taken(objects, run_id)
    prepared = prepare(resolved, workers=workers)
    folder = RunFolder.create(objects.at(run_id), job_to_json(resolved), now=now)
    write_run_data(folder, prepared.data)
    if on_start is not None:
        on_start(run_id)
    return _train(folder, resolved.job, prepared, workers=workers, show=show)


def resume(
    ref: str,
    *,
    storage: str = DEFAULT_STORAGE,
    workers: int | None = None,
    show: bool = True,
    on_start: Callable[[str], None] | None = None,
) -> RunResult:
    """Go on with a run from its newest committed checkpoint, and wait for its end.

    Args:
        ref: A run id in ``storage``, or the path or URL of a run's folder.
        storage: Where a run id is looked for.
        workers: Worker processes; ``None``: as the job says. Another number keeps the order of the
            samples, and the losses up to rounding.
        show: Show progress on stderr.
        on_start: Told the run id once it is known that the run can go on.

    Returns:
        At once if the run is finished already.

    Raises:
        SpecError: There is no such run, or it is still running.
        DataError: The data is not what it was.
        CheckpointError: No sound checkpoint is left, or it does not fit.
        TrainingError: Training failed; the message and the run's folder say why.
    """
    folder = find_run(ref, storage)
    newest = folder.newest_attempt()
    end = folder.read(attempt_key(newest, "end.json")) if newest else None
    if end is not None and end.get("state") == "FINISHED":
        if on_start is not None:
            on_start(folder.run_id)
        return RunResult(run_id=folder.run_id, url=folder.url, state="FINISHED")
    if end is None and newest:
        refuse_running(folder, newest)
    resolved = job_from_json(folder.job_json())
    workers = resolved.job.scale.workers if workers is None else workers
    check_scale(resolved.job, workers=workers)
    _check_reach(folder.objects, workers)
    folder.objects.probe()
    enter_code_root(resolved.code_root)
    prepared = prepare(resolved, workers=workers)
    if folder.objects.exists(DATA_KEY):
        check_run_data(folder)
    else:  # the run was killed before it wrote this
        write_run_data(folder, prepared.data)
    if on_start is not None:
        on_start(folder.run_id)
    return _train(folder, resolved.job, prepared, workers=workers, show=show)


def _train(
    folder: RunFolder, job: Job, prepared: Prepared, *, workers: int, show: bool
) -> RunResult:
    """Run attempts until one ends well or no other follows."""
    folder.objects.delete([STOP_KEY])
    lives: list[Life] = []
    with (
        _screen(folder, prepared, show=show) as screen,
        stop_on_signal(folder, screen.note),
        _workers(job, workers) as group,
    ):
        _say_first(screen, job, prepared)
        while True:
            attempt, from_step = _begin_attempt(folder, workers, prepared)
            alive_key = attempt_key(attempt, "alive.json")
            with Heartbeat(lambda data, key=alive_key: folder.objects.put(key, data)):  # type: ignore[misc]  # mypy does not infer a lambda's default
                with screen.follow(folder, attempt):
                    state, life = _live(folder, group, attempt, from_step)
                if state is not None:
                    return RunResult(run_id=folder.run_id, url=folder.url, state=state)
                lives.append(life)
                decision = plan_next(lives, max_attempts=job.scale.max_attempts)
                stopped = folder.objects.exists(STOP_KEY)
                if not isinstance(decision, Again) or stopped:
                    reason = life.what if isinstance(decision, Again) else decision.reason
                    _write_end(folder, life, "FAILED", reason)
                    raise _as_error(folder, life, reason)
                _write_end(folder, life, LOST, life.what)
                screen.note(
                    f"attempt {attempt} ended: {life.what}. "
                    f"Going on from step {life.to_step} in a new attempt."
                )
                time.sleep(decision.after_s)


def _begin_attempt(folder: RunFolder, workers: int, prepared: Prepared) -> tuple[int, int]:
    """Take the next attempt's number; return it and the step it will begin at."""
    from_step = _newest_step(folder)
    attempt = folder.next_attempt(
        {
            "workers": workers,
            "from_step": from_step,
            "data_engine": prepared.engine.name,
            "started_at": time.time(),
            "python": platform.python_version(),
            "rayway": version("rayway"),
            **sign_of_life(),
        }
    )
    return attempt, from_step


def _live(
    folder: RunFolder, group: Workers, attempt: int, from_step: int
) -> tuple[str | None, Life]:
    """Run one attempt: the state if it ended well, and what is known of its life."""
    state, failure, what = None, None, ""
    try:
        state = group.run(folder.url, attempt)
    except KeyboardInterrupt:
        record = {"state": "STOPPED", "reason": "aborted by a second signal"}
        folder.write(attempt_key(attempt, "end.json"), record)
        step, ref = _newest_step(folder), _reference(folder)
        raise StoppedError(
            f"run {folder.run_id} was aborted. Its newest checkpoint is of step {step}; go on from "
            f"there with: rayway resume {ref}"
        ) from None
    except Exception as error:
        failure = _first_failure(folder, attempt)
        if failure is None and isinstance(error, RaywayError):
            raise
        what = _in_words(failure) if failure else _hang(folder, attempt) or str(error)
    life = Life(
        attempt=attempt,
        from_step=from_step,
        to_step=_newest_step(folder),
        failure=failure,
        what=what,
    )
    return state, life


def _first_failure(folder: RunFolder, attempt: int) -> RankError | None:
    """Return what a rank said of its end: the cause, not its echo on other ranks."""
    failures = [RankError(**(folder.read(key) or {})) for key in folder.error_keys(attempt)]  # type: ignore[arg-type]  # JSON values, written by RankError.record
    causes = [each for each in failures if each.kind != "peer"]
    return min(causes, key=lambda each: (each.step, each.rank), default=None)


def _hang(folder: RunFolder, attempt: int) -> str | None:
    """Say which rank hung, if one did: it left its stacks before it ended itself."""
    for key in folder.output_keys(attempt, "err"):
        if _HANG_MARK in folder.objects.get(key):
            return (
                f"a rank finished no step within scale.step_timeout_s; the stacks of its threads "
                f"are in {key}"
            )
    return None


def _in_words(failure: RankError) -> str:
    if failure.kind == "user":
        return f"the job's own code raised on rank {failure.rank}: {failure.summary}"
    return failure.message


def _as_error(folder: RunFolder, life: Life, reason: str) -> RaywayError:
    """Return the error of a run that failed: the user's traceback first, then what to do."""
    ref = _reference(folder)
    see = f"See it with: rayway show {ref}"
    failure = life.failure
    if failure is not None and failure.kind == "refused":
        error = TrainingError(f"{failure.message}\n{see}")
        error.exit_code = failure.exit_code  # type: ignore[misc]  # of this error only
        return error
    if life.to_step:
        see += f"; go on from step {life.to_step} with: rayway resume {ref}"
    first = "" if failure is None else f"{failure.message}\n\n"
    return TrainingError(f"{first}run {folder.run_id} failed: {reason}.\n{see}")


def _reference(folder: RunFolder) -> str:
    """Return what names the run to another command given in the same folder."""
    by_id = Objects(DEFAULT_STORAGE).at(folder.run_id).url
    return folder.run_id if folder.url == by_id else shlex.quote(folder.url)


def _write_end(folder: RunFolder, life: Life, state: str, reason: str) -> None:
    folder.write(
        attempt_key(life.attempt, "end.json"),
        {"state": state, "reason": reason, "step": life.to_step},
    )


def _newest_step(folder: RunFolder) -> int:
    return max((each.step for each in committed(folder)), default=0)


def _with_workers(resolved: Resolved, workers: int) -> Resolved:
    if workers < 0:
        raise SpecError(f"--workers={workers}: use 0 to train in this process, or 1 and more.")
    scale = resolved.job.scale.model_copy(update={"workers": workers})
    return replace(
        resolved,
        job=resolved.job.model_copy(update={"scale": scale}),
        origins={**resolved.origins, "scale.workers": "--workers"},
    )


def _check_reach(objects: Objects, workers: int) -> None:
    if workers and not objects.is_shared:
        raise SpecError(
            f"--storage {objects.url} lives in this process only, and {workers} workers are "
            f"processes of their own. Use a folder, or --workers 0."
        )


def _refuse_taken(objects: Objects, run_id: str) -> None:
    """Say early what ``RunFolder.create`` would say after the data was read."""
    if run_id in objects.folders():
        RunFolder.open(objects.at(run_id))
        raise SpecError(
            f"run {run_id} exists already in {objects.url}. Go on with it: rayway resume {run_id}. "
            f"Or give another --run-id."
        )


def _say_first(screen: "_Screen", job: Job, prepared: Prepared) -> None:
    """Say who reads the data, what in it is left out, and what is not good about it."""
    if job.data.transform is not None or job.scale.data_engine != "auto":
        screen.note(prepared.engine.reason)
    for advice in prepared.advice:
        screen.note(advice)
    for index in prepared.data.all:
        if index.ignored:
            names = ", ".join(index.ignored[:5])
            more = f" and {index.ignored_count - 5} more" if index.ignored_count > 5 else ""
            screen.note(f"not data, left out in {index.root}: {names}{more}")


class _Screen:
    """Where a run is shown, or not."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def note(self, text: str) -> None:
        """Show one line."""
        if self._progress is not None:
            self._progress.note(text)

    @contextmanager
    def follow(self, folder: RunFolder, attempt: int) -> Iterator[None]:
        """Show an attempt's events while it runs."""
        if self._progress is None:
            yield
            return
        with Follower(folder, attempt, self._progress):
            yield


@contextmanager
def _screen(folder: RunFolder, prepared: Prepared, *, show: bool) -> Iterator[_Screen]:
    if not show:
        yield _Screen(None)
        return
    with Progress(folder.run_id, steps=prepared.course.steps) as progress:
        yield _Screen(progress)


class _ThisProcess:
    """Runs an attempt here, for a debugger."""

    def run(self, run_url: str, attempt: int) -> str:
        """Run one attempt to its end."""
        from rayway.train.worker import RankTask, run_rank  # noqa: PLC0415 - torch takes a second

        return run_rank(
            RankTask(run_url=run_url, attempt=attempt, rank=0, local_rank=0, may_hang=True)
        )


@contextmanager
def _workers(job: Job, workers: int) -> Iterator[Workers]:
    if workers == 0:
        yield _ThisProcess()
        return
    from rayway.launch.on_ray import ray_workers  # noqa: PLC0415 - Ray takes two seconds

    with ray_workers(job, workers=workers) as group:
        yield group

"""One rank of one attempt: from the run folder to the end of training.

A restart is not a special path. The rank asks the run folder for the newest committed checkpoint
and begins there; at step 0 there is none. Nothing here knows Ray: the same function is called by a
Ray worker and, for ``--workers 0``, by the command itself.
"""

import platform
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from rayway.checkpoint.store import CheckpointStore, Loaded
from rayway.errors import TrainingError
from rayway.spec.code import enter_code_root
from rayway.spec.job import Job
from rayway.spec.load import import_object, job_from_json
from rayway.storage.runs import RunFolder, attempt_key, error_key, events_key
from rayway.telemetry.events import EventLog
from rayway.train.build import build_state, learning_rate, replicate
from rayway.train.clock import Clock
from rayway.train.course import plan_course, plan_training
from rayway.train.deadline import StepDeadline
from rayway.train.evaluate import evaluate
from rayway.train.failure import describe_failure
from rayway.train.feeds import Feeds, SharedEngine
from rayway.train.loop import Errands, Observer, device_for, train
from rayway.train.ranks import barrier, dp_size, grouped
from rayway.train.records import StepRecords
from rayway.train.run_data import read_run_data
from rayway.train.saver import Newest, Saver
from rayway.train.starving import DataWatch, waits_record
from rayway.train.state import TrainState
from rayway.train.step import StepSettings, on_device
from rayway.train.watch import Watch

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """Which rank of which attempt of which run. All else is in the run folder."""

    run_url: str
    attempt: int
    rank: int
    local_rank: int
    shared_engine: SharedEngine | None = None
    """Reads for all ranks. ``None``: each rank reads for itself."""

    may_hang: bool = False
    """Let it: the process is also somebody else's, who may hold it in a debugger."""


class _Life:
    """What the rank has built so far, for whoever has to say where an error happened."""

    state: TrainState | None = None


def run_rank(task: RankTask) -> str:
    """Train as one rank until the job is done or the run is asked to stop.

    Returns:
        The state the attempt ends in: ``FINISHED`` or ``STOPPED``.

    Raises:
        Exception: What ended the rank early; the run folder has a record of it.
    """
    folder = RunFolder.open(task.run_url)
    life = _Life()
    try:
        with ExitStack() as stack:
            log = stack.enter_context(event_log(folder, task.attempt, task.rank))
            return _train(task, folder, log, life, stack)
    except (Exception, SystemExit) as error:
        step = life.state.step if life.state else 0
        failure = describe_failure(error, rank=task.rank, step=step)
        folder.write(error_key(task.attempt, task.rank), failure.record())
        if isinstance(error, SystemExit):  # else user code could end a run as if it were done
            raise TrainingError(f"the job's own code called sys.exit({error.code!r})") from error
        raise


def _train(task: RankTask, folder: RunFolder, log: EventLog, life: _Life, stack: ExitStack) -> str:
    clock = Clock()
    resolved = job_from_json(folder.job_json())
    enter_code_root(resolved.code_root)
    job = resolved.job
    torch.set_num_threads(max(int(job.scale.cpus_per_worker), 1))
    data = read_run_data(folder)
    plan = plan_training(job, data.train)
    course = plan_course(job, plan)
    settings = _step_settings(job)
    writes = task.rank == 0
    store = CheckpointStore(
        folder,
        attempt=task.attempt,
        is_newest_attempt=lambda: folder.is_newest(task.attempt),
        rank=task.rank,
        world_size=dp_size(),
        patience_s=job.scale.step_timeout_s / 2,  # a rank that waits must not look hung
    )
    saver = stack.enter_context(Saver(store, log, job=job, plan=plan, writes=writes))
    loaded = saver.find()
    first = loaded.step if loaded else 0
    feeds = Feeds(
        spec=job, plan=plan, rank=task.rank, validation=data.validation, shared=task.shared_engine
    )
    batches = stack.enter_context(feeds.training(first, course.steps))
    device = device_for(task.local_rank)
    state = life.state = build_state(job, device)
    if grouped():
        with feeds.look() as probe:
            sample = on_device(next(probe), device)[0]
        unused = replicate(state, settings.loss_function, sample.columns, seed=job.seed)
        if unused:
            saver.warn(_about_unused(unused))
    _take_up(state, loaded)
    watch = stack.enter_context(Watch(folder, task.attempt)) if writes else None
    if writes:
        log.append(start_event(task.attempt, first=first, steps=course.steps, device=device))
    clock.lap("setup_s")
    records = StepRecords(
        log.append if writes else None,
        rows_in_step=course.rows_in_step,
        trace_slots=-(-job.batch.global_batch // dp_size()) if job.trace else None,
    )

    def evaluate_now(state: TrainState) -> None:
        feed = feeds.evaluation(state.step)
        metrics, rows = evaluate(state.model, feed, settings, step=state.step, device=device)
        if writes:
            log.append({"type": "evaluate", "step": state.step, "metrics": metrics, "rows": rows})

    done = train(
        state,
        batches,
        settings,
        course,
        learning_rate=lambda step: learning_rate(job.optim, step, course.steps),
        errands=Errands(
            save=saver.save,
            evaluate=evaluate_now,
            stop_asked=watch.stop_asked if watch else lambda: False,
        ),
        observers=[
            *_deadline(task, job, stack),
            records,
            DataWatch(batches.waits, saver.warn if writes else None),
        ],
        clock=clock,
    )
    saver.finish()
    barrier()  # no rank ends, and with it the group, before all are through
    ending, reason = ("FINISHED", "all steps done") if done else ("STOPPED", "asked to stop")
    if writes:
        write_end(
            folder,
            log,
            attempt=task.attempt,
            ending=ending,
            reason=reason,
            saved=saver.newest,
            clock=clock,
            data={**waits_record(batches.waits()), "left_out": records.left_out},
        )
    return ending


def _take_up(state: TrainState, loaded: Loaded | None) -> None:
    if loaded is not None:
        others: Any = loaded.facts.get("others")
        state.restore(loaded.tensors, loaded.step, others)


def event_log(folder: RunFolder, attempt: int, rank: int) -> EventLog:
    """Return a rank's event log. A store that is asked over a network is asked less often."""
    key = events_key(attempt, rank)
    return EventLog(
        lambda data: folder.objects.append(key, data),
        flush_s=0.2 if folder.objects.is_local else 1.0,
    )


def _deadline(task: RankTask, job: Job, stack: ExitStack) -> list[Observer]:
    """Return the observer that ends a rank which hangs, if this one may not."""
    if task.may_hang:
        return []
    return [stack.enter_context(StepDeadline(job.scale.step_timeout_s))]


def _about_unused(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{len(names)} weights got no gradient in a first look: {', '.join(names[:_SHOWN])}{more}. "
        f"DDP looks for such weights in each step now, which costs time; freeze them or use them."
    )


def _step_settings(job: Job) -> StepSettings:
    return StepSettings(
        loss_function=import_object(job.loss),
        seed=job.seed,
        max_norm=job.optim.max_norm,
        autocast=torch.bfloat16 if job.precision == "bf16" else None,
    )


def start_event(attempt: int, *, first: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Return what an attempt records of its beginning.

    Args:
        attempt: Its number.
        first: Steps that were finished before it.
        steps: Finished steps at which the run ends.
        device: What this rank trains on.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "type": "start",
        "attempt": attempt,
        "world_size": dp_size(),
        "from_step": first,
        "steps": steps,
        "device": device.type,
        "device_name": name or platform.machine(),
        "host": platform.node(),
        "torch": torch.__version__,
    }


def write_end(
    folder: RunFolder,
    log: EventLog,
    *,
    attempt: int,
    ending: str,
    reason: str,
    saved: Newest | None,
    clock: Clock,
    data: Mapping[str, object],
) -> None:
    """Record how an attempt ended that did not fail, and the weights it ended with.

    ``saved``: the checkpoint of its last step. ``data``: what is known of the rank's feed, see
    ``waits_record``.
    """
    assert saved is not None, "an attempt that does not fail saves its last step"
    record: dict[str, Any] = {
        "state": ending,
        "reason": reason,
        "step": saved.step,
        "clock": clock.seconds(),
        "data": dict(data),
        "weights_sha256": saved.weights_sha256,
    }
    log.append({"type": "end", **record})
    log.flush()
    folder.write(attempt_key(attempt, "end.json"), record)

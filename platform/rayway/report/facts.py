"""What is known about a run, from its folder alone: no process is asked, no tensor is loaded."""

import io
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rayway.checkpoint.catalog import Committed, committed
from rayway.report.merge import Best, find_best, merge_attempts, merge_history
from rayway.report.state import decide_state
from rayway.storage.objects import ObjectMissing, shown_url
from rayway.storage.runs import RunFolder, attempt_key, events_key
from rayway.telemetry.alive import Place, this_place
from rayway.telemetry.events import Decoded, Record, decode


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known about a run."""

    run_id: str
    """The name of its folder."""

    url: str
    """Where its folder is."""

    name: str | None
    """The job's name."""

    state: str
    """FINISHED, STOPPED, FAILED, RUNNING or INTERRUPTED."""

    reason: str | None
    """Why it is in that state."""

    step: int
    """Finished steps."""

    steps: int | None
    """Steps of the whole run; None if not known yet."""

    attempts: int
    """How often its workers were started."""

    created_at: float | None = None
    """When the run was made, unix seconds."""

    starts: list[Record] = field(default_factory=list)
    """What each attempt started with: attempt, from_step, world_size, device, t."""

    loss: float | None = None
    """Mean loss over the global batch of the newest step."""

    metrics: dict[str, float] = field(default_factory=dict)
    """What the newest evaluation found."""

    best: dict[str, Best] = field(default_factory=dict)
    """The best of each metric over all evaluations."""

    checkpoints: list[Committed] = field(default_factory=list)
    """Those with a whole marker, oldest step first; their files are not verified."""

    weights_sha256: str | None = None
    """Hash of the weights the run ended with; if it did not say, those of the newest checkpoint."""

    clock: dict[str, float] = field(default_factory=dict)
    """Where the newest attempt's time went: seconds by activity."""

    data: dict[str, Any] = field(default_factory=dict)
    """How the newest attempt was fed: seconds by stage, the slowest one, rows left out."""

    warnings: list[str] = field(default_factory=list)
    """What the run warned of, and what is wrong with its logs."""

    def to_json(self) -> str:
        """Return all of it as one JSON object. NaN and infinity, which JSON lacks, become null."""
        return to_strict_json(asdict(self))


def read_run(
    folder: RunFolder,
    *,
    whole: bool = True,
    now: float | None = None,
    here: Place | None = None,
) -> RunFacts:
    """Return what a run's folder says.

    Args:
        folder: The run.
        whole: Read all logs. Otherwise only both ends of the newest one, which is enough for a
            line in a table: no starts, bests, checkpoints and warnings then.
        now: Unix seconds; the present time if None.
        here: Where this code runs; found out if None.

    Raises:
        StorageError: The folder cannot be read, or a record in it is damaged.
    """
    attempts = folder.attempts()
    logs = (
        read_logs(folder, attempts) if whole else {a: _read_ends(folder, a) for a in attempts[-1:]}
    )
    history = merge_history(
        {attempt: log.records for attempt, log in logs.items()},
        {attempt: log.damaged for attempt, log in logs.items()} if whole else {},
    )
    end = (folder.read(attempt_key(attempts[-1], "end.json")) if attempts else None) or {}
    ending: Mapping[str, Any] = {**(history.end or {}), **end}
    sign = (_sign_of_life(folder, attempts[-1])) if attempts else None
    state, reason = decide_state(
        end, sign, now=time.time() if now is None else now, here=here or this_place()
    )
    job = _read_job(folder)
    checkpoints = committed(folder) if whole else []
    newest = history.steps[-1] if history.steps else None
    evaluation = history.evaluations[-1] if history.evaluations else {}
    return RunFacts(
        run_id=folder.run_id,
        url=shown_url(folder.url),
        name=job.get("name"),
        state=state,
        reason=reason,
        step=_step(ending, newest, history.starts),
        steps=_steps(history.starts, job),
        attempts=len(attempts),
        created_at=folder.created_at,
        starts=history.starts if whole else [],
        loss=newest.get("loss") if newest else None,
        metrics=evaluation.get("metrics", {}),
        best=find_best(history.evaluations) if whole else {},
        checkpoints=checkpoints,
        weights_sha256=ending.get("weights_sha256")
        or (checkpoints[-1].weights_sha256 if checkpoints else None),
        clock=ending.get("clock") or {},
        data=ending.get("data") or {},
        warnings=history.warnings if whole else [],
    )


def steps_merged(folder: RunFolder) -> list[Record]:
    """Return the step events of a run: by step, no gap and no double, whatever crashed between.

    Raises:
        StorageError: A log cannot be read.
    """
    logs = read_logs(folder, folder.attempts())
    return merge_attempts({attempt: log.records for attempt, log in logs.items()}, "step")


def read_logs(folder: RunFolder, attempts: list[int]) -> dict[int, Decoded]:
    """Return the log of rank 0 of each attempt; an attempt that has none yet has an empty one."""
    return {attempt: _read_log(folder, attempt) for attempt in attempts}


def _read_log(folder: RunFolder, attempt: int) -> Decoded:
    try:
        with folder.objects.open_log(events_key(attempt, 0)) as log:
            return decode(log.read())
    except ObjectMissing:
        return decode(b"")


def _read_ends(folder: RunFolder, attempt: int) -> Decoded:
    """Return the first and the last events of an attempt."""
    head_bytes, tail_bytes = 4_000, 64_000
    try:
        with folder.objects.open_log(events_key(attempt, 0)) as log:
            size = log.seek(0, io.SEEK_END)
            log.seek(0)
            if size <= head_bytes + tail_bytes:
                return decode(log.read())
            head = log.read(head_bytes)
            log.seek(size - tail_bytes)
            tail = log.read()
    except ObjectMissing:
        return decode(b"")
    return decode(head[: head.rfind(b"\n") + 1] + tail[tail.find(b"\n") + 1 :])


def _sign_of_life(folder: RunFolder, attempt: int) -> Record:
    """Return the driver's newest sign of life; before its first, what the attempt began with."""
    alive = folder.read(attempt_key(attempt, "alive.json"))
    begun = folder.read(attempt_key(attempt)) or {}
    return alive or {"t": begun.get("started_at"), **begun}


def _read_job(folder: RunFolder) -> Record:
    """Return the job as plain JSON: a run can be looked at without its code, and when it is old."""
    job = _json(folder.job_json().encode()).get("job")
    return job if isinstance(job, dict) else {}


def _json(data: bytes) -> Record:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _step(ending: Mapping[str, Any], newest: Record | None, starts: list[Record]) -> int:
    """Return the last finished step: a failed run ends at a checkpoint but has logged on."""
    told = [ending.get("step"), newest["step"] if newest else None]
    told += [start.get("from_step") for start in starts[-1:]]
    return max((step for step in told if isinstance(step, int)), default=0)


def _steps(starts: list[Record], job: Record) -> int | None:
    """Return the run's length: what the newest attempt counted, or what the job asks for."""
    told = starts[-1].get("steps") if starts else None
    asked = (job.get("optim") or {}).get("steps")
    return told or asked


def to_strict_json(value: Any) -> str:
    """Return ``value`` as JSON that any reader takes; NaN and infinity become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))

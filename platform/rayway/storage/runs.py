"""The run folder, schema 2: what lies where. No other module spells a path inside it.

::

    run.json                    who made the folder, when; written first, exclusively
    job.json  data.json         the resolved job; the data's index and fingerprint
    stop.json                   somebody asked the run to stop
    attempts/001/               one life of the worker group
        attempt.json            its number is taken by creating this, exclusively
        events-00000.jsonl      what a rank went through; error-00000.json: what it died of
        events-00000.jsonl.more/000001  how it goes on where objects cannot grow, see logs.py
        logs/rank-00000.out     what a rank's process printed; .err: to stderr
        alive.json  end.json    the driver's heartbeat; how the attempt ended
    checkpoints/newest.json     the checkpoint announced last
    checkpoints/step-00000500.attempt-001/
        rank-00000.model-0.safetensors  ...  each rank's tensors; which files, the manifest says
        manifest.json           size and SHA-256 of each file, and all facts that are no tensors
        COMMITTED               written last; the checkpoint exists once this does
"""

import difflib
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Self

from pydantic import JsonValue

from rayway.errors import SpecError, StorageError
from rayway.storage.logs import is_more
from rayway.storage.objects import ObjectMissing, Objects, shown_url
from rayway.storage.records import Record, decode_record, encode_record

SCHEMA = 2
RUN_KEY, JOB_KEY, DATA_KEY, STOP_KEY = "run.json", "job.json", "data.json", "stop.json"
CHECKPOINTS = "checkpoints"
NEWEST_KEY = f"{CHECKPOINTS}/newest.json"
MANIFEST_KEY, MARKER_KEY = "manifest.json", "COMMITTED"  # inside a checkpoint's folder
_ATTEMPTS = "attempts"
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_CHECKPOINT = re.compile(r"step-([0-9]{8,15})\.attempt-([0-9]{3,9})")


def attempt_key(attempt: int, name: str = "attempt.json") -> str:
    """Return the key of an attempt's record: ``attempt.json``, ``alive.json`` or ``end.json``."""
    return f"{_ATTEMPTS}/{attempt:03d}/{name}"


def index_key(name: str) -> str:
    """Return the key of the index of some of the run's data, e.g. ``train-0``."""
    return f"data/{name}.parquet"


def events_key(attempt: int, rank: int) -> str:
    """Return the key of a rank's event log."""
    return attempt_key(attempt, f"events-{rank:05d}.jsonl")


def output_key(attempt: int, rank: int, stream: str) -> str:
    """Return the key of what a rank's process printed to a stream, ``out`` or ``err``."""
    return attempt_key(attempt, f"logs/rank-{rank:05d}.{stream}")


def error_key(attempt: int, rank: int) -> str:
    """Return the key of what ended a rank early."""
    return attempt_key(attempt, f"error-{rank:05d}.json")


def checkpoint_folder(step: int, attempt: int) -> str:
    """Return the name of a checkpoint's folder; no two attempts share one."""
    return f"step-{step:08d}.attempt-{attempt:03d}"


def checkpoint_of(folder: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a checkpoint's folder name, ``None`` for another name."""
    match = _CHECKPOINT.fullmatch(folder)
    if not match:
        return None
    step, attempt = int(match[1]), int(match[2])
    return (step, attempt) if checkpoint_folder(step, attempt) == folder else None


class RunFolder:
    """One run's folder, at a URL or given as the objects in it. Nothing is read until asked."""

    def __init__(self, at: str | Objects) -> None:
        self.objects = Objects(at) if isinstance(at, str) else at
        self._kept: Record | None = None  # run.json never changes

    def __repr__(self) -> str:
        return f"RunFolder({shown_url(self.url)!r})"

    @classmethod
    def create(cls, at: str | Objects, job_json: str, *, now: datetime) -> Self:
        """Make a new run's folder, or fail if there is one: of several callers one succeeds.

        Args:
            at: Where; the last part of the address becomes the run id.
            job_json: The resolved job, stored as it is.
            now: The present time, with a time zone.

        Raises:
            StorageError: The folder is taken, or cannot be written.
            SpecError: The last part of the address is no run id.
        """
        folder = cls(at)
        run_id = check_run_id(folder.url.rsplit("/", 1)[-1])
        record: Record = {
            "schema": SCHEMA,
            "run_id": run_id,
            "created_at": now.timestamp(),
            "writer": secrets.token_hex(16),
        }
        if folder.objects.exists(JOB_KEY) or not folder.objects.create(
            RUN_KEY, encode_record(record, name=RUN_KEY)
        ):
            raise StorageError(
                f"run {run_id} exists already in {shown_url(folder.url)}. Resume it with "
                f"`rayway resume {run_id}`, or start under another name."
            )
        folder.objects.put(JOB_KEY, job_json.encode())
        return folder

    @classmethod
    def open(cls, at: str | Objects) -> Self:
        """Return an existing run's folder.

        Raises:
            SpecError: There is no run; the message names those nearby.
            StorageError: A newer rayway wrote it, or it cannot be read.
        """
        folder = cls(at)
        if not folder.objects.exists(JOB_KEY):
            storage, _, name = folder.url.rpartition("/")
            raise _no_run(name, storage, f"{shown_url(folder.url)} is no run: it has no {JOB_KEY}.")
        schema = folder._record()["schema"]
        if schema != SCHEMA:
            raise StorageError(
                f"{shown_url(folder.url)} has the folder schema {schema}, this rayway reads "
                f"{SCHEMA}. Use the version of rayway that wrote it."
            )
        return folder

    @property
    def url(self) -> str:
        """The folder's address; an absolute path where it is local."""
        return self.objects.url

    @property
    def run_id(self) -> str:
        """The run's id. A copied or moved folder keeps it."""
        return check_run_id(str(self._record()["run_id"]))

    @property
    def created_at(self) -> float:
        """When the folder was made, in Unix seconds."""
        created_at = self._record()["created_at"]
        return float(created_at) if isinstance(created_at, int | float) else 0.0

    @property
    def checkpoints(self) -> Objects:
        """The objects of all checkpoints."""
        return self.objects.at(CHECKPOINTS)

    def job_json(self) -> str:
        """Return the resolved job as it was stored."""
        return self.objects.get(JOB_KEY).decode()

    def read(self, key: str) -> Record | None:
        """Return the JSON record at a key, ``None`` if there is none.

        Raises:
            StorageError: It cannot be read, or is not strict JSON.
        """
        try:
            return decode_record(self.objects.get(key), name=key)
        except ObjectMissing:
            return None

    def write(self, key: str, record: Mapping[str, JsonValue]) -> None:
        """Store a JSON record at a key, whole, in place of an older one."""
        self.objects.put(key, encode_record(record, name=key))

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts, oldest first."""
        keys = {attempt_key(number): number for number in self._attempt_folders()}
        return [keys[key] for key in self.objects.which_exist(keys)]

    def newest_attempt(self) -> int:
        """Return the newest attempt's number, 0 before the first."""
        numbers = reversed(self._attempt_folders())
        newest = next((n for n in numbers if self.objects.exists(attempt_key(n))), 0)
        # A listing may lag behind; a look-up of the next key does not.
        while self.objects.exists(attempt_key(newest + 1)):
            newest += 1
        return newest

    def is_newest(self, attempt: int) -> bool:
        """Return whether no newer attempt has begun. This is the fence that a save asks."""
        return not self.objects.exists(attempt_key(attempt + 1))

    def next_attempt(self, record: Mapping[str, JsonValue]) -> int:
        """Begin a new attempt: take the next number, which fences all older attempts.

        Args:
            record: What is to be kept about the attempt, in ``attempt.json``.

        Returns:
            The number, 1 for the first; of several callers each gets its own.
        """
        number = self.newest_attempt()
        created = False
        while not created:
            number += 1
            key = attempt_key(number)
            owner: Record = {"attempt": number, "writer": secrets.token_hex(16)}
            created = self.objects.create(key, encode_record({**record, **owner}, name=key))
        return number

    def event_keys(self, attempt: int) -> list[str]:
        """Return the keys of an attempt's event logs, by rank."""
        return self._keys(attempt, "events-")

    def error_keys(self, attempt: int) -> list[str]:
        """Return the keys of the records of what ended ranks early, by rank."""
        return self._keys(attempt, "error-")

    def output_keys(self, attempt: int, stream: str) -> list[str]:
        """Return the keys of what the ranks printed to a stream, by rank."""
        keys = self._keys(attempt, "logs/rank-")
        return [key for key in keys if key.endswith(f".{stream}")]

    def _keys(self, attempt: int, kind: str) -> list[str]:
        start = attempt_key(attempt, kind)
        infos = self.objects.list(start.rpartition("/")[0])
        return [info.key for info in infos if info.key.startswith(start) and not is_more(info.key)]

    def _attempt_folders(self) -> list[int]:
        names = self.objects.folders(_ATTEMPTS)
        return sorted(int(name) for name in names if re.fullmatch("[0-9]{3,9}", name))

    def _record(self) -> Record:
        if self._kept is not None:
            return self._kept
        record = self.read(RUN_KEY)
        if record is None or not {"schema", "run_id", "created_at"} <= record.keys():
            raise StorageError(
                f"{shown_url(self.url)}/{RUN_KEY} is missing or incomplete, so the folder is no "
                "whole run. Copy the run folder again, with every file in it."
            )
        self._kept = record
        return record


def new_run_id(job_name: str, now: datetime) -> str:
    """Return a run id that sorts by time within a job: ``digits-20260131-235959-3fa9``."""
    return check_run_id(f"{job_name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")


def list_runs(storage: str | Objects) -> list[str]:
    """Return the ids of the runs in a storage, sorted; none if it does not exist."""
    objects = Objects(storage) if isinstance(storage, str) else storage
    keys = {f"{name}/{JOB_KEY}": name for name in objects.folders()}
    return [keys[key] for key in objects.which_exist(keys)]


def find_run(ref: str, storage: str) -> RunFolder:
    """Return the folder of the run that a user named.

    Args:
        ref: A run id in ``storage``, or the path or URL of a run folder.
        storage: Where to look for a run id.

    Raises:
        SpecError: There is no such run; the message names the nearest ones.
        StorageError: The storage cannot be read.
    """
    if "/" in ref:
        return RunFolder.open(ref)
    if _RUN_ID.fullmatch(ref) and Objects(storage).exists(f"{ref}/{JOB_KEY}"):
        return RunFolder.open(Objects(storage).at(ref))
    asked = f"there is no run {ref!r} in {shown_url(Objects(storage).url)}."
    raise _no_run(ref, storage, asked)


def _no_run(name: str, storage: str, asked: str) -> SpecError:
    runs = list_runs(storage) if storage else []
    nearest = difflib.get_close_matches(name, runs, n=3, cutoff=0.3) or runs[-3:]
    hint = f"Nearest: {', '.join(nearest)}." if nearest else "No run is there; check --storage."
    return SpecError(f"{asked} {hint}")


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it is one.

    Raises:
        SpecError: It is not, and says what one looks like.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise SpecError(
            f"{run_id!r} is no run id: use 1 to 100 of a-z, 0-9, '.', '_' and '-', beginning with "
            "a letter or digit."
        )
    return run_id

"""Save, commit, load and retire the checkpoints of one run.

A save goes, on every rank: files of tensors, each read back and compared; then the rank's *part*,
which says that they are there. Rank 0 goes on once all parts are there: manifest; *then* the
marker; then the note of what was announced last. A process that dies one line before the marker
leaves a folder that no reader takes for a checkpoint.

Ranks wait for each other by looking into the storage, up to a deadline, and never in a collective:
a save cannot hang, nor get in the way of training's own collectives.

The fence is asked twice. Before the marker, so that an attempt that has been replaced does not
commit. And after it, before anybody is told: a newer attempt first takes its number and then looks
for checkpoints, so what passes the second question was there for it to find, and what does not pass
is withdrawn unannounced.
"""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from pydantic import JsonValue
from torch import Tensor

from rayway.checkpoint import catalog
from rayway.checkpoint.catalog import Committed, Found
from rayway.checkpoint.files import FILE_BYTES
from rayway.checkpoint.load import Like, read_state
from rayway.checkpoint.manifest import Manifest, Marker, Part, part_key
from rayway.checkpoint.parts import Parts
from rayway.checkpoint.policy import Keep, to_delete
from rayway.checkpoint.share import Share
from rayway.errors import CheckpointError, StorageError
from rayway.storage.objects import ObjectMissing, Objects
from rayway.storage.records import decode_record
from rayway.storage.runs import (
    MANIFEST_KEY,
    MARKER_KEY,
    NEWEST_KEY,
    RunFolder,
    checkpoint_folder,
)


class AttemptReplaced(CheckpointError):  # noqa: N818 - reads as what it says
    """A newer attempt of the run has begun. This one has to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint's content, every byte of what was read verified."""

    step: int
    """Finished optimizer steps."""

    attempt: int
    """The attempt that committed it."""

    tensors: dict[str, dict[str, Tensor]]
    """File stem -> name -> tensor on the CPU. Tensors of a local file are mapped, not read."""

    facts: dict[str, JsonValue]
    """The state that is no tensor."""

    weights_sha256: str
    """The hash of the model's weights."""

    bytes: int
    """The size of all files of tensors, in bytes."""


class CheckpointStore:
    """The checkpoints of one run, as one rank of one attempt sees them. One save at a time.

    Args:
        folder: The run.
        attempt: This attempt's number.
        is_newest_attempt: The fence: whether no newer attempt has begun, asked from the storage.
        rank: This rank. Rank 0 commits.
        world_size: Ranks that save together.
        patience_s: How long a save may wait for the parts of other ranks, in seconds.
        threads: Files written at once. More than one takes cores from training.
        file_bytes: A file of tensors is closed once it has so many.
        clock: The present time in Unix seconds.

    Raises:
        StorageError: The folder is no run.
    """

    def __init__(  # noqa: PLR0913 - all but two have a default
        self,
        folder: RunFolder,
        *,
        attempt: int,
        is_newest_attempt: Callable[[], bool],
        rank: int = 0,
        world_size: int = 1,
        patience_s: float = 300.0,
        threads: int = 1,
        file_bytes: int = FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = folder
        self._run_id = folder.run_id
        self._objects = folder.checkpoints
        self._attempt = attempt
        self._is_newest_attempt = is_newest_attempt
        self.rank = rank
        self.world_size = world_size
        self.patience_s = patience_s
        self._until = math.inf
        self._threads = threads
        self._file_bytes = file_bytes
        self._clock = clock
        self._last_saved: int | None = None
        self._retired: set[str] = set()

    def save(self, step: int, share: Share, facts: Mapping[str, JsonValue]) -> Committed | None:
        """Write this rank's part of a checkpoint; on rank 0, wait for the others' and commit it.

        Args:
            step: Finished optimizer steps. An attempt saves a step once.
            share: This rank's part, in host memory. It must not change meanwhile.
            facts: JSON values: all state that is no tensor. Rank 0's count.

        Returns:
            What was committed: it is not lost any more. On other ranks ``None``: their part is
            written, and rank 0 has the rest to do.

        Raises:
            AttemptReplaced: A newer attempt has begun.
            CheckpointError: The step is committed already, the ranks do not save the same state,
                or what was read back is not what was written.
            StorageError: The storage failed, or a rank did. Nothing is announced, older
                checkpoints are untouched.
        """
        created_at = self._clock()
        self._check_fence(step)
        name = checkpoint_folder(step, self._attempt)
        folder = self._objects.at(name)
        if folder.exists(MARKER_KEY):
            raise CheckpointError(
                f"checkpoint {name} is committed already and is never written again. "
                "A new attempt may save the step anew."
            )
        parts = self._parts(step, share)
        try:
            parts.write(threads=self._threads)
            if self.rank:
                return None
            manifest = parts.gather(facts, created_at=created_at)
            self._put_manifest(folder, manifest)
            parts.clear()
            self._check_fence(step)
        except Exception as error:
            with suppress(StorageError):  # the first error is the one to report
                if self.world_size > 1:
                    parts.remove()
                    self.tell_failure(step, error)
                else:
                    self._objects.delete_folder(name)
            raise
        return self._commit(name, manifest)

    def tell_failure(self, step: int, error: Exception) -> None:
        """Let the ranks that save a step know that this one's part will not come.

        Raises:
            StorageError: It could not be told. They wait as long as their patience lasts.
        """
        if self.world_size == 1:
            return
        part = Part(
            run_id=self._run_id,
            step=step,
            attempt=self._attempt,
            rank=self.rank,
            world_size=self.world_size,
            error=f"{type(error).__name__}: {error}",
        )
        name = checkpoint_folder(step, self._attempt)
        self._objects.put(f"{name}/{part_key(self.rank)}", part.to_json())

    def hurry(self, seconds: float) -> None:
        """Let a save that is under way wait for other ranks no longer than so many seconds."""
        self._until = time.monotonic() + seconds

    def committed(self) -> list[Committed]:
        """Return the checkpoints there are, oldest first: by step, then attempt, as numbers."""
        return catalog.committed(self._run)

    def load(self, step: int, *, attempt: int | None = None, like: Like | None = None) -> Loaded:
        """Return the checkpoint of a step, verified.

        Args:
            step: Which.
            attempt: Whose; ``None``: of several attempts' the newest sound one.
            like: What is to be filled, see ``read_state``. ``None``: all, whole.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        found = [
            found
            for found in catalog.find(self._run)
            if found.step == step and attempt in (None, found.attempt)
        ]
        problems = []
        for candidate in reversed(found):
            try:
                return self._load(candidate, like)
            except CheckpointError as error:
                problems.append(f"{candidate.folder}: {error}")
        steps = sorted({entry.step for entry in self.committed()} - {step})
        there = f"Committed: {', '.join(map(str, steps))}." if steps else "No other is there."
        reason = " ".join(problems) or "it does not exist."
        raise CheckpointError(f"step {step} cannot be loaded: {reason} {there}")

    def load_newest(
        self, on_skip: Callable[[str], None], *, like: Like | None = None
    ) -> Loaded | None:
        """Return the newest sound checkpoint, verified.

        Args:
            on_skip: Told, in one line each, which newer one was passed over and why.
            like: What is to be filled, see ``read_state``. ``None``: all, whole.

        Returns:
            The checkpoint, or ``None`` if there never was one, which is where a run begins.

        Raises:
            CheckpointError: There were checkpoints and none is sound.
            StorageError: The storage cannot be read. That is no reason to take an older one.
        """
        found = catalog.find(self._run)
        announced = self._announced()
        newest = (found[-1].step, found[-1].attempt) if found else (0, 0)
        if announced is not None and announced > newest:
            on_skip(f"checkpoint {checkpoint_folder(*announced)} is skipped: its folder is gone.")
        newest_is = ""
        for candidate in reversed(found):
            try:
                return self._load(candidate, like)
            except CheckpointError as error:
                on_skip(f"checkpoint {candidate.folder} is skipped: {error}")
                newest_is = newest_is or f" The newest: {error}"
        marked = any(entry.marker or entry.problem for entry in found)
        if marked or announced is not None:
            raise CheckpointError(
                f"run {self._run_id} has committed checkpoints, and none of the {len(found)} found "
                f"in {self._run.url} is sound.{newest_is} Restore the folder from a copy, or start "
                "a new run."
            )
        return None

    def prune(
        self,
        keep_last: int,
        keep_every_steps: int | None,
        in_use: int | None,
        on_skip: Callable[[str], None] | None = None,
    ) -> list[str]:
        """Delete what retention no longer keeps, and half-written folders of older attempts.

        Nothing is deleted before this attempt has committed; nor is anything newer than that.

        Args:
            keep_last: How many of the newest checkpoints stay.
            keep_every_steps: Checkpoints at multiples of this stay for good.
            in_use: The step being resumed from, which stays.
            on_skip: Told, in one line each, what could not be deleted. The next call tries again.

        Returns:
            The names of the folders deleted.

        Raises:
            CheckpointError: A newer attempt has begun.
        """
        if self._last_saved is None:
            return []
        self._check_fence(self._last_saved)
        keep = Keep(keep_last=keep_last, keep_every_steps=keep_every_steps)
        deleted = []
        for name in self._unwanted(keep, in_use):
            try:
                self._retired.add(name)
                self._objects.delete([f"{name}/{MARKER_KEY}"])  # first: no half one looks whole
                self._objects.delete_folder(name)
                self._retired.discard(name)
            except StorageError as error:
                if on_skip is not None:
                    on_skip(f"checkpoint {name} could not be deleted: {error}")
            else:
                deleted.append(name)
        return deleted

    def _parts(self, step: int, share: Share) -> Parts:
        patient_until = time.monotonic() + self.patience_s
        return Parts(
            self._objects.at(checkpoint_folder(step, self._attempt)),
            share,
            run_id=self._run_id,
            step=step,
            attempt=self._attempt,
            file_bytes=self._file_bytes,
            deadline=lambda: min(patient_until, self._until),
        )

    def _put_manifest(self, folder: Objects, manifest: Manifest) -> None:
        data = manifest.to_json()
        folder.put(MANIFEST_KEY, data)
        if folder.get(MANIFEST_KEY) != data:
            raise CheckpointError(f"{MANIFEST_KEY} reads back changed. Check the storage.")

    def _commit(self, name: str, manifest: Manifest) -> Committed:
        """Make the checkpoint exist, and only then tell."""
        marker = Marker(
            step=manifest.step,
            attempt=manifest.attempt,
            manifest_sha256=manifest.digest(),
            total_bytes=manifest.total_bytes,
            weights_sha256=manifest.weights_sha256,
            committed_at=self._clock(),
            writer=secrets.token_hex(16),
        )
        key = f"{name}/{MARKER_KEY}"
        if not self._objects.create(key, marker.to_json()):
            raise CheckpointError(f"{key} was written by somebody else. Nothing is announced.")
        try:
            self._check_fence(manifest.step)
        except StorageError:
            with suppress(StorageError):  # the first error is the one to report
                self._objects.delete([key])
            raise
        self._run.write(NEWEST_KEY, {"schema": 1, "step": marker.step, "attempt": marker.attempt})
        self._last_saved = manifest.step
        return Committed(
            step=marker.step,
            attempt=marker.attempt,
            bytes=marker.total_bytes,
            committed_at=marker.committed_at,
            weights_sha256=marker.weights_sha256,
        )

    def _load(self, found: Found, like: Like | None) -> Loaded:
        manifest = catalog.read_manifest(self._run, found)
        return Loaded(
            step=manifest.step,
            attempt=manifest.attempt,
            tensors=read_state(self._objects.at(found.folder), manifest, like),
            facts=manifest.facts,
            weights_sha256=manifest.weights_sha256,
            bytes=manifest.total_bytes,
        )

    def _unwanted(self, keep: Keep, in_use: int | None) -> list[str]:
        """Return the folders to delete, oldest first. What is newer than our last save is not ours.

        Of a step's checkpoints by several attempts the newest attempt's stays.
        """
        found = catalog.find(self._run)
        past = [entry for entry in found if entry.marker and entry.step <= (self._last_saved or 0)]
        leaving = set(to_delete([entry.step for entry in past], keep, in_use))
        newest = {entry.step: entry.attempt for entry in past}
        return [
            entry.folder
            for entry in found
            if entry.folder in self._retired
            or (entry in past and entry.step in leaving)
            or (entry in past and entry.step != in_use and entry.attempt < newest[entry.step])
            or (not (entry.marker or entry.problem) and self._is_left_over(entry))
        ]

    def _is_left_over(self, entry: Found) -> bool:
        """Return whether nobody writes into a folder any more. All ranks save in order."""
        ours = entry.attempt == self._attempt and entry.step < (self._last_saved or 0)
        return ours or entry.attempt < self._attempt

    def _announced(self) -> tuple[int, int] | None:
        """Return (step, attempt) of what was announced last; (0, 0) if that can't be told."""
        try:
            data = self._run.objects.get(NEWEST_KEY)
        except ObjectMissing:
            return None
        try:
            record = decode_record(data, name=NEWEST_KEY)
            return int(str(record["step"])), int(str(record["attempt"]))
        except (StorageError, KeyError, ValueError):
            return 0, 0

    def _check_fence(self, step: int) -> None:
        if not self._is_newest_attempt():
            raise AttemptReplaced(
                f"attempt {self._attempt} of run {self._run_id} may not commit step {step}: a "
                "newer attempt has begun. This one has to end."
            )

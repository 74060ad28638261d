"""Save, commit, load and retire the checkpoints of one run.

A save goes: files of tensors, each read back and compared; manifest; *then* the marker; then the
note of what was announced last. A process that dies one line before the marker leaves a folder that
no reader takes for a checkpoint.

The fence is asked twice. Before the marker, so that an attempt that has been replaced does not
commit. And after it, before anybody is told: a newer attempt first takes its number and then looks
for checkpoints, so what passes the second question was there for it to find, and what does not pass
is withdrawn unannounced.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pydantic import JsonValue, ValidationError
from torch import Tensor

from rayway.checkpoint import catalog
from rayway.checkpoint.catalog import Committed, Found
from rayway.checkpoint.manifest import FileEntry, Manifest, Marker
from rayway.checkpoint.policy import Keep, to_delete
from rayway.checkpoint.tensors import TensorFile, read_tensors
from rayway.errors import CheckpointError, StorageError
from rayway.storage.objects import ObjectMissing
from rayway.storage.records import decode_record
from rayway.storage.runs import (
    MANIFEST_KEY,
    MARKER_KEY,
    NEWEST_KEY,
    RunFolder,
    checkpoint_folder,
)

Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint's content, every byte of it verified."""

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
    """The checkpoints of one run, as one attempt sees them. One save at a time.

    Args:
        folder: The run.
        attempt: This attempt's number.
        is_newest_attempt: The fence: whether no newer attempt has begun, asked from the storage.
        clock: The present time in Unix seconds.

    Raises:
        StorageError: The folder is no run.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        attempt: int,
        is_newest_attempt: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = folder
        self._run_id = folder.run_id
        self._objects = folder.checkpoints
        self._attempt = attempt
        self._is_newest_attempt = is_newest_attempt
        self._clock = clock
        self._last_saved: int | None = None
        self._retired: set[str] = set()

    def save(
        self, step: int, tensors: Tensors, facts: Mapping[str, JsonValue], weights_sha256: str
    ) -> Committed:
        """Write and commit a checkpoint. Once this returns, it is not lost.

        Args:
            step: Finished optimizer steps.
            tensors: File stem -> name -> tensor on the CPU. They must not change meanwhile.
            facts: JSON values: all state that is no tensor.
            weights_sha256: The hash of the model's weights, see ``weights_sha256``.

        Returns:
            What was committed.

        Raises:
            CheckpointError: A newer attempt has begun, the step is committed already, or what was
                read back is not what was written.
            StorageError: The storage failed. Nothing is announced, older checkpoints are untouched.
        """
        self._check_fence(step)
        name = checkpoint_folder(step, self._attempt)
        if self._objects.exists(f"{name}/{MARKER_KEY}"):
            raise CheckpointError(
                f"checkpoint {name} is committed already and is never written again. "
                "A new attempt may save the step anew."
            )
        self._objects.delete_folder(name)  # what an earlier try of this attempt left
        try:
            manifest = self._write(name, step, tensors, facts, weights_sha256)
            self._check_fence(step)
        except Exception:
            with suppress(StorageError):  # the first error is the one to report
                self._objects.delete_folder(name)
            raise
        return self._commit(name, manifest)

    def committed(self) -> list[Committed]:
        """Return the checkpoints there are, oldest first: by step, then attempt, as numbers."""
        return catalog.committed(self._run)

    def load(self, step: int) -> Loaded:
        """Return the checkpoint of a step, verified; of several attempts', the newest sound one.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        found = [found for found in catalog.find(self._run) if found.step == step]
        problems = []
        for candidate in reversed(found):
            try:
                return self._load(candidate)
            except CheckpointError as error:
                problems.append(f"{candidate.folder}: {error}")
        steps = sorted({entry.step for entry in self.committed()} - {step})
        there = f"Committed: {', '.join(map(str, steps))}." if steps else "No other is there."
        reason = " ".join(problems) or "it does not exist."
        raise CheckpointError(f"step {step} cannot be loaded: {reason} {there}")

    def load_newest(self, on_skip: Callable[[str], None]) -> Loaded | None:
        """Return the newest sound checkpoint, verified.

        Args:
            on_skip: Told, in one line each, which newer one was passed over and why.

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
        for candidate in reversed(found):
            try:
                return self._load(candidate)
            except CheckpointError as error:
                on_skip(f"checkpoint {candidate.folder} is skipped: {error}")
        marked = any(entry.marker or entry.problem for entry in found)
        if marked or announced is not None:
            raise CheckpointError(
                f"run {self._run_id} has committed checkpoints, and none of the {len(found)} found "
                f"in {self._run.url} is sound. Restore the folder from a copy, or start a new run."
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

    def _write(
        self,
        name: str,
        step: int,
        tensors: Tensors,
        facts: Mapping[str, JsonValue],
        weights_sha256: str,
    ) -> Manifest:
        """Write all files and the manifest, and read them back."""
        created_at = self._clock()
        try:
            entries = [self._write_file(name, stem, part) for stem, part in sorted(tensors.items())]
            manifest = Manifest(
                run_id=self._run_id,
                step=step,
                attempt=self._attempt,
                files=tuple(entries),
                facts=dict(facts),
                weights_sha256=weights_sha256,
                created_at=created_at,
            )
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise CheckpointError(
                f"step {step} cannot be stored: {where}: {problem['msg']}. Facts are plain JSON "
                "(text keys, lists, no tuples); a file's stem is made of letters, digits, '-', '_'."
            ) from error
        data = manifest.to_json()
        self._objects.put(f"{name}/{MANIFEST_KEY}", data)
        if self._objects.get(f"{name}/{MANIFEST_KEY}") != data:
            raise CheckpointError(f"{name}/{MANIFEST_KEY} reads back changed. Check the storage.")
        return manifest

    def _write_file(self, name: str, stem: str, tensors: Mapping[str, Tensor]) -> FileEntry:
        content = TensorFile(tensors)
        file = f"{stem}.safetensors"
        self._objects.put(f"{name}/{file}", content)
        entry = FileEntry(
            name=file, bytes=content.bytes, sha256=content.sha256, aliases=content.aliases
        )
        catalog.check_file(self._objects.at(name), entry)
        return entry

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
        except CheckpointError:
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

    def _load(self, found: Found) -> Loaded:
        manifest = catalog.read_manifest(self._run, found)
        with ThreadPoolExecutor(max_workers=4) as pool:  # hashing is most of the time
            parts = pool.map(lambda entry: self._load_file(found.folder, entry), manifest.files)
            tensors = {
                entry.name.removesuffix(".safetensors"): part
                for entry, part in zip(manifest.files, parts, strict=True)
            }
        return Loaded(
            step=manifest.step,
            attempt=manifest.attempt,
            tensors=tensors,
            facts=manifest.facts,
            weights_sha256=manifest.weights_sha256,
            bytes=manifest.total_bytes,
        )

    def _load_file(self, name: str, entry: FileEntry) -> dict[str, Tensor]:
        objects = self._objects.at(name)
        path = objects.local_path(entry.name)
        if path is None:
            return read_tensors(catalog.read_file(objects, entry), entry)
        catalog.check_file(objects, entry)
        return read_tensors(path, entry)

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
            or (not (entry.marker or entry.problem) and entry.attempt < self._attempt)
        ]

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
            raise CheckpointError(
                f"attempt {self._attempt} of run {self._run_id} may not commit step {step}: a "
                "newer attempt has begun. This one has to end."
            )

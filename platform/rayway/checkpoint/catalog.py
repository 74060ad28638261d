"""Which checkpoints there are, and whether one is still what was committed. Needs no torch."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO, TypeVar

from rayway.checkpoint.manifest import FileEntry, Manifest, Marker
from rayway.errors import CheckpointError
from rayway.storage.objects import ObjectMissing, Objects
from rayway.storage.runs import (
    MANIFEST_KEY,
    MARKER_KEY,
    RunFolder,
    checkpoint_folder,
    checkpoint_of,
)

T = TypeVar("T")
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint that exists."""

    step: int
    """Finished optimizer steps."""

    attempt: int
    """The attempt that committed it."""

    bytes: int
    """The size of all its tensors' files, in bytes."""

    committed_at: float
    """When it was committed, in Unix seconds."""

    weights_sha256: str
    """The hash of the model's weights."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return checkpoint_folder(self.step, self.attempt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A checkpoint's folder, with or without a checkpoint in it."""

    step: int
    """The step in its name."""

    attempt: int
    """The attempt in its name."""

    folder: str
    """Its name."""

    marker: Marker | None
    """Its marker, ``None`` if that is missing or damaged."""

    problem: str | None
    """What is wrong with the marker; ``None`` if it is whole or there is none."""


def find(run: RunFolder) -> list[Found]:
    """Return all folders of checkpoints, oldest first: by step, then attempt, as numbers."""
    places = []
    for folder in run.checkpoints.folders():
        place = checkpoint_of(folder)
        if place is not None:
            places.append((*place, folder))
    found = []
    for step, attempt, folder in sorted(places):
        marker, problem = None, None
        try:
            marker = _read_marker(run.checkpoints.at(folder), step, attempt)
        except CheckpointError as error:
            problem = str(error)
        found.append(
            Found(step=step, attempt=attempt, folder=folder, marker=marker, problem=problem)
        )
    return found


def committed(run: RunFolder) -> list[Committed]:
    """Return the checkpoints with a whole marker, oldest first. Their files are not looked at.

    Raises:
        StorageError: The storage cannot be read.
    """
    return [
        Committed(
            step=found.step,
            attempt=found.attempt,
            bytes=found.marker.total_bytes,
            committed_at=found.marker.committed_at,
            weights_sha256=found.marker.weights_sha256,
        )
        for found in find(run)
        if found.marker is not None
    ]


def verify(run: RunFolder, found: Found) -> Manifest:
    """Check every byte of a checkpoint against its marker.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: It is damaged; the message names the file and what is wrong with it.
    """
    manifest = read_manifest(run, found)
    for entry in manifest.files:
        check_file(run.checkpoints.at(found.folder), entry)
    return manifest


def read_manifest(run: RunFolder, found: Found) -> Manifest:
    """Check all of a checkpoint but its files' bytes: marker, manifest, names and sizes.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: It is damaged; the message names the file and what is wrong with it.
    """
    if found.marker is None:
        raise CheckpointError(found.problem or f"{MARKER_KEY} is missing: it was cut off.")
    objects = run.checkpoints.at(found.folder)
    data = _present(MANIFEST_KEY, objects.get)
    if hashlib.sha256(data).hexdigest() != found.marker.manifest_sha256:
        raise CheckpointError(f"{MANIFEST_KEY} is not the one that {MARKER_KEY} was written for.")
    manifest = Manifest.from_json(data)
    if (manifest.step, manifest.attempt) != (found.step, found.attempt):
        raise CheckpointError(f"{MANIFEST_KEY} is that of another checkpoint.")
    if (manifest.total_bytes, manifest.weights_sha256) != (
        found.marker.total_bytes,
        found.marker.weights_sha256,
    ):
        raise CheckpointError(f"{MARKER_KEY} and {MANIFEST_KEY} do not say the same.")
    if manifest.run_id != run.run_id:
        raise CheckpointError(f"{MANIFEST_KEY} is that of run {manifest.run_id}, not {run.run_id}.")
    sizes = {info.key: info.bytes for info in objects.list()}
    expected = {entry.name: entry.bytes for entry in manifest.files}
    for name in sorted(sizes.keys() - expected.keys() - {MANIFEST_KEY, MARKER_KEY}):
        raise CheckpointError(f"{name} does not belong to it: the manifest does not name it.")
    for name, size in expected.items():
        if name not in sizes:
            raise CheckpointError(f"{name} is missing.")
        if sizes[name] != size:
            raise CheckpointError(f"{name} has {sizes[name]} bytes, its manifest says {size}.")
    return manifest


def check_file(objects: Objects, entry: FileEntry) -> None:
    """Read a stored file and compare it with its entry.

    Raises:
        CheckpointError: It is missing or not the same; the message names it.
    """
    with _present(entry.name, objects.open_read) as file:
        _compare(file, entry)


def read_file(objects: Objects, entry: FileEntry) -> bytes:
    """Return a stored file's bytes once they have been compared with its entry.

    Raises:
        CheckpointError: It is missing or not the same; the message names it.
    """
    data = _present(entry.name, objects.get)
    _compare(BytesIO(data), entry)
    return data


def _compare(file: BinaryIO, entry: FileEntry) -> None:
    digest, size = hashlib.sha256(), 0
    piece = bytearray(_PIECE)
    while count := file.readinto(piece):  # type: ignore[attr-defined]  # every binary file has it
        digest.update(memoryview(piece)[:count])
        size += count
    if size != entry.bytes:
        raise CheckpointError(f"{entry.name} has {size} bytes, its manifest says {entry.bytes}.")
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{entry.name} has SHA-256 {digest.hexdigest()[:12]}…, its manifest says "
            f"{entry.sha256[:12]}…: bytes have changed."
        )


def _read_marker(objects: Objects, step: int, attempt: int) -> Marker | None:
    try:
        marker = Marker.from_json(objects.get(MARKER_KEY))
    except ObjectMissing:
        return None
    if (marker.step, marker.attempt) != (step, attempt):
        raise CheckpointError(
            f"{MARKER_KEY} is that of {checkpoint_folder(marker.step, marker.attempt)}."
        )
    return marker


def _present(name: str, read: Callable[[str], T]) -> T:
    try:
        return read(name)
    except ObjectMissing as error:
        raise CheckpointError(f"{name} is missing.") from error

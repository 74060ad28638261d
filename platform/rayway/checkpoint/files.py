"""One rank's part of a save: its files, each read back, and what they hold.

No rank waits for another one here, and none is asked anything: whatever is known of other ranks is
read from the storage.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from rayway.checkpoint.manifest import FileEntry, Part, Piece, TensorEntry, file_name
from rayway.checkpoint.share import WEIGHTS, Share
from rayway.checkpoint.tensors import TensorFile, alias_view, dtype_of, read_tensor, tensor_sha256
from rayway.errors import CheckpointError
from rayway.storage.objects import ObjectMissing, Objects

FILE_BYTES = 128 << 20
"""A file is closed once it has so many bytes: files are written, sent and hashed side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a rank has stored."""

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    """Each with the piece that is this rank's."""

    weights: dict[str, str]
    """The hashes of those of the model's tensors that it has whole, aliases of them included."""


def write_share(
    objects: Objects, share: Share, *, threads: int, file_bytes: int = FILE_BYTES
) -> Written:
    """Write a rank's share into a checkpoint's folder, and read it back.

    Args:
        objects: The folder.
        share: What to write; its tensors are on the CPU and do not change meanwhile.
        threads: Files under way at once. 1: this thread does it all.
        file_bytes: A file is closed once it has so many.

    Raises:
        CheckpointError: A tensor cannot be stored, or a file reads back changed.
        StorageError: The storage failed.
    """
    files = plan_files(share, file_bytes)

    def write(job: tuple[str, list[str]]) -> tuple[FileEntry, dict[str, str]]:
        file, names = job
        return _write_file(objects, file, {name: share.tensors[name] for name in names}), (
            _whole_weights(share, names)
        )

    if threads == 1 or len(files) == 1:
        done = list(map(write, files.items()))
    else:
        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(write, files.items()))
    tensors = {
        name: TensorEntry(
            dtype=share.outlines[name].dtype,
            shape=share.outlines[name].shape,
            pieces=(
                Piece(file=file, offsets=share.boxes[name].offsets, shape=share.boxes[name].shape),
            ),
        )
        for file, names in files.items()
        for name in names
    }
    weights = {name: sha256 for _, hashes in done for name, sha256 in hashes.items()}
    return Written(files=tuple(entry for entry, _ in done), tensors=tensors, weights=weights)


def plan_files(share: Share, file_bytes: int = FILE_BYTES) -> dict[str, list[str]]:
    """Return which tensors go into which file: those of a stem together, until it is full."""
    files: dict[str, list[str]] = {}
    stem, number, names, size = "", 0, list[str](), 0
    for name in sorted(share.tensors):
        if name.partition("/")[0] != stem:
            stem, number, size = name.partition("/")[0], -1, file_bytes
        if size >= file_bytes:
            number, size, names = number + 1, 0, []
            files[file_name(share.rank, stem, number)] = names
        names.append(name)
        size += share.tensors[name].nbytes
    return files


def hash_cut_weights(
    objects: Objects, parts: Sequence[Part], names: Iterable[str]
) -> dict[str, str]:
    """Return the hashes of tensors whose pieces several ranks have stored.

    Args:
        objects: The checkpoint's folder.
        parts: Those of all ranks.
        names: The tensors.

    Raises:
        CheckpointError: A piece cannot be read.
    """
    hashes = {}
    for name in names:
        entries = [part.tensors[name] for part in parts if name in part.tensors]
        if not entries or (dtype := dtype_of(entries[0].dtype)) is None:
            raise CheckpointError(f"no rank has stored a piece of {name!r}.")
        whole = torch.empty(entries[0].shape, dtype=dtype)
        for piece in (piece for entry in entries for piece in entry.pieces):
            with _open(objects, piece.file) as file:
                block = read_tensor(file, name.partition("/")[2], file_name=piece.file)
            index = tuple(
                slice(first, first + length)
                for first, length in zip(piece.offsets, piece.shape, strict=True)
            )
            whole[index] = block
        hashes[name] = tensor_sha256(whole)
    return hashes


def _write_file(objects: Objects, file: str, tensors: dict[str, Tensor]) -> FileEntry:
    content = TensorFile({name.partition("/")[2]: tensor for name, tensor in tensors.items()})
    objects.put(file, content)
    entry = FileEntry(name=file, bytes=content.bytes, sha256=content.sha256)
    check_same(objects, file, content.pieces())
    return entry


def _whole_weights(share: Share, names: list[str]) -> dict[str, str]:
    """Return the hashes of the model's tensors in a file, and of what looks into them."""
    inside = set(names)
    hashes = {
        name: tensor_sha256(share.tensors[name])
        for name in names
        if name.startswith(WEIGHTS) and not share.outlines[name].cut
    }
    for name, alias in share.aliases.items():
        if name.startswith(WEIGHTS) and alias.of in inside and not share.outlines[alias.of].cut:
            whole = share.tensors[alias.of].contiguous()
            hashes[name] = tensor_sha256(alias_view(whole, alias, name=name))
    return hashes


def check_same(objects: Objects, name: str, pieces: Iterable[memoryview]) -> None:
    """Compare a stored file with the bytes it was made of.

    Raises:
        CheckpointError: They differ.
    """
    at, buffer = 0, bytearray()
    with _open(objects, name) as file:
        for piece in pieces:
            if len(buffer) < len(piece):
                buffer = bytearray(len(piece))
            found = memoryview(buffer)[: len(piece)]
            read = file.readinto(found)  # type: ignore[attr-defined] # every binary file has it
            if read != len(piece) or not np.array_equal(
                np.frombuffer(found, np.uint8), np.frombuffer(piece, np.uint8)
            ):
                raise CheckpointError(
                    f"{name} reads back changed, from byte {at} or later on. Check the storage."
                )
            at += len(piece)
        if file.read(1):
            raise CheckpointError(f"{name} reads back longer than its {at} bytes.")


def _open(objects: Objects, name: str) -> BinaryIO:
    try:
        return objects.open_read(name)
    except ObjectMissing as error:
        raise CheckpointError(f"{name} is missing.") from error

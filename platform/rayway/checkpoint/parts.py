"""The parts that the ranks of a save have written, and the manifest that is made of them."""

import time
from collections.abc import Callable, Mapping

from pydantic import JsonValue, ValidationError

from rayway.checkpoint.files import hash_cut_weights, plan_files, write_share
from rayway.checkpoint.manifest import (
    CutWeights,
    Manifest,
    Part,
    TensorEntry,
    part_key,
    weights_key,
)
from rayway.checkpoint.share import WEIGHTS, Share
from rayway.checkpoint.tensors import Unstorable, combined_sha256
from rayway.errors import CheckpointError, StorageError
from rayway.storage.objects import ObjectMissing, Objects

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


class Parts:
    """The parts of one save, in a checkpoint's folder, as one rank sees them.

    Args:
        folder: The checkpoint's.
        share: This rank's part.
        run_id: The run's.
        step: Finished optimizer steps.
        attempt: The attempt's number.
        file_bytes: A file of tensors is closed once it has so many.
        deadline: Gives when to stop waiting for other ranks, by the monotonic clock. It is asked
            again and again.
    """

    def __init__(
        self,
        folder: Objects,
        share: Share,
        *,
        run_id: str,
        step: int,
        attempt: int,
        file_bytes: int,
        deadline: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._share = share
        self._outline = share.outline()
        self._run_id, self._step, self._attempt = run_id, step, attempt
        self._file_bytes = file_bytes
        self._deadline = deadline
        self._began = time.monotonic()
        self._keys = [part_key(share.rank), weights_key(share.rank)]
        self._cut = share.cut_weights()
        self._all: list[Part] = []
        self._cut_hashes: dict[str, str] = {}

    def write(self, *, threads: int) -> None:
        """Write this rank's files, its part, and the hashes of cut weights that fall to it."""
        share, folder = self._share, self._folder
        folder.delete(self._keys)  # of an earlier try
        written = write_share(folder, share, threads=threads, file_bytes=self._file_bytes)
        part = Part(
            run_id=self._run_id,
            step=self._step,
            attempt=self._attempt,
            rank=share.rank,
            world_size=share.world_size,
            outline=self._outline,
            files=written.files,
            tensors=written.tensors,
            weights=written.weights,
        )
        folder.put(part_key(share.rank), part.to_json())
        if share.rank and not self._cut:
            return
        others = [self._await_part(rank) for rank in range(share.world_size) if rank != share.rank]
        self._all = sorted([part, *others], key=lambda part: part.rank)
        mine = [name for name, rank in self._cut.items() if rank == share.rank]
        self._cut_hashes = hash_cut_weights(folder, self._all, mine)
        if share.rank and mine:
            told = CutWeights(rank=share.rank, outline=self._outline, weights=self._cut_hashes)
            folder.put(weights_key(share.rank), told.to_json())

    def gather(self, facts: Mapping[str, JsonValue], *, created_at: float) -> Manifest:
        """Return the manifest of all ranks' parts, once they are there.

        Raises:
            CheckpointError: The parts are not those of one state, or facts are not plain JSON.
            StorageError: A rank failed, or was not done in time.
        """
        hashes = {name: sha256 for part in self._all for name, sha256 in part.weights.items()}
        for rank in sorted({0, *self._cut.values()}):
            hashes |= self._cut_hashes if rank == 0 else self._await_weights(rank)
        files = tuple(entry for part in self._all for entry in part.files)
        try:
            manifest = Manifest(
                run_id=self._run_id,
                step=self._step,
                attempt=self._attempt,
                world_size=self._share.world_size,
                files=files,
                tensors=self._merged(),
                aliases=self._share.aliases,
                facts=dict(facts),
                weights_sha256=self._weights_sha256(hashes),
                created_at=created_at,
            )
        except ValidationError as error:
            raise _unstorable(self._step, error) from error
        manifest.check_pieces()
        surplus = {info.key for info in self._folder.list()} - {entry.name for entry in files}
        self._folder.delete(sorted(surplus - self._part_keys()))  # of an earlier try
        return manifest

    def clear(self) -> None:
        """Remove the parts: the manifest holds all that they say."""
        self._folder.delete(sorted(self._part_keys()))

    def remove(self) -> None:
        """Remove what this rank has written."""
        self._folder.delete([*self._keys, *plan_files(self._share, self._file_bytes)])

    def _part_keys(self) -> set[str]:
        ranks = range(self._share.world_size)
        return {part_key(rank) for rank in ranks} | {weights_key(r) for r in self._cut.values()}

    def _await_part(self, rank: int) -> Part:
        part = Part.from_json(self._await(part_key(rank)), rank=rank)
        if part.error is not None:
            raise StorageError(f"rank {rank} could not store its part: {part.error}")
        ours = (self._run_id, self._step, self._attempt, rank, self._share.world_size)
        if (part.run_id, part.step, part.attempt, part.rank, part.world_size) != ours:
            raise CheckpointError(f"{part_key(rank)} is that of another save or rank.")
        if part.outline != self._outline:
            raise CheckpointError(
                f"rank {rank} has other tensors to save than rank {self._share.rank}: names, types "
                "or shapes differ. Let all ranks build the same model and optimizer."
            )
        return part

    def _await_weights(self, rank: int) -> dict[str, str]:
        return CutWeights.from_json(self._await(weights_key(rank)), rank=rank).weights

    def _await(self, key: str) -> bytes:
        """Look for an object until it is there."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._folder.get(key)
            except ObjectMissing:
                now = time.monotonic()
                if now >= self._deadline():
                    raise StorageError(
                        f"{key} was not there after {now - self._began:.0f} s: its rank did not "
                        "store its part in time."
                    ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _merged(self) -> dict[str, TensorEntry]:
        """Return all tensors, each with the pieces of all ranks."""
        return {
            name: TensorEntry(
                dtype=outline.dtype,
                shape=outline.shape,
                pieces=tuple(
                    piece
                    for part in self._all
                    if name in part.tensors
                    for piece in part.tensors[name].pieces
                ),
            )
            for name, outline in sorted(self._share.outlines.items())
        }

    def _weights_sha256(self, hashes: Mapping[str, str]) -> str:
        outlines, aliases = self._share.outlines, self._share.aliases
        shapes = {
            **{name: (outline.dtype, outline.shape) for name, outline in outlines.items()},
            **{name: (outlines[alias.of].dtype, alias.shape) for name, alias in aliases.items()},
        }
        twins = {name: a.of for name, a in aliases.items() if outlines[a.of].cut}
        hashes = {**hashes, **{name: hashes[of] for name, of in twins.items() if of in hashes}}
        weights = {name: told for name, told in shapes.items() if name.startswith(WEIGHTS)}
        missing = sorted(weights.keys() - hashes.keys())
        if missing:
            raise CheckpointError(f"no rank has hashed {missing[0]!r}: {len(missing)} are missing.")
        return combined_sha256(
            {
                name.removeprefix(WEIGHTS): (dtype, shape, hashes[name])
                for name, (dtype, shape) in weights.items()
            }
        )


def _unstorable(step: int, error: ValidationError) -> Unstorable:
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"]))
    return Unstorable(
        f"step {step} cannot be stored: {where}: {problem['msg']}. Facts are plain JSON (text "
        "keys, lists, no tuples); a file's stem is made of letters, digits, '-', '_'."
    )

"""Reading a checkpoint's tensors: what this rank needs of them, verified, in any layout.

A checkpoint may have been saved by another number of ranks, and with other tensors cut. A reader
says what it fills: a tensor that is whole there is read whole, of a ``DTensor`` only the block that
is this rank's. Files without any of it are not read.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rayway.checkpoint import catalog
from rayway.checkpoint.boxes import Box
from rayway.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from rayway.checkpoint.share import local_box
from rayway.checkpoint.tensors import alias_view, dtype_name, dtype_of, read_tensors, twin
from rayway.errors import CheckpointError
from rayway.storage.objects import Objects
from rayway.storage.runs import MANIFEST_KEY

Like = Callable[[str, tuple[int, ...]], Tensor | None]
"""Told a stored tensor's ``stem/name`` and shape, returns the tensor that it is to fill; ``None``
if there is none yet. Only its layout is looked at."""

_THREADS = 4  # hashing is most of the time, and does not hold the interpreter


def read_state(
    objects: Objects, manifest: Manifest, like: Like | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return a checkpoint's tensors, each file that was read compared with its hash.

    Args:
        objects: The checkpoint's folder.
        manifest: Its manifest.
        like: What is to be filled; ``None``: all is read whole.

    Returns:
        File stem -> name -> tensor on the CPU. Whole tensors of a local file are mapped into
        memory, not read; where ``like`` has a cut ``DTensor``, there is one here too.

    Raises:
        CheckpointError: A file is damaged, or not what the manifest says.
    """
    targets = {
        name: _target(name, shape, like)
        for name, shape in [
            *((name, entry.shape) for name, entry in manifest.tensors.items()),
            *((name, alias.shape) for name, alias in manifest.aliases.items()),
        ]
    }
    needed = {name: targets[name].box for name in manifest.tensors}
    for name, alias in manifest.aliases.items():
        entry = manifest.tensors[alias.of]
        if alias != twin(alias.of, entry.shape) or targets[name].box != needed[alias.of]:
            needed[alias.of] = Box.whole(entry.shape)  # how else to look into it
    blocks = _read_blocks(objects, manifest, needed)
    state: dict[str, dict[str, Tensor]] = {}
    for name in sorted(targets):
        view = manifest.aliases.get(name)
        of = view.of if view is not None else name
        block, box = blocks[of], needed[of]
        if view is not None and box == Box.whole(manifest.tensors[of].shape):
            block, box = alias_view(block, view, name=name), Box.whole(view.shape)
        stem, _, rest = name.partition("/")
        state.setdefault(stem, {})[rest] = targets[name].fit(block, box)
    return state


@dataclass(frozen=True, slots=True)
class _Target:
    """What of a tensor is to be read, and as what."""

    box: Box
    layout: DTensor | None

    def fit(self, block: Tensor, box: Box) -> Tensor:
        """Return the target, of a block around it."""
        if box != self.box:
            block = block[self.box.slices_in(box)].clone()  # lets go of the rest
        if self.layout is None:
            return block
        return DTensor.from_local(
            block,
            self.layout.device_mesh,
            self.layout.placements,
            shape=self.layout.shape,
            stride=self.layout.stride(),
        )


def _target(name: str, shape: tuple[int, ...], like: Like | None) -> _Target:
    layout = like(name, shape) if like is not None else None
    if isinstance(layout, DTensor) and tuple(layout.shape) == shape:
        return _Target(local_box(layout, name=name), layout)
    return _Target(Box.whole(shape), None)


def _read_blocks(
    objects: Objects, manifest: Manifest, needed: Mapping[str, Box]
) -> dict[str, Tensor]:
    """Return the block that is needed of each tensor, put together from its pieces."""
    blocks: dict[str, Tensor] = {}
    files: dict[str, dict[str, Box]] = {}
    for name, entry in manifest.tensors.items():
        box = needed[name]
        if all(piece.box != box for piece in entry.pieces):
            blocks[name] = torch.empty(box.shape, dtype=_dtype(name, entry))
        for piece in entry.pieces:
            files.setdefault(piece.file, {})[name] = piece.box
    wanted = [
        (entry, files[entry.name])
        for entry in manifest.files
        if any(
            box == needed[name] or box.overlap(needed[name])
            for name, box in files.get(entry.name, {}).items()
        )
    ]

    def take(job: tuple[FileEntry, dict[str, Box]]) -> None:
        entry, inside = job
        stored = _read_file(objects, entry)
        if stored.keys() != {name.partition("/")[2] for name in inside}:
            raise CheckpointError(f"{entry.name} holds other tensors than {MANIFEST_KEY} says.")
        for name, piece in inside.items():
            tensor = stored[name.partition("/")[2]]
            if tuple(tensor.shape) != piece.shape or dtype_name(tensor.dtype) != (
                manifest.tensors[name].dtype
            ):
                raise CheckpointError(f"{entry.name}: {name!r} is not what {MANIFEST_KEY} says.")
            if piece == needed[name]:
                blocks[name] = tensor
            elif (overlap := piece.overlap(needed[name])) is not None:
                into = blocks[name][overlap.slices_in(needed[name])]
                into.copy_(tensor[overlap.slices_in(piece)])

    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        for _ in pool.map(take, wanted):  # hands on what was raised
            pass
    return blocks


def _dtype(name: str, entry: TensorEntry) -> torch.dtype:
    dtype = dtype_of(entry.dtype)
    if dtype is None:
        raise CheckpointError(f"{MANIFEST_KEY}: {name!r} is of an unknown type {entry.dtype!r}.")
    return dtype


def _read_file(objects: Objects, entry: FileEntry) -> dict[str, Tensor]:
    path = objects.local_path(entry.name)
    if path is None:
        return read_tensors(catalog.read_file(objects, entry), name=entry.name)
    catalog.check_file(objects, entry)
    return read_tensors(path, name=entry.name)

"""Which part of a state a rank stores.

A state is a set of named tensors. Of a tensor that is cut over ranks (a ``DTensor``, as FSDP2 has
them) each rank stores the block it holds. Of the others, those that are equal on all ranks are
dealt out, each to one rank, so that all write about the same number of bytes; the rest is that of
rank 0. Every rank works this out for itself: nothing is asked of another one.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rayway.checkpoint.boxes import Box, deal, shard_box
from rayway.checkpoint.manifest import Alias
from rayway.checkpoint.tensors import Unstorable, dtype_name, find_aliases, storable, twin

Tensors = Mapping[str, Mapping[str, Tensor]]
"""File stem -> name -> tensor. A stem is made of letters, digits, '-' and '_'; one without tensors
is not stored."""

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")

WEIGHTS = "model/"
"""What the names of a model's tensors begin with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What a tensor is, apart from its values. The same on every rank."""

    dtype: str
    """Its type as safetensors names it, e.g. ``F32``."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""

    cut: bool
    """Whether it is cut over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rank's part of a state, by ``stem/name``."""

    rank: int
    world_size: int

    outlines: dict[str, Outline]
    """All stored tensors of the whole state; the same on every rank."""

    aliases: dict[str, Alias]
    """Tensors that look into a stored one; the same on every rank."""

    boxes: dict[str, Box]
    """Which block of a tensor this rank stores; of most tensors none."""

    tensors: dict[str, Tensor] = field(repr=False)
    """Those blocks."""

    def holding(self, tensors: dict[str, Tensor]) -> "Share":
        """Return the same share with other tensors in place of its own, such as copies."""
        return replace(self, tensors=tensors)

    def outline(self) -> str:
        """Return a hash of names, types and shapes of the whole state."""
        rows = [[name, o.dtype, o.shape, o.cut] for name, o in sorted(self.outlines.items())]
        views = [
            [name, a.of, a.shape, a.stride, a.offset] for name, a in sorted(self.aliases.items())
        ]
        return hashlib.sha256(json.dumps([rows, views]).encode()).hexdigest()

    def cut_weights(self) -> dict[str, int]:
        """Return which rank hashes those of the model's tensors that no rank has whole."""
        cut = {
            name: o.shape for name, o in self.outlines.items() if o.cut and name.startswith(WEIGHTS)
        }
        sizes = {name: Box.whole(shape).volume for name, shape in cut.items()}
        return deal(sizes, self.world_size)


def plan_share(
    tensors: Tensors,
    *,
    rank: int = 0,
    world_size: int = 1,
    replicated: Collection[str] = (),
) -> Share:
    """Return what a rank stores of a state.

    Args:
        tensors: The state as this rank has it.
        rank: This one.
        world_size: How many ranks save together.
        replicated: Those which all ranks have equal, by ``stem/name``. Of others that are not cut,
            rank 0 has the one that counts.

    Raises:
        Unstorable: A tensor cannot be stored.
    """
    for stem in tensors:
        if not _STEM.fullmatch(stem):
            raise Unstorable(
                f"{stem!r} cannot begin a file's name: use 1 to 80 letters, digits, '-' and '_'."
            )
    flat = {f"{stem}/{name}": t for stem, part in tensors.items() for name, t in part.items()}
    held = {name: _held(name, tensor) for name, tensor in flat.items()}
    local = {name: storable(name, block.tensor) for name, block in held.items()}
    aliases = find_aliases({name: t for name, t in local.items() if not held[name].cut})
    aliases |= _cut_twins(flat, held)
    stored = [name for name in flat if name not in aliases]
    outlines = {
        name: Outline(
            dtype=dtype_name(local[name].dtype), shape=tuple(flat[name].shape), cut=held[name].cut
        )
        for name in stored
    }
    whole = [name for name in stored if not held[name].cut]
    dealt = {name: _bytes(local[name]) for name in whole if name in replicated}
    first_has = sum(_bytes(local[name]) for name in whole if name not in replicated)
    owners = deal(dealt, world_size, first_has=first_has)
    mine = [
        name
        for name in stored
        if (held[name].owned if held[name].cut else owners.get(name, 0) == rank)
    ]
    return Share(
        rank=rank,
        world_size=world_size,
        outlines=outlines,
        aliases=aliases,
        boxes={name: held[name].box for name in mine},
        tensors={name: local[name] for name in mine},
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """The block of a tensor that this rank has in memory."""

    tensor: Tensor
    box: Box
    cut: bool
    owned: bool = True
    """Whether it is this rank that stores a block which several have."""


def local_box(tensor: DTensor, *, name: str) -> Box:
    """Return which block of a tensor is this rank's.

    Raises:
        Unstorable: It is laid out in a way that has no such block.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    cuts = []
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:  # a subclass cuts in another way
            cuts.append((placement.dim % tensor.ndim, mesh.size(axis), coordinate[axis]))
        elif not isinstance(placement, Replicate):
            raise Unstorable(
                f"{name!r} is placed as {placement}, which cannot be stored. Save tensors that are "
                "sharded in whole blocks, or replicated."
            )
    return shard_box(tensor.shape, cuts)


def _held(name: str, tensor: Tensor) -> _Held:
    if not isinstance(tensor, DTensor):
        return _Held(tensor, Box.whole(tensor.shape), cut=False)
    box, block = local_box(tensor, name=name), tensor.to_local()
    if tuple(block.shape) != box.shape:
        raise Unstorable(
            f"{name!r} should be a block of shape {box.shape} here, and is {tuple(block.shape)}."
        )
    mesh = tensor.device_mesh
    cut = tensor.numel() > 0 and any(
        isinstance(placement, Shard) and mesh.size(axis) > 1
        for axis, placement in enumerate(tensor.placements)
    )
    coordinate = mesh.get_coordinate() or [1] * len(tensor.placements)
    first = all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    return _Held(block, box, cut=cut, owned=first and box.volume > 0)


def _cut_twins(flat: Mapping[str, Tensor], held: Mapping[str, _Held]) -> dict[str, Alias]:
    """Return which cut tensors are another one. A block that is empty has its memory too."""
    seen: dict[object, str] = {}
    aliases = {}
    for name in sorted(name for name, block in held.items() if block.cut):
        block, shape = held[name].tensor, tuple(flat[name].shape)
        place = (block.untyped_storage()._cdata, block.storage_offset(), block.dtype, shape)
        if place in seen:
            aliases[name] = twin(seen[place], shape)
        else:
            seen[place] = name
    return aliases


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize

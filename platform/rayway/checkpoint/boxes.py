"""Where the pieces of a tensor lie in it, and who stores what. Numbers alone, no torch.

A box is a block of a tensor: where it begins and how far it reaches, in each dimension. The pieces
that several ranks hold of a sharded tensor are boxes; together they must tile it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Self


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor; a tensor of no dimension has exactly one, of volume 1."""

    offsets: tuple[int, ...]
    """Its first index, per dimension."""

    shape: tuple[int, ...]
    """Its length, per dimension."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the box that is a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Return the block that both hold, ``None`` if there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return where it lies in a box around it, as an index into that box's elements."""
        return tuple(
            slice(mine - first, mine - first + length)
            for mine, first, length in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )


def untiled(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return what keeps boxes from tiling a tensor, each element once; ``None`` if they do.

    Args:
        shape: The tensor's.
        boxes: The pieces; none of an empty tensor is empty.
    """
    whole = Box.whole(shape)
    for box in boxes:
        inside = len(box.offsets) == len(box.shape) == len(whole.shape) and all(
            first + length <= size
            for first, length, size in zip(box.offsets, box.shape, shape, strict=True)
        )
        if not inside:
            return f"a piece at {box.offsets} of shape {box.shape} is not inside {tuple(shape)}"
    ordered = sorted(boxes, key=lambda box: box.offsets)
    for place, box in enumerate(ordered):
        for later in ordered[place + 1 :]:
            if box.offsets and later.offsets[0] >= box.offsets[0] + box.shape[0]:
                break  # sorted by the first dimension: no later one reaches back
            if box.overlap(later):
                return f"pieces at {box.offsets} and {later.offsets} overlap"
    missing = whole.volume - sum(box.volume for box in boxes)
    if missing or not boxes:
        return f"{missing} of {whole.volume} elements are in no piece"
    return None


def deal(sizes: Mapping[str, int], ranks: int, *, first_has: int = 0) -> dict[str, int]:
    """Deal things out so that all ranks carry about the same; the same result on every rank.

    The largest goes first, each to the rank that has least so far.

    Args:
        sizes: What each weighs, e.g. bytes by tensor.
        ranks: How many share.
        first_has: What rank 0 carries already.

    Returns:
        The rank of each.
    """
    loads = [(first_has, 0), *((0, rank) for rank in range(1, ranks))]
    heapify(loads)
    owners = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, rank = loads[0]
        heapreplace(loads, (load + size, rank))
        owners[name] = rank
    return owners


def shard_box(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """Return which block of a tensor a rank holds, if cut as ``torch.chunk`` cuts.

    Args:
        shape: The tensor's.
        cuts: One after the other, each of what the one before left: the dimension, into how many
            parts it is cut, and which of them is the rank's.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for dim, parts, mine in cuts:
        step = -(-lengths[dim] // parts)
        start = min(step * mine, lengths[dim])
        offsets[dim] += start
        lengths[dim] = min(step, lengths[dim] - start)
    return Box(tuple(offsets), tuple(lengths))

"""Boxes, tilings and dealing: numbers alone."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayway.checkpoint.boxes import Box, deal, shard_box, untiled

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
BOXES = SHAPES.flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        *[
            st.tuples(*[st.integers(0, n - 1) for n in shape]).flatmap(
                lambda first, shape=shape: st.tuples(
                    st.just(first),
                    st.tuples(*[st.integers(1, n - a) for n, a in zip(shape, first, strict=True)]),
                )
            )
            for _ in range(2)
        ],
    )
)


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True)]
    return set(itertools.product(*ranges))


@given(BOXES)
def test_an_overlap_is_what_both_hold(drawn) -> None:
    shape, one, two = drawn
    a, b = Box(*one), Box(*two)
    common = a.overlap(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    assert a.volume == len(cells(a))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    if common:
        inside = whole[a.slices_in(Box.whole(shape))][common.slices_in(a)]
        assert torch.equal(inside, whole[common.slices_in(Box.whole(shape))])


@given(BOXES, st.integers(0, 3))
def test_boxes_tile_if_each_element_is_in_exactly_one(drawn, split: int) -> None:
    shape, one, two = drawn
    for boxes in ([Box(*one), Box(*two)], [Box(*one)], [Box.whole(shape)], []):
        counts = [sum(cell in cells(box) for box in boxes) for cell in cells(Box.whole(shape))]
        assert (untiled(shape, boxes) is None) == (set(counts) == {1})


@given(SHAPES, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=2))
def test_the_blocks_of_all_ranks_tile_and_are_those_of_chunk(shape, cuts) -> None:
    cuts = [(dim, parts) for dim, parts in cuts if dim < len(shape)]
    boxes = []
    for places in itertools.product(*[range(parts) for _, parts in cuts]):
        box = shard_box(shape, [(*cut, mine) for cut, mine in zip(cuts, places, strict=True)])
        tensor = torch.empty(shape)
        for (dim, parts), mine in zip(cuts, places, strict=True):
            chunks = tensor.chunk(parts, dim)
            tensor = chunks[mine] if mine < len(chunks) else tensor.narrow(dim, 0, 0)
        assert tuple(tensor.shape) == box.shape
        if box.volume:
            boxes.append(box)
    assert untiled(shape, boxes) is None


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=30),
    st.integers(1, 5),
    st.integers(0, 2000),
)
def test_what_is_dealt_goes_to_one_rank_each_and_evenly(sizes, ranks: int, first_has: int) -> None:
    owners = deal(sizes, ranks, first_has=first_has)
    assert owners.keys() == sizes.keys()
    assert owners == deal(dict(reversed(sizes.items())), ranks, first_has=first_has)
    loads = [first_has * (rank == 0) for rank in range(ranks)]
    for name, rank in owners.items():
        loads[rank] += sizes[name]
    largest = max(sizes.values(), default=0)
    mean = (first_has + sum(sizes.values())) / ranks
    assert max(loads) <= max(mean + largest, first_has)


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([Box((0,), (9,))], "not inside"),
        ([Box((0, 0), (1, 1))], "not inside"),
        ([Box((0,), (3,)), Box((2,), (2,))], "overlap"),
        ([Box((0,), (3,))], "1 of 4 elements are in no piece"),
    ],
)
def test_what_keeps_boxes_from_tiling_is_told(boxes, says: str) -> None:
    problem = untiled((4,), boxes)
    assert problem is not None
    assert says in problem


def test_numbers_need_no_torch() -> None:
    code = "import rayway.checkpoint.boxes, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

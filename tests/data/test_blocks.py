from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.blocks import Block, Blocks
from rayway.data.columns import Columns
from rayway.data.index import Index
from rayway.data.plan import Plan, Stream, Unit
from rayway.errors import DataError


def index_of(rows: list[int]) -> Index:
    return Index(
        root="set",
        paths=("a.parquet",),
        sizes=(1,),
        digests=("a",),
        rows=np.array(rows),
        shard=np.zeros(len(rows), np.int64),
        ordinal=np.arange(len(rows)),
        group_bytes=1,
        schema=pa.schema({"x": pa.int64()}),
    )


class Made:
    """An engine that makes each row from its id, and notes what it was asked for."""

    def __init__(self, index: Index) -> None:
        self.index, self.asked, self.closed = index, list[Unit](), 0

    def __call__(self, units: Iterator[Unit]) -> Generator[Columns, None, None]:
        try:
            for unit in units:
                self.asked.append(unit)
                ids = unit.stored_ids(self.index)
                yield {"x": ids * 10, "v": (ids[:, None] + [0.0, 0.5]).astype(np.float32)}
        finally:
            self.closed += 1


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=10))
    cover = draw(st.sampled_from(["drop", "all"]))
    most = min(sum(rows), 30) if cover == "drop" else 30
    shape = {
        "batch": draw(st.integers(1, most)),
        "seed": draw(st.integers(0, 99)),
        "shuffle": draw(st.booleans()),
        "lanes": draw(st.integers(1, 12)),
        "bands": draw(st.integers(1, 6)),
        "window": draw(st.integers(1, 4)),
    }
    return Plan(Stream(index_of(rows), cover=cover, **shape))


def steps_of(block: Block, micro_batches: int) -> list[list[tuple[list[int], Columns]]]:
    """A block as steps of micro-batches of (ids, columns)."""
    edges = np.cumsum([0, *block.counts])
    pieces = [
        (block.ids[a:b].tolist(), {name: x[a:b] for name, x in block.columns.items()})
        for a, b in pairwise(edges)
    ]
    assert edges[-1] == len(block.ids)
    return [pieces[i : i + micro_batches] for i in range(0, len(pieces), micro_batches)]


def walk(plan: Plan, engine: Any, start: int, stop: int, **who: int) -> list[Any]:
    blocks = Blocks(plan, engine, **who)
    return [
        step
        for block in blocks.run(start, stop)
        for step in steps_of(block, len(blocks.first_slots))
    ]


@settings(max_examples=50, deadline=None)
@given(plans(), st.integers(1, 9), st.integers(1, 12), st.integers(0, 40), st.integers(1, 90))
def test_a_ranks_rows_are_the_plans_for_any_world_micro_batch_and_start(
    plan: Plan, world: int, micro_batch: int, start: int, count: int
) -> None:
    most_slots = -(-plan.global_batch // world)
    for rank in {0, world // 2, world - 1}:
        engine = Made(plan.stream.index)
        who = {"rank": rank, "world_size": world, "micro_batch": micro_batch}
        steps = walk(plan, engine, start, start + count, **who)
        assert len(steps) == count
        for step, got in enumerate(steps, start):
            slots = plan.ids(step, rank, world)
            cuts = range(0, most_slots, micro_batch)
            want = [slots[a : a + micro_batch] for a in cuts]
            assert [ids for ids, _ in got] == [ids[ids >= 0].tolist() for ids in want]
            for ids, columns in got:
                if ids:
                    assert columns["x"].tolist() == [10 * i for i in ids]
                    assert columns["v"].tolist() == [[i, i + 0.5] for i in ids]
        assert engine.closed == int(bool(engine.asked))
        common = list(plan.units(rank, world, start, start + count))
        assert engine.asked == common[: len(engine.asked)]


@settings(max_examples=50, deadline=None)
@given(plans(), st.integers(1, 4), st.integers(0, 30))
def test_a_seek_gives_what_walking_there_gives(plan: Plan, world: int, start: int) -> None:
    who = {"rank": world - 1, "world_size": world, "micro_batch": 3}
    walked = walk(plan, Made(plan.stream.index), 0, start + 5, **who)
    sought = walk(plan, Made(plan.stream.index), start, start + 5, **who)
    assert [[ids for ids, _ in step] for step in walked[start:]] == [
        [ids for ids, _ in step] for step in sought
    ]


def test_the_first_step_waits_for_nothing_but_its_own_units() -> None:
    index = index_of([8] * 20)
    stream = Stream(index, batch=4, seed=0, shuffle=True, cover="drop", lanes=4, bands=4, window=1)
    plan, engine = Plan(stream), Made(index)
    blocks = Blocks(plan, engine, rank=0, world_size=1, micro_batch=4).run(0, None)
    assert len(next(blocks).counts) == 1
    assert engine.asked == list(plan.units(stop=1))
    sizes = [len(next(blocks).counts) for _ in range(6)]
    assert sizes == [2, 4, 8, 16, 9, 40], "blocks grow, and end with the epoch of 40 steps"


def test_a_block_of_wide_rows_holds_one_step() -> None:
    index = index_of([100])

    def wide(units: Iterator[Unit]) -> Generator[Columns, None, None]:
        for unit in units:
            yield {"x": np.zeros((unit.rows, 300_000), np.uint8)}

    plan = Plan(
        Stream(index, batch=10, seed=0, shuffle=True, cover="drop", lanes=1, bands=1, window=1)
    )
    blocks = Blocks(plan, wide, rank=0, world_size=1, micro_batch=10).run(0, 5)
    assert [len(block.counts) for block in blocks] == [1] * 5


@pytest.mark.parametrize("world", [2, 4, 7])
def test_a_rank_without_a_row_gets_the_first_row_as_filler(world: int) -> None:
    index = index_of([1, 2])
    plan = Plan(
        Stream(index, batch=8, seed=0, shuffle=True, cover="all", lanes=1, bands=1, window=1)
    )
    engine = Made(index)
    blocks = Blocks(plan, engine, rank=world - 1, world_size=world, micro_batch=2)
    block = next(blocks.run(0, 1))
    assert block.counts == [0] * len(blocks.first_slots)
    assert engine.asked == []
    assert {name: x.tolist() for name, x in blocks.filler.items()} == {"x": [0], "v": [[0, 0.5]]}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x.astype(np.float64), "float64 of shape .* and was int64 of shape"),
        (lambda x: x[:, None], r"int64 of shape \(1,\) a row and was int64 of shape \(\) a row"),
        (None, "missing and was int64"),
    ],
)
def test_units_whose_columns_do_not_fit_together_are_refused(spoil: Any, words: str) -> None:
    index = index_of([4, 4])

    def engine(units: Iterator[Unit]) -> Generator[Columns, None, None]:
        for number, unit in enumerate(units):
            x = unit.stored_ids(index)
            y = x if number == 0 else spoil and spoil(x)
            yield {"x": x} if y is None else {"x": x, "y": y}

    plan = Plan(
        Stream(index, batch=4, seed=0, shuffle=False, cover="drop", lanes=1, bands=1, window=1)
    )
    blocks = Blocks(plan, engine, rank=0, world_size=1, micro_batch=4).run(0, 2)
    next(blocks)
    with pytest.raises(DataError, match=rf"'y' of set/a\.parquet \(row group 1\) is {words}"):
        next(blocks)


def test_two_blocks_share_no_memory_with_each_other_or_with_the_units() -> None:
    index = index_of([64])
    plan = Plan(
        Stream(index, batch=8, seed=0, shuffle=False, cover="drop", lanes=1, bands=1, window=1)
    )
    given_out: list[Columns] = []

    def engine(units: Iterator[Unit]) -> Generator[Columns, None, None]:
        for unit in units:
            given_out.append({"x": unit.stored_ids(index)})
            yield given_out[-1]

    blocks = list(Blocks(plan, engine, rank=0, world_size=1, micro_batch=8).run(0, 8))
    arrays = [block.columns["x"] for block in blocks] + [x["x"] for x in given_out]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])


def test_ending_early_closes_the_engine() -> None:
    index = index_of([64] * 4)
    plan = Plan(
        Stream(index, batch=8, seed=0, shuffle=True, cover="drop", lanes=2, bands=1, window=1)
    )
    made, held = Made(index), list[Generator[Columns, None, None]]()

    def engine(units: Iterator[Unit]) -> Generator[Columns, None, None]:
        held.append(made(units))
        return held[-1]

    blocks = Blocks(plan, engine, rank=0, world_size=1, micro_batch=8).run(0, None)
    next(blocks)
    assert made.closed == 0
    blocks.close()
    assert made.closed == 1

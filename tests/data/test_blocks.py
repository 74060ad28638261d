from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.blocks import Block, Blocks
from rayway.data.columns import Columns, Rows
from rayway.data.index import Index
from rayway.data.keys import Int64s, mix_array
from rayway.data.plan import Plan
from rayway.data.stream import STREAM_BITS, Stream, Unit
from rayway.errors import DataError

Valid = Callable[[Int64s], npt.NDArray[np.bool_]]


def index_of(rows: list[int], root: str = "set") -> Index:
    return Index(
        root=root,
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
    """An engine that makes each row from its id, and notes what it was asked for.

    ``valid`` says which ids count; the others come as zeros.
    """

    def __init__(self, plan: Plan, valid: Valid | None = None) -> None:
        self.plan, self.valid, self.asked, self.closed = plan, valid, list[Unit](), 0

    def __call__(self, units: Iterator[Unit]) -> Generator[Rows, None, None]:
        try:
            for unit in units:
                self.asked.append(unit)
                ids = unit.stored_ids(self.plan.streams[unit.stream].index)
                valid = None if self.valid is None else self.valid(ids)
                x = np.where(valid if valid is not None else True, ids * 10, 0)
                yield Rows({"x": x, "v": x[:, None] + [0.0, 0.5]}, valid)
        finally:
            self.closed += 1


def some(ids: Int64s) -> npt.NDArray[np.bool_]:
    """Two rows of three, by their hash."""
    return mix_array(ids.astype(np.uint64)) % np.uint64(3) > 0


def none(ids: Int64s) -> npt.NDArray[np.bool_]:
    return np.zeros(len(ids), np.bool_)


def all_but_the_first_stream(ids: Int64s) -> npt.NDArray[np.bool_]:
    return ids >> STREAM_BITS > 0


def plan_of(index: Index, **shape: Any) -> Plan:
    usual = {"seed": 0, "shuffle": True, "cover": "drop", "lanes": 1, "bands": 1, "window": 1}
    return Plan([Stream(index, **{**usual, **shape})])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Mixtures of up to three streams."""

    def stream(number: int) -> Stream:
        rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=10))
        cover = draw(st.sampled_from(["drop", "all"]))
        most = min(sum(rows), 30) if cover == "drop" else 30
        shape = {
            "batch": draw(st.integers(1, most)),
            "seed": draw(st.integers(0, 99)),
            "shuffle": draw(st.sampled_from([True, False, "sticky"])),
            "lanes": draw(st.integers(1, 12)),
            "bands": draw(st.integers(1, 6)),
            "window": draw(st.integers(1, 4)),
        }
        return Stream(index_of(rows), cover=cover, number=number, **shape)

    return Plan([stream(number) for number in range(draw(st.integers(1, 3)))])


def steps_of(block: Block, micro_batches: int) -> list[list[tuple[list[int], Columns]]]:
    """A block as steps of micro-batches of (ids, columns)."""
    edges = np.cumsum([0, *block.counts])
    pieces = [
        (block.ids[a:b].tolist(), {name: x[a:b] for name, x in block.columns.items()})
        for a, b in pairwise(edges)
    ]
    assert edges[-1] == len(block.ids)
    assert all(len(x) == len(block.ids) for x in block.columns.values())
    return [pieces[i : i + micro_batches] for i in range(0, len(pieces), micro_batches)]


def walk(plan: Plan, engine: Any, start: int, stop: int, **who: int) -> list[Any]:
    blocks = Blocks(plan, engine, **who)
    return [
        step
        for block in blocks.run(start, stop)
        for step in steps_of(block, len(blocks.first_slots))
    ]


@settings(max_examples=80, deadline=None)
@given(
    plans(),
    st.sampled_from([None, None, some, none, all_but_the_first_stream]),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(0, 40),
    st.integers(1, 90),
)
def test_a_ranks_rows_are_the_plans_for_any_world_micro_batch_and_start(
    plan: Plan, valid: Valid | None, world: int, micro_batch: int, start: int, count: int
) -> None:
    most_slots = -(-plan.global_batch // world)
    for rank in {0, world // 2, world - 1}:
        engine = Made(plan, valid)
        blocks = Blocks(plan, engine, rank=rank, world_size=world, micro_batch=micro_batch)
        steps, skipped, want_skipped = list[Any](), 0, 0
        for block in blocks.run(start, start + count):
            steps += steps_of(block, len(blocks.first_slots))
            skipped += block.skipped
        assert len(steps) == count
        for step, got in enumerate(steps, start):
            slots = plan.ids(step, rank, world)
            counts = slots >= 0
            if valid is not None:
                counts &= valid(slots)
            want_skipped += int(((slots >= 0) & ~counts).sum())
            cuts = range(0, most_slots, micro_batch)
            want = [slots[a : a + micro_batch][counts[a : a + micro_batch]] for a in cuts]
            assert [ids for ids, _ in got] == [ids.tolist() for ids in want]
            for ids, columns in got:
                if ids:
                    assert columns["x"].tolist() == [10 * i for i in ids]
                    assert columns["v"].tolist() == [[10.0 * i, 10 * i + 0.5] for i in ids]
        assert skipped == want_skipped
        assert engine.closed == int(bool(engine.asked))
        common = list(plan.units(rank, world, start, start + count))
        assert engine.asked == common[: len(engine.asked)]


@settings(max_examples=50, deadline=None)
@given(plans(), st.integers(1, 4), st.integers(0, 30))
def test_a_seek_gives_what_walking_there_gives(plan: Plan, world: int, start: int) -> None:
    who = {"rank": world - 1, "world_size": world, "micro_batch": 3}
    walked = walk(plan, Made(plan), 0, start + 5, **who)
    sought = walk(plan, Made(plan), start, start + 5, **who)
    assert [[ids for ids, _ in step] for step in walked[start:]] == [
        [ids for ids, _ in step] for step in sought
    ]


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6, 12])
def test_micro_batches_are_the_same_sets_for_one_two_and_four_ranks(micro_batch: int) -> None:
    streams = [
        Stream(
            index_of([30, 9, 17, 40]),
            batch=batch,
            seed=0,
            shuffle=True,
            cover="all",
            lanes=8,
            bands=4,
            window=2,
            number=number,
        )
        for number, batch in enumerate([32, 16])
    ]
    plan = Plan(streams)
    found = []
    for world in (1, 2, 4):
        who = {"world_size": world, "micro_batch": micro_batch}
        ranks = [walk(plan, Made(plan), 0, 9, rank=rank, **who) for rank in range(world)]
        found.append([[ids for r in step for ids, _ in r] for step in zip(*ranks, strict=True)])
    assert found[0] == found[1] == found[2]


def test_the_first_step_waits_for_nothing_but_its_own_units() -> None:
    plan = plan_of(index_of([8] * 20), batch=4, lanes=4, bands=4)
    engine = Made(plan)
    blocks = Blocks(plan, engine, rank=0, world_size=1, micro_batch=4).run(0, None)
    assert len(next(blocks).counts) == 1
    assert engine.asked == list(plan.units(stop=1))
    sizes = [len(next(blocks).counts) for _ in range(6)]
    assert sizes == [2, 4, 8, 16, 32, 64], "blocks grow, whatever the 40 steps of an epoch"


def test_a_block_of_wide_rows_holds_one_step() -> None:
    index = index_of([100])

    def wide(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        for unit in units:
            yield Rows({"x": np.zeros((unit.rows, 300_000), np.uint8)})

    plan = plan_of(index, batch=10)
    blocks = Blocks(plan, wide, rank=0, world_size=1, micro_batch=10).run(0, 5)
    assert [len(block.counts) for block in blocks] == [1] * 5


@pytest.mark.parametrize("world", [2, 4, 7])
def test_a_rank_without_a_row_gets_the_first_row_as_filler(world: int) -> None:
    plan = plan_of(index_of([1, 2]), batch=8, cover="all")
    engine = Made(plan)
    blocks = Blocks(plan, engine, rank=world - 1, world_size=world, micro_batch=2)
    block = next(blocks.run(0, 1))
    assert block.counts == [0] * len(blocks.first_slots)
    assert engine.asked == []
    assert {name: x.tolist() for name, x in blocks.filler.items()} == {"x": [0], "v": [[0, 0.5]]}


def test_a_filler_is_finite_where_the_first_row_does_not_count() -> None:
    plan = plan_of(index_of([4, 4]), batch=8)
    blocks = Blocks(plan, Made(plan, none), rank=0, world_size=1, micro_batch=4)
    block = next(blocks.run(0, 1))
    assert block.counts == [0, 0]
    assert block.skipped == 8
    assert all(np.isfinite(x).all() and len(x) == 1 for x in blocks.filler.values())


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

    def engine(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        for number, unit in enumerate(units):
            x = unit.stored_ids(index)
            y = x if number == 0 else spoil and spoil(x)
            yield Rows({"x": x} if y is None else {"x": x, "y": y})

    plan = plan_of(index, batch=4, shuffle=False)
    blocks = Blocks(plan, engine, rank=0, world_size=1, micro_batch=4).run(0, 2)
    next(blocks)
    with pytest.raises(DataError, match=rf"'y' of set/a\.parquet \(row group 1\) is {words}"):
        next(blocks)


def test_a_stream_whose_columns_do_not_fit_another_is_named() -> None:
    shape: dict[str, Any] = {"seed": 0, "shuffle": False, "cover": "drop", "window": 1}
    shape |= {"lanes": 1, "bands": 1, "batch": 2}
    streams = [Stream(index_of([4], root), number=n, **shape) for n, root in enumerate("ab")]

    def engine(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        for unit in units:
            kind = (np.float32, np.float64)[unit.stream]
            yield Rows({"x": np.zeros(unit.rows, kind)})

    blocks = Blocks(Plan(streams), engine, rank=0, world_size=1, micro_batch=4).run(0, 2)
    words = (
        r"column 'x' of b/a\.parquet \(row group 0\) is float64 .* and was float32 .* in a/a\.parq"
    )
    with pytest.raises(DataError, match=words):
        next(blocks)


def test_blocks_share_no_memory_with_each_other_or_with_the_units() -> None:
    plan = plan_of(index_of([64]), batch=8, shuffle=False)
    given_out: list[Columns] = []

    def engine(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        for unit in units:
            given_out.append({"x": unit.stored_ids(plan.streams[0].index)})
            yield Rows(given_out[-1])

    blocks = list(Blocks(plan, engine, rank=0, world_size=1, micro_batch=8).run(0, 8))
    arrays = [block.columns["x"] for block in blocks] + [x["x"] for x in given_out]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])


def test_columns_need_not_be_contiguous_or_writable() -> None:
    plan = plan_of(index_of([16, 16]), batch=8)

    def engine(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        for unit in units:
            ids = unit.stored_ids(plan.streams[0].index)
            x = np.stack([ids, ids + 1], axis=1)[:, ::-1]
            x.flags.writeable = False
            yield Rows({"x": x, "t": np.stack([ids, ids]).T})

    for block in Blocks(plan, engine, rank=0, world_size=1, micro_batch=8).run(0, 8):
        assert block.columns["x"].tolist() == [[i + 1, i] for i in block.ids.tolist()]
        assert block.columns["t"].tolist() == [[i, i] for i in block.ids.tolist()]
        assert all(x.flags.writeable and x.flags.c_contiguous for x in block.columns.values())


def test_ending_early_closes_the_engine() -> None:
    plan = plan_of(index_of([64] * 4), batch=8, lanes=2)
    made, held = Made(plan), list[Generator[Rows, None, None]]()

    def engine(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        held.append(made(units))
        return held[-1]

    blocks = Blocks(plan, engine, rank=0, world_size=1, micro_batch=8).run(0, None)
    next(blocks)
    assert made.closed == 0
    blocks.close()
    assert made.closed == 1

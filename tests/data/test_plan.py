import math
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.index import Index
from rayway.data.keys import Domain, key, mix
from rayway.data.plan import ORDER_VERSION, Part, Plan, Stream, plan_order
from rayway.errors import DataError


def index_of(rows: list[int], group_bytes: int = 1000) -> Index:
    """One shard a row group."""
    names = tuple(f"{i:04}.parquet" for i in range(len(rows)))
    return Index(
        root="set",
        paths=names,
        sizes=(1,) * len(rows),
        digests=names,
        rows=np.array(rows),
        shard=np.arange(len(rows)),
        ordinal=np.zeros(len(rows), np.int64),
        group_bytes=group_bytes,
        schema=pa.schema({"x": pa.int64()}),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    cover = draw(st.sampled_from(["drop", "all"]))
    most = min(sum(rows), 40) if cover == "drop" else 40
    shape = {
        "batch": draw(st.integers(1, most)),
        "seed": draw(st.integers(0, 2**64)),
        "shuffle": draw(st.booleans()),
        "lanes": draw(st.integers(1, 24)),
        "bands": draw(st.integers(1, 9)),
        "window": draw(st.integers(1, 5)),
    }
    return Plan(Stream(index_of(rows), cover=cover, **shape))


def spelled_out(plan: Plan, epoch: int) -> list[list[int]]:
    """The ids of an epoch's steps, from the definition and with nothing but loops; -1: empty."""
    stream = plan.stream
    rows, batch, bands = stream.index.rows.tolist(), stream.batch, min(stream.bands, stream.batch)
    per_band, total = stream.lanes // bands, sum(rows)

    def shuffled(items: list[Any], *words: int) -> list[Any]:
        if not stream.shuffle:
            return items
        k = key(stream.seed, *words)
        return [items[i] for i in sorted(range(len(items)), key=lambda i: mix(i ^ k))]

    lane_of = []
    for band in range(bands):
        slots = (band + 1) * batch // bands - band * batch // bands
        lane_of += [band * per_band + i % per_band for i in range(slots)]
    line = [
        (g, r)
        for g in shuffled(list(range(len(rows))), Domain.ROW_GROUPS, 0, epoch)
        for r in range(rows[g])
    ]
    queues: list[list[int]] = []
    for lane in range(stream.lanes):
        before = sum(x < lane for x in lane_of)
        upto = before + lane_of.count(lane)
        mine = line[total * before // batch : total * upto // batch]
        spans: list[list[tuple[int, int]]] = []
        for g, r in mine:
            if not spans or spans[-1][-1][0] != g:
                spans.append([])
            spans[-1].append((g, r))
        queue, window, i = [], 0, 0
        size = 1 + lane * stream.window // stream.lanes
        while i < len(spans):
            unit = [sum(rows[:g]) + r for span in spans[i : i + size] for g, r in span]
            queue += shuffled(unit, Domain.WINDOW, 0, epoch, lane, window)
            i, window, size = i + size, window + 1, stream.window
        queues.append(queue)
    steps = total // batch if stream.cover == "drop" else -(-total // batch)
    return [[queues[x].pop(0) if queues[x] else -1 for x in lane_of] for _ in range(steps)]


@settings(max_examples=60, deadline=None)
@given(plans())
def test_the_order_is_the_one_defined(plan: Plan) -> None:
    steps = plan.steps_per_epoch
    for epoch in range(2):
        want = spelled_out(plan, epoch)
        assert [plan.ids(epoch * steps + s).tolist() for s in range(len(want))] == want
        assert len(want) == steps


@settings(max_examples=60, deadline=None)
@given(plans())
def test_an_epoch_holds_each_row_once_and_leaves_out_less_than_a_batch(plan: Plan) -> None:
    total = plan.stream.index.total
    for epoch in range(2):
        first = epoch * plan.steps_per_epoch
        steps = [plan.ids(first + s) for s in range(plan.steps_per_epoch)]
        seen = np.concatenate(steps)
        seen = seen[seen >= 0]
        assert len(set(seen.tolist())) == len(seen)
        if plan.stream.cover == "all":
            assert sorted(seen) == list(range(total))
            assert all((ids >= 0).all() for ids in steps[:-1])
        else:
            assert len(seen) == plan.steps_per_epoch * plan.global_batch
            assert len(seen) > total - plan.global_batch
        rows = [int((ids >= 0).sum()) for ids in steps]
        assert rows == [plan.rows_in_step(first + s) for s in range(plan.steps_per_epoch)]


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 9), st.integers(0, 100))
def test_the_ranks_shares_make_up_the_same_global_batch(plan: Plan, world: int, step: int) -> None:
    shares = [plan.ids(step, rank, world) for rank in range(world)]
    assert np.concatenate(shares).tolist() == plan.ids(step).tolist()
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 5), st.integers(0, 30), st.integers(1, 12))
def test_a_rank_reads_what_it_needs_once_in_time_and_nothing_else(
    plan: Plan, world: int, start: int, count: int
) -> None:
    stop, steps, index = start + count, plan.steps_per_epoch, plan.stream.index
    common = list(plan.units(0, 1, start, stop))
    for rank in range(world):
        need: dict[tuple[int, int], int] = {}
        for step in range(start, math.ceil(stop / steps) * steps):
            for i in plan.ids(step, rank, world).tolist():
                if i >= 0:
                    need[step // steps, i] = step
        held: set[tuple[int, int]] = set()
        needed_at = []
        units = list(plan.units(rank, world, start, stop))
        for unit in units:
            rows = {(unit.epoch, i) for i in unit.stored_ids(index).tolist()}
            assert not held & rows
            assert rows & need.keys(), "read without need"
            held |= rows
            needed_at.append((min(need[row] for row in rows & need.keys()), unit.lane))
        assert {row for row in need if need[row] < stop} <= held
        if world == 1:
            assert needed_at == sorted(needed_at)
            assert all(step < stop for step, _ in needed_at)
        every = iter(common)
        assert all(unit in every for unit in units), "not in the common order"


def test_a_part_owns_its_places_of_each_step() -> None:
    for width in range(1, 5):
        for first, end in [(a, b) for b in range(width + 1) for a in range(b)]:
            part = Part(lane=0, width=width, first=first, end=end, places=np.arange(end - first))
            for begin in range(2 * width):
                for stop in range(begin, begin + 2 * width):
                    owned = any(first <= p % width < end for p in range(begin, stop))
                    assert part.owns_any(begin, stop) == owned


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 9))
def test_ranks_share_no_lane_where_they_own_whole_bands(plan: Plan, world: int) -> None:
    stream = plan.stream
    lanes = [{part.lane for part in plan.parts(rank, world)} for rank in range(world)]
    read_twice = sum(map(len, lanes)) - len(set().union(*lanes))
    assert set().union(*lanes) == set(range(stream.lanes))
    assert read_twice <= (world - 1) * stream.lanes // stream.bands
    if stream.bands % world == 0:
        assert read_twice == 0


@pytest.mark.parametrize("rows", [[1], [3], [5], [2, 2, 1], [30, 7], list(range(1, 12))])
@pytest.mark.parametrize("batch", [1, 4, 8, 64])
def test_evaluation_counts_every_row_once_on_any_world(rows: list[int], batch: int) -> None:
    plan = plan_order(index_of(rows), global_batch=batch, seed=0, shuffle=False, cover="all")
    for world in range(1, 8):
        ids = np.concatenate(
            [
                plan.ids(step, rank, world)
                for step in range(plan.steps_per_epoch)
                for rank in range(world)
            ]
        )
        assert sorted(ids[ids >= 0]) == list(range(sum(rows)))


def test_without_shuffle_and_with_one_lane_rows_come_as_stored() -> None:
    plan = plan_order(index_of([5, 9, 2]), global_batch=4, seed=3, shuffle=False, lanes=1)
    ids = np.concatenate([plan.ids(step) for step in range(plan.steps_per_epoch)])
    assert ids.tolist() == list(range(16))


def test_epochs_and_seeds_have_their_own_order() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        plan = plan_order(index_of([20, 9, 30, 4]), global_batch=7, seed=seed)
        steps = plan.steps_per_epoch
        return np.concatenate([plan.ids(number * steps + s) for s in range(steps)]).tolist()

    assert len({tuple(epoch(s, e)) for s in (0, 1, 2) for e in (0, 1, 2)}) == 9


def test_too_few_rows_are_refused_with_both_numbers_and_the_repair() -> None:
    with pytest.raises(DataError, match=r"3 rows do not fill one global batch of 8.*cover='all'"):
        plan_order(index_of([1, 2]), global_batch=8, seed=0)
    plan = plan_order(index_of([1, 2]), global_batch=8, seed=0, cover="all")
    assert sorted(plan.ids(0).tolist()) == [-1] * 5 + [0, 1, 2]


def test_by_default_large_data_gets_all_lanes_and_small_data_few() -> None:
    def shape(rows: list[int], batch: int, **more: Any) -> tuple[int, int, int]:
        group_bytes = more.pop("group_bytes", 1 << 20)
        plan = plan_order(index_of(rows, group_bytes), global_batch=batch, seed=0, **more)
        return plan.stream.bands, plan.stream.lanes, plan.stream.window

    large = [1000] * 1000
    assert shape(large, 512) == (64, 256, 1)
    assert shape(large, 96) == (64, 64, 2)
    assert shape(large, 16) == (16, 16, 8)
    assert shape(large, 512, shuffle=False) == (64, 64, 1)
    assert shape(large, 512, lanes=8) == (8, 8, 16)
    assert shape(large, 512, group_bytes=128 << 20) == (16, 16, 1), "2 GiB hold 16 such groups"
    assert shape([200] * 7, 64) == (4, 4, 32)
    assert shape([50], 8) == (1, 1, 128)


def test_a_resume_under_another_order_is_refused_by_field() -> None:
    index = index_of([20, 9, 30, 4])
    shape = {"global_batch": 8, "seed": 1, "lanes": 4, "bands": 2, "window": 2}
    plan = plan_order(index, **shape)
    plan.check_state(plan_order(index, **shape).state())
    others = {"global_batch": 9, "seed": 2, "lanes": 2, "bands": 1, "window": 3}
    for name, value in {**others, "cover": "all", "shuffle": False}.items():
        with pytest.raises(DataError, match=f"{name} was .* and is now"):
            plan_order(index, **{**shape, name: value}).check_state(plan.state())
    with pytest.raises(DataError, match="fingerprint"):
        plan_order(replace(index, sizes=(1, 1, 1, 2)), **shape).check_state(plan.state())
    with pytest.raises(DataError, match="order_version was 0"):
        plan.check_state({**plan.state(), "order_version": 0})
    with pytest.raises(DataError, match="sticky was True"):
        plan.check_state({**plan.state(), "sticky": True})


GOLDEN = """
import numpy as np, pyarrow as pa
from rayway.data.index import Index
from rayway.data.plan import ORDER_VERSION, Part, Plan, Stream
rows = np.array([i * 7 % 23 + 1 for i in range(40)])
index = Index(root="", paths=(), sizes=(), digests=(), rows=rows, shard=np.arange(40),
              ordinal=np.zeros(40, int), group_bytes=1, schema=pa.schema({}))
plan = Plan(Stream(index, batch=16, seed=42, shuffle=True, cover="drop", lanes=4, bands=2,
                   window=2))
print(ORDER_VERSION, *plan.ids(3), *plan.ids(plan.steps_per_epoch))
"""
GOLDEN_IDS = (
    "1 359 445 348 381 342 393 358 449 125 315 247 140 126 316 123 143 "
    "173 431 168 426 171 424 169 430 469 205 479 201 473 119 373 200"
)


def test_golden_ids_in_a_fresh_process() -> None:
    # a change here is a change of everyone's numbers: raise ORDER_VERSION with it
    run = [sys.executable, "-c", GOLDEN]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert out.strip() == GOLDEN_IDS
    assert ORDER_VERSION == 1


@pytest.mark.timeout(30)
def test_a_schedule_without_end_ends_where_a_rank_never_has_a_row() -> None:
    plan = plan_order(index_of([3]), global_batch=8, seed=0, cover="all", lanes=8, bands=8)
    rows = [len(list(islice(plan.units(rank, 8), 5))) for rank in range(8)]
    assert sorted(rows) == [0] * 5 + [5] * 3


@pytest.mark.timeout(30)
@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(0, 200))
def test_schedules_start_at_any_step_without_walking_there(plan: Plan, start: int) -> None:
    unit = next(plan.units(start=start))
    ids = unit.stored_ids(plan.stream.index)
    assert unit.epoch == start // plan.steps_per_epoch
    assert np.isin(ids, plan.ids(start)).any()

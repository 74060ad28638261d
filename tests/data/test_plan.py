import json
import math
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.index import Index
from rayway.data.keys import Domain, key, mix
from rayway.data.plan import ORDER_VERSION, Part, Plan, plan_order, split_slots
from rayway.data.stream import STREAM_BITS, Stream
from rayway.errors import DataError


def index_of(rows: list[int], group_bytes: int = 1000, root: str = "set") -> Index:
    """One shard a row group."""
    names = tuple(f"{i:04}.parquet" for i in range(len(rows)))
    return Index(
        root=root,
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
def plans(draw: st.DrawFn, streams: int = 3) -> Plan:
    """Mixtures of up to ``streams`` streams."""

    def stream(number: int) -> Stream:
        rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
        cover = draw(st.sampled_from(["drop", "all"]))
        most = min(sum(rows), 40) if cover == "drop" else 40
        shape = {
            "batch": draw(st.integers(1, most)),
            "seed": draw(st.integers(0, 2**64)),
            "shuffle": draw(st.sampled_from([True, False, "sticky"])),
            "lanes": draw(st.integers(1, 24)),
            "bands": draw(st.integers(1, 9)),
            "window": draw(st.integers(1, 5)),
        }
        return Stream(index_of(rows), cover=cover, number=number, **shape)

    return Plan([stream(number) for number in range(draw(st.integers(1, streams)))])


def ids_of_stream(stream: Stream, epoch: int) -> list[list[int]]:
    """A stream's ids of an epoch's steps, from the definition and with loops; -1: empty."""
    rows, batch, bands = stream.index.rows.tolist(), stream.batch, min(stream.bands, stream.batch)
    per_band, total, number = stream.lanes // bands, sum(rows), stream.number

    def shuffled(items: list[Any], *words: int) -> list[Any]:
        if not stream.shuffle:
            return items
        k = key(stream.seed, *words)
        return [items[i] for i in sorted(range(len(items)), key=lambda i: mix(i ^ k))]

    lane_of = []
    for band in range(bands):
        slots = (band + 1) * batch // bands - band * batch // bands
        lane_of += [band * per_band + i % per_band for i in range(slots)]
    line_epoch = 0 if stream.shuffle == "sticky" else epoch
    line = [
        (g, r)
        for g in shuffled(list(range(len(rows))), Domain.ROW_GROUPS, number, line_epoch)
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
        if stream.shuffle == "sticky":
            spans = shuffled(spans, Domain.SPAN, number, epoch, lane)
        queue, window, i = [], 0, 0
        size = 1 + lane * stream.window // stream.lanes
        while i < len(spans):
            unit = [sum(rows[:g]) + r for span in spans[i : i + size] for g, r in span]
            queue += shuffled(unit, Domain.WINDOW, number, epoch, lane, window)
            i, window, size = i + size, window + 1, stream.window
        queues.append([(number << 48) + row for row in queue])
    steps = total // batch if stream.cover == "drop" else -(-total // batch)
    return [[queues[x].pop(0) if queues[x] else -1 for x in lane_of] for _ in range(steps)]


def spelled_out(plan: Plan, steps: int) -> list[list[int]]:
    """The ids of the first steps of a plan, from the definition; -1: empty."""
    places = sorted(
        (Fraction(2 * i + 1, 2 * stream.batch), number)
        for number, stream in enumerate(plan.streams)
        for i in range(stream.batch)
    )
    runs: list[list[list[int]]] = []
    for stream in plan.streams:
        epoch, run = 0, list[list[int]]()
        while len(run) < steps:
            run += ids_of_stream(stream, epoch)
            epoch += 1
        runs.append(run)
    batches = []
    for step in range(steps):
        queues = [iter(run[step]) for run in runs]
        batches.append([next(queues[number]) for _, number in places])
    return batches


@settings(max_examples=80, deadline=None)
@given(plans())
def test_the_order_is_the_one_defined(plan: Plan) -> None:
    steps = min(2 * plan.steps_per_epoch, 60)
    assert [plan.ids(step).tolist() for step in range(steps)] == spelled_out(plan, steps)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_each_streams_epoch_holds_each_row_once_and_leaves_out_less_than_its_slots(
    plan: Plan,
) -> None:
    for number, stream in enumerate(plan.streams):
        total = stream.index.total
        for epoch in range(2):
            first = epoch * stream.steps
            steps = [plan.ids(first + s)[plan.stream_of == number] for s in range(stream.steps)]
            seen = np.concatenate(steps)
            seen = seen[seen >= 0] - (number << STREAM_BITS)
            assert len(set(seen.tolist())) == len(seen)
            if stream.cover == "all":
                assert sorted(seen) == list(range(total))
                assert all((ids >= 0).all() for ids in steps[:-1])
            else:
                assert len(seen) == stream.steps * stream.batch
                assert len(seen) > total - stream.batch
    for step in range(min(2 * plan.steps_per_epoch, 60)):
        assert int((plan.ids(step) >= 0).sum()) == plan.rows_in_step(step)


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 9), st.integers(0, 100))
def test_the_ranks_shares_make_up_the_same_global_batch(plan: Plan, world: int, step: int) -> None:
    shares = [plan.ids(step, rank, world) for rank in range(world)]
    assert np.concatenate(shares).tolist() == plan.ids(step).tolist()
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=80, deadline=None)
@given(plans(), st.integers(1, 5), st.integers(0, 30), st.integers(1, 12))
def test_a_rank_reads_what_it_needs_once_in_time_and_nothing_else(
    plan: Plan, world: int, start: int, count: int
) -> None:
    stop = start + count
    common = list(plan.units(0, 1, start, stop))
    # of the epochs that the steps end in, the rest of a window may be needed later
    later = max(math.ceil(stop / stream.steps) * stream.steps for stream in plan.streams)
    for rank in range(world):
        need: dict[tuple[int, int], int] = {}
        for step in range(start, later):
            for i in plan.ids(step, rank, world).tolist():
                stream = plan.streams[i >> STREAM_BITS]
                if i >= 0 and step // stream.steps <= (stop - 1) // stream.steps:
                    need[step // stream.steps, i] = step
        held: set[tuple[int, int]] = set()
        needed_at = []
        units = list(plan.units(rank, world, start, stop))
        for unit in units:
            ids = unit.stored_ids(plan.streams[unit.stream].index)
            rows = {(unit.epoch, i) for i in ids.tolist()}
            assert not held & rows
            assert rows & need.keys(), "read without need"
            held |= rows
            needed_at.append((min(need[r] for r in rows & need.keys()), unit.stream, unit.lane))
        assert {row for row in need if need[row] < stop} <= held
        if world == 1:
            assert needed_at == sorted(needed_at)
            assert all(step < stop for step, _, _ in needed_at)
        every = iter(common)
        assert all(unit in every for unit in units), "not in the common order"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 200), st.data())
def test_slots_are_split_by_largest_remainder(
    weights: list[int], batch: int, data: st.DataObject
) -> None:
    scale = data.draw(st.sampled_from([1, 10, 1000]))
    places = [f"set{n}" for n in range(len(weights))]
    asked = [weight / scale for weight in weights]
    exact = [Fraction(batch * weight, sum(weights)) for weight in weights]
    want = [math.floor(share) for share in exact]
    while sum(want) < batch:
        # ties: the first of the largest
        most = max(range(len(want)), key=lambda n: (exact[n] - want[n], -n))
        want[most] += 1
    if 0 not in want:
        assert split_slots(batch, asked, places) == want
    else:
        with pytest.raises(DataError, match=r"gives it no slot in a global batch of \d+"):
            split_slots(batch, asked, places)


def test_equal_remainders_go_to_the_lower_number() -> None:
    assert split_slots(3, [1, 1], ["a", "b"]) == [2, 1]
    assert split_slots(10, [0.15, 0.35, 0.5], list("abc")) == [2, 3, 5], "decimals as written"
    assert split_slots(7, [5], ["a"]) == [7]


def test_a_stream_without_a_slot_is_refused_with_what_would_do() -> None:
    with pytest.raises(DataError) as error:
        split_slots(64, [1, 0.001, 2], ["s3://a", "s3://b", "s3://c"])
    assert str(error.value) == (
        "the weight 0.001 of s3://b gives it no slot in a global batch of 64: 64 x 0.001 / 3.001 "
        "= 0.0213. Use a weight of 0.0477 or more, or batch.global_batch=3001 or more."
    )
    assert min(split_slots(64, [1, 0.0477, 2], ["", "", ""])) == 1
    assert min(split_slots(3001, [1, 0.001, 2], ["", "", ""])) == 1
    with pytest.raises(DataError, match=r"weight 1 of b .* = 0\.5\. Use batch\.global_batch=2 or"):
        split_slots(1, [1, 1], ["a", "b"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.floats(0.1, 10)), min_size=2, max_size=4),
    st.integers(60, 120),
    st.integers(0, 80),
    st.integers(1, 9),
)
def test_every_batch_and_share_of_a_mixture_has_each_streams_part(
    streams: list[tuple[int, float]], batch: int, step: int, world: int
) -> None:
    indexes = [index_of([rows, 7], root=str(n)) for n, (rows, _) in enumerate(streams)]
    weights = [weight for _, weight in streams]
    try:
        slots = split_slots(batch, weights, ["" for _ in streams])
    except DataError:
        return
    plan = plan_order(indexes, weights=weights, global_batch=batch, seed=1, cover="all")
    assert [stream.batch for stream in plan.streams] == slots
    ids = plan.ids(step)
    for number, stream in enumerate(plan.streams):
        mine = ids[(ids >= 0) & (ids >> STREAM_BITS == number)]
        assert len(mine) == stream.rows_in_step(step)
        for rank in range(world):
            begin, end = plan.share(rank, world)
            here = int((plan.stream_of[begin:end] == number).sum())
            # streams are spread evenly: a run of slots is off by one for each of them at most
            assert abs(here - slots[number] * (end - begin) / batch) <= 1 + len(streams)


def test_streams_keep_their_own_epochs() -> None:
    short, long = index_of([6], root="short"), index_of([40], root="long")
    plan = plan_order([short, long], weights=[1, 2], global_batch=6, seed=0)
    assert [stream.steps for stream in plan.streams] == [3, 10]
    assert plan.steps_per_epoch == 10, "one pass of the stream that lasts longest"
    ids = np.concatenate([plan.ids(step) for step in range(30)])
    seen = [ids[ids >> STREAM_BITS == n].reshape(-1, plan.streams[n].batch) for n in (0, 1)]
    for epoch in range(10):
        assert len(set(seen[0][3 * epoch : 3 * epoch + 3].ravel())) == 6
    for epoch in range(3):
        assert len(set(seen[1][10 * epoch : 10 * epoch + 10].ravel())) == 40
    assert len({tuple(seen[0][3 * e : 3 * e + 3].ravel()) for e in range(10)}) > 5


def test_a_step_counts_the_rows_of_streams_that_end_in_it() -> None:
    plan = plan_order(
        [index_of([5], root="a"), index_of([10], root="b")], global_batch=8, seed=0, cover="all"
    )
    assert [plan.rows_in_step(step) for step in range(6)] == [8, 5, 6, 5, 8, 3]


@settings(max_examples=40, deadline=None)
@given(plans())
def test_sticky_lanes_keep_their_row_groups(plan: Plan) -> None:
    for stream in plan.streams:
        for lane in range(stream.lanes):
            spans = [
                [s for w in range(len(x)) for s in x.unit(w).spans]
                for x in (stream.lane(epoch, lane) for epoch in range(3))
            ]
            if stream.shuffle == "sticky":
                assert sorted(spans[0]) == sorted(spans[1]) == sorted(spans[2])
            assert len(set(spans[0])) == len(spans[0])


def test_sticky_lanes_change_the_order_of_their_row_groups() -> None:
    plan = plan_order(
        index_of([10] * 40), global_batch=4, seed=0, shuffle="sticky", lanes=4, bands=4, window=1
    )
    stream = plan.streams[0]
    groups = [
        tuple(stream.lane(epoch, 0).unit(w).spans[0][0] for w in range(10)) for epoch in range(4)
    ]
    assert len(set(groups)) == 4


@settings(max_examples=30, deadline=None)
@given(plans(), st.integers(0, 40))
def test_a_plan_can_be_pickled_and_stays_the_same(plan: Plan, step: int) -> None:
    ids, units = plan.ids(step), list(plan.units(start=step, stop=step + 3))
    again = pickle.loads(pickle.dumps(plan))
    assert again.ids(step).tolist() == ids.tolist()
    assert list(again.units(start=step, stop=step + 3)) == units
    assert again.state() == plan.state()


def test_a_pickled_plan_holds_nothing_of_what_was_looked_up() -> None:
    plan = plan_order(index_of([100_000] * 4), global_batch=8, seed=0)
    before = len(pickle.dumps(plan))
    for step in range(100):
        plan.ids(step)
    assert len(pickle.dumps(plan)) < before + 100


def test_a_part_owns_its_places_of_each_step() -> None:
    for width in range(1, 5):
        for first, end in [(a, b) for b in range(width + 1) for a in range(b)]:
            part = Part(
                stream=0, lane=0, width=width, first=first, end=end, places=np.arange(end - first)
            )
            for begin in range(2 * width):
                for stop in range(begin, begin + 2 * width):
                    owned = any(first <= p % width < end for p in range(begin, stop))
                    assert part.owns_any(begin, stop) == owned


@settings(max_examples=60, deadline=None)
@given(plans(streams=1), st.integers(1, 9))
def test_ranks_share_no_lane_where_they_own_whole_bands(plan: Plan, world: int) -> None:
    (stream,) = plan.streams
    lanes = [{part.lane for part in plan.parts(rank, world)} for rank in range(world)]
    read_twice = sum(map(len, lanes)) - len(set().union(*lanes))
    assert set().union(*lanes) == set(range(stream.lanes))
    assert read_twice <= (world - 1) * stream.lanes // stream.bands
    if stream.bands % world == 0:
        assert read_twice == 0


def test_ranks_share_no_lane_of_a_mixture_whose_bands_line_up() -> None:
    indexes = [index_of([50] * 40, root="a"), index_of([50] * 40, root="b")]
    plan = plan_order(indexes, weights=[3, 1], global_batch=64, seed=0, bands=8, lanes=16)
    assert [stream.batch for stream in plan.streams] == [48, 16]
    for world in (1, 2, 4, 8):
        lanes = [{(p.stream, p.lane) for p in plan.parts(r, world)} for r in range(world)]
        assert sum(map(len, lanes)) == 32 == len(set().union(*lanes))


@pytest.mark.parametrize("rows", [[1], [3], [5], [2, 2, 1], [30, 7], list(range(1, 12))])
@pytest.mark.parametrize("batch", [1, 4, 8, 64])
def test_evaluation_counts_every_row_once_on_any_world(rows: list[int], batch: int) -> None:
    plan = plan_order(index_of(rows), global_batch=batch, seed=0, shuffle=False, cover="all")
    for world in [*range(1, 8), 50]:
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
        (stream,) = plan.streams
        return stream.bands, stream.lanes, stream.window

    large = [1000] * 1024
    assert shape(large, 512) == (64, 256, 1)
    assert shape(large, 96) == (64, 64, 2)
    assert shape(large, 16) == (16, 16, 8)
    assert shape(large, 512, shuffle=False) == (64, 64, 1)
    assert shape(large, 512, lanes=8) == (8, 8, 16)
    assert shape(large, 512, group_bytes=128 << 20) == (16, 16, 1), "2 GiB hold 16 such groups"
    assert shape([1000] * 240, 512) == (32, 32, 4), "lanes of some row groups, each read once"
    assert shape([1000] * 240, 512, group_bytes=1 << 18) == (64, 192, 1), "kept by the readers"
    assert shape([200] * 7, 64) == (4, 4, 32)
    assert shape([50], 8) == (1, 1, 128)


def test_a_data_set_of_a_mixture_that_does_not_fill_its_slots_is_refused_by_name() -> None:
    indexes = [index_of([90], root="large"), index_of([3], root="small")]
    words = r"3 rows of small do not fill its 4 slots of one global batch of 8.*cover='all'"
    with pytest.raises(DataError, match=words):
        plan_order(indexes, global_batch=8, seed=0)
    assert plan_order(indexes, global_batch=8, seed=0, cover="all").rows_in_step(0) == 7


def test_a_mixture_shares_the_memory_for_shuffling_by_slots() -> None:
    indexes = [index_of([1000] * 1024, 1 << 20, root) for root in "ab"]
    plan = plan_order(indexes, weights=[3, 1], global_batch=1024, seed=0)
    shapes = [(s.batch, s.lanes, s.bands, s.window) for s in plan.streams]
    assert shapes == [(768, 256, 64, 1), (256, 256, 64, 1)]
    plan = plan_order(
        [replace(index, group_bytes=16 << 20) for index in indexes],
        weights=[3, 1],
        global_batch=1024,
        seed=0,
    )
    assert [(s.lanes, s.window) for s in plan.streams] == [(64, 1), (32, 1)]


def test_a_resume_under_another_order_is_refused_by_field() -> None:
    index = index_of([20, 9, 30, 4])
    shape: dict[str, Any] = {"global_batch": 8, "seed": 1, "lanes": 4, "bands": 2, "window": 2}
    plan = plan_order(index, **shape)
    plan.check_state(plan_order(index, **shape).state())
    others: dict[str, Any] = {"global_batch": 9, "seed": 2, "lanes": 2, "bands": 1, "window": 3}
    for name, value in {**others, "cover": "all", "shuffle": False}.items():
        with pytest.raises(DataError, match=f"{name} was .* and is now"):
            plan_order(index, **{**shape, name: value}).check_state(plan.state())
    with pytest.raises(DataError, match="shuffle was True and is now 'sticky'"):
        plan_order(index, **shape, shuffle="sticky").check_state(plan.state())
    with pytest.raises(DataError, match=r"fingerprint was .* and is now"):
        plan_order(replace(index, sizes=(1, 1, 1, 2)), **shape).check_state(plan.state())
    with pytest.raises(DataError, match="order_version was 0"):
        plan.check_state({**plan.state(), "order_version": 0})
    with pytest.raises(DataError, match="sticky was True"):
        plan.check_state({**plan.state(), "sticky": True})
    with pytest.raises(DataError, match="seed was None"):
        plan.check_state({k: v for k, v in plan.state().items() if k != "seed"})


def test_the_state_of_one_stream_is_flat_and_plain() -> None:
    index = index_of([20, 9])
    state = plan_order(index, global_batch=8, seed=1, lanes=4, bands=2, window=2).state()
    assert state == {
        "order_version": 1,
        "fingerprint": index.fingerprint,
        "global_batch": 8,
        "seed": 1,
        "shuffle": True,
        "cover": "drop",
        "lanes": 4,
        "bands": 2,
        "window": 2,
    }


def test_a_resume_under_another_mixture_is_refused_by_what_changed() -> None:
    a, b, c = (index_of([20, n], root=f"s3://{n}") for n in (5, 6, 7))
    a, b, c = (replace(x, digests=(x.root, "")) for x in (a, b, c))

    def plan(*indexes: Index, **more: Any) -> Plan:
        return plan_order(indexes, **{"global_batch": 8, "seed": 1, **more})

    state = json.loads(json.dumps(plan(a, b).state()))
    plan(a, b).check_state(state)
    plan(replace(a, root="moved"), b).check_state(state)
    with pytest.raises(DataError, match=r"slots of data set 0 \(s3://5\) was 4 and is now 6"):
        plan(a, b, weights=[3, 1]).check_state(state)
    with pytest.raises(DataError, match=r"window of data set 0 \(s3://5\) was \d+ and is now 99"):
        plan(a, b, window=99).check_state(state)
    changed = replace(b, sizes=(2, 2))
    with pytest.raises(DataError, match=r"fingerprint of data set 1 \(s3://6\) was .* is now"):
        plan(a, changed).check_state(state)
    with pytest.raises(DataError, match=r"was made without s3://7; data\.train is now s3://5, s3:"):
        plan(a, b, c).check_state(state)
    with pytest.raises(DataError, match=r"was made with s3://6; data\.train is now s3://5, s3://7"):
        plan(a, c, b).check_state(plan(a, b, c, b).state())
    with pytest.raises(
        DataError, match=r"in the order s3://5, s3://6; data\.train is now s3://6, "
    ):
        plan(b, a).check_state(state)
    with pytest.raises(DataError, match=r"was made with s3://6; data\.train is now the data set"):
        plan(a).check_state(state)
    with pytest.raises(DataError, match=r"was made without s3://6; data\.train is now s3://5, "):
        plan(a, b).check_state(plan(a).state())


GOLDEN = """
import numpy as np, pyarrow as pa
from rayway.data.index import Index
from rayway.data.plan import ORDER_VERSION, Plan
from rayway.data.stream import Stream
def index(count):
    rows = np.array([i * 7 % 23 + 1 for i in range(count)])
    return Index(root="", paths=(), sizes=(), digests=(), rows=rows, shard=np.arange(count),
                 ordinal=np.zeros(count, int), group_bytes=1, schema=pa.schema({}))
def stream(number, count, **more):
    shape = dict(seed=42, shuffle=True, cover="drop", lanes=4, bands=2, window=2) | more
    return Stream(index(count), number=number, **shape)
def show(*streams):
    plan = Plan(streams)
    print(ORDER_VERSION, *plan.ids(3), *plan.ids(plan.steps_per_epoch))
show(stream(0, 40, batch=16))
show(stream(0, 40, batch=16, shuffle="sticky"))
show(stream(0, 40, batch=5), stream(1, 9, batch=3, cover="all", window=1))
"""
GOLDEN_IDS = [
    "1 359 445 348 381 342 393 358 449 125 315 247 140 126 316 123 143 173 431 168 "
    "426 171 424 169 430 469 205 479 201 473 119 373 200",
    "1 150 169 160 14 163 173 152 13 64 315 59 270 53 316 61 273 346 223 353 218 351 "
    "216 357 222 175 8 185 2 179 142 58 7",
    "1 352 281474976710720 400 13 281474976710745 97 281474976710752 12 173 "
    "281474976710722 248 318 281474976710693 361 281474976710682 450",
]


def test_golden_ids_in_a_fresh_process() -> None:
    # a change here is a change of everyone's numbers: raise ORDER_VERSION with it
    run = [sys.executable, "-c", GOLDEN]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == GOLDEN_IDS
    assert ORDER_VERSION == 1


@pytest.mark.timeout(30)
def test_a_schedule_without_end_ends_where_a_rank_never_has_a_row() -> None:
    plan = plan_order(index_of([3]), global_batch=8, seed=0, cover="all", lanes=8, bands=8)
    rows = [len(list(islice(plan.units(rank, 8), 5))) for rank in range(8)]
    assert sorted(rows) == [0] * 5 + [5] * 3


@pytest.mark.timeout(30)
@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(0, 10**9))
def test_schedules_start_at_any_step_without_walking_there(plan: Plan, start: int) -> None:
    unit = next(plan.units(start=start))
    stream = plan.streams[unit.stream]
    assert unit.epoch == start // stream.steps
    assert np.isin(unit.stored_ids(stream.index), plan.ids(start)).any()


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(1, 4), st.integers(1, 30), st.integers(1, 20))
def test_a_seek_reads_what_is_left_of_a_walk(
    plan: Plan, world: int, start: int, count: int
) -> None:
    walked = list(plan.units(0, world, 0, start + count))
    sought = list(plan.units(0, world, start, start + count))
    assert set(sought) <= set(walked)
    assert set(walked) - set(plan.units(0, world, 0, start)) <= set(sought)


def test_a_seek_into_a_large_set_costs_little() -> None:
    # 1e5 row groups, 1e8 rows: one shuffle of the row groups, nothing of the size of the rows
    plan = plan_order(index_of([1000] * 100_000), global_batch=4096, seed=0)
    begin = time.process_time()
    units = list(islice(plan.units(3, 64, start=int(7.9 * plan.steps_per_epoch)), 64))
    assert {unit.epoch for unit in units} == {7}
    assert time.process_time() - begin < 0.5

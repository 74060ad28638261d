import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayway.data.columns import Rows
from rayway.data.engine import local_engine
from rayway.data.feed import Feed, MicroBatch
from rayway.data.index import Index, build_index
from rayway.data.keys import Int64s, sample_keys, uniforms
from rayway.data.plan import Plan, plan_order
from rayway.data.shards import Reader
from rayway.data.stages import Stages
from rayway.data.stream import STREAM_BITS, Cover, Unit
from rayway.data.transforms import SampleRng
from rayway.errors import DataError, TrainingError

Step = list[MicroBatch]


@pytest.fixture(scope="session")
def index(uneven: Path) -> Index:
    return build_index(str(uneven))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """19 rows in three row groups; their ``id`` begins at 1000."""
    ids = np.arange(1000, 1019)
    x = (ids[:, None] + np.arange(4)).astype(np.float32).ravel()
    table = pa.table(
        {
            "id": ids,
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x), 4),
            "b": ids % 3 == 0,
        }
    )
    folder = tmp_path_factory.mktemp("small")
    pq.write_table(table, folder / "a.parquet", row_group_size=8)
    return build_index(str(folder))


def noise(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
    return {**columns, "noise": rng.uniform(0), "more": rng.uniform(1)}


def ids_of(step: Step) -> list[int]:
    return [i for micro_batch in step for i in micro_batch.ids.tolist()]


def feed_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("rayway-")]


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while feed_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not feed_threads()


def stored(ids: Int64s) -> Int64s:
    """The column ``id`` of samples: 1000 more in each next data set of a mixture."""
    return (ids & (1 << STREAM_BITS) - 1) + 1000 * (ids >> STREAM_BITS)


def check(step: Step, plan: Plan, t: int, **who: int) -> None:
    """One rank's step holds the plan's ids, and each id's own values."""
    rank, world, micro_batch = who["rank"], who["world_size"], who["micro_batch"]
    slots, begin = plan.ids(t, rank, world), plan.share(rank, world)[0]
    most_slots = math.ceil(plan.global_batch / world)
    assert len(step) == math.ceil(most_slots / micro_batch)
    for number, got in enumerate(step):
        want = slots[number * micro_batch : (number + 1) * micro_batch]
        want = want[want >= 0]
        ids = torch.from_numpy(stored(want)) if len(want) else torch.zeros(1, dtype=torch.int64)
        assert got.ids.tolist() == want.tolist()
        assert got.weight_rows == len(want)
        assert got.first_slot == begin + number * micro_batch
        assert torch.equal(got.columns["id"], ids)
        assert torch.equal(got.columns["x"], (ids[:, None] + torch.arange(4)).float())
        assert torch.equal(got.columns["b"], ids % 3 == 0)


@settings(max_examples=40, deadline=None)
@given(
    world=st.integers(1, 9),
    micro_batch=st.integers(1, 9),
    budget_bytes=st.sampled_from([1, 10_000, 1 << 20]),
    start=st.integers(0, 60),
    mixed=st.booleans(),
    shape=st.fixed_dictionaries(
        {
            "global_batch": st.integers(4, 40),
            "seed": st.integers(0, 9),
            "shuffle": st.sampled_from([True, False, "sticky"]),
            "cover": st.sampled_from(["drop", "all"]),
            "lanes": st.none() | st.integers(1, 12),
            "window": st.none() | st.integers(1, 3),
        }
    ),
)
def test_ids_and_values_are_the_plans(
    index: Index,
    small: Index,
    world: int,
    micro_batch: int,
    budget_bytes: int,
    start: int,
    mixed: bool,
    shape: dict[str, Any],
) -> None:
    plan = plan_order([index, small], weights=[2, 1], **shape) if mixed else None
    plan = plan or plan_order(index, **shape)
    stop = start + 10
    steps: list[list[int]] = [[] for _ in range(start, stop)]
    for rank in range(world):
        who = {"rank": rank, "world_size": world, "micro_batch": micro_batch}
        where = {"start_step": start, "stop_step": stop, "budget_bytes": budget_bytes}
        with Feed(plan, **who, **where) as feed:
            for t, step in enumerate(feed, start):
                check(step, plan, t, **who)
                steps[t - start] += ids_of(step)
    for t, ids in enumerate(steps, start):
        whole = plan.ids(t)
        assert ids == whole[whole >= 0].tolist()
        assert len(ids) == plan.rows_in_step(t)


def shards(folder: Path, rows: list[int]) -> Index:
    """The files of the handed cases: a shard of each number of rows; ``id`` and x[8] from it."""
    first = 0
    for number, count in enumerate(rows):
        ids = range(first, first + count)
        table = pa.table({"id": ids, "x": [[float(i)] * 8 for i in ids], "y": [i % 4 for i in ids]})
        pq.write_table(table, folder / f"part-{number}.parquet")
        first += count
    return build_index(str(folder))


def test_case_h12_a_resume_goes_on_where_it_was(tmp_path: Path) -> None:
    plan = plan_order(shards(tmp_path, [8] * 5), global_batch=4, seed=0)

    def run(start: int, stop: int) -> list[list[int]]:
        who = {"rank": 0, "world_size": 1, "micro_batch": 4}
        with Feed(plan, **who, start_step=start) as feed:
            return [next(feed)[0].columns["id"].tolist() for _ in range(start, stop)]

    undisturbed = run(0, 20)
    resumed = run(0, 4)[:3] + run(3, 20)
    assert resumed == undisturbed
    assert sorted(chain.from_iterable(resumed[:10])) == list(range(40))
    assert sorted(chain.from_iterable(resumed[10:])) == list(range(40))
    assert resumed[:10] != resumed[10:]


def test_case_h15_all_ranks_take_the_same_number_of_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, 1000), 36, replace=False))
    sizes = np.diff([0, *cuts, 1000]).tolist()
    index = shards(tmp_path, sizes)
    for seed in range(10):
        plan = plan_order(index, global_batch=32, seed=seed, cover="all")
        ranks = []
        for rank in range(2):
            who = {"rank": rank, "world_size": 2, "micro_batch": 16}
            with Feed(plan, **who, stop_step=2 * plan.steps_per_epoch) as feed:
                ranks.append(list(feed))
        assert [len(steps) for steps in ranks] == [64, 64]
        assert {len(step) for steps in ranks for step in steps} == {1}
        rows = [sum(m.weight_rows for m in (*a, *b)) for a, b in zip(*ranks, strict=True)]
        assert rows == ([32] * 31 + [8]) * 2
        for epoch in (slice(0, 32), slice(32, 64)):
            seen = [i for steps in ranks for step in steps[epoch] for i in ids_of(step)]
            assert sorted(seen) == list(range(1000))


@pytest.mark.parametrize("tasks", [1, 2, 4, 32])
def test_case_h18_read_tasks_and_their_timing_do_not_change_the_order(
    tmp_path: Path, tasks: int
) -> None:
    plan = plan_order(shards(tmp_path, [11] * 8 + [12]), global_batch=8, seed=7)
    rng, reader = np.random.default_rng(tasks), Reader([plan.streams[0].index])

    def read(unit: Unit) -> Rows:
        time.sleep(float(rng.uniform(0, 0.003)))
        return reader(unit)

    engine = local_engine(read, budget_bytes=tasks, unit_bytes=1)
    who = {"rank": 0, "world_size": 1, "micro_batch": 8}
    with Feed(plan, **who, stop_step=30, engine=engine) as feed:
        assert [ids_of(step) for step in feed] == [plan.ids(t).tolist() for t in range(30)]


@settings(max_examples=20, deadline=None)
@given(world=st.integers(1, 9), start=st.integers(0, 40))
def test_a_samples_draws_are_the_same_on_any_world_and_after_a_seek(
    index: Index, world: int, start: int
) -> None:
    plan = plan_order(index, global_batch=20, seed=3)
    for rank in range(world):
        who = {"rank": rank, "world_size": world, "micro_batch": 4}
        with Feed(plan, **who, start_step=start, stop_step=start + 6, transform=noise) as feed:
            for t, step in enumerate(feed, start):
                keys = [sample_keys(m.ids, seed=3, epoch=t // plan.steps_per_epoch) for m in step]
                for micro_batch, k in zip(step, keys, strict=True):
                    if micro_batch.weight_rows:
                        got = micro_batch.columns
                        assert got["noise"].tolist() == uniforms(k, 0).tolist()
                        assert got["more"].tolist() == uniforms(k, 1).tolist()


def test_the_transforms_seed_can_be_another_than_the_plans(index: Index) -> None:
    plan = plan_order(index, global_batch=20, seed=3)
    who = {"rank": 0, "world_size": 1, "micro_batch": 20}
    with Feed(plan, **who, stop_step=1, transform=noise, seed=0) as feed:
        (micro_batch,) = next(feed)
    want = uniforms(sample_keys(micro_batch.ids, seed=0, epoch=0), 0)
    assert micro_batch.columns["noise"].tolist() == want.tolist()


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["drop", "all"]),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=2, max_size=8),
)
def test_kills_and_resumes_on_other_worlds_give_the_ids_of_one_run(
    index: Index, small: Index, cover: Cover, mixed: bool, lives: list[tuple[int, int]]
) -> None:
    # case H12, on other worlds
    plan = plan_order([index, small] if mixed else index, global_batch=24, seed=5, cover=cover)
    t, seen = 0, []
    for world, steps in lives:
        runs = []
        for rank in range(world):
            who = {"rank": rank, "world_size": world, "micro_batch": 5}
            with Feed(plan, **who, start_step=t) as feed:
                runs.append([ids_of(next(feed)) for _ in range(steps)])
                next(feed)  # fetched, but not finished when the run was killed
        seen += [list(chain.from_iterable(step)) for step in zip(*runs, strict=True)]
        t += steps
    whole = [plan.ids(step) for step in range(t)]
    assert seen == [ids[ids >= 0].tolist() for ids in whole]


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("world", [1, 3])
def test_a_resume_reads_only_row_groups_that_are_still_needed(
    tmp_path: Path, world: int, share: float
) -> None:
    plan = plan_order(shards(tmp_path, [20] * 60), global_batch=8, seed=2, lanes=4, window=1)
    (index,) = (stream.index for stream in plan.streams)
    start, stop = int(plan.steps_per_epoch * share), plan.steps_per_epoch
    for rank in range(world):
        reads: list[int] = []
        reader = Reader([index], on_read=lambda stream, group, to=reads: to.append(group))
        engine = local_engine(reader, budget_bytes=4, unit_bytes=1)
        who = {"rank": rank, "world_size": world, "micro_batch": 8}
        with Feed(plan, **who, start_step=start, stop_step=stop, engine=engine) as feed:
            ids = [i for step in feed for i in ids_of(step)]
        needed = set((np.searchsorted(index.first, ids, "right") - 1).tolist())
        assert set(reads) == needed
        assert len(reads) == len(needed) < 60 * (1 - share) + 4


@pytest.mark.parametrize("rows", [1, 3, 5, 23])
@pytest.mark.parametrize("batch", [4, 8])
def test_evaluation_counts_every_row_once_on_any_world(
    tmp_path: Path, rows: int, batch: int
) -> None:
    # cases H14 and H19: also with fewer rows than ranks
    table = pa.table({"id": range(rows), "x": [[float(i)] * 8 for i in range(rows)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    index = build_index(str(tmp_path))
    plan = plan_order(index, global_batch=batch, seed=0, shuffle=False, cover="all")
    for world in [*range(1, 8), 50]:
        seen, lengths = [], set()
        for rank in range(world):
            with Feed(
                plan,
                rank=rank,
                world_size=world,
                micro_batch=2,
                stop_step=plan.steps_per_epoch,
            ) as feed:
                steps = list(feed)
            micro_batches = [m for step in steps for m in step]
            lengths.add(len(micro_batches))
            assert all(len(m.columns["id"]) == max(m.weight_rows, 1) for m in micro_batches)
            assert all(m.columns["x"].shape[1:] == (8,) for m in micro_batches)
            seen += [i for m in micro_batches for i in m.columns["id"][: m.weight_rows].tolist()]
        assert sorted(seen) == list(range(rows))
        assert len(lengths) == 1, "all ranks make the same number of passes"


def test_micro_batches_may_be_written_to(index: Index) -> None:
    plan = plan_order(index, global_batch=12, seed=0, cover="all")
    who = {"rank": 0, "world_size": 20, "micro_batch": 1}
    for rank in (0, 11):
        who["rank"] = rank
        with Feed(plan, **who, stop_step=3 * plan.steps_per_epoch) as feed:
            for t, step in enumerate(feed):
                check(step, plan, t, **who)
                for micro_batch in step:
                    micro_batch.columns["x"].fill_(-1)
                    micro_batch.columns["id"].add_(1)


def test_writing_to_a_micro_batch_does_not_disturb_the_backward_of_another(index: Index) -> None:
    plan = plan_order(index, global_batch=12, seed=0)
    with Feed(plan, rank=0, world_size=1, micro_batch=6) as feed:
        for _ in range(3):
            first, second = next(feed)
            weight = torch.ones(4, requires_grad=True)
            loss = (first.columns["x"] * weight).sum()
            second.columns["x"].mul_(2)
            loss.backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None


def broken(error: Exception, at: int) -> Callable[[Unit], Rows]:
    count = 0

    def read(unit: Unit) -> Rows:
        nonlocal count
        count += 1
        if count == at:
            raise error
        return Rows({"x": np.zeros(unit.rows)})

    return read


@pytest.mark.parametrize("at", [1, 4])
def test_an_error_in_a_thread_reaches_the_consumer_and_ends_the_feed(index: Index, at: int) -> None:
    plan = plan_order(index, global_batch=8, seed=0, lanes=2, window=1)
    engine = local_engine(broken(DataError("disk gone"), at), budget_bytes=1, unit_bytes=1)
    feed = Feed(plan, rank=0, world_size=1, micro_batch=8, engine=engine)
    with pytest.raises(DataError, match="disk gone"):
        deque(feed, maxlen=0)
    with pytest.raises(ValueError, match="closed"):
        next(feed)


def test_an_error_of_the_transform_reaches_the_consumer(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        raise ZeroDivisionError("by me")

    with (
        Feed(plan, rank=0, world_size=1, micro_batch=8, transform=transform) as feed,
        pytest.raises(TrainingError, match="ZeroDivisionError: by me"),
    ):
        next(feed)


def test_a_feed_ends_and_stays_ended(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)
    with Feed(plan, rank=0, world_size=1, micro_batch=8, stop_step=3) as feed:
        assert len(list(feed)) == 3
        assert list(feed) == []
    with Feed(plan, rank=0, world_size=1, micro_batch=8, start_step=3, stop_step=3) as empty:
        assert list(empty) == []


def test_closing_ends_the_threads_at_once_while_they_wait_for_the_consumer(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)
    feed = Feed(plan, rank=0, world_size=1, micro_batch=8)
    next(feed)
    time.sleep(0.1)  # by now all is read that may be read ahead
    begin = time.monotonic()
    feed.close()
    assert time.monotonic() - begin < 0.9
    feed.close()
    with pytest.raises(ValueError, match="closed"):
        next(feed)


def test_closing_does_not_wait_for_a_read_that_hangs(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)
    hangs, started = threading.Event(), threading.Event()

    def read(unit: Unit) -> Rows:
        started.set()
        hangs.wait(30)
        return Rows({"x": np.zeros(unit.rows)})

    engine = local_engine(read, budget_bytes=1, unit_bytes=1)
    feed = Feed(plan, rank=0, world_size=1, micro_batch=8, engine=engine)
    started.wait(10)
    begin = time.monotonic()
    feed.close()
    assert time.monotonic() - begin < 5
    hangs.set()


def test_what_is_read_ahead_is_bounded(tmp_path: Path) -> None:
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array([0.0] * 400 * 8000), 8000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    index = build_index(str(tmp_path))
    plan = plan_order(index, global_batch=10, seed=0, lanes=1, window=1)
    reads: list[int] = []
    reader = Reader([index], on_read=lambda stream, group: reads.append(group))
    engine = local_engine(reader, budget_bytes=4, unit_bytes=1)
    with Feed(plan, rank=0, world_size=1, micro_batch=10, engine=engine) as feed:
        for _ in range(4):
            next(feed)
        time.sleep(0.3)
        # 4 steps taken, blocks of at most 6 steps (4 MiB): 2 wait, 1 is in the thread's hands
        assert len(reads) < 35


def test_a_tiny_batch_costs_little_in_the_consumers_thread(tmp_path: Path) -> None:
    pixels = np.arange(2000 * 64, dtype=np.uint8)
    table = pa.table(
        {
            "image": pa.FixedSizeListArray.from_arrays(pa.array(pixels), 64),
            "label": pa.array(range(2000)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250)
    index = build_index(str(tmp_path))
    plan = plan_order(index, global_batch=64, seed=0)
    with Feed(plan, rank=0, world_size=1, micro_batch=64) as feed:
        next(feed)
        mine, all_threads, steps = time.thread_time(), time.process_time(), 3000
        for _ in range(steps):
            next(feed)
        mine = (time.thread_time() - mine) / steps
        all_threads = (time.process_time() - all_threads) / steps
    print(f"{mine * 1e6:.1f} us a step in the consumer, {all_threads * 1e6:.1f} in all threads")
    assert mine < 0.05e-3
    assert all_threads < 0.15e-3


def with_gaps(folder: Path) -> Index:
    """60 rows in groups of 10; x of every 7th is NaN, of the group [20, 30) all are."""
    x = [math.nan if i % 7 == 0 or 20 <= i < 30 else float(i) for i in range(60)]
    pq.write_table(pa.table({"id": range(60), "x": x}), folder / "a.parquet", row_group_size=10)
    return build_index(str(folder))


@pytest.mark.parametrize("micro_batch", [1, 3, 20])
@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_rows_that_do_not_count_are_left_out_on_any_world(
    tmp_path: Path, world: int, micro_batch: int
) -> None:
    plan = plan_order(with_gaps(tmp_path), global_batch=10, seed=1, cover="all")
    sound = {i for i in range(60) if i % 7 and not 20 <= i < 30}
    seen, skipped = [], 0
    for rank in range(world):
        who = {"rank": rank, "world_size": world, "micro_batch": micro_batch}
        with Feed(plan, **who, stop_step=plan.steps_per_epoch, invalid="skip") as feed:
            for t, step in enumerate(feed):
                mine = [i for i in plan.ids(t, rank, world).tolist() if i in sound]
                assert ids_of(step) == mine
                for m in step:
                    assert m.weight_rows == len(m.ids)
                    assert len(m.columns["x"]) == max(m.weight_rows, 1)
                    assert all(torch.isfinite(x).all() for x in m.columns.values())
                    if m.weight_rows:
                        assert m.columns["x"].tolist() == m.ids.tolist()
                seen += mine
            skipped += feed.waits().skipped_rows
    assert sorted(seen) == sorted(sound)
    assert skipped == 60 - len(sound)


def test_padding_is_masked_and_the_same_on_any_world(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 50).tolist()
    table = pa.table({"id": range(50), "t": [[i + 1] * n for i, n in enumerate(lengths)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    plan = plan_order(build_index(str(tmp_path)), global_batch=8, seed=0, cover="all")
    for world in (1, 2, 4, 11):
        tokens = 0
        for rank in range(world):
            who = {"rank": rank, "world_size": world, "micro_batch": 2}
            with Feed(plan, **who, stop_step=plan.steps_per_epoch, pad={"t": 8}) as feed:
                for m in chain.from_iterable(feed):
                    t, mask = m.columns["t"], m.columns["t_mask"]
                    assert t.shape == mask.shape == (max(m.weight_rows, 1), 8)
                    assert mask.dtype == torch.bool
                    for i, row in zip(m.ids.tolist(), range(m.weight_rows), strict=True):
                        want = [i + 1] * lengths[i] + [0] * (8 - lengths[i])
                        assert t[row].tolist() == want
                        assert mask[row].tolist() == [n < lengths[i] for n in range(8)]
                    tokens += int(mask[: m.weight_rows].sum())
        assert tokens == sum(lengths)


def test_a_slow_source_is_waited_for_and_a_ready_step_is_not(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0, lanes=1, window=1)
    reader, stages = Reader([index]), Stages()
    go = threading.Event()

    def read(unit: Unit) -> Rows:
        go.wait(10)
        return reader(unit)

    stages.add("read", 3.0)
    engine = local_engine(read, budget_bytes=1, unit_bytes=1)
    who = {"rank": 0, "world_size": 1, "micro_batch": 8}
    with Feed(plan, **who, stop_step=7, engine=engine, stages=stages) as feed:
        assert feed.waits().wait_s == 0
        threading.Timer(0.2, go.set).start()
        next(feed)
        first = feed.waits()
        assert 0.15 < first.wait_s < 5
        assert first.read_s == 3.0
        time.sleep(0.3)  # by now all blocks that may wait are ready
        for _ in range(2):
            next(feed)
        assert feed.waits().wait_s - first.wait_s < 0.05
        deque(feed, maxlen=0)
    assert 0 < feed.waits().gather_s < 1


def test_the_feeds_own_reader_tells_its_times(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)

    def slow(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        time.sleep(0.02)
        return columns

    who = {"rank": 0, "world_size": 1, "micro_batch": 8}
    with Feed(plan, **who, stop_step=plan.steps_per_epoch, transform=slow) as feed:
        deque(feed, maxlen=0)
    waits = feed.waits()
    assert waits.transform_s > 0.02
    assert waits.decode_s > 0
    assert waits.skipped_rows == 0


def test_taking_a_ready_step_costs_less_than_two_microseconds(index: Index) -> None:
    def read(unit: Unit) -> Rows:
        return Rows({"x": np.zeros(unit.rows, np.int8)})

    plan = plan_order(index, global_batch=4, seed=0)
    engine = local_engine(read, budget_bytes=1 << 20, unit_bytes=1)
    with Feed(plan, rank=0, world_size=1, micro_batch=4, engine=engine) as feed:
        best = math.inf
        for _ in range(300):
            begin = time.perf_counter()
            next(feed)
            best = min(best, time.perf_counter() - begin)
    assert best < 2e-6

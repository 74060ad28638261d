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

from rayway.data.columns import Columns
from rayway.data.engine import local_engine
from rayway.data.feed import Feed, MicroBatch
from rayway.data.index import Index, build_index
from rayway.data.keys import sample_keys, uniforms
from rayway.data.plan import Plan, Unit, plan_order
from rayway.data.shards import Reader, SampleRng
from rayway.errors import DataError, TrainingError

Step = list[MicroBatch]


@pytest.fixture(scope="session")
def index(uneven: Path) -> Index:
    return build_index(str(uneven))


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


def check(step: Step, plan: Plan, t: int, **who: int) -> None:
    """One rank's step holds the plan's ids, and each id's own values."""
    rank, world, micro_batch = who["rank"], who["world_size"], who["micro_batch"]
    slots, begin = plan.ids(t, rank, world), plan.share(rank, world)[0]
    most_slots = math.ceil(plan.global_batch / world)
    assert len(step) == math.ceil(most_slots / micro_batch)
    for number, got in enumerate(step):
        want = slots[number * micro_batch : (number + 1) * micro_batch]
        want = want[want >= 0]
        ids = torch.from_numpy(want) if len(want) else torch.zeros(1, dtype=torch.int64)
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
    threads=st.integers(1, 4),
    start=st.integers(0, 60),
    shape=st.fixed_dictionaries(
        {
            "global_batch": st.integers(1, 40),
            "seed": st.integers(0, 9),
            "shuffle": st.booleans(),
            "cover": st.sampled_from(["drop", "all"]),
            "lanes": st.none() | st.integers(1, 12),
            "window": st.none() | st.integers(1, 3),
        }
    ),
)
def test_ids_and_values_are_the_plans(
    index: Index, world: int, micro_batch: int, threads: int, start: int, shape: dict[str, Any]
) -> None:
    plan = plan_order(index, **shape)
    stop = start + 10
    steps: list[list[int]] = [[] for _ in range(start, stop)]
    for rank in range(world):
        who = {"rank": rank, "world_size": world, "micro_batch": micro_batch}
        with Feed(plan, index, **who, start_step=start, stop_step=stop, threads=threads) as feed:
            for t, step in enumerate(feed, start):
                check(step, plan, t, **who)
                steps[t - start] += ids_of(step)
    for t, ids in enumerate(steps, start):
        whole = plan.ids(t)
        assert ids == whole[whole >= 0].tolist()
        assert len(ids) == plan.rows_in_step(t)


def test_read_threads_do_not_change_the_order(index: Index) -> None:
    # case H18
    plan = plan_order(index, global_batch=24, seed=7)

    def run(threads: int) -> list[list[int]]:
        who = {"rank": 0, "world_size": 1, "micro_batch": 24}
        with Feed(plan, index, **who, stop_step=30, threads=threads) as feed:
            return [ids_of(step) for step in feed]

    assert run(2) == run(2) == run(4)


@settings(max_examples=20, deadline=None)
@given(world=st.integers(1, 9), start=st.integers(0, 40))
def test_a_samples_draws_are_the_same_on_any_world_and_after_a_seek(
    index: Index, world: int, start: int
) -> None:
    plan = plan_order(index, global_batch=20, seed=3)
    for rank in range(world):
        who = {"rank": rank, "world_size": world, "micro_batch": 4}
        with Feed(
            plan, index, **who, start_step=start, stop_step=start + 6, transform=noise
        ) as feed:
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
    with Feed(plan, index, **who, stop_step=1, transform=noise, seed=0) as feed:
        (micro_batch,) = next(feed)
    want = uniforms(sample_keys(micro_batch.ids, seed=0, epoch=0), 0)
    assert micro_batch.columns["noise"].tolist() == want.tolist()


def test_kills_and_resumes_on_other_worlds_give_the_ids_of_one_run(index: Index) -> None:
    # case H12
    rng = np.random.default_rng(1)
    for cover in ("drop", "all"):
        plan = plan_order(index, global_batch=24, seed=5, cover=cover)
        t, total, seen = 0, 2 * plan.steps_per_epoch + 3, []
        while t < total:
            world, stop = int(rng.integers(1, 6)), min(total, t + int(rng.integers(1, 9)))
            runs = []
            for rank in range(world):
                who = {"rank": rank, "world_size": world, "micro_batch": 5}
                with Feed(plan, index, **who, start_step=t) as feed:
                    runs.append([ids_of(next(feed)) for _ in range(t, stop)])
                    next(feed)  # fetched, but not finished when the run was killed
            seen += [list(chain.from_iterable(step)) for step in zip(*runs, strict=True)]
            t = stop
        whole = [plan.ids(step) for step in range(total)]
        assert seen == [ids[ids >= 0].tolist() for ids in whole]


def test_a_resume_reads_only_row_groups_that_are_still_needed(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=2, lanes=4, window=1)
    start, stop = int(plan.steps_per_epoch * 0.8), plan.steps_per_epoch
    reads: list[int] = []
    engine = local_engine(Reader(index, on_read=reads.append))
    who = {"rank": 0, "world_size": 1, "micro_batch": 8}
    with Feed(plan, index, **who, start_step=start, stop_step=stop, engine=engine) as feed:
        steps = list(feed)
    needed = {
        int(np.searchsorted(index.first, i, "right")) - 1 for step in steps for i in ids_of(step)
    }
    assert set(reads) == needed
    assert len(reads) == len(needed) < len(index.rows) / 2


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
    for world in range(1, 8):
        seen, lengths = [], set()
        for rank in range(world):
            with Feed(
                plan,
                index,
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
        with Feed(plan, index, **who, stop_step=3 * plan.steps_per_epoch) as feed:
            for t, step in enumerate(feed):
                check(step, plan, t, **who)
                for micro_batch in step:
                    micro_batch.columns["x"].fill_(-1)
                    micro_batch.columns["id"].add_(1)


def test_writing_to_a_micro_batch_does_not_disturb_the_backward_of_another(index: Index) -> None:
    plan = plan_order(index, global_batch=12, seed=0)
    with Feed(plan, index, rank=0, world_size=1, micro_batch=6) as feed:
        for _ in range(3):
            first, second = next(feed)
            weight = torch.ones(4, requires_grad=True)
            loss = (first.columns["x"] * weight).sum()
            second.columns["x"].mul_(2)
            loss.backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None


def broken(error: Exception, at: int) -> Callable[[Unit], Columns]:
    count = 0

    def read(unit: Unit) -> Columns:
        nonlocal count
        count += 1
        if count == at:
            raise error
        return {"x": np.zeros(unit.rows)}

    return read


@pytest.mark.parametrize("at", [1, 4])
def test_an_error_in_a_thread_reaches_the_consumer_and_ends_the_feed(index: Index, at: int) -> None:
    plan = plan_order(index, global_batch=8, seed=0, lanes=2, window=1)
    engine = local_engine(broken(DataError("disk gone"), at), threads=1)
    feed = Feed(plan, index, rank=0, world_size=1, micro_batch=8, engine=engine)
    with pytest.raises(DataError, match="disk gone"):
        deque(feed, maxlen=0)
    with pytest.raises(ValueError, match="closed"):
        next(feed)


def test_an_error_of_the_transform_reaches_the_consumer(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)

    def transform(columns: dict[str, Any], rng: SampleRng) -> dict[str, Any]:
        raise ZeroDivisionError("by me")

    with (
        Feed(plan, index, rank=0, world_size=1, micro_batch=8, transform=transform) as feed,
        pytest.raises(TrainingError, match="ZeroDivisionError: by me"),
    ):
        next(feed)


def test_a_feed_ends_and_stays_ended(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)
    with Feed(plan, index, rank=0, world_size=1, micro_batch=8, stop_step=3) as feed:
        assert len(list(feed)) == 3
        assert list(feed) == []
    with Feed(plan, index, rank=0, world_size=1, micro_batch=8, start_step=3, stop_step=3) as empty:
        assert list(empty) == []


def test_closing_ends_the_threads_at_once_while_they_wait_for_the_consumer(index: Index) -> None:
    plan = plan_order(index, global_batch=8, seed=0)
    feed = Feed(plan, index, rank=0, world_size=1, micro_batch=8, threads=3)
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

    def read(unit: Unit) -> Columns:
        started.set()
        hangs.wait(30)
        return {"x": np.zeros(unit.rows)}

    feed = Feed(plan, index, rank=0, world_size=1, micro_batch=8, engine=local_engine(read))
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
    engine = local_engine(Reader(index, on_read=reads.append), threads=2)
    with Feed(plan, index, rank=0, world_size=1, micro_batch=10, engine=engine) as feed:
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
    with Feed(plan, index, rank=0, world_size=1, micro_batch=64) as feed:
        next(feed)
        mine, all_threads, steps = time.thread_time(), time.process_time(), 3000
        for _ in range(steps):
            next(feed)
        mine = (time.thread_time() - mine) / steps
        all_threads = (time.process_time() - all_threads) / steps
    print(f"{mine * 1e6:.1f} us a step in the consumer, {all_threads * 1e6:.1f} in all threads")
    assert mine < 0.05e-3
    assert all_threads < 0.15e-3

"""The ray engine on a real cluster: other processes, the same rows in the same order."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray._private.node import Node
from ray._private.parameter import RayParams

from rayway.data.engine import Engine, local_engine
from rayway.data.feed import Feed, MicroBatch
from rayway.data.index import Index, build_index
from rayway.data.plan import Plan, plan_order
from rayway.data.recipe import Order, ReaderRecipe
from rayway.data.router import start_router
from rayway.data.rows import ray_engine
from rayway.data.stages import Stages
from rayway.errors import DataError, LostError, TrainingError
from rayway.launch.cluster import LOOPBACK, local_cluster
from rayway.spec.code import leave_code_root

pytestmark = [pytest.mark.ray, pytest.mark.slow]

Step = list[MicroBatch]
Routers = Callable[[int], Any]

# the user's module: functions that are slow, die or fail
CODE = """
import os, random, time
from pathlib import Path
import numpy as np

HERE = Path(__file__).parent

def noise(columns, rng):
    time.sleep(random.random() * 0.03)  # no order may come from timing
    y = rng.uniform(0)
    y[y < 0.1] = np.nan if rng.training else 0
    return {**columns, "y": y.astype(np.float32), "training": np.full(len(y), rng.training)}

def dying(columns, rng):
    mark = HERE / f"died-{columns['id'][0]}"
    if columns["id"][0] % 9 == 0 and not mark.exists():
        mark.touch()
        os._exit(1)
    return noise(columns, rng)

def always_dying(columns, rng):
    os._exit(1)

def failing(columns, rng):
    if (columns["id"] == 200).any():
        raise ValueError("no sample 200, please")
    return columns

def exiting(columns, rng):
    raise SystemExit("enough")

def growing(columns, rng):
    (HERE / "grown" / str(random.random())).touch()
    return {**columns, "large": np.zeros((len(columns["id"]), 32768), np.uint8)}

def hanging(columns, rng):
    time.sleep(600)

def sleepy(columns, rng):
    time.sleep(0.3)
    return columns
"""


@dataclass
class Place:
    """Where the tests of this file work."""

    index: Index
    other: Index
    code: Path

    def recipe(self, transform: str | None = "noise", **fields: Any) -> ReaderRecipe:
        fields = {"seed": 3, "invalid": "skip", **fields}
        path = None if transform is None else f"tricks:{transform}"
        return ReaderRecipe(code_root=self.code, transform=path, **fields)


@pytest.fixture(scope="module")
def place(uneven: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A cluster of 3 CPUs; its data sets; the code of its user."""
    code = tmp_path_factory.mktemp("code")
    (code / "tricks.py").write_text(CODE)
    (code / "grown").mkdir()
    index = build_index(str(uneven))
    with pytest.MonkeyPatch.context() as patch:
        # a node that is gone is missed sooner than by default
        patch.setenv("RAY_health_check_period_ms", "300")
        patch.setenv("RAY_health_check_timeout_ms", "1000")
        patch.setenv("RAY_health_check_initial_delay_ms", "1000")
        with local_cluster(cpus=3, start_timeout_s=60):
            yield Place(index, index, code)
    leave_code_root()


@contextmanager
def router_for(world: int, **settings: Any) -> Iterator[Any]:
    settings = {
        "data_cpus": 3,
        "store_bytes": 64 << 20,
        "group_bytes": 1500,
        "segment": 6,
        **settings,
    }
    router = start_router(world_size=world, **settings)
    try:
        yield router
    finally:
        ray.kill(router)


@pytest.fixture(scope="module")
def routers(place: Place) -> Iterator[Routers]:
    """Routers for the tests that do not end theirs, by number of ranks."""
    with ExitStack() as stack:
        yield lru_cache(lambda world: stack.enter_context(router_for(world)))


def order_of(plan: Plan, recipe: ReaderRecipe, **steps: Any) -> Order:
    return Order(plan=plan, recipe=recipe, **steps)


def ray_feed(router: Any, order: Order, rank: int, *, name: str = "training", **how: Any) -> Feed:
    stages = Stages()
    engine = ray_engine(router, name, order, rank=rank, stages=stages, **how)
    return feed_of(order, rank, engine, stages)


def local_feed(order: Order, rank: int) -> Feed:
    read = order.recipe.build([stream.index for stream in order.plan.streams])
    engine = local_engine(read, budget_bytes=1 << 20, unit_bytes=1000)
    return feed_of(order, rank, engine, None)


def feed_of(order: Order, rank: int, engine: Engine, stages: Stages | None) -> Feed:
    return Feed(
        order.plan,
        rank=rank,
        world_size=order.world_size,
        micro_batch=5,
        start_step=order.start,
        stop_step=order.stop,
        engine=engine,
        stages=stages,
    )


def check_same(got: Step, want: Step) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.weight_rows == other.weight_rows
        assert one.first_slot == other.first_slot
        assert one.columns.keys() == other.columns.keys()
        for name, column in other.columns.items():
            assert torch.equal(one.columns[name], column), name


def ids_of(step: Step) -> list[int]:
    return [i for micro_batch in step for i in micro_batch.ids.tolist()]


def until(condition: Callable[[], bool], *, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


PLANS: dict[str, Callable[[Place], Plan]] = {
    "shuffled": lambda p: plan_order(p.index, global_batch=24, seed=3, lanes=8, bands=4, window=2),
    "all rows, in stored order": lambda p: plan_order(
        p.index, global_batch=24, seed=3, shuffle=False, cover="all", lanes=3, bands=3
    ),
    "a sticky mixture": lambda p: plan_order(
        [p.index, p.other],
        weights=[2, 1],
        global_batch=24,
        seed=3,
        shuffle="sticky",
        lanes=6,
        bands=3,
        window=1,
    ),
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", PLANS)
def test_rows_are_those_of_the_local_engine_for_any_world(
    place: Place, routers: Routers, kind: str, world: int
) -> None:
    # resumed in the middle of an epoch, over segments and the end of the epoch
    plan = PLANS[kind](place)
    start = plan.steps_per_epoch // 3
    stop = plan.steps_per_epoch + start
    order = order_of(plan, place.recipe(), start=start, stop=stop, world_size=world)
    with ExitStack() as stack:
        enter = stack.enter_context
        feeds = [enter(ray_feed(routers(world), order, r, name=kind)) for r in range(world)]
        wanted = [enter(local_feed(order, r)) for r in range(world)]
        for _ in range(start, stop):
            for rank in random.sample(range(world), world):
                check_same(next(feeds[rank]), next(wanted[rank]))
        check_ended(feeds, wanted)
    until(lambda: kind not in ray.get(routers(world).orders.remote()))


def check_ended(feeds: list[Feed], wanted: list[Feed]) -> None:
    for feed in feeds:
        with pytest.raises(StopIteration):
            next(feed)
        assert feed.waits().transform_s > 0
    skipped = [feed.waits().skipped_rows for feed in feeds]
    assert skipped == [feed.waits().skipped_rows for feed in wanted]
    assert sum(skipped) > 0


def test_engines_are_exchanged_and_routers_die_and_the_order_stays(place: Place) -> None:
    plan = PLANS["a sticky mixture"](place)
    whole = order_of(plan, place.recipe(), start=0, stop=40, world_size=1)
    with local_feed(whole, 0) as one_run:
        wanted = [ids_of(step) for step in one_run]
    seen: list[list[int]] = []
    for world, steps, shared in [(3, 9, True), (1, 8, False), (2, 23, True)]:
        start = len(seen)
        order = order_of(plan, place.recipe(), start=start, stop=40, world_size=world)
        with ExitStack() as stack:
            if shared:
                router = stack.enter_context(router_for(world))  # killed in the middle
                feeds = [stack.enter_context(ray_feed(router, order, r)) for r in range(world)]
            else:
                feeds = [stack.enter_context(local_feed(order, r)) for r in range(world)]
            seen += [[i for feed in feeds for i in ids_of(next(feed))] for _ in range(steps)]
    assert seen == wanted


def test_validation_is_read_while_training_is_read_ahead(place: Place, routers: Routers) -> None:
    training = order_of(PLANS["shuffled"](place), place.recipe(), start=0, stop=30, world_size=2)
    validation = order_of(
        PLANS["all rows, in stored order"](place),
        place.recipe(training=False),
        start=0,
        stop=16,
        world_size=2,
    )
    with ExitStack() as stack:
        feeds = [stack.enter_context(ray_feed(routers(2), training, r)) for r in range(2)]
        wanted = [stack.enter_context(local_feed(training, r)) for r in range(2)]
        for step in range(30):
            for feed, want in zip(feeds, wanted, strict=True):
                check_same(next(feed), next(want))
            if step in (2, 7):
                check_validation(routers(2), validation, name=f"validation-{step}")


def check_validation(router: Any, order: Order, *, name: str) -> None:
    for rank in range(2):  # one rank may be through before the other begins
        with ray_feed(router, order, rank, name=name) as feed, local_feed(order, rank) as wanted:
            for want in wanted:
                check_same(got := next(feed), want)
                assert not any(micro.columns["training"].any() for micro in got)
            with pytest.raises(StopIteration):
                next(feed)
    until(lambda: name not in ray.get(router.orders.remote()))


def test_a_slow_rank_holds_up_the_others_at_a_bound_only(place: Place) -> None:
    # each row grows to 32 KB in the transform, a unit to half a megabyte, all to 47 MB
    plan = plan_order(place.index, global_batch=4, seed=3, lanes=4, bands=2, window=1)
    recipe = place.recipe("growing", invalid="error")
    order = order_of(plan, recipe, start=0, stop=4 * plan.steps_per_epoch, world_size=2)
    read = recipe.build([place.index])
    with router_for(2, store_bytes=8 << 20, group_bytes=1, segment=1000) as router:
        ends = [
            ray_engine(router, "training", order, rank=rank, budget_bytes=1 << 19)
            for rank in range(2)
        ]
        units = [list(plan.units(rank, 2, 0, order.stop)) for rank in range(2)]
        with closing(ends[0](iter(units[0]))) as slow, closing(ends[1](iter(units[1]))) as fast:
            next(slow)
            # a megabyte waits for each rank at the router before another's block has to wait
            taken = [next(fast) for _ in range(2)]
            time.sleep(1.5)  # nobody takes, so the pipeline comes to rest
            grown = len(list((place.code / "grown").iterdir()))
            assert grown << 19 < 12 << 20
            taken += [rows for rows, _ in zip(fast, slow, strict=False)]
    for rows, unit in zip(taken, units[1], strict=False):
        assert rows.columns["id"].tolist() == read(unit).columns["id"].tolist()
    assert len(taken) > len(units[1]) // 2


def test_tasks_whose_process_dies_run_again(place: Place, routers: Routers) -> None:
    order = order_of(
        PLANS["shuffled"](place), place.recipe("dying"), start=0, stop=10, world_size=2
    )
    wanted = order_of(order.plan, place.recipe(), start=0, stop=10, world_size=2)
    with ExitStack() as stack:
        feeds = [
            stack.enter_context(ray_feed(routers(2), order, r, name="dying")) for r in range(2)
        ]
        others = [stack.enter_context(local_feed(wanted, r)) for r in range(2)]
        for _ in range(10):
            for feed, other in zip(feeds, others, strict=True):
                check_same(next(feed), next(other))
    assert list(place.code.glob("died-*"))


def test_a_node_that_dies_changes_no_order(place: Place) -> None:
    plan = PLANS["a sticky mixture"](place)
    order = order_of(plan, place.recipe(), start=0, stop=20, world_size=2)
    with second_node() as raylet, router_for(2, data_cpus=5) as router, ExitStack() as stack:
        feeds = [stack.enter_context(ray_feed(router, order, rank)) for rank in range(2)]
        others = [stack.enter_context(local_feed(order, rank)) for rank in range(2)]
        for step in range(20):
            if step == 3:
                raylet.kill()
            for feed, other in zip(feeds, others, strict=True):
                check_same(next(feed), next(other))


@contextmanager
def second_node() -> Iterator[psutil.Process]:
    """A node with 2 CPUs more; yields its raylet."""
    node = Node(
        RayParams(
            node_ip_address=LOOPBACK,
            gcs_address=ray.get_runtime_context().gcs_address,
            redis_address=ray.get_runtime_context().gcs_address,
            node_manager_port=0,
            dashboard_agent_listen_port=None,
            num_cpus=2,
            object_store_memory=100 << 20,
            include_log_monitor=False,
            min_worker_port=0,
            max_worker_port=0,
        ),
        head=False,
        shutdown_at_exit=False,
        spawn_reaper=True,
    )
    try:
        until(lambda: ray.cluster_resources().get("CPU") == 5)
        (raylet,) = node.all_processes["raylet"]
        yield psutil.Process(raylet.process.pid)
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def test_a_killed_router_is_noticed_within_seconds(place: Place) -> None:
    order = order_of(
        PLANS["shuffled"](place), place.recipe("sleepy"), start=0, stop=1000, world_size=2
    )
    with router_for(2) as router, ray_feed(router, order, 0) as zero, ray_feed(router, order, 1):
        next(zero)
        ray.kill(router)
        killed = time.monotonic()
        with pytest.raises(LostError, match="the data pipeline lost a process or a node"):
            list(zero)
        assert time.monotonic() - killed < 5


@pytest.mark.parametrize("transform", ["failing", "exiting"])
def test_an_error_of_the_users_comes_at_its_step_as_from_the_local_engine(
    place: Place, routers: Routers, transform: str
) -> None:
    order = order_of(
        PLANS["shuffled"](place), place.recipe(transform), start=0, stop=15, world_size=1
    )
    shared, local = (
        ended(ray_feed(routers(1), order, 0, name=transform)),
        ended(local_feed(order, 0)),
    )
    assert shared == local
    assert transform == "exiting" or shared[1] is TrainingError


def test_a_damaged_file_is_named(place: Place, routers: Routers, tmp_path: Path) -> None:
    for name in ("part-000", "part-001"):
        table = pa.table({"x": np.arange(40)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20)
    index = build_index(str(tmp_path))
    shard = tmp_path / "part-001.parquet"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    plan = plan_order(index, global_batch=20, seed=3)
    order = order_of(plan, place.recipe(None), start=0, stop=4, world_size=1)
    shared, local = (
        ended(ray_feed(routers(1), order, 0, name="damaged")),
        ended(local_feed(order, 0)),
    )
    assert shared == local
    assert shared[1] is DataError
    assert "part-001" in shared[2]


def ended(feed: Feed) -> tuple[int, type[BaseException], str]:
    """Return after how many steps a feed failed, and with what."""
    steps = 0
    try:
        with feed:
            for _ in feed:
                steps += 1
    except BaseException as error:  # noqa: BLE001 - SystemExit is one of those
        return steps, type(error), str(error)
    raise AssertionError("the feed came to its end")


def test_a_transform_that_always_kills_its_process_ends_the_reading(
    place: Place, routers: Routers
) -> None:
    order = order_of(
        PLANS["shuffled"](place), place.recipe("always_dying"), start=0, stop=4, world_size=1
    )
    with (
        ray_feed(routers(1), order, 0, name="dying") as feed,
        pytest.raises(LostError, match="WorkerCrashedError"),
    ):
        next(feed)


def test_ranks_that_begin_apart_are_told(place: Place, routers: Routers) -> None:
    plan = PLANS["shuffled"](place)
    one = order_of(plan, place.recipe(), start=0, stop=9, world_size=2)
    other = order_of(plan, place.recipe(), start=5, stop=9, world_size=2)
    with ray_feed(routers(2), one, 0, name="apart") as zero:
        next(zero)
        with (
            ray_feed(routers(2), other, 1, name="apart") as feed,
            pytest.raises(TrainingError, match=r"rank 1 asks .* start=5, and rank 0 asked with 0"),
        ):
            next(feed)


def test_waiting_too_long_says_for_what(place: Place) -> None:
    order = order_of(
        PLANS["shuffled"](place), place.recipe("hanging"), start=0, stop=9, world_size=1
    )
    with (
        router_for(1) as router,
        ray_feed(router, order, 0, timeout_s=2) as feed,
        pytest.raises(
            LostError,
            match=r"rank 0 waited more than 2 s for a block of the data pipeline \(training\); "
            r"its blocks so far: rank 0: 0 taken, 0 ready",
        ),
    ):
        next(feed)


def test_closing_ends_an_order_early(place: Place, routers: Routers) -> None:
    recipe = place.recipe("growing", invalid="error")
    order = order_of(PLANS["shuffled"](place), recipe, start=0, stop=10**6, world_size=2)
    feeds = [ray_feed(routers(2), order, rank, name="long") for rank in range(2)]
    for feed in feeds:
        next(feed)
    feeds[0].close()
    next(feeds[1])
    assert "long" in ray.get(routers(2).orders.remote())
    feeds[1].close()
    until(lambda: "long" not in ray.get(routers(2).orders.remote()))

    def grown() -> int:
        return len(list((place.code / "grown").iterdir()))

    until(lambda: grown() == (time.sleep(1), grown())[1])  # no task runs on for nobody


def test_a_rank_without_rows_gets_a_row_to_keep_step_with(place: Place, routers: Routers) -> None:
    plan = plan_order(place.index, global_batch=2, seed=3)
    order = order_of(plan, place.recipe(), start=0, stop=2, world_size=3)
    with ExitStack() as stack:
        feeds = [stack.enter_context(ray_feed(routers(3), order, r, name="few")) for r in range(3)]
        others = [stack.enter_context(local_feed(order, rank)) for rank in range(3)]
        steps = [next(feed) for feed in feeds]
        for step, other in zip(steps, others, strict=True):
            check_same(step, next(other))
        assert 0 in [step[0].weight_rows for step in steps]

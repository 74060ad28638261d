"""The ``ray`` engine: one Ray Data pipeline reads for all ranks, a router hands out its blocks.

The router is an actor of the job. It holds references to blocks, never blocks, and has no state
worth saving: a new one goes on at any step, for any number of ranks. It serves several orders at a
time, e.g. training and a validation, by name; an order's pipeline begins when the first rank asks
for it, and ends when all ranks have left it or the router goes.

What a task fails with travels in its block, so that it is raised where its unit is needed: after
the same step, as the same error, as if the rank had read by itself.
"""

import asyncio
import importlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayway.data.columns import Rows
from rayway.data.engine import Engine
from rayway.data.plan import Plan
from rayway.data.recipe import Order, ReaderRecipe
from rayway.data.stages import Stages
from rayway.data.stream import Unit
from rayway.data.wire import from_table
from rayway.errors import LostError, RaywayError, TrainingError

GROUP_BYTES = 10 << 20
SEGMENT_TASKS = 250
_BUDGET_BYTES = 64 << 20
_TIMEOUT_S = 600.0
_ASK_TIMEOUT_S = 10.0
_LOOK_S = 1.0
TRANSFER = "transfer"
"""The stage of fetching blocks that are ready from the object store."""


@dataclass
class _Served:
    """An order while it is served, as the router's event loop sees it."""

    facts: Mapping[str, object]
    first_rank: int
    waiting: list[deque[tuple[Any, int]]]
    """For each rank the references and bytes of blocks that it did not take yet."""
    taken: list[int]
    """Blocks that each rank has taken."""
    left: set[int] = field(default_factory=set)
    """Ranks that want no more."""
    ended: bool = False
    """All blocks are handed over, or there will be none for another reason."""
    error: BaseException | None = None

    def has_room(self, rank: int, size_bytes: int, most_bytes: int) -> bool:
        """Return whether a block for ``rank`` may be kept. One always may."""
        held = sum(size for _, size in self.waiting[rank])
        return not held or held + size_bytes <= most_bytes


class Router:
    """Hands each block of the pipelines to the rank it is for. Run as an actor, see start_router.

    Args:
        world_size: Number of ranks.
        data_cpus: CPUs that may read and transform.
        store_bytes: Of the object store, what blocks may occupy that no rank has fetched.
        group_bytes: What one task reads, about.
        segment: Tasks of one Ray Data set.
    """

    def __init__(
        self,
        *,
        world_size: int,
        data_cpus: int,
        store_bytes: int,
        group_bytes: int,
        segment: int,
    ) -> None:
        self._world_size, self._data_cpus = world_size, data_cpus
        self._group_bytes, self._segment = group_bytes, segment
        self._pipeline_bytes = store_bytes // 4  # of two orders; as much again waits for ranks
        self._rank_bytes = store_bytes // 4 // world_size
        self._served: dict[str, _Served] = {}
        self._changed = asyncio.Condition()
        threading.Thread(  # it takes two seconds, in which the ranks start, too
            target=importlib.import_module, args=("rayway.data.pipeline",), daemon=True
        ).start()

    async def begin(self, name: str, rank: int, facts: Mapping[str, object]) -> bool:
        """Ask for an order; return whether this rank has to hand it in with :meth:`serve`.

        Raises:
            TrainingError: Another rank asked for something else under this name.
        """
        served = self._served.get(name)
        if served is None:
            ranks = range(self._world_size)
            self._served[name] = _Served(facts, rank, [deque() for _ in ranks], [0 for _ in ranks])
            return True
        for fact in facts:
            if served.facts.get(fact) != facts[fact]:
                raise TrainingError(
                    f"rank {rank} asks for the {name} data with {fact}={facts[fact]!r}, and rank "
                    f"{served.first_rank} asked with {served.facts.get(fact)!r}. All ranks have "
                    f"to begin alike, at the same checkpoint: resume the run."
                )
        return False

    async def serve(self, name: str, order: Order) -> None:
        """Begin an order's pipeline."""
        threading.Thread(
            target=self._read,
            args=(asyncio.get_running_loop(), self._served[name], order),
            name=f"read-{name}",
            daemon=True,
        ).start()

    async def take(self, name: str, rank: int) -> list[Any]:
        """Return the rank's next block, or nothing at the end.

        It comes in a list, so that Ray passes on the reference and not the block.

        Raises:
            Exception: What ended the pipeline.
        """
        served = self._served.get(name)
        if served is None:  # all ranks have left, this one a moment ago
            return []
        mine = served.waiting[rank]
        async with self._changed:
            await self._changed.wait_for(lambda: mine or served.ended or rank in served.left)
            if rank in served.left:
                return []
            if not mine:
                if served.error is not None:
                    raise served.error
                return []
            reference, _ = mine.popleft()
            served.taken[rank] += 1
            self._changed.notify_all()
            return [reference]

    async def leave(self, name: str, rank: int) -> None:
        """Want no more of an order. When all ranks have left, it is forgotten."""
        served = self._served.get(name)
        if served is None:
            return
        async with self._changed:
            served.left.add(rank)
            served.waiting[rank].clear()
            if len(served.left) == self._world_size:
                del self._served[name]
            self._changed.notify_all()

    async def orders(self) -> list[str]:
        """Return the names of the orders that are served."""
        return list(self._served)

    async def describe(self, name: str) -> str:
        """Return what there is of an order, for a message."""
        served = self._served.get(name)
        if served is None:
            return "the router serves no such order"
        ranks = "; ".join(
            f"rank {rank}: {taken} taken, {len(waiting)} ready"
            for rank, (taken, waiting) in enumerate(zip(served.taken, served.waiting, strict=True))
        )
        return f"its blocks so far: {ranks}"

    def _read(self, loop: asyncio.AbstractEventLoop, served: _Served, order: Order) -> None:
        """Run an order's pipeline, in a thread of its own."""
        from rayway.data.pipeline import Limits, read_order  # noqa: PLC0415 - see there

        def limits() -> Limits:
            share = max(self._data_cpus // max(len(self._served), 1), 1)
            return Limits(share, self._pipeline_bytes)

        def on_loop(step: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(step, loop).result()

        error: BaseException | None = None
        blocks = read_order(
            order, limits=limits, group_bytes=self._group_bytes, segment=self._segment
        )
        try:
            for block in blocks:
                if not on_loop(self._keep(served, block.rank, block.reference, block.size_bytes)):
                    break
        except BaseException as raised:  # noqa: BLE001 - goes to the ranks
            error = raised if isinstance(raised, RaywayError) else LostError(_lost(raised))
        finally:
            blocks.close()
        on_loop(self._end(served, error))

    async def _keep(self, served: _Served, rank: int, reference: Any, size_bytes: int) -> bool:
        """Keep a block for its rank once there is room; return whether anybody wants more."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: rank in served.left or served.has_room(rank, size_bytes, self._rank_bytes)
            )
            if rank not in served.left:
                served.waiting[rank].append((reference, size_bytes))
                self._changed.notify_all()
            return len(served.left) < self._world_size

    async def _end(self, served: _Served, error: BaseException | None) -> None:
        async with self._changed:
            served.ended, served.error = True, error
            self._changed.notify_all()


def start_router(
    *,
    world_size: int,
    data_cpus: int,
    store_bytes: int,
    group_bytes: int = GROUP_BYTES,
    segment: int = SEGMENT_TASKS,
) -> Any:
    """Start a job's router beside the caller and return its handle.

    It lives as long as the caller's Ray job.

    Args:
        world_size: Number of ranks.
        data_cpus: CPUs that may read and transform, at least 1.
        store_bytes: Of the object store, what blocks may occupy.
        group_bytes: What one task reads, about; a task costs Ray some 14 ms whatever it does.
        segment: Tasks of one Ray Data set.
    """
    here = ray.get_runtime_context().get_node_id()
    actor = ray.remote(
        num_cpus=0,  # it waits most of the time
        # no other node's end is to end it
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        max_concurrency=1000 + 2 * world_size,  # a rank's request waits in it for a block
    )(Router)
    return actor.remote(
        world_size=world_size,
        data_cpus=data_cpus,
        store_bytes=store_bytes,
        group_bytes=group_bytes,
        segment=segment,
    )


def shared_engine(
    router: Any,
    recipes: Mapping[str, ReaderRecipe],
    *,
    rank: int,
    world_size: int,
    timeout_s: float = _TIMEOUT_S,
) -> Callable[..., Engine]:
    """Return what makes a rank's engines.

    Args:
        router: The handle.
        recipes: How data of each kind is read.
        rank: Whose engines.
        world_size: Number of ranks.
        timeout_s: Seconds after which a block that does not come is an error.
    """

    def make(
        kind: str, plan: Plan, *, start: int, stop: int | None, stages: Stages, name: str
    ) -> Engine:
        order = Order(
            plan=plan, recipe=recipes[kind], start=start, stop=stop, world_size=world_size
        )
        return ray_engine(router, name, order, rank=rank, stages=stages, timeout_s=timeout_s)

    return make


def ray_engine(
    router: Any,
    name: str,
    order: Order,
    *,
    rank: int,
    stages: Stages | None = None,
    budget_bytes: int = _BUDGET_BYTES,
    timeout_s: float = _TIMEOUT_S,
) -> Engine:
    """Return a rank's end of an order's pipeline.

    The first time it is called it gives the rank's units of the order. A unit apart from these is
    read by this process.

    Args:
        router: The handle.
        name: Of the order, the same on all ranks.
        order: What is read, the same on all ranks.
        rank: Whose units.
        stages: Told where the tasks' time goes.
        budget_bytes: What blocks fetched ahead may hold. One is always fetched.
        timeout_s: Seconds after which a block that does not come is an error.

    Raises:
        DataError: While units are taken: what the reader raises.
        TrainingError: While units are taken: the transform failed, or the ranks ask for
            different orders.
        LostError: While units are taken: the router or the tasks went away, or no block came.
    """
    begun = False

    def run(units: Iterator[Unit]) -> Generator[Rows, None, None]:
        nonlocal begun
        if begun:
            read = order.recipe.build([stream.index for stream in order.plan.streams])
            return (read(unit) for unit in units)
        begun = True
        link = _Link(router, name, rank, timeout_s)
        return _own(units, _Ahead(link, order, budget_bytes), stages or Stages())

    return run


def _own(units: Iterator[Unit], blocks: "_Ahead", stages: Stages) -> Generator[Rows, None, None]:
    """Yield the rows of a rank's units from its blocks."""
    ready: deque[Rows | BaseException] = deque()
    try:
        for unit in units:
            if not ready:
                parcel = from_table(blocks.next())
                ready.extend(parcel.units)
                if parcel.error is not None:
                    ready.append(parcel.error)
                for stage, seconds in parcel.seconds.items():
                    stages.add(stage, seconds)
            rows = ready.popleft()
            if isinstance(rows, BaseException):
                raise rows
            count = len(next(iter(rows.columns.values())))
            assert count == unit.rows, f"the block holds {count} rows for the {unit.rows} of {unit}"
            begin = perf_counter()
            own = _copied(rows)  # so that the block leaves the object store
            stages.add(TRANSFER, perf_counter() - begin)
            yield own
    finally:
        blocks.close()


class _Ahead:
    """A rank's blocks, fetched ahead by a thread of its own."""

    def __init__(self, link: "_Link", order: Order, budget_bytes: int) -> None:
        self._link, self._order, self._budget_bytes = link, order, budget_bytes
        self._ready: deque[Any] = deque()  # tables, at last what ended them
        self._held_bytes, self._closed = 0, False
        self._wanted_since: float | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="rayway-fetch", daemon=True)

    def next(self) -> Any:
        """Return the next block's table, or raise what ended them."""
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._wanted_since = monotonic()
            self._changed.wait_for(lambda: self._ready)
            self._wanted_since = None
            if isinstance(self._ready[0], BaseException):
                raise self._ready[0]
            table = self._ready.popleft()
            self._held_bytes -= table.nbytes
            self._changed.notify()
            return table

    def close(self) -> None:
        """Want no more. The thread ends by itself."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify()
        self._link.leave()

    def _work(self) -> None:
        end: BaseException = LostError("the data pipeline ended before the steps it is for")
        try:
            self._link.begin(self._order, self._waited_s)
            while not self._closed:
                table = self._link.block(self._waited_s)
                if table is None or not self._keep(table):
                    break
        except BaseException as error:  # noqa: BLE001 - raised where blocks are taken
            end = error
        with self._changed:
            self._ready.append(end)
            self._changed.notify()

    def _keep(self, table: Any) -> bool:
        """Keep a block once there is room; return whether more are wanted."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or not self._held_bytes
                    or self._held_bytes + table.nbytes <= self._budget_bytes
                )
            )
            self._ready.append(table)
            self._held_bytes += table.nbytes
            self._changed.notify()
            return not self._closed

    def _waited_s(self) -> float:
        """Return for how long somebody has been waiting for a block."""
        since = self._wanted_since
        return 0.0 if since is None or self._closed else monotonic() - since


class _Link:
    """A rank's talk with the router about one order. What goes wrong comes out in our words."""

    def __init__(self, router: Any, name: str, rank: int, timeout_s: float) -> None:
        self._router, self._name, self._rank = router, name, rank
        self._timeout_s = timeout_s

    def begin(self, order: Order, waited_s: Callable[[], float]) -> None:
        """Ask for the order, and hand it in if nobody did."""
        asked = self._router.begin.remote(self._name, self._rank, order.facts())
        if self._get(asked, waited_s, "the data router"):
            self._get(self._router.serve.remote(self._name, order), waited_s, "the data router")

    def block(self, waited_s: Callable[[], float]) -> Any:
        """Return the rank's next block as a table, or ``None`` after the last."""
        taken = self._router.take.remote(self._name, self._rank)
        references = self._get(taken, waited_s, "a block of the data pipeline")
        if not references:
            return None
        return self._get(references[0], waited_s, "a block from the object store")

    def leave(self) -> None:
        """Want no more blocks, and wait for no answer."""
        if ray.is_initialized():  # else Ray would start a cluster, only to ask an actor of it
            with suppress(RayError):
                self._router.leave.remote(self._name, self._rank)

    def _get(self, reference: Any, waited_s: Callable[[], float], what: str) -> Any:
        """Return a value, as long as nobody waited too long for it."""
        try:
            while not ray.wait([reference], timeout=_LOOK_S)[0]:
                if waited_s() > self._timeout_s:
                    raise LostError(
                        f"rank {self._rank} waited more than {self._timeout_s:g} s for {what} "
                        f"({self._name}); {self._state()}"
                    )
            return ray.get(reference, timeout=self._timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, RaywayError):
                raise error.cause from None
            raise LostError(f"the data router failed: {error.cause!r}") from None
        except RayError as error:
            raise LostError(_lost(error)) from None

    def _state(self) -> str:
        try:
            told = ray.get(self._router.describe.remote(self._name), timeout=_ASK_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return "the router does not answer"
        return str(told)


def _copied(rows: Rows) -> Rows:
    valid = None if rows.valid is None else rows.valid.copy()
    return Rows({name: np.array(column) for name, column in rows.columns.items()}, valid)


def _lost(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (
        f"the data pipeline lost a process or a node ({type(error).__name__}: "
        f"{lines[0] if lines else 'no message'})"
    )

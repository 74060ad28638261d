"""The router: hands each block of the job's Ray Data pipelines to the rank it is for.

It is an actor of the job. It holds references to blocks, never blocks, and has no state worth
saving: a new one goes on at any step, for any number of ranks. It serves several orders at a time,
e.g. training and a validation, by name; an order's pipeline begins when the first rank asks for it,
and ends when all ranks have left it or the router goes.
"""

import asyncio
import importlib
import threading
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayway.data.recipe import Order
from rayway.errors import LostError, RaywayError, TrainingError

if TYPE_CHECKING:
    from rayway.data.pipeline import Block

GROUP_BYTES = 10 << 20
SEGMENT_TASKS = 250


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
        error: BaseException | None = None
        try:
            with closing(self._blocks(order)) as blocks:
                for block in blocks:
                    keep = self._keep(served, block.rank, block.reference, block.size_bytes)
                    if not asyncio.run_coroutine_threadsafe(keep, loop).result():
                        break
        except BaseException as raised:  # noqa: BLE001 - goes to the ranks
            error = raised if isinstance(raised, RaywayError) else LostError(lost(raised))
        asyncio.run_coroutine_threadsafe(self._end(served, error), loop).result()

    def _blocks(self, order: Order) -> "Generator[Block, None, None]":
        from rayway.data.pipeline import Limits, read_order  # noqa: PLC0415 - see there

        def limits() -> Limits:
            share = max(self._data_cpus // max(len(self._served), 1), 1)
            return Limits(share, self._pipeline_bytes)

        return read_order(
            order, limits=limits, group_bytes=self._group_bytes, segment=self._segment
        )

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


def lost(error: BaseException) -> str:
    """Return the words for an error that Ray raised because something went away."""
    lines = str(error).strip().splitlines()
    return (
        f"the data pipeline lost a process or a node ({type(error).__name__}: "
        f"{lines[0] if lines else 'no message'})"
    )

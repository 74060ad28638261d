"""The ``ray`` engine: a rank's end of the pipelines that read for all ranks.

A thread takes blocks from the router ahead of need. Rows are copied out of them when they are
asked for, so what waits in the object store is bounded by the router, however long a rank holds
rows.

What a task fails with travels in its block, so that it is raised where its unit is needed: after
the same step, as the same error, as if the rank had read by itself. No wait is without an end: a
process or node that goes away ends it, and so does a deadline while somebody waits for rows.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from rayway.data.columns import Rows
from rayway.data.engine import Engine
from rayway.data.plan import Plan
from rayway.data.recipe import Order, ReaderRecipe
from rayway.data.router import lost
from rayway.data.stages import Stages
from rayway.data.stream import Unit
from rayway.data.wire import from_table
from rayway.errors import LostError, RaywayError

TRANSFER = "transfer"
"""The stage of copying rows out of blocks."""
_BUDGET_BYTES = 64 << 20
_TIMEOUT_S = 600.0
_ASK_TIMEOUT_S = 10.0
_LOOK_S = 1.0


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
            raise LostError(lost(error)) from None

    def _state(self) -> str:
        try:
            told = ray.get(self._router.describe.remote(self._name), timeout=_ASK_TIMEOUT_S)
        except RayError:
            return "the router does not answer"
        return str(told)


def _copied(rows: Rows) -> Rows:
    valid = None if rows.valid is None else rows.valid.copy()
    return Rows({name: np.array(column) for name, column in rows.columns.items()}, valid)

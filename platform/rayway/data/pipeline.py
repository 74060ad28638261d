"""The Ray Data pipeline that reads for all ranks: groups of units in, references of blocks out.

A group is some consecutive units of one rank, read by one task. The groups of all ranks are merged
by the first step that needs them, and Ray Data keeps that order.

Only the router and the tasks import this module: Ray Data takes two seconds to import.
"""

import heapq
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import ray
from ray.data import DataContext, Datasource, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from rayway.data.columns import Rows
from rayway.data.recipe import Order
from rayway.data.shards import Reader
from rayway.data.stages import Stages
from rayway.data.stream import Unit
from rayway.data.wire import Parcel, to_table

_TASK_THREADS = 4  # they hide the latency of the storage; the task reserves one CPU
_READERS = 4  # a process may read for training and for validation in turn
_TASK_RETRIES = 3
"""Lives of a task whose process or node dies. A transform that kills its process ends the run."""


@dataclass(frozen=True, slots=True)
class Group:
    """What one task reads."""

    needed_at: int
    """The first step that needs one of the units."""
    rank: int
    """Whose the units are."""
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """What a task has read."""

    rank: int
    reference: Any
    """The ``ObjectRef`` of the table."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pipeline may use at a time."""

    cpus: int
    store_bytes: int
    """Of blocks that nobody took yet."""


class _Size:
    """How large rows are. First estimated from the data sets, then measured on blocks."""

    def __init__(self, order: Order, group_bytes: int) -> None:
        self._group_bytes = group_bytes
        indexes = [stream.index for stream in order.plan.streams]
        self._row_bytes = max(index.group_bytes / int(index.rows.max()) for index in indexes)

    def group_rows(self) -> float:
        """Return how many rows a group may have."""
        return self._group_bytes / max(self._row_bytes, 1.0)

    def measured(self, size_bytes: int, rows: int) -> None:
        """Take note of what blocks turned out to be, the transform's part included."""
        if rows:
            self._row_bytes = size_bytes / rows


def read_order(
    order: Order, *, limits: Callable[[], Limits], group_bytes: int, segment: int
) -> Generator[Block, None, None]:
    """Run an order's pipeline and yield its blocks, by the first step that needs them.

    A new Ray Data set begins every ``segment`` tasks: Ray puts all tasks of a data set into its
    object store before it runs the first, and keeps something of each finished one.

    Args:
        order: What is read.
        limits: Asked at the start of each segment.
        group_bytes: What one task reads, about.
        segment: Tasks of one Ray Data set.
    """
    reference = ray.put((order.recipe, [stream.index for stream in order.plan.streams]))
    size = _Size(order, group_bytes)
    groups = merged_groups(order, size.group_rows)
    while tasks := list(islice(groups, segment)):
        read_bytes = 0
        # strict: it would be Ray that made two blocks of one, or lost one
        for group, entry in zip(tasks, _run(tasks, reference, limits()), strict=True):
            read_bytes += entry.metadata.size_bytes
            yield Block(group.rank, entry.ref, entry.metadata.size_bytes)
        size.measured(read_bytes, sum(unit.rows for group in tasks for unit in group.units))


def merged_groups(order: Order, group_rows: Callable[[], float]) -> Iterator[Group]:
    """Yield the groups of all ranks, by the first step that needs them and rank.

    A rank that has all it needs for a step has taken every block that comes before another rank's
    block for that step. So ranks that go in step never wait for each other here, however few
    blocks may wait for each.
    """
    ranks = (_groups_of(order, rank, group_rows) for rank in range(order.world_size))
    return heapq.merge(*ranks, key=lambda group: (group.needed_at, group.rank))


def _groups_of(order: Order, rank: int, group_rows: Callable[[], float]) -> Iterator[Group]:
    units: list[Unit] = []
    rows = 0
    for unit in order.plan.units(rank, order.world_size, order.start, order.stop):
        if units and rows + unit.rows > group_rows():
            yield Group(_needed_at(order, units[0]), rank, tuple(units))
            units, rows = [], 0
        units.append(unit)
        rows += unit.rows
    if units:
        yield Group(_needed_at(order, units[0]), rank, tuple(units))


def _needed_at(order: Order, unit: Unit) -> int:
    stream = order.plan.streams[unit.stream]
    step = unit.epoch * stream.steps + unit.first // stream.width[unit.lane]
    return max(step, order.start)


def _run(tasks: list[Group], reference: Any, limits: Limits) -> Iterator[Any]:
    """Yield the entry (reference and metadata) of each task's block, in order."""
    context = DataContext.get_current().copy()
    options = context.execution_options
    options.preserve_order = True
    options.resource_limits = ExecutionResources.for_limits(
        cpu=limits.cpus, object_store_memory=limits.store_bytes
    )
    context.target_max_block_size = None  # one block a task, neither cut nor merged
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # training may pause for as long as it likes
    with DataContext.current(context):
        data = ray.data.read_datasource(
            _Tasks(tasks, reference),
            override_num_blocks=len(tasks),
            num_cpus=1,
            ray_remote_args={"max_retries": _TASK_RETRIES},
        )
    for bundle in data.iter_internal_ref_bundles():
        yield from bundle.blocks


class _Tasks(Datasource):  # type: ignore[misc]  # Ray ships no types we could check against
    """One read task a group."""

    def __init__(self, groups: list[Group], reference: Any) -> None:
        super().__init__()
        self._groups, self._reference = groups, reference

    def estimate_inmemory_data_size(self) -> int | None:
        """Say nothing: it would only change the number of blocks, which is given."""
        return None

    def get_read_tasks(self, *_: object, **__: object) -> list[ReadTask]:
        """Return the tasks; how many was decided by the groups."""
        unknown = BlockMetadata(None, None, None, None)
        return [
            ReadTask(partial(_read, self._reference, group.units), unknown)
            for group in self._groups
        ]


def _read(reference: Any, units: tuple[Unit, ...]) -> list[Any]:
    """Read a group in a task's process: one block, with the rows up to the first error."""
    done: list[Rows] = []
    seconds: dict[str, float] = {}
    error: BaseException | None = None
    try:
        reader, stages = _reader(reference)
        before = stages.seconds()
        with ThreadPoolExecutor(min(_TASK_THREADS, len(units))) as pool:
            for rows in pool.map(reader, units):
                done.append(rows)
        seconds = {name: s - before.get(name, 0.0) for name, s in stages.seconds().items()}
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - goes to the rank, in its place
        error = raised
    return [to_table(Parcel(done, seconds, error))]


@lru_cache(_READERS)
def _reader(reference: Any) -> tuple[Reader, Stages]:
    """Return this process's reader for an order; it keeps footers and row groups between tasks."""
    recipe, indexes = ray.get(reference)
    stages = Stages()
    return recipe.build(indexes, stages=stages), stages

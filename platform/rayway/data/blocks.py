"""From a sequence of units to a rank's rows, gathered for many steps at once.

A rank's rows of one step come from many lanes. Gathering each step by itself would cost a few
numpy calls per lane and step; a block of up to 64 steps pays them once per lane and block. The
first block is one step long, so that the first batch waits for nothing it does not need.

Rows are gathered lane by lane into memory that is used again for every block, and put into slot
order by one pass into memory of the block's own. Slots without a row that counts close up in it.
"""

import math
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from time import thread_time

import numpy as np
import numpy.typing as npt

from rayway.data.columns import Array, Columns, Rows
from rayway.data.engine import Engine
from rayway.data.keys import Int64s
from rayway.data.plan import Plan
from rayway.data.stream import Unit
from rayway.errors import DataError

_Layout = dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
_MAX_STEPS = 64
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """A rank's rows of a few consecutive steps, in slot order; slots without a row close up."""

    ids: Int64s
    """Sample ids, shape (rows,)."""
    columns: Columns
    """Arrays of shape (rows, ...); nobody else holds them."""
    counts: list[int]
    """Rows of each micro-batch, step after step; 0 where none of its slots has one."""
    skipped: int
    """Rows left out because they do not count."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A unit whose rows are in use."""

    unit: Unit
    order: Int64s
    ids: Int64s
    """Sample ids in the unit's order, shape (rows,)."""
    columns: Columns
    """In stored order."""
    valid: npt.NDArray[np.bool_] | None
    """In the unit's order."""


class _Gathered:
    """Rows of one block as they are gathered: part after part, step after step, slot after slot."""

    def __init__(self, rows: int, scratch: Columns) -> None:
        self.ids = np.empty(rows, dtype=np.int64)
        self.there = np.ones(rows, dtype=np.bool_)
        """Which rows exist and count, shape (rows,)."""
        self.skipped = 0
        self._scratch, self._end = scratch, 0

    def take(self, held: _Held, which: "slice[int, int, None] | Int64s") -> None:
        """Add the rows ``which`` of the unit's order."""
        source = held.order[which]
        begin, end = self._end, self._end + len(source)
        self.ids[begin:end] = held.ids[which]
        for name, column in held.columns.items():
            # "clip" as the rows are there, and only with it numpy writes to ``out`` without a copy
            column.take(source, axis=0, out=self._column(name, column)[begin:end], mode="clip")
        if held.valid is not None:
            self.there[begin:end] = valid = held.valid[which]
            self.skipped += len(source) - int(np.count_nonzero(valid))
        self._end = end

    def leave(self, rows: int) -> None:
        """Add rows that do not exist."""
        self.there[self._end : self._end + rows] = False
        self._end += rows

    def in_order(self, order: Int64s) -> tuple[Int64s, Columns]:
        """Return ids and columns of the rows at ``order``, in memory of their own."""
        columns = {
            name: column.take(order, axis=0, mode="clip") for name, column in self._scratch.items()
        }
        return self.ids[order], columns

    def _column(self, name: str, like: Array) -> Array:
        column = self._scratch.get(name)
        if column is None or len(column) < len(self.ids):  # only a block's first unit finds it so
            column = np.empty((len(self.ids), *like.shape[1:]), like.dtype)
            self._scratch[name] = column
        return column


class Blocks:
    """A rank's blocks. Knows the plan and an engine, not how the engine reads.

    Args:
        plan: The order.
        engine: Gives the rows of units.
        rank: Whose rows.
        world_size: All ranks that see different data.
        micro_batch: Slots of a micro-batch.
    """

    def __init__(
        self, plan: Plan, engine: Engine, *, rank: int, world_size: int, micro_batch: int
    ) -> None:
        self._plan, self._engine = plan, engine
        self._rank, self._world_size = rank, world_size
        begin, end = plan.share(rank, world_size)
        self._slots = end - begin
        most_slots = -(-plan.global_batch // world_size)
        self.first_slots = list(range(begin, begin + most_slots, micro_batch))
        """The place in the global batch where each micro-batch of a step begins."""
        self.engine_cpu_s = 0.0
        """CPU seconds that the thread of :meth:`run` spent inside the engine."""
        self._cuts = np.minimum(np.arange(0, most_slots + micro_batch, micro_batch), self._slots)
        self._parts = plan.parts(rank, world_size)
        self._part_of = {(p.stream, p.lane): number for number, p in enumerate(self._parts)}
        steps = np.arange(_MAX_STEPS)[:, None]
        # the lane positions of each part in a block that begins at lane position 0
        self._offsets = [
            (steps * part.width + np.arange(part.first, part.end)).ravel() for part in self._parts
        ]
        self._held: list[deque[_Held]] = [deque() for _ in self._parts]
        self._asked: deque[Unit] = deque()
        self._first: tuple[Unit, _Layout] | None = None
        self._row_bytes = 0
        self._scratch = Columns()
        self._last_order = np.empty(0, dtype=np.int64)

    def run(self, start: int, stop: int | None) -> Generator[Block, None, None]:
        """Yield the blocks of steps [start, stop); ``None`` never ends. To be called once.

        Raises:
            DataError: From the engine; or the units' columns do not fit together.
        """
        step, most = start, 1
        with closing(self._engine(self._needed(start, stop))) as tables:
            while stop is None or step < stop:
                count = most if stop is None else min(most, stop - step)
                yield self._block(step, count, tables)
                step += count
                most = min(2 * most, self._most_steps())

    @cached_property
    def filler(self) -> Columns:
        """The first row of the first data set, for a micro-batch without a row; shape (1, ...)."""
        unit = Unit(stream=0, epoch=0, lane=0, first=0, rows=1, spans=((0, 0, 1),), order_key=None)
        with closing(self._engine(iter([unit]))) as tables:
            columns = next(tables).columns
        self._check_layout(columns, unit)
        return columns

    def _needed(self, start: int, stop: int | None) -> Iterator[Unit]:
        for unit in self._plan.units(self._rank, self._world_size, start, stop):
            self._asked.append(unit)
            yield unit

    def _most_steps(self) -> int:
        return max(1, min(_MAX_STEPS, _BLOCK_BYTES // max(self._row_bytes * self._slots, 1)))

    def _block(self, step: int, count: int, tables: Iterator[Rows]) -> Block:
        """Gather the steps [step, step + count). They may lie in several epochs of a stream."""
        gathered = _Gathered(count * self._slots, self._scratch)
        epochs = [_by_epoch(stream.steps, step, count) for stream in self._plan.streams]
        for number, part in enumerate(self._parts):
            for epoch, into_epoch, steps in epochs[part.stream]:
                self._gather(number, epoch, into_epoch, steps, gathered, tables)
        order = self._slot_order(count)
        edges = (np.arange(count)[:, None] * self._slots + self._cuts).ravel()
        if not gathered.there.all():
            there = gathered.there[order]
            order, edges = order[there], np.concatenate([[0], np.cumsum(there)])[edges]
        counts = np.diff(edges.reshape(count, -1)).ravel().tolist()
        ids, columns = gathered.in_order(order)
        return Block(ids, columns, counts, gathered.skipped)

    def _gather(
        self,
        number: int,
        epoch: int,
        into_epoch: int,
        steps: int,
        gathered: _Gathered,
        tables: Iterator[Rows],
    ) -> None:
        """Gather what a part gives to some steps of one epoch."""
        part = self._parts[number]
        stream, offsets = self._plan.streams[part.stream], self._offsets[number]
        begin, rows = into_epoch * part.width, steps * len(part.places)
        limit, upto = (into_epoch + steps) * part.width, rows
        if into_epoch + steps > stream.full_steps:  # the lane may end before the last step does
            limit = min(limit, stream.limit(epoch, part.lane))
            upto = int(np.searchsorted(offsets[:rows], limit - begin))
        whole, done = len(part.places) == part.width, 0
        while done < upto:
            held = self._holding(number, epoch, begin + int(offsets[done]), tables)
            first, end = begin - held.unit.first, min(held.unit.end, limit) - begin
            if whole:  # then the offsets are 0, 1, 2, ...
                gathered.take(held, slice(first + done, first + end))
                done = end
            else:
                end = int(np.searchsorted(offsets[:upto], end))
                gathered.take(held, offsets[done:end] + first)
                done = end
        gathered.leave(rows - upto)

    def _slot_order(self, count: int) -> Int64s:
        """Return for each row of ``count`` steps, slot by slot, where it was gathered."""
        if len(self._last_order) != count * self._slots:
            steps = np.arange(count)[:, None] * self._slots
            slots = [(steps + part.places).ravel() for part in self._parts]
            self._last_order = np.argsort(np.concatenate([np.empty(0, np.int64), *slots]))
        return self._last_order

    def _holding(self, number: int, epoch: int, position: int, tables: Iterator[Rows]) -> _Held:
        """Return the unit of a part that holds a lane position, once the engine gave it.

        Units come in the order of need over all lanes, so what is needed now always comes before
        what is not.
        """
        queue = self._held[number]
        while queue and (queue[0].unit.epoch, queue[0].unit.end) <= (epoch, position):
            queue.popleft()
        while not queue:
            began = thread_time()
            rows = next(tables)
            self.engine_cpu_s += thread_time() - began
            unit = self._asked.popleft()
            self._check_layout(rows.columns, unit)
            self._held[self._part_of[unit.stream, unit.lane]].append(self._hold(unit, rows))
        return queue[0]

    def _hold(self, unit: Unit, rows: Rows) -> _Held:
        order, valid = unit.order(), rows.valid
        return _Held(
            unit=unit,
            order=order,
            ids=unit.stored_ids(self._plan.streams[unit.stream].index)[order],
            columns={name: np.ascontiguousarray(x) for name, x in rows.columns.items()},
            valid=None if valid is None or valid.all() else valid[order],
        )

    def _check_layout(self, columns: Columns, unit: Unit) -> None:
        layout = {name: (column.shape[1:], column.dtype) for name, column in columns.items()}
        if self._first is None:
            self._first = unit, layout
            self._row_bytes = sum(
                math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()
            )
        first, expected = self._first
        if layout != expected:
            name = next(n for n in [*layout, *expected] if layout.get(n) != expected.get(n))
            raise DataError(
                f"column {name!r} of {self._where(unit)} is {_kind(layout.get(name))} and was "
                f"{_kind(expected.get(name))} in {self._where(first)}. Make all rows alike in "
                f"data.prepare or data.transform."
            )

    def _where(self, unit: Unit) -> str:
        return self._plan.streams[unit.stream].index.where(unit.spans[0][0])


def _by_epoch(steps_per_epoch: int, step: int, count: int) -> list[tuple[int, int, int]]:
    """Return (epoch, first step in it, steps) of each epoch that the steps lie in."""
    found, end = [], step + count
    while step < end:
        epoch, into_epoch = divmod(step, steps_per_epoch)
        steps = min(steps_per_epoch - into_epoch, end - step)
        found.append((epoch, into_epoch, steps))
        step += steps
    return found


def _kind(layout: tuple[tuple[int, ...], np.dtype[np.generic]] | None) -> str:
    return "missing" if layout is None else f"{layout[1]} of shape {layout[0]} a row"

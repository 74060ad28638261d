"""From a stream of units to a rank's rows, gathered for many steps at once.

A rank's rows of one step come from many lanes. Gathering each step by itself would cost a few
numpy calls per lane and step; a block of up to 64 steps pays them once per lane and block. The
first block is one step long, so that the first batch waits for nothing it does not need.
"""

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rayway.data.columns import Columns
from rayway.data.engine import Engine
from rayway.data.keys import Int64s
from rayway.data.plan import Plan, Unit
from rayway.errors import DataError

_MAX_STEPS = 64
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """A rank's rows of a few consecutive steps, in slot order, empty slots left out."""

    ids: Int64s
    """Sample ids, shape (rows,)."""
    columns: Columns
    """Arrays of shape (rows, ...); nobody else holds them."""
    counts: list[int]
    """Rows of each micro-batch, step after step; 0 where all its slots are empty."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A unit whose rows are in use."""

    unit: Unit
    order: Int64s
    ids: Int64s
    columns: Columns


class Blocks:
    """A rank's blocks. Knows the plan and an engine, not how the engine reads.

    Args:
        plan: The order.
        engine: Gives the columns of units.
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
        self._cuts = np.minimum(np.arange(0, most_slots + micro_batch, micro_batch), self._slots)
        self._parts = plan.parts(rank, world_size)
        self._part_of = {part.lane: number for number, part in enumerate(self._parts)}
        steps = np.arange(_MAX_STEPS)[:, None]
        # of each part, for a block that begins at step 0: lane positions, and rows of the block
        self._positions = [
            (steps * part.width + np.arange(part.first, part.end)).ravel() for part in self._parts
        ]
        self._places = [(steps * self._slots + part.places).ravel() for part in self._parts]
        self._held: list[deque[_Held]] = [deque() for _ in self._parts]
        self._asked: deque[Unit] = deque()
        self._layout: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] | None = None

    def run(self, start: int, stop: int | None) -> Generator[Block, None, None]:
        """Yield the blocks of steps [start, stop); ``None`` never ends. To be called once.

        Raises:
            DataError: From the engine; or the units' columns do not fit together.
        """
        steps_per_epoch, full_steps = self._plan.steps_per_epoch, self._plan.stream.full_steps
        step, most = start, 1
        with closing(self._engine(self._needed(start, stop))) as tables:
            while stop is None or step < stop:
                epoch, into_epoch = divmod(step, steps_per_epoch)
                last = into_epoch >= full_steps  # a step with empty slots is a block of its own
                count = 1 if last else min(most, full_steps - into_epoch)
                if stop is not None:
                    count = min(count, stop - step)
                yield self._block(epoch, into_epoch, count, tables)
                step += count
                most = min(2 * most, self._most_steps())

    @cached_property
    def filler(self) -> Columns:
        """The first row of the data set, for a micro-batch without a row; shape (1, ...)."""
        unit = Unit(epoch=0, lane=0, first=0, rows=1, spans=((0, 0, 1),), order_key=None)
        with closing(self._engine(iter([unit]))) as tables:
            columns = next(tables)
        self._check_layout(columns, unit)
        return columns

    def _needed(self, start: int, stop: int | None) -> Iterator[Unit]:
        for unit in self._plan.units(self._rank, self._world_size, start, stop):
            self._asked.append(unit)
            yield unit

    def _most_steps(self) -> int:
        if self._layout is None:
            return _MAX_STEPS
        row_bytes = sum(int(np.prod(s)) * dtype.itemsize for s, dtype in self._layout.values())
        return max(1, min(_MAX_STEPS, _BLOCK_BYTES // max(row_bytes * self._slots, 1)))

    def _block(self, epoch: int, into_epoch: int, count: int, tables: Iterator[Columns]) -> Block:
        filled = self._filled(epoch, into_epoch)
        rows_before = np.concatenate([[0], np.cumsum(filled)])
        counts = np.diff(rows_before[self._cuts]).tolist() * count
        rows = int(rows_before[-1]) * count
        ids, columns = np.empty(rows, dtype=np.int64), Columns()
        for number, part in enumerate(self._parts):
            size = count * len(part.places)
            positions = self._positions[number][:size] + into_epoch * part.width
            places = self._places[number][:size]
            if not filled.all():  # rows close up
                there = filled[places]
                positions, places = positions[there], rows_before[places[there]]
            done = 0
            while done < len(positions):
                held = self._holding(number, epoch, int(positions[done]), tables)
                upto = int(np.searchsorted(positions, held.unit.end))
                source = held.order[positions[done:upto] - held.unit.first]
                target = places[done:upto]
                ids[target] = held.ids[source]
                for name, column in held.columns.items():
                    if name not in columns:
                        columns[name] = np.empty((rows, *column.shape[1:]), column.dtype)
                    columns[name][target] = column.take(source, axis=0)
                done = upto
        return Block(ids, columns, counts)

    def _filled(self, epoch: int, into_epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
        """Return which of the rank's slots have a row in this step, shape (slots,)."""
        filled = np.ones(self._slots, dtype=np.bool)
        if into_epoch >= self._plan.stream.full_steps:
            for number, part in enumerate(self._parts):
                positions = self._positions[number][: len(part.places)] + into_epoch * part.width
                filled[part.places] = positions < self._plan.stream.limit(epoch, part.lane)
        return filled

    def _holding(self, number: int, epoch: int, position: int, tables: Iterator[Columns]) -> _Held:
        """Return the unit of a part that holds a lane position, once the engine gave it.

        Units come in the order of need over all lanes, so what is needed now always comes before
        what is not.
        """
        queue = self._held[number]
        while queue and (queue[0].unit.epoch, queue[0].unit.end) <= (epoch, position):
            queue.popleft()
        while not queue:
            columns = next(tables)
            unit = self._asked.popleft()
            self._check_layout(columns, unit)
            held = _Held(unit, unit.order(), unit.stored_ids(self._plan.stream.index), columns)
            self._held[self._part_of[unit.lane]].append(held)
        return queue[0]

    def _check_layout(self, columns: Columns, unit: Unit) -> None:
        layout = {name: (column.shape[1:], column.dtype) for name, column in columns.items()}
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            name = next(n for n in [*layout, *self._layout] if layout.get(n) != self._layout.get(n))
            raise DataError(
                f"column {name!r} of {self._plan.stream.index.where(unit.spans[0][0])} is "
                f"{_kind(layout.get(name))} and was {_kind(self._layout.get(name))} before. Make "
                f"all rows alike in data.prepare or data.transform."
            )


def _kind(layout: tuple[tuple[int, ...], np.dtype[np.generic]] | None) -> str:
    return "missing" if layout is None else f"{layout[1]} of shape {layout[0]} a row"

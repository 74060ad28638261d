"""Which stored row fills which slot of which global batch.

The plan is a pure function of the data set and (seed, global batch, lanes, bands, window). World
size, micro-batch, reader threads, timing and crashes are no arguments of it, so they cannot change
the order. A resume needs the step number and nothing else.

Words beyond those of the whole project:

- slot: one of the places of a global batch.
- lane: a fixed set of slots, fed by its own sub-sequence of row groups.
- band: a contiguous run of slots, over which its lanes are dealt round-robin. A rank that owns
  whole bands shares no lane with another rank.
- span: the part [low, high) of one row group; whole, except where a lane begins or ends in it.
- unit: a window of a few consecutive spans of a lane, shuffled together and read as one.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from rayway.data.index import Index
from rayway.data.keys import Domain, Int64s, key, permutation
from rayway.errors import DataError

ORDER_VERSION = 1
"""Goes into checkpoints. Any change of the order raises it; a resume under another is refused."""

Cover = Literal["drop", "all"]
"""``drop``: only whole global batches. ``all``: every row, the last step has empty slots."""

_MAX_BANDS = 64
_MAX_LANES = 256
_RESIDENT_GROUPS = 128
_SHUFFLE_BYTES = 2 << 30
_ROWS_PER_LANE = 256


@dataclass(frozen=True, slots=True)
class Unit:
    """A window of one lane in one epoch."""

    epoch: int
    lane: int
    first: int
    """The lane position of its first row."""
    rows: int
    spans: tuple[tuple[int, int, int], ...]
    """(row group, low, high) of each part, in stored order."""
    order_key: int | None
    """Names the order of its rows. ``None``: stored order."""

    @property
    def end(self) -> int:
        """The lane position after its last row."""
        return self.first + self.rows

    def order(self) -> Int64s:
        """Return which stored row comes when, shape (rows,)."""
        if self.order_key is None:
            return np.arange(self.rows)
        return permutation(self.rows, self.order_key)

    def stored_ids(self, index: Index) -> Int64s:
        """Return the sample ids of the spans' rows as they are stored, shape (rows,)."""
        starts = index.first
        return np.concatenate([np.arange(low, high) + starts[g] for g, low, high in self.spans])


class Lane:
    """The spans of one lane in one epoch, cut into windows."""

    def __init__(self, stream: "Stream", epoch: int, lane: int) -> None:
        index, offset = stream.index, stream.offset
        self._stream, self._epoch, self._lane = stream, epoch, lane
        begin = index.total * offset[lane] // stream.batch
        end = index.total * offset[lane + 1] // stream.batch
        groups, starts = stream.line(epoch)
        i = int(np.searchsorted(starts, begin, "right")) - 1
        j = int(np.searchsorted(starts, end, "left")) if end > begin else i
        self._groups = groups[i:j]
        self._low = np.maximum(begin - starts[i:j], 0)
        self._high = np.minimum(end - starts[i:j], index.rows[self._groups])
        positions = np.concatenate([[0], np.cumsum(self._high - self._low)])
        self.rows = int(positions[-1])
        # the first window differs from lane to lane, or all lanes would turn over in one step
        first = 1 + lane * stream.window // stream.lanes
        count = len(self._groups)
        self._edges = [0, *range(first, count, stream.window), count] if count else [0]
        self.starts: list[int] = positions[self._edges].tolist()
        """The lane position at which each window begins, and the end."""

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._edges) - 1

    def window_at(self, position: int) -> int:
        """Return the number of the window that holds a lane position."""
        return bisect_right(self.starts, position) - 1

    def unit(self, window: int) -> Unit:
        """Return window number ``window``."""
        stream, (i, j) = self._stream, self._edges[window : window + 2]
        words = (Domain.WINDOW, stream.number, self._epoch, self._lane, window)
        parts = (self._groups[i:j].tolist(), self._low[i:j].tolist(), self._high[i:j].tolist())
        return Unit(
            epoch=self._epoch,
            lane=self._lane,
            first=self.starts[window],
            rows=self.starts[window + 1] - self.starts[window],
            spans=tuple(zip(*parts, strict=True)),
            order_key=key(stream.seed, *words) if stream.shuffle else None,
        )


class Stream:
    """One data set that fills ``batch`` slots of every global batch, and its lanes."""

    def __init__(  # noqa: PLR0913 - what an order is made of, each a fact of its own
        self,
        index: Index,
        *,
        batch: int,
        seed: int,
        shuffle: bool,
        cover: Cover,
        lanes: int,
        bands: int,
        window: int,
        number: int = 0,
    ) -> None:
        self.index, self.batch, self.seed, self.number = index, batch, seed, number
        self.shuffle, self.cover, self.window = shuffle, cover, window
        self.bands = max(1, min(bands, batch))
        per_band = max(1, min(lanes, batch) // self.bands)
        self.lanes = per_band * self.bands
        self.lane_of = np.empty(batch, dtype=np.int64)
        """The lane of each slot, shape (batch,)."""
        for band in range(self.bands):
            begin, end = band * batch // self.bands, (band + 1) * batch // self.bands
            self.lane_of[begin:end] = band * per_band + np.arange(end - begin) % per_band
        widths = np.bincount(self.lane_of, minlength=self.lanes)
        self.width: list[int] = widths.tolist()
        """Slots of each lane, that is the rows it gives to a step."""
        self.offset: list[int] = [0, *np.cumsum(widths).tolist()]
        """Slots of the lanes before each lane."""
        self.full_steps = index.total // batch
        """Steps of an epoch in which every slot is filled."""
        left_over = cover == "all" and index.total % batch > 0
        self.steps = self.full_steps + int(left_over)
        """Steps of an epoch."""
        self.line = lru_cache(2)(self._line)
        self.lane = lru_cache(4 * self.lanes)(lambda epoch, lane: Lane(self, epoch, lane))

    def _line(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return the row groups in the epoch's order, and the row at which each begins."""
        count = len(self.index.rows)
        order = np.arange(count)
        if self.shuffle:
            order = permutation(count, key(self.seed, Domain.ROW_GROUPS, self.number, epoch))
        return order, np.concatenate([[0], np.cumsum(self.index.rows[order])])

    def limit(self, epoch: int, lane: int) -> int:
        """Return how many lane positions the epoch uses."""
        return min(self.lane(epoch, lane).rows, self.steps * self.width[lane])


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank owns of a lane: of its ``width`` rows a step those numbered [first, end)."""

    lane: int
    width: int
    first: int
    end: int
    places: Int64s
    """Where these rows go in the rank's share of the global batch, shape (end - first,)."""

    def owns_any(self, begin: int, end: int) -> bool:
        """Return whether one of the lane positions [begin, end) is the rank's."""
        number = begin % self.width
        if number < self.first:
            begin += self.first - number
        elif number >= self.end:
            begin += self.width - number + self.first
        return begin < end


class Plan:
    """The order of all samples. Global step t counts over epochs: t = epoch x steps + step."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.global_batch = stream.batch
        self.steps_per_epoch = stream.steps
        self._unit_ids = lru_cache(4096)(self._order_ids)

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the slots [begin, end) of a rank; shares differ by at most one slot."""
        batch = self.global_batch
        return rank * batch // world_size, (rank + 1) * batch // world_size

    def parts(self, rank: int, world_size: int) -> list[Part]:
        """Return what a rank owns of each lane that it has a slot of, by lane."""
        begin, end = self.share(rank, world_size)
        parts = []
        for lane in np.unique(self.stream.lane_of[begin:end]).tolist():
            slots = np.flatnonzero(self.stream.lane_of == lane)
            first, stop = np.searchsorted(slots, [begin, end]).tolist()
            parts.append(Part(lane, len(slots), first, stop, slots[first:stop] - begin))
        return parts

    def rows_in_step(self, step: int) -> int:
        """Return the filled slots of global step ``step``, over all ranks."""
        into_epoch = step % self.steps_per_epoch
        return min(self.global_batch, self.stream.index.total - into_epoch * self.global_batch)

    def ids(self, step: int, rank: int = 0, world_size: int = 1) -> Int64s:
        """Return the sample ids in a rank's share of a step, shape (slots,); -1 where empty.

        This is the plan spelled out, for records and tests. Feeds read :meth:`units`.
        """
        begin, end = self.share(rank, world_size)
        ids = np.full(end - begin, -1, dtype=np.int64)
        epoch, into_epoch = divmod(step, self.steps_per_epoch)
        for part in self.parts(rank, world_size):
            lane, limit = self.stream.lane(epoch, part.lane), self.stream.limit(epoch, part.lane)
            for number, place in zip(range(part.first, part.end), part.places, strict=True):
                position = into_epoch * part.width + number
                if position < limit:
                    window = lane.window_at(position)
                    unit_ids = self._unit_ids(epoch, part.lane, window)
                    ids[place] = unit_ids[position - lane.starts[window]]
        return ids

    def _order_ids(self, epoch: int, lane: int, window: int) -> Int64s:
        unit = self.stream.lane(epoch, lane).unit(window)
        return unit.stored_ids(self.stream.index)[unit.order()]

    def units(
        self, rank: int = 0, world_size: int = 1, start: int = 0, stop: int | None = None
    ) -> Iterator[Unit]:
        """Yield what a rank must read for the steps [start, stop), in order of need.

        The order is that of the whole plan, (first step that needs the unit, lane), less the units
        in which the rank has no row: all ranks agree on it, so one pipeline can serve them all.
        ``stop=None`` never ends.
        """
        parts = self.parts(rank, world_size)
        lanes = [self._lane_units(part, start, stop) for part in parts]
        for _, _, unit in heapq.merge(*lanes, key=lambda need: need[:2]):
            yield unit

    def _lane_units(
        self, part: Part, start: int, stop: int | None
    ) -> Iterator[tuple[int, int, Unit]]:
        """Yield (first step that needs it, lane, unit) of one lane."""
        step, steps, width = start, self.steps_per_epoch, part.width
        if not part.owns_any(0, self.stream.limit(0, part.lane)):
            return  # the same in every epoch: it would look for a row for ever
        while stop is None or step < stop:
            epoch, into_epoch = divmod(step, steps)
            lane, limit = self.stream.lane(epoch, part.lane), self.stream.limit(epoch, part.lane)
            begin = into_epoch * width
            window = lane.window_at(begin) if begin < limit else len(lane)
            while window < len(lane) and lane.starts[window] < limit:
                position = max(lane.starts[window], begin)
                needed_at = epoch * steps + position // width
                if stop is not None and needed_at >= stop:
                    return
                if part.owns_any(position, min(lane.starts[window + 1], limit)):
                    yield needed_at, part.lane, lane.unit(window)
                window += 1
            step = (epoch + 1) * steps

    def state(self) -> dict[str, int | str | bool]:
        """Return what the order was made of, for a checkpoint; the step is not part of it."""
        stream = self.stream
        return {
            "order_version": ORDER_VERSION,
            "fingerprint": stream.index.fingerprint,
            "global_batch": stream.batch,
            "seed": stream.seed,
            "shuffle": stream.shuffle,
            "cover": stream.cover,
            "lanes": stream.lanes,
            "bands": stream.bands,
            "window": stream.window,
        }

    def check_state(self, state: Mapping[str, object]) -> None:
        """Compare with the state of the plan that a checkpoint was made under.

        Raises:
            DataError: A field differs; it is named with both values.
        """
        mine = self.state()
        for name in [*mine, *sorted(state.keys() - mine.keys())]:
            if mine.get(name) != state.get(name):
                raise DataError(
                    f"the checkpoint was made under another order of samples: {name} was "
                    f"{state.get(name)!r} and is now {mine.get(name)!r}. Put it back to resume "
                    f"this run, or start a new one."
                )


def plan_order(
    index: Index,
    *,
    global_batch: int,
    seed: int,
    shuffle: bool = True,
    cover: Cover = "drop",
    lanes: int | None = None,
    bands: int | None = None,
    window: int | None = None,
) -> Plan:
    """Return the order of a job over one data set.

    Args:
        index: The data set.
        global_batch: Samples of a step, over all ranks.
        seed: Names the shuffle; without ``shuffle`` it changes nothing.
        shuffle: ``False``: each lane reads its rows as they are stored.
        cover: Whether an epoch leaves out what does not fill a global batch, or has a short step.
        lanes: Row groups mixed in each batch, about. ``None``: as many as pay and fit in memory.
        bands: Ranks up to which no row group is read twice. ``None``: 64, or fewer for small data.
        window: Row groups of a lane that are shuffled together. ``None``: from memory.

    Raises:
        DataError: The rows do not fill one global batch and ``cover`` is ``drop``.
    """
    if cover == "drop" and index.total < global_batch:
        raise DataError(
            f"{index.total} rows do not fill one global batch of {global_batch}. Use "
            f"batch.global_batch={index.total} or less, or data.cover='all'."
        )
    in_memory = max(1, _SHUFFLE_BYTES // max(index.group_bytes, 1))
    # more lanes than row groups, or lanes of a few rows, shuffle no better and read groups twice
    worthwhile = max(1, min(len(index.rows), index.total // _ROWS_PER_LANE, in_memory))
    if bands is None:
        most = min(global_batch, _MAX_BANDS)
        bands = most if worthwhile >= most else _power_of_two_below(worthwhile)
        bands = min(bands, lanes or bands)
    if lanes is None:
        lanes = min(global_batch, _MAX_LANES, worthwhile) if shuffle else bands
        lanes = max(lanes // bands, 1) * bands
    if window is None:
        window = max(1, min(math.ceil(_RESIDENT_GROUPS / lanes), in_memory // lanes))
        window = window if shuffle else 1
    return Plan(
        Stream(
            index,
            batch=global_batch,
            seed=seed,
            shuffle=shuffle,
            cover=cover,
            lanes=lanes,
            bands=bands,
            window=window,
        )
    )


def _power_of_two_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)

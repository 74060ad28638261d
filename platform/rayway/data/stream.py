"""One data set's share of every global batch: its lanes, their windows, its epochs.

Words beyond those of the whole project:

- slot: one of the places of a global batch.
- stream: a data set that fills a fixed number of the slots, at its own pace.
- lane: a fixed set of a stream's slots, fed by its own sub-sequence of row groups.
- band: a contiguous run of slots, over which its lanes are dealt round-robin. A rank that owns
  whole bands shares no lane with another rank.
- span: the part [low, high) of one row group; whole, except where a lane begins or ends in it.
- unit: a window of a few consecutive spans of a lane, shuffled together and read as one.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from rayway.data.index import Index
from rayway.data.keys import Domain, Int64s, key, permutation

Cover = Literal["drop", "all"]
"""``drop``: only whole global batches. ``all``: every row, the last step has empty slots."""

Shuffle = bool | Literal["sticky"]
"""``sticky``: a lane keeps its row groups over all epochs, for caches; their order changes."""

STREAM_BITS = 48
"""A sample id is ``stream << STREAM_BITS | row``, the row's place in its stream's index."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A window of one lane in one epoch."""

    stream: int
    epoch: int
    """The stream's own."""
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
        """Return the sample ids of the spans' rows as they are stored, shape (rows,).

        Args:
            index: That of the unit's stream.
        """
        starts, bits = index.first, self.stream << STREAM_BITS
        return np.concatenate(
            [np.arange(low, high) + (int(starts[g]) | bits) for g, low, high in self.spans]
        )


class Lane:
    """The spans of one lane in one epoch, cut into windows."""

    def __init__(self, stream: "Stream", epoch: int, lane: int) -> None:
        index, offset = stream.index, stream.offset
        self._stream, self._epoch, self._lane = stream, epoch, lane
        begin = index.total * offset[lane] // stream.batch
        end = index.total * offset[lane + 1] // stream.batch
        sticky = stream.shuffle == "sticky"
        groups, starts = stream.line(0 if sticky else epoch)
        i = int(np.searchsorted(starts, begin, "right")) - 1
        j = int(np.searchsorted(starts, end, "left")) if end > begin else i
        spans = np.arange(i, j)
        if sticky:
            spans = spans[permutation(j - i, stream.key(Domain.SPAN, epoch, lane))]
        self._groups = groups[spans]
        self._low = np.maximum(begin - starts[spans], 0)
        self._high = np.minimum(end - starts[spans], index.rows[self._groups])
        positions = np.concatenate([[0], np.cumsum(self._high - self._low)])
        self.rows = int(positions[-1])
        # the first window differs from lane to lane, or all lanes would turn over in one step
        first = 1 + lane * stream.window // stream.lanes
        count = len(spans)
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
        words = (Domain.WINDOW, self._epoch, self._lane, window)
        parts = (self._groups[i:j].tolist(), self._low[i:j].tolist(), self._high[i:j].tolist())
        return Unit(
            stream=stream.number,
            epoch=self._epoch,
            lane=self._lane,
            first=self.starts[window],
            rows=self.starts[window + 1] - self.starts[window],
            spans=tuple(zip(*parts, strict=True)),
            order_key=stream.key(*words) if stream.shuffle else None,
        )


class Stream:
    """One data set that fills ``batch`` slots of every global batch, and its lanes. Picklable."""

    def __init__(  # noqa: PLR0913 - what an order is made of, each a fact of its own
        self,
        index: Index,
        *,
        batch: int,
        seed: int,
        shuffle: Shuffle,
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
        self._make_caches()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the caches, which another process fills anew."""
        return {k: v for k, v in self.__dict__.items() if k not in ("line", "lane", "unit_ids")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what :meth:`__getstate__` gave."""
        self.__dict__.update(state)
        self._make_caches()

    def _make_caches(self) -> None:
        self.line = lru_cache(2)(self._line)
        self.lane = lru_cache(4 * self.lanes)(lambda epoch, lane: Lane(self, epoch, lane))
        self.unit_ids = lru_cache(4096)(self._unit_ids)

    def _line(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return the row groups in the epoch's order, and the row at which each begins."""
        count = len(self.index.rows)
        order = np.arange(count)
        if self.shuffle:
            order = permutation(count, self.key(Domain.ROW_GROUPS, epoch))
        return order, np.concatenate([[0], np.cumsum(self.index.rows[order])])

    def _unit_ids(self, epoch: int, lane: int, window: int) -> Int64s:
        """Return the sample ids of a window in its own order, shape (rows,)."""
        unit = self.lane(epoch, lane).unit(window)
        return unit.stored_ids(self.index)[unit.order()]

    def key(self, domain: Domain, *words: int) -> int:
        """Return the key of one of this stream's shuffles."""
        return key(self.seed, domain, self.number, *words)

    def limit(self, epoch: int, lane: int) -> int:
        """Return how many lane positions the epoch uses."""
        return min(self.lane(epoch, lane).rows, self.steps * self.width[lane])

    def rows_in_step(self, step: int) -> int:
        """Return the stream's filled slots in global step ``step``, over all ranks."""
        return min(self.batch, self.index.total - step % self.steps * self.batch)

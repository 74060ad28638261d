"""Which stored row fills which slot of which global batch.

The plan is a pure function of the data sets and (seed, global batch, weights, lanes, bands,
window). World size, micro-batch, reader threads, timing and crashes are no arguments of it, so
they cannot change the order. A resume needs the step number and nothing else.

Each data set is a stream (see :mod:`rayway.data.stream`) with its own slots and its own epochs.
The streams' slots are merged by their relative place, so that every rank gets each stream's share.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rayway.data.index import Index
from rayway.data.keys import Int64s
from rayway.data.stream import Cover, Shuffle, Stream, Unit
from rayway.errors import DataError

ORDER_VERSION = 1
"""Goes into checkpoints. Any change of the order raises it; a resume under another is refused."""

_FACTS = ("fingerprint", "seed", "shuffle", "cover", "lanes", "bands", "window")
_MAX_BANDS = 64
_MAX_LANES = 256
_RESIDENT_GROUPS = 128
_SHUFFLE_BYTES = 2 << 30
_ROWS_PER_LANE = 256
_GROUPS_PER_LANE = 4
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank owns of a lane: of its ``width`` rows a step those numbered [first, end)."""

    stream: int
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
    """The order of all samples. Global steps count over epochs, without end. Picklable.

    At global step t, a stream of ``steps`` steps is in its epoch t // steps at step t % steps.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)
        self.global_batch = sum(stream.batch for stream in self.streams)
        self.steps_per_epoch = max(stream.steps for stream in self.streams)
        """Steps of one pass; in a mixture that of the stream that lasts longest."""
        numbers = [np.full(stream.batch, n) for n, stream in enumerate(self.streams)]
        relative = [
            (2 * np.arange(stream.batch) + 1) / (2 * stream.batch) for stream in self.streams
        ]
        merged = np.lexsort((np.concatenate(numbers), np.concatenate(relative)))
        self.stream_of = np.concatenate(numbers)[merged]
        """The stream of each slot, shape (global batch,)."""
        self.lane_of = np.concatenate([stream.lane_of for stream in self.streams])[merged]
        """The lane of each slot, in its stream; shape (global batch,)."""

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the slots [begin, end) of a rank; shares differ by at most one slot."""
        batch = self.global_batch
        return rank * batch // world_size, (rank + 1) * batch // world_size

    def parts(self, rank: int, world_size: int) -> list[Part]:
        """Return what a rank owns of each lane that it has a slot of, by stream and lane."""
        begin, end = self.share(rank, world_size)
        owned = set(
            zip(self.stream_of[begin:end].tolist(), self.lane_of[begin:end].tolist(), strict=True)
        )
        parts = []
        for stream, lane in sorted(owned):
            slots = np.flatnonzero((self.stream_of == stream) & (self.lane_of == lane))
            first, stop = np.searchsorted(slots, [begin, end]).tolist()
            parts.append(Part(stream, lane, len(slots), first, stop, slots[first:stop] - begin))
        return parts

    def rows_in_step(self, step: int) -> int:
        """Return the filled slots of global step ``step``, over all ranks and streams."""
        return sum(stream.rows_in_step(step) for stream in self.streams)

    def ids(self, step: int, rank: int = 0, world_size: int = 1) -> Int64s:
        """Return the sample ids in a rank's share of a step, shape (slots,); -1 where empty.

        This is the plan spelled out, for records and tests. Feeds read :meth:`units`.
        """
        begin, end = self.share(rank, world_size)
        ids = np.full(end - begin, -1, dtype=np.int64)
        for part in self.parts(rank, world_size):
            stream = self.streams[part.stream]
            epoch, into_epoch = divmod(step, stream.steps)
            lane, limit = stream.lane(epoch, part.lane), stream.limit(epoch, part.lane)
            for number, place in zip(range(part.first, part.end), part.places, strict=True):
                position = into_epoch * part.width + number
                if position < limit:
                    window = lane.window_at(position)
                    unit_ids = stream.unit_ids(epoch, part.lane, window)
                    ids[place] = unit_ids[position - lane.starts[window]]
        return ids

    def units(
        self, rank: int = 0, world_size: int = 1, start: int = 0, stop: int | None = None
    ) -> Iterator[Unit]:
        """Yield what a rank must read for the steps [start, stop), in order of need.

        The order is that of the whole plan, (first step that needs the unit, stream, lane), less
        the units in which the rank has no row: all ranks agree on it, so one pipeline can serve
        them all. ``stop=None`` never ends.
        """
        parts = self.parts(rank, world_size)
        lanes = [self._lane_units(part, start, stop) for part in parts]
        for _, unit in heapq.merge(
            *lanes, key=lambda need: (need[0], need[1].stream, need[1].lane)
        ):
            yield unit

    def _lane_units(self, part: Part, start: int, stop: int | None) -> Iterator[tuple[int, Unit]]:
        """Yield (first step that needs it, unit) of one lane."""
        stream, step, width = self.streams[part.stream], start, part.width
        if not part.owns_any(0, stream.limit(0, part.lane)):
            return  # the same in every epoch: it would look for a row for ever
        while stop is None or step < stop:
            epoch, into_epoch = divmod(step, stream.steps)
            lane, limit = stream.lane(epoch, part.lane), stream.limit(epoch, part.lane)
            begin = into_epoch * width
            window = lane.window_at(begin) if begin < limit else len(lane)
            while window < len(lane) and lane.starts[window] < limit:
                position = max(lane.starts[window], begin)
                needed_at = epoch * stream.steps + position // width
                if stop is not None and needed_at >= stop:
                    return
                if part.owns_any(position, min(lane.starts[window + 1], limit)):
                    yield needed_at, lane.unit(window)
                window += 1
            step = (epoch + 1) * stream.steps

    def state(self) -> dict[str, object]:
        """Return what the order was made of, as plain JSON; the step is not part of it.

        One stream's facts stand beside those of the whole order, those of more below ``streams``.
        """
        whole: dict[str, object] = {
            "order_version": ORDER_VERSION,
            "global_batch": self.global_batch,
        }
        if len(self.streams) == 1:
            return whole | _facts(self.streams[0])
        streams = [{"root": s.index.root, "slots": s.batch} | _facts(s) for s in self.streams]
        return whole | {"streams": streams}

    def check_state(self, state: Mapping[str, object]) -> None:
        """Compare with the state of the plan that a checkpoint was made under.

        Raises:
            DataError: A field differs; it is named with both values. Or a stream was added, left
                out or moved; it is named.
        """
        mine, theirs = self.state(), dict(state)
        my_streams, their_streams = _pop_streams(mine), _pop_streams(theirs)
        _compare(mine, theirs)
        _check_same_streams(my_streams, their_streams)
        for number, (now, was) in enumerate(zip(my_streams, their_streams, strict=True)):
            root = now.pop("root", None)
            was.pop("root", None)  # data may move; its fingerprint stays
            _compare(now, was, "" if root is None else f" of data set {number} ({root})")


def plan_order(  # noqa: PLR0913 - what an order is made of, each a fact of its own
    indexes: Index | Sequence[Index],
    *,
    weights: Sequence[float] | None = None,
    global_batch: int,
    seed: int,
    shuffle: Shuffle = True,
    cover: Cover = "drop",
    lanes: int | None = None,
    bands: int | None = None,
    window: int | None = None,
) -> Plan:
    """Return the order of a job over one data set or a mixture.

    Args:
        indexes: The data sets. Their order counts.
        weights: Each data set's share of every global batch, in any unit. ``None``: equal.
        global_batch: Samples of a step, over all ranks.
        seed: Names the shuffle; without ``shuffle`` it changes nothing.
        shuffle: ``False``: each lane reads its rows as they are stored. ``"sticky"``: lanes keep
            their row groups over epochs, so that caches pay.
        cover: Whether an epoch leaves out what does not fill a global batch, or has a short step.
        lanes: Row groups of each data set mixed in a batch, about. ``None``: as many as pay and
            fit in memory.
        bands: Ranks up to which no row group is read twice. ``None``: 64, or fewer for small data.
        window: Row groups of a lane that are shuffled together. ``None``: from memory.

    Raises:
        DataError: The rows of a data set do not fill its slots and ``cover`` is ``drop``, or its
            weight is too small for a slot.
    """
    indexes = [indexes] if isinstance(indexes, Index) else list(indexes)
    places = [index.root for index in indexes]
    quotas = split_slots(global_batch, weights or [1.0] * len(indexes), places)
    streams = []
    for number, (index, batch) in enumerate(zip(indexes, quotas, strict=True)):
        if cover == "drop":
            _check_filled(index, batch, global_batch)
        # a stream of a mixture may have fewer slots than there are bands
        its_bands = min(bands, batch) if bands and len(indexes) > 1 else bands
        shape = _shape(
            index,
            batch=batch,
            memory=_SHUFFLE_BYTES * batch // global_batch,
            shuffle=bool(shuffle),
            asked=(lanes, its_bands, window),
        )
        streams.append(
            Stream(
                index, batch=batch, seed=seed, shuffle=shuffle, cover=cover, number=number, **shape
            )
        )
    return Plan(streams)


def split_slots(global_batch: int, weights: Sequence[float], places: Sequence[str]) -> list[int]:
    """Return each stream's slots of a global batch: largest remainder, ties to the lower number.

    Args:
        global_batch: All slots.
        weights: Finite and above 0, one a stream. Decimals count as they are written.
        places: What to call the streams in a message.

    Raises:
        DataError: A stream gets no slot.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [global_batch * weight / total for weight in exact]
    slots = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(slots)), key=lambda n: (slots[n] - shares[n], n))
    for number in by_remainder[: global_batch - sum(slots)]:
        slots[number] += 1
    if 0 in slots:
        least = min(range(len(slots)), key=lambda n: (slots[n], exact[n]))
        enough = ""
        if global_batch > 1:
            others = total - exact[least]
            enough = f"a weight of {_rounded_up(others / (global_batch - 1))} or more, or "
        raise DataError(
            f"the weight {float(weights[least]):g} of {places[least]} gives it no slot in a global "
            f"batch of {global_batch}: {global_batch} x {float(exact[least]):g} / "
            f"{float(total):g} = {float(shares[least]):.3g}. Use {enough}"
            f"batch.global_batch={math.ceil(total / exact[least])} or more."
        )
    return slots


def _check_filled(index: Index, batch: int, global_batch: int) -> None:
    if index.total >= batch:
        return
    if batch == global_batch:
        raise DataError(
            f"{index.total} rows do not fill one global batch of {global_batch}. Use "
            f"batch.global_batch={index.total} or less, or data.cover='all'."
        )
    raise DataError(
        f"the {index.total} rows of {index.root} do not fill its {batch} slots of one global batch "
        f"of {global_batch}. Give it less weight, lower batch.global_batch, or use "
        f"data.cover='all'."
    )


def _shape(
    index: Index,
    *,
    batch: int,
    memory: int,
    shuffle: bool,
    asked: tuple[int | None, int | None, int | None],
) -> dict[str, int]:
    """Return a stream's lanes, bands and window: as asked, or what pays and fits in memory."""
    lanes, bands, window = asked
    in_memory = max(1, memory // max(index.group_bytes, 1))
    # A row group in which one lane ends and another begins is read twice: where readers cannot keep
    # the whole set, lanes of several row groups. More lanes than row groups, or lanes of a few
    # rows, shuffle no better.
    groups = len(index.rows)
    kept = groups * index.group_bytes <= _KEPT_BYTES
    useful = groups if kept else groups // _GROUPS_PER_LANE
    worthwhile = max(1, min(useful, index.total // _ROWS_PER_LANE, in_memory))
    if bands is None:
        most = min(batch, _MAX_BANDS)
        bands = most if worthwhile >= most else _power_of_two_below(worthwhile)
        bands = min(bands, lanes or bands)
    if lanes is None:
        lanes = min(batch, _MAX_LANES, worthwhile) if shuffle else bands
        lanes = max(lanes // bands, 1) * bands
    if window is None:
        window = max(1, min(math.ceil(_RESIDENT_GROUPS / lanes), in_memory // lanes))
        window = window if shuffle else 1
    return {"lanes": lanes, "bands": bands, "window": window}


def _power_of_two_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _rounded_up(number: Fraction) -> str:
    """Return a number above 0 with three digits, not less than it is."""
    digits = 2 - math.floor(math.log10(number))
    scale = Fraction(10) ** digits
    return f"{float(math.ceil(number * scale) / scale):g}"


def _facts(stream: Stream) -> dict[str, object]:
    shape = {name: getattr(stream, name) for name in _FACTS if name != "fingerprint"}
    return {"fingerprint": stream.index.fingerprint} | shape


def _pop_streams(state: dict[str, object]) -> list[dict[str, object]]:
    """Take each stream's facts out of a plan's state."""
    streams = state.pop("streams", None)
    if isinstance(streams, list):
        return [dict(facts) for facts in streams]
    return [{name: state.pop(name) for name in _FACTS if name in state}]


def _check_same_streams(now: list[dict[str, object]], was: list[dict[str, object]]) -> None:
    """Refuse streams that were added, left out or moved; changed ones are compared by field."""
    gone, added = list(was), []
    for stream in now:
        same = [s for s in gone if s.get("fingerprint") == stream["fingerprint"]]
        if same:
            gone.remove(same[0])
        else:
            added.append(stream)
    moved = [s.get("fingerprint") for s in now] != [s.get("fingerprint") for s in was]
    found = [
        f"{what} {', '.join(_name(s) for s in streams)}"
        for what, streams in (("without", added), ("with", gone))
        if streams and len(now) != len(was)
    ]
    if not added and not gone and moved:
        found = [f"with the data sets in the order {', '.join(map(_name, was))}"]
    if found:
        raise DataError(
            f"the checkpoint was made {' and '.join(found)}; data.train is now "
            f"{', '.join(map(_name, now))}. Put it back to resume this run, or start a new one."
        )


def _name(facts: Mapping[str, object]) -> str:
    return str(facts.get("root", f"the data set of fingerprint {facts.get('fingerprint')}"))


def _compare(now: Mapping[str, object], was: Mapping[str, object], whose: str = "") -> None:
    for name in [*now, *sorted(was.keys() - now.keys())]:
        if now.get(name) != was.get(name):
            raise DataError(
                f"the checkpoint was made under another order of samples: {name}{whose} was "
                f"{was.get(name)!r} and is now {now.get(name)!r}. Put it back to resume this run, "
                f"or start a new one."
            )

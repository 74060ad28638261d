"""Claim: with the same rows in memory, batches of rayway vary less than those of known orders.

``python benchmarks/shuffle_quality.py [--quick] [--seeds N]`` takes under a minute on one core.

The orders called py1e and py1br are *not* the code of mosaicml-streaming: they are re-stated here
in a few lines from their description in its public documentation. Both shuffle the order of the
row groups, deal it in equal runs to canonical nodes, and fill batches from all nodes in turn.
py1br then shuffles a node's rows in blocks of 0.75 to 1.25 of the block size, drawn at random.
py1e moves each row of a node to a random place in its group's range, widened to the block size.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from measure import note, report
from rayway.data.index import Index
from rayway.data.keys import Int64s, key, permutation
from rayway.data.stream import Shuffle, Stream

MICRO_BATCH, LONG, QUANTITIES, BANDS = 8, 32, 8, 16
METHOD = """\
An order is the sample id at each place of an epoch; batches are slices of it. vif: variance of \
batch means over that of independent draws, for a quantity constant in each row group, the worst \
case; vif_long: the same for means over 32 batches, that is slow drifts; groups: row groups in a \
batch over those of a full shuffle; micro: the same for 8 consecutive rows; displacement: mean \
|place - id| / rows (full shuffle: 1/3); neighbours: correlation of ids next to each other; \
repeat: pairs of one batch that meet again in the next epoch, over chance; resident_rows: rows of \
row groups begun and not ended, mean over the epoch, which memory or caches of the whole cluster \
must hold. Means over the seeds; vif with the range over them."""

Order = Callable[[int, int], Int64s]
"""(seed, epoch) -> the sample id at each place of the epoch, shape (rows,)."""


@dataclass(frozen=True)
class Data:
    """Equal row groups, and the size of a batch."""

    groups: int
    group_rows: int
    batch: int

    @property
    def rows(self) -> int:
        """All rows."""
        return self.groups * self.group_rows


def ours(data: Data, lanes: int, window: int, shuffle: Shuffle = True) -> Order:
    """Return the order of rayway's plan."""
    index = Index(
        root="",
        paths=("",),
        sizes=(0,),
        digests=("",),
        rows=np.full(data.groups, data.group_rows),
        shard=np.zeros(data.groups, np.int64),
        ordinal=np.arange(data.groups),
        group_bytes=1,
        schema=pa.schema([]),
    )

    def order(seed: int, epoch: int) -> Int64s:
        stream = Stream(
            index,
            batch=data.batch,
            seed=seed,
            shuffle=shuffle,
            cover="all",
            lanes=lanes,
            bands=min(BANDS, lanes),
            window=window,
        )
        steps = np.empty((stream.steps, data.batch), np.int64)
        for number in range(stream.lanes):
            windows = range(len(stream.lane(epoch, number)))
            ids = np.concatenate([stream.unit_ids(epoch, number, w) for w in windows])
            steps[:, stream.lane_of == number] = ids.reshape(stream.steps, -1)
        return steps.ravel()

    return order


def full(data: Data) -> Order:
    """Return a shuffle of all rows."""
    return lambda seed, epoch: permutation(data.rows, key(seed, 99, epoch))


def stored(data: Data) -> Order:
    """Return the stored order."""
    return lambda _seed, _epoch: np.arange(data.rows)


def by_nodes(
    data: Data, nodes: int, shuffled: Callable[[Int64s, np.random.Generator], Int64s]
) -> Order:
    """Return the order of nodes that each shuffle their run of the shuffled row groups."""

    def order(seed: int, epoch: int) -> Int64s:
        groups = np.random.default_rng(seed).permutation(data.groups).reshape(nodes, -1)
        rng = np.random.default_rng([seed, epoch])
        streams = []
        for mine in groups:
            line = rng.permutation(mine)[:, None] * data.group_rows + np.arange(data.group_rows)
            streams.append(shuffled(line.ravel(), rng))
        return np.stack(streams, axis=1).ravel()

    return order


def py1br(data: Data, nodes: int, block: int) -> Order:
    """Return shuffled blocks of random size; see the module's docstring."""

    def shuffled(line: Int64s, rng: np.random.Generator) -> Int64s:
        begin, pieces = 0, []
        while begin < len(line):
            end = begin + int(rng.uniform(0.75, 1.25) * block)
            pieces.append(rng.permutation(line[begin:end]))
            begin = end
        return np.concatenate(pieces)

    return by_nodes(data, nodes, shuffled)


def py1e(data: Data, nodes: int, block: int) -> Order:
    """Return rows at random places of a widened range; see the module's docstring."""

    def shuffled(line: Int64s, rng: np.random.Generator) -> Int64s:
        starts = np.arange(len(line)) // data.group_rows * data.group_rows
        middle, half = starts + data.group_rows / 2, max(block, data.group_rows) / 2
        # a range that would leave the epoch ends with it, or its rows would pile up there
        low, high = np.maximum(middle - half, 0), np.minimum(middle + half, len(line))
        return line[np.argsort(rng.uniform(low, high))]

    return by_nodes(data, nodes, shuffled)


def resident_rows(data: Data, order: Int64s) -> float:
    """Return the rows of groups that were begun and not ended, mean over the epoch."""
    places, groups = np.arange(data.rows), order // data.group_rows
    first, last = np.full(data.groups, data.rows), np.zeros(data.groups, np.int64)
    np.minimum.at(first, groups, places)
    np.maximum.at(last, groups, places)
    return float((last - first + 1).sum() / data.rows * data.group_rows)


def repeat(data: Data, order: Int64s, following: Int64s) -> float:
    """Return how many pairs of a batch share one again in the next epoch, over chance."""
    batch_of = np.empty(data.rows, np.int64)
    batch_of[following] = np.arange(data.rows) // data.batch
    batches = order.reshape(-1, data.batch)
    same = []
    for batch in batches[:: max(1, len(batches) // 256)]:
        counts = np.bincount(batch_of[batch])
        same.append((counts * (counts - 1)).sum() / (data.batch * (data.batch - 1)))
    return float(np.mean(same) * (data.rows - 1) / (data.batch - 1))


def expected_groups(data: Data, rows: int) -> float:
    """Return in how many groups ``rows`` random rows are."""
    return data.groups * (1 - (1 - 1 / data.groups) ** rows)


def distinct(groups: npt.NDArray[np.int64]) -> float:
    """Return the mean number of distinct values in a row."""
    ordered = np.sort(groups, axis=1)
    return float(1 + (np.diff(ordered, axis=1) != 0).sum(axis=1).mean())


def measure_once(data: Data, order: Order, seed: int) -> dict[str, float]:
    """Return the measures of METHOD for one seed."""
    ids, following = order(seed, 0), order(seed, 1)
    assert np.array_equal(np.sort(ids), np.arange(data.rows)), "an epoch holds each row once"
    rng = np.random.default_rng(0)
    groups = ids // data.group_rows
    batches = groups.reshape(-1, data.batch)
    vif, vif_long = [], []
    for _ in range(QUANTITIES):
        quantity = rng.standard_normal(data.groups)
        quantity = (quantity - quantity.mean()) / quantity.std()
        means = quantity[batches].mean(axis=1)
        vif.append(means.var() * data.batch)
        whole = means[: len(means) // LONG * LONG].reshape(-1, LONG)
        vif_long.append(whole.mean(axis=1).var() * data.batch * LONG)
    return {
        "vif": float(np.mean(vif)),
        "vif_long": float(np.mean(vif_long)),
        "groups": distinct(batches[::16]) / expected_groups(data, data.batch),
        "micro": distinct(groups.reshape(-1, MICRO_BATCH)[::64])
        / expected_groups(data, MICRO_BATCH),
        "displacement": float(np.abs(np.arange(data.rows) - ids).mean() / data.rows),
        "neighbours": float(np.corrcoef(ids[:-1], ids[1:])[0, 1]),
        "repeat": repeat(data, ids, following),
        "resident_rows": resident_rows(data, ids),
    }


def measure(data: Data, order: Order, seeds: int) -> dict[str, Any]:
    """Return the means over the seeds, to four digits, and the range of vif."""
    found = [measure_once(data, order, seed) for seed in range(7, 7 + seeds)]
    means = {name: float(f"{np.mean([one[name] for one in found]):.4g}") for name in found[0]}
    vif = [one["vif"] for one in found]
    return means | {"vif_range": [float(f"{end:.4g}") for end in (min(vif), max(vif))]}


def orders(data: Data, *, quick: bool) -> dict[str, Order]:
    """Return what is compared, by name."""
    group = data.group_rows
    found = {
        "stored order": stored(data),
        "full shuffle": full(data),
        "one window of 64 groups": ours(data, 1, 64),
        "rayway, 64 lanes": ours(data, 64, 1),
        "rayway, 64 lanes, sticky": ours(data, 64, 1, "sticky"),
        "py1e as described, 16 nodes x 4 groups": py1e(data, 16, 4 * group),
        "py1br as described, 16 nodes x 4 groups": py1br(data, 16, 4 * group),
    }
    if quick:
        return found
    return found | {
        "rayway, 16 lanes": ours(data, 16, 1),
        "rayway, 16 lanes, windows of 4": ours(data, 16, 4),
        "rayway, 64 lanes, windows of 2": ours(data, 64, 2),
        "rayway, 128 lanes": ours(data, 128, 1),
        "rayway, 128 lanes, sticky": ours(data, 128, 1, "sticky"),
        "rayway, 128 lanes, windows of 2": ours(data, 128, 2),
        "rayway, 256 lanes": ours(data, 256, 1),
        "py1e as described, 1 node x 64 groups": py1e(data, 1, 64 * group),
        "py1e as described, 16 nodes x 8 groups": py1e(data, 16, 8 * group),
        "py1e as described, 16 nodes x 16 groups": py1e(data, 16, 16 * group),
        "py1br as described, 1 node x 64 groups": py1br(data, 1, 64 * group),
        "py1br as described, 16 nodes x 8 groups": py1br(data, 16, 8 * group),
        "py1br as described, 16 nodes x 16 groups": py1br(data, 16, 16 * group),
    }


def main() -> None:
    """Measure all orders and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer orders of a small set")
    parser.add_argument("--seeds", type=int, default=8, help="orders drawn of each kind")
    options = parser.parse_args()
    data = Data(groups=1024, group_rows=1024, batch=512)
    if options.quick:
        data = Data(groups=256, group_rows=128, batch=128)
    found: dict[str, Any] = {}
    for name, order in orders(data, quick=options.quick).items():
        began = time.perf_counter()
        found[name] = measure(data, order, options.seeds)
        note(f"{name:42} {time.perf_counter() - began:5.1f} s  {found[name]}")
    report(
        "shuffle_quality",
        method=METHOD,
        packages=["numpy"],
        rows=data.rows,
        row_groups=data.groups,
        global_batch=data.batch,
        seeds=options.seeds,
        orders=found,
    )


if __name__ == "__main__":
    main()

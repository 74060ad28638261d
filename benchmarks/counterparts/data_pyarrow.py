"""The limit: Parquet decoded by pyarrow, row group after row group in shuffled order.

``raw``: no row is moved, a row group's rows come as they are stored. ``pool``: what an honest
shuffle by hand costs, a pool of 8 row groups gathered into batches by one index. ``gets``: the
bytes of the row groups, not decoded; on S3 by 16 threads, like ``raw`` there.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from data_consumer import (
    Arrays,
    Asked,
    Batch,
    arrays_of,
    parquet_files,
    serve,
    tensors_of,
)

POOL_GROUPS = 8
S3_THREADS = 16
Place = tuple[str, int]
"""A shard and a row group in it."""


class Reading:
    """Reads row groups; a shard's footer once."""

    def __init__(self, asked: Asked) -> None:
        self._filesystem, paths = parquet_files(asked)
        self._remote = asked.source.startswith("s3://")
        scan = pads.ParquetFragmentScanOptions(pre_buffer=self._remote)
        kind = pads.ParquetFileFormat(default_fragment_scan_options=scan)
        self._shards = {path: kind.make_fragment(path, self._filesystem) for path in paths}
        self._asked, self._epoch = asked, 0
        self._file = lru_cache(None)(pq.ParquetFile)
        self._stored = lru_cache(None)(self._filesystem.open_input_file)  # each asks for the size

    def places(self) -> Iterator[Place]:
        """Yield the row groups of this consumer's shards in a new order each epoch, for ever."""
        mine = list(self._shards)[self._asked.rank :: self._asked.world]
        while True:
            shuffle = np.random.default_rng(self._epoch)
            self._epoch += 1
            for number in shuffle.permutation(len(mine)).tolist():
                for group in shuffle.permutation(self._shards[mine[number]].num_row_groups):
                    yield mine[number], int(group)

    def decoded(self, place: Place) -> Arrays:
        """Return a row group's columns."""
        if self._remote:  # a fragment needs no request for the size, a file no scan: 1/2 of the CPU
            part = self._shards[place[0]].subset(row_group_ids=[place[1]])
            return arrays_of(part.to_table(use_threads=False))
        return arrays_of(self._file(place[0]).read_row_group(place[1], use_threads=False))

    def fetched(self, place: Place) -> Arrays:
        """Return nothing of a row group but as many rows, once its bytes were read."""
        about = self._shards[place[0]].metadata.row_group(place[1])
        columns = [about.column(number) for number in range(about.num_columns)]
        begin = min(column.dictionary_page_offset or column.data_page_offset for column in columns)
        size = sum(column.total_compressed_size for column in columns)
        self._stored(place[0]).read_at(size, begin)
        return {"rows": np.zeros(about.num_rows)}

    def in_turn(self, read: Callable[[Place], Arrays]) -> Iterator[Arrays]:
        """Yield what is read, one after the other or, from S3, by threads ahead."""
        if not self._remote:
            yield from map(read, self.places())
            return
        places, waiting = self.places(), deque[Future[Arrays]]()
        with ThreadPoolExecutor(S3_THREADS) as pool:
            while True:
                while len(waiting) < S3_THREADS:
                    waiting.append(pool.submit(read, next(places)))
                yield waiting.popleft().result()


def batches(asked: Asked) -> Iterator[Batch]:
    """Yield row groups, or batches of a pool of them."""
    reading = Reading(asked)
    read = reading.fetched if asked.how == "gets" else reading.decoded
    for arrays in reading.in_turn(read) if asked.how != "pool" else _pools(reading):
        if asked.how == "pool":
            for begin in range(0, len(next(iter(arrays.values()))), asked.batch):
                yield tensors_of({k: x[begin : begin + asked.batch] for k, x in arrays.items()})
        else:
            yield tensors_of(arrays)


def _pools(reading: Reading) -> Iterator[Arrays]:
    """Yield pools of rows, shuffled by one gather."""
    shuffle, held = np.random.default_rng(0), list[Arrays]()
    for arrays in reading.in_turn(reading.decoded):
        held.append(arrays)
        if len(held) == POOL_GROUPS:
            pool = {name: np.concatenate([each[name] for each in held]) for name in arrays}
            order = shuffle.permutation(len(next(iter(pool.values()))))
            yield {name: column.take(order, axis=0) for name, column in pool.items()}
            held.clear()


if __name__ == "__main__":
    serve(batches)
